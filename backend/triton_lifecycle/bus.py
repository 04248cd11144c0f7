"""The event bus: facts go out, and no subscriber can hurt a request or another subscriber.

``publish`` is synchronous, never blocks and never raises. A *cheap* subscriber is a plain function and runs in line; a
coroutine function gets its own bounded queue and task, a time limit for each event, and counted drops. One that keeps
failing is removed and reported; what became of its events stays in the counts.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, Protocol, cast

import msgspec

from triton_lifecycle.events import TYPES, Event
from triton_lifecycle.worker import Worker

log = logging.getLogger(__name__)

InlineHandler = Callable[[Any], None]
AsyncHandler = Callable[[Any], Awaitable[None]]

FAILURES_BEFORE_REMOVAL: Final = 10
"""Failures or overruns in a row after which a subscriber is removed."""
CLOSE_S: Final = 3.0
"""What handlers may take at the end to work off their queues, and again to end."""
EARLIER: Final = "(earlier)"
"""Under this name the counts of the subscribers that ended longest ago are added up, so that none are lost."""


class Counts(msgspec.Struct):
    """What became of the events of one type, or of all, that were published to one subscriber."""

    handled: int = 0
    failed: int = 0
    timed_out: int = 0
    dropped: int = 0
    """Lost to a full queue, or because the subscription ended first."""
    backlog: int = 0
    """Waiting for the subscriber."""

    def add(self, other: Counts) -> None:
        """Add another's figures to these."""
        self.handled += other.handled
        self.failed += other.failed
        self.timed_out += other.timed_out
        self.dropped += other.dropped
        self.backlog += other.backlog


class _Route:
    """One type's way to one inline subscriber. ``handler`` is looked up at each event: a closed one gets no more."""

    __slots__ = ("counts", "handler", "subscription")

    def __init__(self, subscription: Subscription, handler: InlineHandler, counts: Counts) -> None:
        self.subscription = subscription
        self.handler = handler
        self.counts = counts


class _Type:
    """What the bus knows of one event type."""

    __slots__ = ("inline", "published", "queued")

    def __init__(self) -> None:
        self.published = 0
        self.queued: tuple[InlineHandler, ...] = ()
        self.inline: tuple[_Route, ...] = ()


