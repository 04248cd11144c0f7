"""Bare vLLM: the baseline, with nothing between it and whoever counts the tokens.

The same arguments as our model's ``model.json``, its logging and statistics off.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from load.overhead.measure import BenchFailed, Prompt

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


class BareSource:
    """An ``AsyncLLM`` in this process.

    Args:
        directory: a model version's folder, with ``model.json``.

    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._llm: Any = None
        self._count = 0

    async def open(self) -> None:
        """Load the model."""
        # Seconds of import that no other load process must pay.
        from vllm import AsyncEngineArgs  # noqa: PLC0415
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

        settings = json.loads((self._directory / "model.json").read_text(encoding="utf-8"))
        for key in ("model", "tokenizer"):
            if key in settings and (self._directory / settings[key]).exists():
                settings[key] = str(self._directory / settings[key])
        settings |= {"enable_log_requests": False, "disable_log_stats": True}
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))

    async def close(self) -> None:
        """Shut vLLM down."""
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)

    async def stream(self, prompt: Prompt, max_tokens: int, *, stream: bool) -> AsyncGenerator[str, None]:
        """See :class:`~load.overhead.measure.Source`."""
        from vllm import SamplingParams  # noqa: PLC0415
        from vllm.inputs.engine import tokens_input  # noqa: PLC0415
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

        kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0, output_kind=kind)
        self._count += 1
        made = 0
        outputs = self._llm.generate(tokens_input(prompt.ids), sampling, str(self._count))
        async with aclosing(outputs):
            async for output in outputs:
                made += len(output.outputs[0].token_ids)
                yield output.outputs[0].text
        if made != max_tokens:
            raise BenchFailed(f"bare vLLM made {made} tokens instead of {max_tokens}")
