"""Stage 3: a permit or a refusal, at once."""

from __future__ import annotations

from triton_lifecycle.admission import Admission
from triton_lifecycle.config import Config
from triton_lifecycle.context import Context
from triton_lifecycle.events import Admitted
from triton_lifecycle.timeouts.limits import choose


class Schedule:
    """Gives a request its permit, which is held until the request ends."""

    def __init__(self, config: Config, admission: Admission) -> None:
        self._timeouts = config.timeout_handling
        self._admission = admission

    async def __call__(self, ctx: Context) -> None:
        """Admit the request; raises a subclass of ``Overloaded`` when there is no room."""
        ctx.held.enter_context(self._admission.permit())
        if ctx.deadline is None:
            # A plug-in stands in the place of 'receive'.
            ctx.start_deadline(choose(self._timeouts, ctx.metadata.timeout))
        ctx.publish(
            Admitted,
            at=ctx.mark("admitted"),
            priority=ctx.metadata.priority,
            limits=ctx.execution.limits,
            sequences=1 if ctx.execution.sampling is None else ctx.execution.sampling.n,
        )
