"""Stage 2: from what the caller wrote to what the engine can run."""

from __future__ import annotations

from triton_lifecycle.context import Context
from triton_lifecycle.engine import Engine
from triton_lifecycle.errors import InvalidInput
from triton_lifecycle.sampling import type_values


class Preprocess:
    """Types the sampling parameters and has the engine prove them legal."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def __call__(self, ctx: Context) -> None:
        """Fill ``execution.sampling``; raises ``InvalidInput`` naming the parameter."""
        if ctx.input is None:
            raise InvalidInput("no stage before 'preprocess' has read the request")
        ctx.execution.sampling = self._engine.sampling(type_values(ctx.input.parameters, self._engine.sampling_fields))