class Subscription:
    """One handler's place on the bus; :meth:`close` ends it, also from within a handler."""

    def __init__(self, bus: Bus, name: str, handler: InlineHandler, types: tuple[type[Event], ...]) -> None:
        self.name = name
        self.types = types
        self.counted = True
        """Whether it takes one of the places for handlers."""
        self.removed = False
        """Whether the bus ended it because it kept failing."""
        self.by_type: dict[type[Event], Counts] = {event_type: Counts() for event_type in types}
        self.routes = {event_type: _Route(self, handler, counts) for event_type, counts in self.by_type.items()}
        self._bus = bus
        self._closed = False
        self._failures = 0
        self._handled_before = 0

    @property
    def counts(self) -> Counts:
        """The figures of all types together."""
        total = Counts()
        for counts in self.by_type.values():
            total.add(counts)
        return total

    @property
    def backlog(self) -> int:
        """Events that wait for this handler."""
        return 0

    def close(self) -> None:
        """Receive nothing more."""
        if not self._closed:
            self._closed = True
            for route in self.routes.values():
                route.handler = _closed
            self._bus.remove(self)

    async def aclose(self) -> None:
        """Receive nothing more and wait until nothing of this subscription runs."""
        self.close()

    def failed(self, event: Event, error: BaseException | None = None, *, overran: bool = False) -> None:
        """Count an event that the handler failed on, and end the subscription after too many in a row."""
        counts = self.by_type[type(event)]
        if isinstance(error, _Gone):
            counts.dropped += 1
            return
        if overran:
            counts.timed_out += 1
        else:
            counts.failed += 1
        handled = sum(counts.handled for counts in self.by_type.values())
        self._failures = self._failures + 1 if handled == self._handled_before else 1
        self._handled_before = handled
        if self._failures == 1:
            how = "ran over its time limit" if overran else "failed"
            log.error("event handler %s %s on %s", self.name, how, type(event).__name__, exc_info=error)
        if self._failures >= FAILURES_BEFORE_REMOVAL and not self._closed:
            self.removed = True
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
        super().__init__(bus, name, _closed, types)
        self._time_limit = time_limit
        self._worker = Worker(handler, self, name=name, size=size, time_limit=time_limit)
        self.offer = self._worker.offer

    @property
    def counts(self) -> Counts:
        """The figures of all types together, with what waits."""
        self.count_backlog()
        return super().counts

    @property
    def backlog(self) -> int:
        """Events that wait for this handler, the one that it has in hand among them."""
        return self._worker.backlog

    def count_backlog(self) -> None:
        """Write down by type what waits."""
        waiting = Counter(type(event) for event in self._worker.waiting())
        for event_type, counts in self.by_type.items():
            counts.backlog = waiting[event_type]

    def close(self) -> None:
        """Receive nothing more; what is queued, and the event in hand, is dropped and counted."""
        if not self._closed:
            super().close()
            self._worker.close()

    async def aclose(self) -> None:
        """Close, and wait until the handler's task has ended."""
        self.close()
        await self.ended(self._time_limit)

    async def ended(self, limit: float) -> None:
        """Wait until the handler's task has ended after :meth:`close`, at most ``limit`` seconds."""
        await self._worker.ended(limit)

    async def drained(self, timeout: float) -> bool:  # noqa: ASYNC109 - a bound, not a cancellation
        """Wait until the queue is empty, at most ``timeout`` seconds; return whether it is."""
        return await self._worker.drained(timeout)

    def handled(self, event: Event) -> None:
        """Count an event that was handled."""
        self.by_type[type(event)].handled += 1

    def dropped(self, event: Event) -> None:
        """Count an event that was lost."""
        self.by_type[type(event)].dropped += 1


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
        self._routes: dict[type[Event], _Type] = {}
        self._known: dict[type[Event], _Type] = defaultdict(_Type)
        self._subscriptions: list[Subscription] = []
        self._ended: deque[Subscription] = deque()
        self._earlier: defaultdict[type[Event], Counts] = defaultdict(Counts)

    def subscribe(
        self,
        handler: InlineHandler | AsyncHandler,
        types: Iterable[type[Event]] = TYPES,
        *,
        name: str | None = None,
        counted: bool = True,
    ) -> Subscription:
        """Send events of ``types`` to ``handler`` until the subscription is closed.

        Args:
            handler: a plain function runs in line with whoever publishes, so it must be quick; it cannot be stopped. A
                coroutine function runs in its own task.
            types: event types; a base class stands for all below it, so ``[Event]`` is everything.
            name: for counts and logs; a number is added when it is taken.
            counted: whether it takes one of the places for handlers; the server's own parts do not.

        Raises:
            ValueError: the bus already has as many handlers as it may.

        """
        if counted and sum(each.counted for each in self._subscriptions) >= self._max_handlers:
            raise ValueError(f"the bus takes at most {self._max_handlers} handlers (event_driven.max_event_handlers)")
        label = self._free(name or str(getattr(handler, "__qualname__", type(handler).__name__)))
        chosen = _concrete(types)
        subscription: Subscription
        if is_async(handler):
            coroutine = cast("AsyncHandler", handler)
            subscription = QueuedSubscription(
                self, label, coroutine, chosen, size=self._queue_size, time_limit=self._time_limit
            )
        else:
            subscription = Subscription(self, label, cast("InlineHandler", handler), chosen)
        subscription.counted = counted
        self._subscriptions.append(subscription)
        self._rebuild()
        return subscription

    def wants(self, event_type: type[Event]) -> bool:
        """Whether anybody subscribes to this type: one dictionary look-up."""
        return event_type in self._routes

    def publish(self, event: Event) -> None:
        """Hand the event to everyone who subscribes to its type, in the order of subscription.

        Queues come before functions that run in line, so that what those publish in turn stands behind it there too.
        """
        try:
            found = self._routes[type(event)]
        except KeyError:
            return
        found.published += 1
        # The tuples cannot change under the loops: closing a subscription builds new ones.
        for offer in found.queued:
            offer(event)
        for route in found.inline:
            try:
                route.handler(event)
            except BaseException as error:  # noqa: BLE001 - a subscriber's fault must not reach the publisher
                route.subscription.failed(event, error)
            else:
                route.counts.handled += 1

    def remove(self, subscription: Subscription) -> None:
        """Forget a subscription, but not its counts; unknown ones are ignored."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            self._rebuild()
            self._ended.append(subscription)
            if len(self._ended) > self._max_handlers:
                for event_type, counts in self._ended.popleft().by_type.items():
                    self._earlier[event_type].add(counts)

    async def aclose(self, limit: float = CLOSE_S) -> None:
        """Let queued events be handled within ``limit`` seconds, then end every subscription within as many again."""
        queued = [subscription for subscription in self._subscriptions if isinstance(subscription, QueuedSubscription)]
        await asyncio.gather(*(subscription.drained(limit) for subscription in queued))
        for subscription in list(self._subscriptions):
            subscription.close()
        # Those that were closed a moment ago as well: the event that one had in hand is counted where its task ends.
        closed = [subscription for subscription in self._ended if isinstance(subscription, QueuedSubscription)]
        await asyncio.gather(*(subscription.ended(limit) for subscription in {*queued, *closed}))

    @property
    def backlog(self) -> int:
        """Events that wait, over all handlers."""
        return sum(found.backlog for found in self._subscriptions if isinstance(found, QueuedSubscription))

    @property
    def published(self) -> dict[str, int]:
        """How many events of each type were published to anybody, by the type's name."""
        return {kind.__name__: known.published for kind, known in self._known.items() if known.published}

    def counts(self) -> dict[str, dict[str, Any]]:
        """Return what became of each subscriber's events, in all and by type, by the subscriber's name.

        Those that ended are among them. For each and for each type: published while it was subscribed = handled +
        failed + timed_out + dropped + backlog.
        """
        rows = {}
        for subscription in (*self._ended, *self._subscriptions):
            total = msgspec.structs.asdict(subscription.counts)
            rows[subscription.name] = total | {"removed": subscription.removed, "types": _named(subscription.by_type)}
        if self._earlier:
            earlier = Counts()
            for counts in self._earlier.values():
                earlier.add(counts)
            rows[EARLIER] = msgspec.structs.asdict(earlier) | {"removed": True, "types": _named(self._earlier)}
        return rows

    def _free(self, name: str) -> str:
        taken = {subscription.name for subscription in (*self._ended, *self._subscriptions)}
        number, free = 1, name
        while free in taken:
            number += 1
            free = f"{name} #{number}"
        return free

    def _rebuild(self) -> None:
        queued: defaultdict[type[Event], list[InlineHandler]] = defaultdict(list)
        inline: defaultdict[type[Event], list[_Route]] = defaultdict(list)
        for subscription in self._subscriptions:
            for event_type, route in subscription.routes.items():
                if isinstance(subscription, QueuedSubscription):
                    queued[event_type].append(subscription.offer)
                else:
                    inline[event_type].append(route)
        self._routes = {}
        for event_type in queued.keys() | inline.keys():
            known = self._routes[event_type] = self._known[event_type]
            known.queued, known.inline = tuple(queued[event_type]), tuple(inline[event_type])


