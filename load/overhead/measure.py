"""The closed loop: so many streams at a time, every response with the time at which it arrived."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

LOOK_S = 0.02
"""Between two looks at the child's own event loop."""


class BenchFailed(Exception):
    """The benchmark cannot go on; the text says why and what to do."""


class Prompt(msgspec.Struct, frozen=True):
    """A prompt; ``ids`` is what its text becomes, where that is known."""

    text: str
    ids: list[int] = []


class Order(msgspec.Struct, frozen=True):
    """One measurement, as the parent asks a child for it."""

    prompts: list[Prompt]
    """One request each."""
    concurrency: int
    max_tokens: int
    """Every request is told to make exactly so many."""
    limit_s: float
    stream: bool = True
    expected: list[str] | None = None
    """The whole answer to each prompt; one that differs fails the measurement."""
    keep_texts: bool = False


class Sample(msgspec.Struct):
    """What one measurement found. Times are in seconds on the child's clock."""

    seconds: float
    """From the first request's start to the last one's end."""
    cpu_seconds: float
    """CPU time of the child itself meanwhile, all threads."""
    requests: int
    tokens: int
    responses: int
    first: list[float]
    """Per request, from its start to its first response."""
    gaps: list[float]
    """Between two responses of a request."""
    texts: list[str] = []
    lags: list[float] = []
    """By how much the child's own event loop woke too late, each time that it looked."""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Answer(msgspec.Struct):
    """A child's reply: a sample or the reason why there is none."""

    sample: Sample | None = None
    error: str | None = None


class Source(Protocol):
    """Where answers come from."""

    async def open(self) -> None:
        """Be ready for requests."""
        ...

    async def close(self) -> None:
        """Give everything back."""
        ...

    def stream(self, prompt: Prompt, max_tokens: int, *, stream: bool) -> AsyncGenerator[str, None]:
        """Yield the text of each response to one request; raise ``BenchFailed`` if it fails."""
        ...


async def closed_loop(source: Source, order: Order) -> Sample:
    """Run the order's requests, ``concurrency`` at a time.

    Raises:
        BenchFailed: a request failed, gave another answer than expected, or time ran out.

    """
    sample = Sample(seconds=0.0, cpu_seconds=0.0, requests=0, tokens=0, responses=0, first=[], gaps=[])
    if order.keep_texts:
        sample.texts = [""] * len(order.prompts)
    todo = iter(range(len(order.prompts)))

    async def stream_after_stream() -> None:
        for index in todo:
            text = await _one(source, order, order.prompts[index], sample)
            if order.keep_texts:
                sample.texts[index] = text
            if order.expected is not None and text != order.expected[index]:
                raise BenchFailed(_difference(order.prompts[index].text, text, order.expected[index]))

    began, cpu = time.perf_counter(), time.process_time()
    watch = asyncio.create_task(_watch(sample))
    try:
        async with asyncio.timeout(order.limit_s), asyncio.TaskGroup() as group:
            for _ in range(min(order.concurrency, len(order.prompts))):
                group.create_task(stream_after_stream())
    except TimeoutError:
        raise BenchFailed(
            f"{sample.requests} of {len(order.prompts)} requests were done after {order.limit_s:.0f} s"
        ) from None
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        watch.cancel()
    sample.seconds, sample.cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    return sample


async def _watch(sample: Sample) -> None:
    """Measure how late the event loop itself is, until cancelled."""
    while True:
        due = time.perf_counter() + LOOK_S
        await asyncio.sleep(LOOK_S)
        sample.lags.append(max(0.0, time.perf_counter() - due))


async def _one(source: Source, order: Order, prompt: Prompt, sample: Sample) -> str:
    parts: list[str] = []
    clock = time.perf_counter
    last = began = clock()
    async with aclosing(source.stream(prompt, order.max_tokens, stream=order.stream)) as responses:
        async for text in responses:
            now = clock()
            if parts:
                sample.gaps.append(now - last)
            else:
                sample.first.append(now - began)
            last = now
            parts.append(text)
    if not parts:
        raise BenchFailed(f"no response at all to {prompt.text[:60]!r}")
    sample.requests += 1
    sample.responses += len(parts)
    sample.tokens += order.max_tokens
    return "".join(parts)


def _difference(prompt: str, found: str, expected: str) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), min(len(found), len(expected))
    )
    return (
        f"the stream for {prompt[:40]!r} is not the unary answer: from character {at} it goes on "
        f"{found[at : at + 40]!r} instead of {expected[at : at + 40]!r} ({len(found)} characters instead of "
        f"{len(expected)}): tokens were lost, repeated or out of order"
    )


def percentile(values: Sequence[float], q: float) -> float:
    """Return the q-th percentile (0…100), NaN of nothing."""
    return float(np.percentile(values, q)) if values else float("nan")


def combine(samples: Sequence[Sample]) -> Sample:
    """Put together what several children measured at the same time."""
    return Sample(
        seconds=max(s.seconds for s in samples),
        cpu_seconds=sum(s.cpu_seconds for s in samples),
        requests=sum(s.requests for s in samples),
        tokens=sum(s.tokens for s in samples),
        responses=sum(s.responses for s in samples),
        first=[value for s in samples for value in s.first],
        gaps=[value for s in samples for value in s.gaps],
        texts=[text for s in samples for text in s.texts],
        lags=[value for s in samples for value in s.lags],
    )
