"""Stage 4: the engine's stream, and what the request's life makes of each chunk."""

from __future__ import annotations

from contextlib import aclosing

import msgspec

from triton_lifecycle.chat import Conversation
from triton_lifecycle.context import Context
from triton_lifecycle.embedding import Embedding
from triton_lifecycle.engine import Chunk, Delta, EmbeddingRequest, Engine, EngineRequest
from triton_lifecycle.errors import GenerationFailed, InvalidInput
from triton_lifecycle.events import DeadlineMoved, FirstToken, Progress, Scheduled
from triton_lifecycle.stages import Deliver


class Execute:
    """Runs a request on the engine. Leaving it in any way takes the request off the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def __call__(self, ctx: Context, deliver: Deliver) -> None:
        """Deliver chunks until the engine has finished the request.

        Raises:
            RequestError: the prompt does not fit, or vLLM refuses a parameter.
            EngineError: the engine failed.

        """
        if ctx.input is None:
            raise InvalidInput("no stage before 'execute' has prepared the request")
        if isinstance(ctx.input.source, Embedding):
            await self._embed(ctx, ctx.input.source, deliver)
            return
        if ctx.execution.sampling is None:
            raise InvalidInput("no stage before 'execute' has prepared the request")
        ctx.execution.prompt_token_ids = await self._engine.tokenize(
            ctx.execution.prompt, special=not isinstance(ctx.input.source, Conversation)
        )
        ctx.execution.attempts += 1
        request = EngineRequest(
            id=ctx.attempt_id,
            token_ids=ctx.execution.prompt_token_ids,
            sampling=ctx.execution.sampling,
            priority=ctx.metadata.priority,
        )
        async with aclosing(self._engine.generate(request)) as chunks:
            async for chunk in chunks:
                self._account(ctx, chunk)
                await deliver(chunk)
                if chunk.finished:
                    return
        raise GenerationFailed("the engine ended the stream without finishing the request")

    async def _embed(self, ctx: Context, asked: Embedding, deliver: Deliver) -> None:
        """Deliver one vector, as the JSON list that the official backend answers with."""
        ids = await self._engine.tokenize(asked.source, room=0) if isinstance(asked.source, str) else asked.source
        ctx.execution.prompt_token_ids = ids
        ctx.execution.attempts += 1
        vector = await self._engine.embed(
            EmbeddingRequest(ctx.attempt_id, ids, asked.dimensions, ctx.metadata.priority)
        )
        chunk = Chunk((Delta(0, msgspec.json.encode(vector).decode(), (), "stop"),), finished=True)
        ctx.absorb(chunk)
        await deliver(chunk)

    @staticmethod
    def _account(ctx: Context, chunk: Chunk) -> None:
        first = not ctx.output.tokens
        gained = ctx.absorb(chunk)
        if "scheduled" not in ctx.execution.times:
            now = ctx.now()
            # The engine reads the same clock, but elsewhere and perhaps coarser: keep the order of what happened.
            told = now if chunk.scheduled_at is None else chunk.scheduled_at
            at = ctx.mark("scheduled", min(now, max(told, ctx.execution.times.get("admitted", told))))
            ctx.publish(
                Scheduled,
                at=at,
                attempt=ctx.execution.attempts,
                prompt_tokens=len(ctx.execution.prompt_token_ids or ()),
                cached_tokens=ctx.kv.cached_tokens or 0,
            )
        if not gained:
            return
        if first:
            ctx.publish(FirstToken, at=ctx.mark("first_token"))
        if ctx.deadline is not None:
            ctx.deadline.progress(gained)
            if ctx.wants(DeadlineMoved) and ctx.deadline.due is not None:
                ctx.publish(DeadlineMoved, due=ctx.deadline.due, limit=ctx.deadline.limit)
        if ctx.wants(Progress):
            ctx.publish(Progress, tokens=gained, total=ctx.output.tokens)
