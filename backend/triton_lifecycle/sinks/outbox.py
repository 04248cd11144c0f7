"""Between the bus and a broker: bounded, in batches, again and again until it is through, exactly counted.

Batches go out one after the other, and one that failed goes again before any other: the order of a request's events is
kept. A broker that took a batch and could not say so gets it twice; the id ``request_id:seq`` tells which are the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from itertools import islice
from typing import Final, Protocol

import msgspec

from triton_lifecycle.events import Event, encode
from triton_lifecycle.sinks import FLUSH_S

log = logging.getLogger(__name__)

BATCH: Final = 128
"""Events in one batch at most: little enough to be packed within a millisecond or two."""
GATHER_S: Final = 0.02
"""How long a batch that is not full waits for more."""
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
"""Pauses between two attempts double from the first to the longest; each is shortened by chance."""


class Entry(msgspec.Struct, frozen=True):
    """An event on its way out."""

    id: str
    """``request_id:seq``: the same event always has the same."""
    key: str
    """The request: entries with the same key must stay in order."""
    body: bytes
    """The event as JSON."""


class Broker(Protocol):
    """What an outbox needs of a broker's client."""

    async def send(self, batch: list[Entry]) -> int:
        """Hand over a batch and wait until the broker has it.

        Returns:
            How many entries it will never take, such as too large ones.

        Raises:
            Exception: it is not known to have all of the batch; the same batch comes again.

        """
        ...

    async def close(self) -> None:
        """Let go of connections; a later :meth:`send` connects anew."""
        ...


class Outbox:
    """A sink in front of a broker.

    Args:
        name: in counts and logs.
        broker: where events go.
        types: which events.
        size: events that may wait; more are lost and counted.
        time_limit: seconds that the broker may take for one batch.

    """

    def __init__(
        self, name: str, broker: Broker, types: tuple[type[Event], ...], *, size: int, time_limit: float
    ) -> None:
        self.name = name
        self.types = types
        self._broker = broker
        self._size = size
        self._time_limit = time_limit
        self._queue: deque[Event] = deque()
        self._taken = self._sent = self._lost = self._retried = 0
        self._ready = asyncio.Event()
        self._empty = asyncio.Event()
        self._down_since: float | None = None
        self._lost_before = 0
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"outbox-{name}")

    def take(self, event: Event) -> None:
        """Let the event wait for its batch, or count it as lost when too many wait."""
        self._taken += 1
        if len(self._queue) >= self._size:
            self._lost += 1
            return
        self._queue.append(event)
        self._ready.set()

    def counts(self) -> dict[str, int]:
        """Return what became of the events: taken = sent + lost + backlog. Retried ones count once for each time."""
        return {
            "taken": self._taken,
            "sent": self._sent,
            "lost": self._lost,
            "retried": self._retried,
            "backlog": len(self._queue),
        }

    async def aclose(self) -> None:
        """Send what waits, within :data:`~triton_lifecycle.sinks.FLUSH_S`; what does not go out is lost and counted."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                while self._queue and not self._task.done():
                    self._empty.clear()
                    await self._empty.wait()
        self._task.cancel()
        await asyncio.wait([self._task], timeout=FLUSH_S)
        self._lost += len(self._queue)
        if self._queue:
            log.error("%s: %d events could not be sent before the end and are lost", self.name, len(self._queue))
        self._queue.clear()
        await self._let_go()

    async def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            if not self._queue:
                self._empty.set()
                self._ready.clear()
                await self._ready.wait()
            if len(self._queue) < BATCH:
                await asyncio.sleep(GATHER_S)
            batch = [
                Entry(f"{event.request_id}:{event.seq}", event.request_id, encode(event))
                for event in islice(self._queue, BATCH)
            ]
            try:
                async with asyncio.timeout(self._time_limit + 1):
                    refused = await self._broker.send(batch)
            except Exception as error:  # noqa: BLE001 - whatever the client raises, the batch goes again
                self._retried += len(batch)
                self._report_down(error)
                await self._let_go()
                await asyncio.sleep(pause * random.uniform(0.5, 1))  # noqa: S311 - to spread replicas
                pause = min(pause * 2, LONGEST_PAUSE_S)
                continue
            for _ in batch:
                self._queue.popleft()
            self._sent += len(batch) - refused
            self._lost += refused
            pause = FIRST_PAUSE_S
            self._report_up()

    async def _let_go(self) -> None:
        try:
            async with asyncio.timeout(FLUSH_S):
                await self._broker.close()
        except Exception as error:  # noqa: BLE001 - a connection that is broken may not even close
            log.debug("%s: closing failed: %s", self.name, type(error).__name__)

    def _report_down(self, error: Exception) -> None:
        if self._down_since is None:
            self._down_since, self._lost_before = time.monotonic(), self._lost
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            log.warning("%s takes no events (%s); up to %d wait, and it is tried again", self.name, what, self._size)

    def _report_up(self) -> None:
        if self._down_since is not None:
            seconds, lost = time.monotonic() - self._down_since, self._lost - self._lost_before
            log.warning("%s takes events again after %.1f s; %d were lost meanwhile", self.name, seconds, lost)
            self._down_since = None
