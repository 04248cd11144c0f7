"""Recorded arrivals, sent to a server again: the same sizes, limits and tenants at the same distances in time."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Any

import msgspec

from triton_lifecycle.errors import Cancelled, DeadlineExceeded, Draining, LifecycleError, Overloaded, RequestError
from triton_lifecycle.events import Cancelled as CancelledEvent
from triton_lifecycle.events import Finished
from triton_lifecycle_client.errors import ServerUnreachable

from .compare import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from triton_lifecycle.story import Story
    from triton_lifecycle_client.client import AsyncClient
    from triton_lifecycle_client.types import Options

NO_LIMIT_S = 3600.0
"""Sent where the recorded request had no limit at all: the client always sends one."""
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_INVALID: dict[str, dict[str, Any]] = {
    "invalid_input": {"not_a_sampling_parameter": True},
    "prompt_too_long": {},
}


class Arrival(msgspec.Struct, frozen=True):
    """One request as it will be sent again."""

    story: Story
    after: float
    """Seconds from the first one."""
    prompt: str
    stream: bool
    options: Options
    leave_after_tokens: int | None = None
    leave_after_s: float | None = None
    by_order: bool = False
    """Whether it is cancelled by an order to the server, and not by its caller's leaving."""


def arrivals(stories: Iterable[Story], speed: float) -> tuple[list[Arrival], dict[str, int]]:
    """Return what is to be sent, and how many requests cannot be, by the reason."""
    whole: list[Story] = []
    left_out = {"beginning missing": 0, "end missing": 0, "kind not replayed": 0, "refused for its words": 0}
    for story in stories:
        if story.received is None:
            left_out["beginning missing"] += 1
        elif story.ending is None:
            left_out["end missing"] += 1
        elif story.prepared is not None and story.prepared.kind == "embedding":
            left_out["kind not replayed"] += 1
        elif story.prepared is None and story.status == "rejected" and story.slug not in _INVALID:
            left_out["refused for its words"] += 1
        else:
            whole.append(story)
    begin = min((story.begin for story in whole), default=0.0)
    return [_arrival(story, (story.begin - begin) / speed) for story in whole], left_out


async def send(
    client: AsyncClient, planned: list[Arrival], *, progress: Callable[[int], None] = lambda _: None
) -> dict[str, Outcome]:
    """Send all at their times and return how each went, by the recorded id.

    Cancelling the task that waits here cancels what is under way on the server.
    """
    began = time.monotonic()
    outcomes: dict[str, Outcome] = {}

    async def one(arrival: Arrival) -> None:
        await asyncio.sleep(max(0.0, began + arrival.after - time.monotonic()))
        outcomes[arrival.story.id] = await _send(client, arrival)
        progress(len(outcomes))

    async with asyncio.TaskGroup() as group:
        for arrival in planned:
            group.create_task(one(arrival))
    return outcomes


def words(size: int) -> str:
    """Return a prompt of exactly ``size`` bytes."""
    parts, length, number = [], 0, 0
    while length < size:
        part = f"{WORDS[number % len(WORDS)]} "
        parts.append(part)
        length += len(part)
        number += 1
    return "".join(parts)[:size].rstrip().ljust(size, ".")


