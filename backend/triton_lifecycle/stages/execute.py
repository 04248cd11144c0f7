"""Stage 4: the engine's stream, in one attempt or more, and what the request's life makes of each chunk."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

import msgspec

from triton_lifecycle.chat import Conversation
from triton_lifecycle.config import ErrorHandling
from triton_lifecycle.context import Context, Output, Sequence
from triton_lifecycle.continuation import begin
from triton_lifecycle.embedding import Embedding
from triton_lifecycle.engine import Chunk, Delta, EmbeddingRequest, Engine, EngineRequest
from triton_lifecycle.engine.splice import Known, Splice
from triton_lifecycle.engine.supervisor import Course, Supervisor
from triton_lifecycle.errors import EngineDied, EngineError, EngineRestarting, GenerationFailed, InvalidInput
from triton_lifecycle.events import DeadlineMoved, FirstToken, Progress, Retrying, Scheduled
from triton_lifecycle.recovery import Step, Trouble, decide
from triton_lifecycle.stages import Deliver

T = TypeVar("T")


class Execute:
    """Runs a request on the engine. Leaving it in any way takes the request off the engine.

    When the engine fails, the request goes on as the table in ``recovery.py`` says: the caller sees a pause.
    """

    def __init__(self, engine: Engine, supervisor: Supervisor, settings: ErrorHandling) -> None:
        self._engine = engine
        self._supervisor = supervisor
        self._delay = settings.recovery_delay
        self._most = settings.max_recovery_attempts if settings.enabled and settings.enable_auto_recovery else 0

    async def __call__(self, ctx: Context, deliver: Deliver) -> None:
        """Deliver chunks until the engine has finished the request.

        Raises:
            RequestError: the prompt does not fit, or vLLM refuses a parameter.
            EngineError: the engine failed, and the request could not go on.

        """
        if ctx.input is None:
            raise InvalidInput("no stage before 'execute' has prepared the request")
        if isinstance(ctx.input.source, Embedding):
            await self._embed(ctx, ctx.input.source, deliver)
            return
        if ctx.execution.sampling is None:
            raise InvalidInput("no stage before 'execute' has prepared the request")
        ids = await self._engine.tokenize(
            ctx.execution.prompt, special=not isinstance(ctx.input.source, Conversation), images=len(ctx.images)
        )
        length = ctx.execution.prompt_tokens = len(ids) + len(ctx.input.continued)
        asked = EngineRequest(
            id=ctx.attempt_id,
            token_ids=ids,
            sampling=ctx.execution.sampling,
            priority=_place(ctx, length),
            images=ctx.images,
            trace=ctx.trace_headers or None,
        )
        answer = _Answer(self._engine, ctx, asked, deliver)
        await self._persist(ctx, answer.attempt, answer.next_step)

    async def _embed(self, ctx: Context, asked: Embedding, deliver: Deliver) -> None:
        """Deliver one vector, as the JSON list that the official backend answers with."""
        ids = await self._engine.tokenize(asked.source, room=0) if isinstance(asked.source, str) else asked.source
        ctx.execution.prompt_tokens = len(ids)
        place, trace = _place(ctx, len(ids)), ctx.trace_headers or None

        async def attempt(progress: Callable[[], None]) -> list[float]:
            vector = await self._engine.embed(EmbeddingRequest(ctx.attempt_id, ids, asked.dimensions, place, trace))
            progress()
            return vector

        vector = await self._persist(ctx, attempt, decide)
        chunk = Chunk((Delta(0, msgspec.json.encode(vector).decode(), (), "stop"),), finished=True)
        ctx.absorb(chunk)
        await deliver(chunk)

    async def _persist(
        self, ctx: Context, attempt: Callable[[Callable[[], None]], Awaitable[T]], next_step: Callable[[Trouble], Step]
    ) -> T:
        """Make attempts until one succeeds or nothing more can be done."""
        course = Course()
        fruitless = most_tokens = 0
        while True:
            ctx.execution.attempts += 1
            held = course.deaths > 0 or not self._supervisor.admits
            if held and ctx.deadline is not None:
                ctx.deadline.suspend()
            try:
                async with self._supervisor.attempt(course, left=None if ctx.deadline is None else ctx.deadline.left):
                    if held and ctx.deadline is not None:
                        ctx.deadline.resume()
                    return await attempt(lambda: self._supervisor.progress(course))
            except EngineRestarting:
                raise
            except EngineError as error:
                fruitless = 0 if ctx.output.tokens > most_tokens else fruitless + 1
                most_tokens = max(most_tokens, ctx.output.tokens)
                trouble = Trouble(fruitless, self._most, quarantined=course.quarantined)
                if next_step(trouble) is Step.FAIL:
                    raise _explained(error, ctx, trouble) from error
                ctx.publish(Retrying, attempt=ctx.execution.attempts, slug=error.slug)
                if not isinstance(error, EngineDied):
                    await asyncio.sleep(self._delay)


class _Answer:
    """One request's answer, over all its attempts. It may go on behind tokens that the caller has from elsewhere.

    Raises:
        RequestError: it cannot.

    """

    def __init__(self, engine: Engine, ctx: Context, asked: EngineRequest, deliver: Deliver) -> None:
        self._engine = engine
        self._ctx = ctx
        self._asked = asked
        self._deliver = deliver
        self._given = [] if ctx.input is None else list(ctx.input.continued)
        self._first, kept = begin(engine, asked, self._given) if self._given else (asked, 0)
        self._pending = tuple(self._given[kept:])
        """Given tokens of a character that was not complete: they come anew, and their text for the first time."""
        self._next = self._first
        self._splice = self._new_splice()

    async def attempt(self, progress: Callable[[], None]) -> None:
        """Deliver what the engine makes of the request, or of its remainder."""
        request = msgspec.structs.replace(self._next, id=self._ctx.attempt_id)
        async with aclosing(self._engine.generate(request)) as chunks:
            async for made in chunks:
                progress()
                chunk = made if self._splice is None else self._splice.apply(made)
                if chunk is None:
                    continue
                _account(self._ctx, chunk)
                await self._deliver(chunk)
                if chunk.finished:
                    return
        raise GenerationFailed("the engine ended the stream without finishing the request")

    def next_step(self, trouble: Trouble) -> Step:
        """Return what is to be done, and prepare for it."""
        output = self._ctx.output
        only = output.sequences[0].token_ids if len(output.sequences) == 1 else []
        made = [*self._given, *only]
        rest = self._engine.remainder(self._asked, made) if only else None
        step = decide(
            trouble,
            made=output.tokens > 0,
            sent=self._ctx.metadata.stream,
            continuable=rest is not None,
            repeatable=self._engine.repeatable(self._asked.sampling),
        )
        self._next, self._splice = self._first, self._new_splice()
        if step is Step.CONTINUE and rest is not None:
            self._next = rest.request
            # The tokens behind those kept come again, and their text for the first time.
            before = output.sequences[0].cumulative_logprob
            self._splice = Splice([Known(tuple(made[rest.kept :]), 0, before, exact=False)])
        elif step is Step.REPEAT:
            self._splice = Splice([_all_of(sequence, self._pending) for sequence in output.sequences])
        elif step is Step.AGAIN:
            self._ctx.output = Output()
        return step

    def _new_splice(self) -> Splice | None:
        return Splice([Known(self._pending, exact=False)]) if self._pending else None


def _place(ctx: Context, length: int) -> int:
    """Return the engine's priority, and let admission know how long the prompt is."""
    if ctx.permit is None:
        # A plug-in stands in the place of 'schedule'.
        return ctx.metadata.priority
    ctx.permit.tokenized(length)
    return ctx.permit.place


