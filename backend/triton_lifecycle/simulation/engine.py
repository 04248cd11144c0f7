"""A simulated engine that keeps the recorded pace of each request; beyond it, it goes on as the others did."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection
from random import Random
from typing import Any

from triton_lifecycle.engine import Chunk, Delta, EmbeddingRequest, EngineRequest, Limits, Load, Remainder, Sampling
from triton_lifecycle.engine.simulated import SimulatedEngine, SimulatedSettings
from triton_lifecycle.errors import EngineError, LifecycleError
from triton_lifecycle.events import Finished
from triton_lifecycle.simulation.trace import Pace, Trace

FOREVER_S = 366 * 24 * 3600.0


async def reach(when: float) -> None:
    """Wait until the loop's clock shows ``when``; several who wait for different times go on in their order."""
    loop = asyncio.get_running_loop()
    if when <= loop.time():
        return
    future: asyncio.Future[None] = loop.create_future()
    handle = loop.call_at(when, _settle, future)
    try:
        await future
    finally:
        handle.cancel()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class PacedEngine(SimulatedEngine):
    """The simulated engine, with the time and the number of tokens taken from recordings.

    Args:
        current: tells which recorded request the calling task serves.
        pace: for what a recording does not tell.
        seed: of every choice.
        max_model_len: of the model; prompts are taken as they were.

    """

    def __init__(self, current: Callable[[], Trace], pace: Pace, seed: int, max_model_len: int) -> None:
        blocks = -(-max_model_len // SimulatedSettings().block_size)
        super().__init__(SimulatedSettings(seed=seed, max_model_len=max_model_len, kv_blocks=max(blocks, 4096)))
        self._current = current
        self._pace = pace
        self._seed = seed
        self._known: set[str] = set()

    @property
    def limits(self) -> Limits:
        """Those of the simulated model, which also embeds here."""
        limits = super().limits
        return Limits(limits.max_model_len, limits.vocab_size, frozenset({"generate", "embed"}))

    async def start(self) -> None:
        """Be ready: there is no step to drive."""
        self._alive = True

    def sampling(self, values: Any) -> Sampling:  # noqa: ANN401 - the protocol's mapping
        """Refuse what was refused here; else check as the simulated engine does."""
        self._judge("preprocess")
        return super().sampling(values)

    async def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:  # noqa: ARG002
        """Return the words alone: their size is that of the written-out conversation."""
        return "".join(str(turn["content"]) for turn in messages)

    async def tokenize(
        self,
        prompt: str,  # noqa: ARG002
        *,
        special: bool = True,  # noqa: ARG002
        room: int = 1,  # noqa: ARG002
        images: int = 0,  # noqa: ARG002
    ) -> list[int]:
        """Return as many tokens as the prompt had."""
        trace = self._current()
        verdict = trace.verdict
        if verdict is not None and verdict[0] == "execute" and trace.story.scheduled is None:
            await reach(trace.story.end)
            if not isinstance(verdict[1], EngineError):
                raise verdict[1]
        return [1] * trace.prompt_tokens

    async def embed(self, request: EmbeddingRequest) -> list[float]:
        """Take as long as it took."""
        trace = self._current()
        failure = trace.failure(_attempt(request.id))
        if failure is not None:
            await reach(failure[0])
            raise failure[1]
        if trace.outside is None:
            await reach(trace.story.end)
            if trace.verdict is not None:
                raise _final(trace.verdict[1])
        else:
            await reach(trace.story.end + FOREVER_S)
        return [0.0]

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Chunk, None]:
        """Yield the recorded tokens at their times, and end as recorded; go on where the end was not the engine's."""
        trace, n, attempt = self._current(), request.sampling.n, _attempt(request.id)
        writer = _Writer(self._seed, trace, n, self._vocabulary.common, request.made)
        self._known.add(request.id)
        try:
            for at, count in trace.tokens_of(attempt, request.made):
                await reach(at)
                yield writer.chunk(count)
            failure = trace.failure(attempt)
            if failure is not None:
                await reach(failure[0])
                raise failure[1]
            ending = trace.story.ending
            if trace.verdict is not None:
                await reach(trace.story.end)
                raise _final(trace.verdict[1])
            if isinstance(ending, Finished):
                await reach(ending.at)
                yield writer.last(ending.finish_reason.split(","))
                return
            async for chunk in self._beyond(trace, writer, request.sampling.max_tokens):
                yield chunk
        finally:
            self._known.discard(request.id)

    async def _beyond(self, trace: Trace, writer: _Writer, most: int | None) -> AsyncGenerator[Chunk, None]:
        """What nobody recorded, because the request was refused, cancelled or out of time: drawn from the seed."""
        now = asyncio.get_running_loop().time()
        wait, gap, length = self._pace.draw(self._seed, trace.story.id)
        writer.scheduled_at = writer.scheduled_at or now
        wanted = length if most is None else min(length, most)
        wanted = max(wanted, writer.made // writer.n + 1)
        # Until the recorded end there was no further token, or it would have been recorded.
        ended = trace.story.end if trace.story.ending is not None else trace.until
        at = now + wait if trace.story.admitted is None else max(now, trace.story.end, ended) + gap
        while writer.made < wanted * writer.n:
            await reach(at)
            at += gap
            yield writer.chunk(writer.n)
        yield writer.last(["length" if wanted == most else "stop"] * writer.n)

    def remainder(self, request: EngineRequest, made: Collection[int]) -> Remainder | None:
        """Go on behind the tokens ``made``, unless the recorded answer was begun again."""
        if self._current().began_again:
            return None
        return Remainder(request.after(list(made), request.sampling.native), kept=len(made))

    def repeatable(self, sampling: Sampling) -> bool:  # noqa: ARG002 - a recording always is
        """Make the same tokens again."""
        return True

    def load(self) -> Load:
        """Return how many requests are under way."""
        return Load(running=len(self._known), waiting=0, kv_usage=0.0, requests=len(self._known))

    def _judge(self, stage: str) -> None:
        verdict = self._current().verdict
        if verdict is not None and verdict[0] == stage:
            raise verdict[1]


def _attempt(request_id: str) -> int:
    """Return which of a request's attempts this is, from 1."""
    return int(request_id.rpartition("-")[2])


def _final(error: LifecycleError) -> LifecycleError:
    """Return what says the same and is not tried again."""
    if not isinstance(error, EngineError):
        return error
    kind: type[LifecycleError] = type("Recorded", (LifecycleError,), {"slug": error.slug})
    return kind(error.message)


class _Writer:
    """Makes chunks of tokens whose words are drawn from the seed, spread over the sequences in turn."""

    def __init__(self, seed: int, trace: Trace, n: int, words: list[str], made: int) -> None:
        self.made = made
        self.n = n
        scheduled = trace.story.scheduled
        self.scheduled_at = None if scheduled is None else scheduled.at
        self._cached = None if scheduled is None else scheduled.cached_tokens
        self._random = Random(f"{seed}/{trace.story.id}/words")  # noqa: S311 - a simulation
        self._words = words

    def chunk(self, count: int) -> Chunk:
        """Return a chunk of ``count`` tokens in all."""
        shares = [0] * self.n
        for number in range(count):
            shares[(self.made + number) % self.n] += 1
        self.made += count
        deltas = tuple(
            Delta(index, "".join(self._random.choices(self._words, k=share)), (1,) * share)
            for index, share in enumerate(shares)
            if share
        )
        return Chunk(deltas, finished=False, scheduled_at=self.scheduled_at, cached_tokens=self._cached)

    def last(self, reasons: list[str]) -> Chunk:
        """Return the chunk that ends every sequence."""
        deltas = tuple(Delta(index, "", (), reason) for index, reason in enumerate(reasons))
        return Chunk(deltas, finished=True, scheduled_at=self.scheduled_at, cached_tokens=self._cached)


__all__ = ["PacedEngine", "reach"]
