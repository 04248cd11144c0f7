"""One asynchronous event handler at work: its bounded queue, its task, and the limit on its time.

A limit for each event needs no timer for each: one timer looks when the handler in hand may have been too long, and is
set anew from there. Ten thousand quick events cost one timer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice
from typing import Any, Final, Protocol

from triton_lifecycle.events import Event

TURN_S: Final = 0.001
"""For how long a handler with a backlog may keep the event loop before others get their turn."""


class Account(Protocol):
    """Where a worker writes down what became of each event."""

    def handled(self, event: Event) -> None:
        """The handler returned."""
        ...

    def dropped(self, event: Event) -> None:
        """The event never reached the handler, or was taken from it by the end."""
        ...

    def failed(self, event: Event, error: BaseException | None = None, *, overran: bool = False) -> None:
        """The handler raised, or ran over its limit."""
        ...


class Worker:
    """Hands events to a coroutine function, one at a time and in order.

    Args:
        handler: the coroutine function.
        account: told exactly once of each event that was offered, except of those that wait.
        name: for the task.
        size: events that may wait, the one in hand among them.
        time_limit: seconds for one event.

    """

    def __init__(
        self,
        handler: Callable[[Any], Awaitable[None]],
        account: Account,
        *,
        name: str,
        size: int,
        time_limit: float,
    ) -> None:
        self._handler = handler
        self._account = account
        self._size = size
        self._time_limit = time_limit
        self._queue: deque[Event] = deque()
        self._hand: Event | None = None
        self._began = 0.0
        self._expired = False
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._empty = asyncio.Event()
        self._empty.set()
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run(), name=f"event-handler-{name}")

    @property
    def backlog(self) -> int:
        """Events that wait, the one in hand among them."""
        return len(self._queue)

    def waiting(self) -> Iterable[Event]:
        """Return the events that wait, the one in hand among them."""
        return self._queue

    def offer(self, event: Event) -> None:
        """Queue one event, or count it as dropped when there is no room."""
        if len(self._queue) >= self._size or self._closed:
            self._account.dropped(event)
            return
        self._queue.append(event)
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            self._empty.clear()
            if not waiter.done():
                waiter.set_result(None)

    def close(self) -> None:
        """Take nothing more; what waits is dropped and counted, and the handler is cancelled."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        in_hand = self._hand is not None
        for event in islice(self._queue, in_hand, None):
            self._account.dropped(event)
        # The event in hand is counted where its handling ends.
        self._queue = deque(islice(self._queue, in_hand))
        self._task.cancel()

    async def ended(self, limit: float) -> None:
        """Wait until the task has ended, at most ``limit`` seconds; returns at once within the handler itself."""
        if self._task is not asyncio.current_task():
            await asyncio.wait([self._task], timeout=limit)

    async def drained(self, limit: float) -> bool:
        """Wait until nothing waits, at most ``limit`` seconds; return whether it is so."""
        if self._queue:
            self._empty.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await self._empty.wait()
        return not self._queue

    async def _run(self) -> None:
        turn = time.monotonic()
        while not self._closed:
            if not self._queue:
                self._empty.set()
                self._waiter = self._loop.create_future()
                await self._waiter
                turn = time.monotonic()
                continue
            self._hand = self._queue[0]
            try:
                await self._handle(self._hand)
            finally:
                self._hand = None
                self._queue.popleft()
            if time.monotonic() - turn > TURN_S:
                await asyncio.sleep(0)
                turn = time.monotonic()
        self._empty.set()

    async def _handle(self, event: Event) -> None:
        self._began = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(self._began + self._time_limit, self._look)
        try:
            await self._handler(event)
        except asyncio.CancelledError as error:
            if self._overran():
                self._account.failed(event, overran=True)
            elif self._task.cancelling():
                self._account.dropped(event)
                raise
            else:
                self._account.failed(event, error)
        except BaseException as error:  # noqa: BLE001 - a subscriber's fault stays its own
            overran = self._overran()
            self._account.failed(event, None if overran else error, overran=overran)
        else:
            if self._overran():
                self._account.failed(event, overran=True)
            else:
                self._account.handled(event)

    def _look(self) -> None:
        self._timer = None
        if self._hand is None or self._closed:
            return
        due = self._began + self._time_limit
        if self._loop.time() >= due:
            self._expired = True
            self._task.cancel()
            due = self._loop.time() + self._time_limit  # for one that lets itself not be cancelled
        self._timer = self._loop.call_at(due, self._look)

    def _overran(self) -> bool:
        """Whether the limit passed for the event in hand; takes back the cancels that this brought."""
        if not self._expired:
            return False
        self._expired = False
        while self._task.cancelling() > self._closed:
            self._task.uncancel()
        return True
