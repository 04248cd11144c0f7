"""Stage 2: from what the caller wrote to what the engine can run."""

from __future__ import annotations

import asyncio

from triton_lifecycle.chat import Conversation
from triton_lifecycle.config import RequestLimits
from triton_lifecycle.context import Context
from triton_lifecycle.continuation import check, work
from triton_lifecycle.embedding import Embedding
from triton_lifecycle.engine import Engine, Sampling
from triton_lifecycle.errors import InvalidInput, Unsupported
from triton_lifecycle.events import Prepared
from triton_lifecycle.images import decode
from triton_lifecycle.sampling import type_values


class Preprocess:
    """Types the sampling parameters, has the engine prove them legal, decodes images, and writes out a conversation.

    Args:
        engine: decides what is legal.
        limits: how much one request may ask for.
        strict: whether a sampling parameter that the engine does not know is refused, or else left out.

    """

    def __init__(self, engine: Engine, limits: RequestLimits, *, strict: bool = True) -> None:
        self._engine = engine
        self._limits = limits
        self._strict = strict

    async def __call__(self, ctx: Context) -> None:
        """Fill ``execution.sampling`` and ``execution.prompt``.

        Raises:
            InvalidInput: a parameter or an image is wrong; the message names it.
            Unsupported: the loaded model does not do what is asked.

        """
        if ctx.input is None:
            raise InvalidInput("no stage before 'preprocess' has read the request")
        source = ctx.input.source
        if isinstance(source, Embedding):
            self._must_do(ctx, "embed", "embedding_request")
            self._tell(ctx, "embedding", source.source if isinstance(source.source, str) else "")
            return
        self._must_do(ctx, "generate", "text_input")
        self._must_see(len(ctx.input.images))
        given, fields = ctx.input.parameters, self._engine.sampling_fields
        if not self._strict:
            given = {name: value for name, value in given.items() if name in fields}
        sampling = self._engine.sampling(type_values(given, fields))
        if sampling.n > self._limits.max_sequences:
            raise InvalidInput(
                f"sampling_parameters.n: at most {self._limits.max_sequences} sequences, found {sampling.n}"
            )
        if ctx.input.continued:
            check(ctx.input.continued, self._engine.limits, sampling.max_tokens)
        if sampling.structured:
            await self._engine.prove(sampling, self._limits.structured_output_timeout)
        ctx.execution.sampling = sampling
        if ctx.input.images:
            ctx.images = await asyncio.to_thread(decode, ctx.input.images, self._limits)
        ctx.execution.prompt = (
            await self._engine.render(source.messages, source.tools) if isinstance(source, Conversation) else source
        )
        self._tell(ctx, "messages" if isinstance(source, Conversation) else "prompt", ctx.execution.prompt, sampling)

    @staticmethod
    def _tell(ctx: Context, kind: str, prompt: str, sampling: Sampling | None = None) -> None:
        if not ctx.wants(Prepared):
            return
        given = () if ctx.input is None else ctx.input.continued
        prompt_bytes, max_tokens = work(prompt, None if sampling is None else sampling.max_tokens, given)
        ctx.publish(
            Prepared,
            kind=kind,
            prompt_bytes=prompt_bytes,
            stream=ctx.metadata.stream,
            priority=ctx.metadata.priority,
            tenant=ctx.metadata.tenant,
            timeout=ctx.metadata.timeout,
            sequences=1 if sampling is None else sampling.n,
            max_tokens=max_tokens,
        )

    def _must_see(self, images: int) -> None:
        most = self._engine.limits.images
        if images and not most:
            raise Unsupported("image: the loaded model takes no images; it takes text_input or messages")
        if images > most:
            raise InvalidInput(f"image: the loaded model takes at most {most} in a prompt, found {images}")

    def _must_do(self, ctx: Context, task: str, field: str) -> None:
        can = self._engine.limits.tasks
        if task not in can:
            does = {"generate": "text_input or messages", "embed": "embedding_request"}
            takes = " and ".join(does[name] for name in sorted(can) if name in does)
            raise Unsupported(
                # Up to the semicolon the official backend's own words, which its users match on.
                f"{field}: Model {ctx.model} does not support '{task}' request; "
                f"it takes {takes or 'no request of this kind'}"
            )
