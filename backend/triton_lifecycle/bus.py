"""The event bus: facts go out, and no subscriber can hurt a request or another subscriber.

``publish`` is synchronous, never blocks and never raises. A *cheap* subscriber is a plain function and runs in line; a
coroutine function gets its own bounded queue and task, a time limit for each event, and counted drops. One that keeps
failing is removed and reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

import msgspec

from triton_lifecycle.events import TYPES, Event

log = logging.getLogger(__name__)

InlineHandler = Callable[[Any], None]
AsyncHandler = Callable[[Any], Awaitable[None]]

FAILURES_BEFORE_REMOVAL = 10
"""Failures or overruns in a row after which a subscriber is removed."""


class Counts(msgspec.Struct):
    """What became of one subscriber's events."""

    handled: int = 0
    failed: int = 0
    timed_out: int = 0
    dropped: int = 0
    removed: bool = False


class Subscription:
    """One handler's place on the bus; :meth:`close` ends it, also from within a handler."""

    def __init__(self, bus: Bus, name: str, handler: InlineHandler, types: tuple[type[Event], ...]) -> None:
        self.name = name
        self.types = types
        self.counts = Counts()
        self._bus = bus
        self._handler = handler
        self._failures = 0

    def offer(self, event: Event) -> None:
        """Hand over one event; never raises."""
        try:
            self._handler(event)
        except Exception:  # noqa: BLE001 - a subscriber's fault must not reach the publisher
            self.counts.failed += 1
            self._failed_once()
        else:
            self.counts.handled += 1
            self._failures = 0

    def close(self) -> None:
        """Receive nothing more."""
        self._bus.remove(self)

    async def aclose(self) -> None:
        """Receive nothing more and wait until nothing of this subscription runs."""
        self.close()

    def _failed_once(self) -> None:
        self._failures += 1
        if self._failures == 1:
            log.exception("event handler %s failed", self.name)
        if self._failures >= FAILURES_BEFORE_REMOVAL:
            self.counts.removed = True
            log.error("event handler %s failed %d times in a row and is removed", self.name, self._failures)
            self.close()