class NoBus:
    """The bus when ``event_driven.enabled`` is false: nobody listens, publishing costs one call."""

    backlog = 0
    published: dict[str, int] = {}  # noqa: RUF012 - nothing is ever written to it

    def wants(self, event_type: type[Event]) -> bool:  # noqa: ARG002 - the protocol's signature
        """Nobody subscribes."""
        return False

    def publish(self, event: Event) -> None:
        """Nothing happens."""

    async def aclose(self, limit: float = CLOSE_S) -> None:
        """Nothing to close."""

    def counts(self) -> dict[str, dict[str, Any]]:
        """Return no subscribers."""
        return {}


def is_async(handler: Any) -> bool:  # noqa: ANN401 - anything callable
    """Whether calling this makes a coroutine: a coroutine function, or an object whose ``__call__`` is one."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004


class _Gone(Exception):
    """The subscription ended while an event was being handed out."""


def _closed(event: Event) -> None:  # noqa: ARG001 - a handler's signature
    raise _Gone


def _concrete(types: Iterable[type[Event]]) -> tuple[type[Event], ...]:
    """Return every type that is meant, once: those given, and the known ones below them."""
    given = tuple(types)
    below = [event_type for event_type in TYPES if issubclass(event_type, given)] if given else []
    return tuple(dict.fromkeys([*below, *(event_type for event_type in given if event_type is not Event)]))


def _named(by_type: dict[type[Event], Counts]) -> dict[str, dict[str, int]]:
    seen = {event_type.__name__: msgspec.structs.asdict(counts) for event_type, counts in by_type.items()}
    return {name: figures for name, figures in seen.items() if any(figures.values())}