def _all_of(sequence: Sequence, pending: tuple[int, ...]) -> Known:
    return Known((*pending, *sequence.token_ids), sum(map(len, sequence.text)))


def _account(ctx: Context, chunk: Chunk) -> None:
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
            prompt_tokens=ctx.execution.prompt_tokens or 0,
            cached_tokens=ctx.kv.cached_tokens or 0,
        )
    if not gained:
        return
    first, by_token = "first_token" not in ctx.execution.times, ctx.wants(Progress)
    if first:
        ctx.publish(FirstToken, at=ctx.mark("first_token"), tokens=gained)
    if ctx.deadline is not None:
        ctx.deadline.progress(gained)
        # With the first token another limit becomes the next one; each further token only moves it.
        if (first or by_token) and ctx.wants(DeadlineMoved) and ctx.deadline.due is not None:
            ctx.publish(DeadlineMoved, due=ctx.deadline.due, limit=ctx.deadline.limit)
    if by_token:
        ctx.publish(Progress, tokens=gained, total=ctx.output.tokens)


def _explained(error: EngineError, ctx: Context, trouble: Trouble) -> EngineError:
    """Return the error with what was tried."""
    if trouble.quarantined:
        return GenerationFailed(
            "the engine died each time it began to work on this request, also when it had no other: the request is not "
            "tried again, and should not be sent again"
        )
    attempts = ctx.execution.attempts
    if attempts == 1 and not trouble.most:
        return error
    if trouble.fruitless > trouble.most:
        return type(error)(f"{error.message}; {attempts} attempts were made")
    return type(error)(
        f"{error.message}, after {ctx.output.tokens} tokens, and this answer cannot be continued exactly (see "
        "compatibility.md: it depends on more than its tokens, and is random); send it again"
    )