class QueuedSubscription(Subscription):
    """A coroutine handler behind its own bounded queue."""

    def __init__(
        self,
        bus: Bus,
        name: str,
        handler: AsyncHandler,
        types: tuple[type[Event], ...],
        *,
        size: int,
        time_limit: float,
    ) -> None:
        super().__init__(bus, name, self._enqueue, types)
        self._coroutine = handler
        self._time_limit = time_limit
        self._size = size
        self._queue: deque[Event] = deque()
        self._ready = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"event-handler-{name}")

    def offer(self, event: Event) -> None:
        """Queue one event, or count it as dropped when the queue is full."""
        self._enqueue(event)

    @property
    def backlog(self) -> int:
        """Events that wait for this handler."""
        return len(self._queue)

    def close(self) -> None:
        """Receive nothing more; what is queued is dropped and counted."""
        super().close()
        self.counts.dropped += len(self._queue)
        self._queue.clear()
        self._task.cancel()

    async def aclose(self) -> None:
        """Close, and wait until the handler's task has ended."""
        self.close()
        if self._task is not asyncio.current_task():
            await asyncio.wait([self._task], timeout=self._time_limit)

    async def drained(self, timeout: float) -> bool:  # noqa: ASYNC109 - a bound, not a cancellation
        """Wait until the queue is empty, at most ``timeout`` seconds; return whether it is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._empty.wait()
        return not self._queue

    def _enqueue(self, event: Event) -> None:
        if len(self._queue) >= self._size:
            self.counts.dropped += 1
            return
        self._queue.append(event)
        self._empty.clear()
        self._ready.set()

    async def _run(self) -> None:
        while True:
            await self._ready.wait()
            self._ready.clear()
            while self._queue:
                await self._handle(self._queue[0])
                if self._queue:
                    self._queue.popleft()
            self._empty.set()

    async def _handle(self, event: Event) -> None:
        try:
            async with asyncio.timeout(self._time_limit):
                await self._coroutine(event)
        except TimeoutError:
            self.counts.timed_out += 1
            self._failed_once()
        except Exception:  # noqa: BLE001 - a subscriber's fault stays its own
            self.counts.failed += 1
            self._failed_once()
        else:
            self.counts.handled += 1
            self._failures = 0


class Publisher(Protocol):
    """What a request needs of the bus."""

    def wants(self, event_type: type[Event]) -> bool:
        """Whether anybody would see an event of this type."""
        ...

    def publish(self, event: Event) -> None:
        """Hand the event to its subscribers."""
        ...


class Bus:
    """Typed publish and subscribe within one event loop.

    Args:
        queue_size: events that may wait for one coroutine handler.
        time_limit: seconds a coroutine handler may take for one event.
        max_handlers: subscriptions that may exist at once.

    """

    def __init__(self, *, queue_size: int = 10_000, time_limit: float = 10.0, max_handlers: int = 100) -> None:
        self._queue_size = queue_size
        self._time_limit = time_limit
        self._max_handlers = max_handlers
        self._routes: dict[type[Event], tuple[Subscription, ...]] = {}
        self._subscriptions: list[Subscription] = []
        self.published: defaultdict[str, int] = defaultdict(int)

    def subscribe(
        self, handler: InlineHandler | AsyncHandler, types: Iterable[type[Event]] = TYPES, *, name: str | None = None
    ) -> Subscription:
        """Send events of ``types`` to ``handler`` until the subscription is closed.

        Raises:
            ValueError: the bus already has as many handlers as it may.

        """
        if len(self._subscriptions) >= self._max_handlers:
            raise ValueError(f"the bus takes at most {self._max_handlers} handlers (event_driven.max_event_handlers)")
        label = name or str(getattr(handler, "__qualname__", type(handler).__name__))
        chosen = tuple(types)
        subscription: Subscription
        if inspect.iscoroutinefunction(handler):
            subscription = QueuedSubscription(
                self, label, handler, chosen, size=self._queue_size, time_limit=self._time_limit
            )
        else:
            subscription = Subscription(self, label, handler, chosen)  # type: ignore[arg-type]
        self._subscriptions.append(subscription)
        self._rebuild()
        return subscription

    def wants(self, event_type: type[Event]) -> bool:
        """Whether anybody subscribes to this type: one dictionary look-up."""
        return event_type in self._routes

    def publish(self, event: Event) -> None:
        """Hand the event to everyone who subscribes to its type, in the order of subscription."""
        routes = self._routes.get(type(event))
        if routes is None:
            return
        self.published[type(event).__name__] += 1
        # The tuple cannot change under the loop: closing a subscription builds new routes.
        for subscription in routes:
            subscription.offer(event)

    def remove(self, subscription: Subscription) -> None:
        """Forget a subscription; unknown ones are ignored."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            self._rebuild()

    async def aclose(self) -> None:
        """Let queued events be handled within the time limit, then end every subscription."""
        for subscription in list(self._subscriptions):
            if isinstance(subscription, QueuedSubscription):
                await subscription.drained(self._time_limit)
            await subscription.aclose()

    def counts(self) -> dict[str, dict[str, int | bool]]:
        """Return what became of the events of each present subscriber, by its name."""
        return {subscription.name: msgspec.structs.asdict(subscription.counts) for subscription in self._subscriptions}

    def _rebuild(self) -> None:
        routes: defaultdict[type[Event], list[Subscription]] = defaultdict(list)
        for subscription in self._subscriptions:
            for event_type in subscription.types:
                routes[event_type].append(subscription)
        self._routes = {event_type: tuple(found) for event_type, found in routes.items()}


class NoBus:
    """The bus when ``event_driven.enabled`` is false: nobody listens, publishing costs one call."""

    def wants(self, event_type: type[Event]) -> bool:  # noqa: ARG002 - the protocol's signature
        """Nobody subscribes."""
        return False

    def publish(self, event: Event) -> None:
        """Nothing happens."""

    async def aclose(self) -> None:
        """Nothing to close."""

    def counts(self) -> dict[str, dict[str, int | bool]]:
        """Return no subscribers."""
        return {}