def _arrival(story: Story, after: float) -> Arrival:
    asked, ending = story.prepared, story.ending
    options: Options = {"request_id": f"replay-{uuid.uuid4().hex}"}
    refused = story.status == "rejected" and story.slug in _INVALID
    sampling: dict[str, Any] = dict(_INVALID[str(story.slug)]) if refused else {}
    size = 16
    if asked is not None:
        size = asked.prompt_bytes
        options["priority"] = asked.priority
        if asked.tenant:
            options["tenant"] = asked.tenant
        sampling |= {"n": asked.sequences, "max_tokens": asked.max_tokens, "ignore_eos": True}
        if isinstance(ending, Finished):
            # The end of the new words lies elsewhere; the amount of work is what is repeated.
            sampling["max_tokens"] = max(1, -(-ending.output_tokens // asked.sequences))
    limits = {} if story.admitted is None else story.admitted.limits
    given = None if asked is None else asked.timeout
    options["timeout"] = given or limits.get("total") or NO_LIMIT_S
    options["sampling"] = sampling
    left = isinstance(ending, CancelledEvent)
    return Arrival(
        story=story,
        after=after,
        prompt=words(max(1, size)),
        stream=asked is not None and asked.stream,
        options=options,
        leave_after_tokens=story.output_tokens if left and story.output_tokens else None,
        leave_after_s=story.duration if left else None,
        by_order=left and story.slug == Cancelled.slug,
    )


async def _send(client: AsyncClient, arrival: Arrival) -> Outcome:
    began = time.monotonic()
    reader = _Reader(client, arrival)
    task = asyncio.create_task(reader.read())
    limit = arrival.leave_after_s if arrival.leave_after_tokens is None or not arrival.stream else None
    try:
        await asyncio.wait({task, *reader.enough_or_end()}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        slug: str | None
        if not task.done() and arrival.by_order:
            await _order(client, arrival)
            await asyncio.wait({task}, timeout=NO_LIMIT_S)
        if task.done():
            status, slug = _ended(task.exception())
        else:
            status, slug = "cancelled", "caller_left"
    finally:
        reader.stop()
        task.cancel()
        await asyncio.wait({task})
    return Outcome(status, slug, reader.tokens, reader.first_s, time.monotonic() - began)


async def _order(client: AsyncClient, arrival: Arrival) -> None:
    """Have the server cancel the request; it may have ended just now."""
    try:
        await client.cancel(arrival.options["request_id"])
    except LifecycleError:
        return


class _Reader:
    """Takes one answer, and says when the recorded caller would leave."""

    def __init__(self, client: AsyncClient, arrival: Arrival) -> None:
        self.tokens = 0
        self.first_s: float | None = None
        self._client = client
        self._arrival = arrival
        self._more = asyncio.Event()
        self._enough = asyncio.create_task(self._until_enough()) if arrival.leave_after_tokens else None

    def enough_or_end(self) -> set[asyncio.Task[None]]:
        """Return the task that ends when as many tokens have come as the caller took; none if that does not matter."""
        return set() if self._enough is None else {self._enough}

    def stop(self) -> None:
        """Count no further."""
        if self._enough is not None:
            self._enough.cancel()

    async def read(self) -> None:
        """Take the answer to its end."""
        began = time.monotonic()
        arrival = self._arrival
        if not arrival.stream:
            completion = await self._client.generate(arrival.prompt, **arrival.options)
            self.tokens = completion.output_tokens
            return
        async with self._client.stream(arrival.prompt, **arrival.options) as stream:
            async for chunk in stream:
                if self.first_s is None and chunk.output_tokens:
                    self.first_s = time.monotonic() - began
                self.tokens += chunk.output_tokens
                self._more.set()

    async def _until_enough(self) -> None:
        wanted = self._arrival.leave_after_tokens or 0
        while self.tokens < wanted:
            await self._more.wait()
            self._more.clear()


def _ended(error: BaseException | None) -> tuple[str, str | None]:
    """Return the status and slug that a caller's view of the end stands for."""
    if error is None:
        return "completed", None
    if not isinstance(error, LifecycleError):
        raise error
    if isinstance(error, ServerUnreachable):
        return "unreachable", error.slug
    statuses: tuple[tuple[type[LifecycleError], str], ...] = (
        (Cancelled, "cancelled"),
        (DeadlineExceeded, "timed_out"),
        (RequestError, "rejected"),
        (Draining, "failed"),
        (Overloaded, "rejected"),
    )
    return next((status for kind, status in statuses if isinstance(error, kind)), "failed"), error.slug
