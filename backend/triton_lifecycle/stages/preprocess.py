"""Stage 2: from what the caller wrote to what the engine can run."""

from __future__ import annotations

from triton_lifecycle.chat import Conversation
from triton_lifecycle.config import RequestLimits
from triton_lifecycle.context import Context
from triton_lifecycle.embedding import Embedding
from triton_lifecycle.engine import Engine, Sampling
from triton_lifecycle.errors import InvalidInput, Unsupported
from triton_lifecycle.events import Prepared
from triton_lifecycle.sampling import type_values


class Preprocess:
    """Types the sampling parameters, has the engine prove them legal, and writes out a conversation."""

    def __init__(self, engine: Engine, limits: RequestLimits) -> None:
        self._engine = engine
        self._limits = limits

    async def __call__(self, ctx: Context) -> None:
        """Fill ``execution.sampling`` and ``execution.prompt``.

        Raises:
            InvalidInput: a parameter is wrong; the message names it.
            Unsupported: the loaded model does not do what is asked.

        """
        if ctx.input is None:
            raise InvalidInput("no stage before 'preprocess' has read the request")
        source = ctx.input.source
        if isinstance(source, Embedding):
            self._must_do("embed", "embedding_request")
            self._tell(ctx, "embedding", source.source if isinstance(source.source, str) else "")
            return
        self._must_do("generate", "text_input")
        sampling = self._engine.sampling(type_values(ctx.input.parameters, self._engine.sampling_fields))
        if sampling.n > self._limits.max_sequences:
            raise InvalidInput(
                f"sampling_parameters.n: at most {self._limits.max_sequences} sequences, found {sampling.n}"
            )
        if sampling.structured:
            await self._engine.prove(sampling, self._limits.structured_output_timeout)
        ctx.execution.sampling = sampling
        ctx.execution.prompt = (
            await self._engine.render(source.messages, source.tools) if isinstance(source, Conversation) else source
        )
        self._tell(ctx, "messages" if isinstance(source, Conversation) else "prompt", ctx.execution.prompt, sampling)

    @staticmethod
    def _tell(ctx: Context, kind: str, prompt: str, sampling: Sampling | None = None) -> None:
        if not ctx.wants(Prepared):
            return
        ctx.publish(
            Prepared,
            kind=kind,
            prompt_bytes=len(prompt.encode()),
            stream=ctx.metadata.stream,
            priority=ctx.metadata.priority,
            tenant=ctx.metadata.tenant,
            timeout=ctx.metadata.timeout,
            sequences=1 if sampling is None else sampling.n,
            max_tokens=None if sampling is None else sampling.max_tokens,
        )

    def _must_do(self, task: str, field: str) -> None:
        can = self._engine.limits.tasks
        if task not in can:
            does = {"generate": "text_input or messages", "embed": "embedding_request"}
            takes = " and ".join(does[name] for name in sorted(can) if name in does)
            raise Unsupported(
                f"{field}: the loaded model does not {task}; it takes {takes or 'no request of this kind'}"
            )
