"""What publishing an event costs, beside ``pyee`` and ``blinker``: ``python -m load.bus``.

All contenders run in turn in one process, several rounds (A B C A B C …). *plain* is the library as it comes: a handler
that raises reaches the publisher, nothing is counted, nothing is bounded. *guarded* has what our bus gives: a raising
handler is isolated, events are counted by type (published, handled, failed, timed out, dropped), and for asynchronous
handlers the number that waits is bounded and each has a time limit.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeAlias

from blinker import Signal
from pyee.asyncio import AsyncIOEventEmitter
from pyee.base import EventEmitter
from rich.console import Console
from rich.table import Table

from triton_lifecycle.bus import Bus, NoBus, Publisher
from triton_lifecycle.context import Contexts
from triton_lifecycle.events import Event, FirstToken

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

ROUNDS = 9
EVENTS = 20_000
WAITING = 10_000
"""Events that may wait for an asynchronous handler."""
BATCH = 1000
"""Asynchronous: events that are published between two turns of the loop."""
LIMIT_S = 10.0

EVENT = FirstToken(request_id="r", seq=0, at=0.0)
Publish: TypeAlias = "Callable[[Event], object]"


class Tally:
    """The counts that our bus keeps, kept beside another library."""

    def __init__(self) -> None:
        self.published: Counter[type] = Counter()
        self.handled: Counter[type] = Counter()
        self.failed: Counter[type] = Counter()
        self.timed_out: Counter[type] = Counter()
        self.dropped: Counter[type] = Counter()
        self.waiting = 0

    def guarded(self, handler: Callable[[Event], None]) -> Callable[[Event], None]:
        """Return the handler, isolated and counted."""

        def call(event: Event) -> None:
            try:
                handler(event)
            except BaseException:  # noqa: BLE001 - the same isolation as ours
                self.failed[type(event)] += 1
            else:
                self.handled[type(event)] += 1

        return call

    def limited(self, handler: Callable[[Event], Awaitable[None]]) -> Callable[[Event], Awaitable[None]]:
        """Return the handler, isolated, counted, and limited in time."""

        async def call(event: Event) -> None:
            try:
                async with asyncio.timeout(LIMIT_S):
                    await handler(event)
            except TimeoutError:
                self.timed_out[type(event)] += 1
            except BaseException:  # noqa: BLE001
                self.failed[type(event)] += 1
            else:
                self.handled[type(event)] += 1
            finally:
                self.waiting -= 1

        return call

    def counted(self, publish: Callable[[Event], object]) -> Callable[[Event], None]:
        """Return a publish that counts."""

        def call(event: Event) -> None:
            self.published[type(event)] += 1
            publish(event)

        return call

    def bounded(self, publish: Callable[[Event], object]) -> Callable[[Event], None]:
        """Return a publish that counts, and drops what is too much."""

        def call(event: Event) -> None:
            self.published[type(event)] += 1
            if self.waiting >= WAITING:
                self.dropped[type(event)] += 1
                return
            self.waiting += 1
            publish(event)

        return call


def inline_contenders(handler: Callable[[Event], None]) -> dict[str, Publish]:
    """Return a publish for each contender, each with one inline handler."""
    bus = Bus()
    bus.subscribe(handler, [FirstToken])
    plain_pyee, plain_blinker = EventEmitter(), Signal()
    plain_pyee.add_listener("FirstToken", handler)
    plain_blinker.connect(handler)
    pyee, pyee_tally = EventEmitter(), Tally()
    pyee.add_listener("FirstToken", pyee_tally.guarded(handler))
    blinker, blinker_tally = Signal(), Tally()
    receiver = blinker_tally.guarded(handler)
    blinker.connect(receiver, weak=False)
    return {
        "ours": bus.publish,
        "pyee, guarded": pyee_tally.counted(lambda event: pyee.emit("FirstToken", event)),
        "blinker, guarded": blinker_tally.counted(blinker.send),
        "pyee, plain": lambda event: plain_pyee.emit("FirstToken", event),
        "blinker, plain": plain_blinker.send,
    }


def async_contenders(handler: Callable[[Event], Awaitable[None]]) -> dict[str, Publish]:
    """Return a publish for each contender, each with one asynchronous handler."""
    bus = Bus(queue_size=WAITING, time_limit=LIMIT_S)
    bus.subscribe(handler, [FirstToken])
    plain_pyee, plain_blinker, tasks = AsyncIOEventEmitter(), Signal(), set[asyncio.Future[Any]]()
    plain_pyee.add_listener("FirstToken", handler)
    plain_blinker.connect(handler)
    pyee, pyee_tally = AsyncIOEventEmitter(), Tally()
    pyee.add_listener("FirstToken", pyee_tally.limited(handler))
    blinker, blinker_tally = Signal(), Tally()
    receiver = blinker_tally.limited(handler)
    blinker.connect(receiver, weak=False)

    def spawn(signal: Signal) -> Callable[[Event], None]:
        def publish(event: Event) -> None:
            task = asyncio.ensure_future(signal.send_async(event))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        return publish

    return {
        "ours": bus.publish,
        "pyee, guarded": pyee_tally.bounded(lambda event: pyee.emit("FirstToken", event)),
        "blinker, guarded": blinker_tally.bounded(spawn(blinker)),
        "pyee, plain": lambda event: plain_pyee.emit("FirstToken", event),
        "blinker, plain": spawn(plain_blinker),
    }


def measure_inline() -> dict[str, list[float]]:
    """Return nanoseconds per event, one figure a round, for each contender."""
    seen = [0]

    def handler(event: Event) -> None:  # noqa: ARG001
        seen[0] += 1

    contenders = inline_contenders(handler)
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, publish in contenders.items():
            before, began = seen[0], time.perf_counter_ns()
            for _ in range(EVENTS):
                publish(EVENT)
            found[name].append((time.perf_counter_ns() - began) / EVENTS)
            if seen[0] - before != EVENTS:
                raise RuntimeError(f"{name}: {seen[0] - before} of {EVENTS} events were handled")
    return found


async def measure_async() -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return nanoseconds per event that the publisher waits, and in all until the event is handled."""
    seen = [0]

    async def handler(event: Event) -> None:  # noqa: ARG001
        seen[0] += 1

    contenders = async_contenders(handler)
    publishing: dict[str, list[float]] = {name: [] for name in contenders}
    whole: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, publish in contenders.items():
            spent, wanted, began = 0, seen[0] + EVENTS, time.perf_counter_ns()
            for _ in range(EVENTS // BATCH):
                at = time.perf_counter_ns()
                for _ in range(BATCH):
                    publish(EVENT)
                spent += time.perf_counter_ns() - at
                target = seen[0] + BATCH
                async with asyncio.timeout(LIMIT_S):
                    while seen[0] < target:  # noqa: ASYNC110 - the turns of the loop are part of what is measured
                        await asyncio.sleep(0)
            if seen[0] != wanted:
                raise RuntimeError(f"{name}: {wanted - seen[0]} events were not handled")
            publishing[name].append(spent / EVENTS)
            whole[name].append((time.perf_counter_ns() - began) / EVENTS)
    return publishing, whole


def measure_off() -> dict[str, list[float]]:
    """Return nanoseconds for a request to tell of an event that nobody hears."""

    class Call:
        id = ""

    publishers: dict[str, Publisher] = {
        "off (event_driven.enabled: false)": NoBus(),
        "on, nobody subscribes to the type": Bus(),
    }
    contexts = {name: Contexts().open(Call(), "m", publisher) for name, publisher in publishers.items()}
    found: dict[str, list[float]] = {name: [] for name in publishers}
    for _ in range(ROUNDS):
        for name, ctx in contexts.items():
            began = time.perf_counter_ns()
            for _ in range(EVENTS):
                ctx.publish(FirstToken)
            found[name].append((time.perf_counter_ns() - began) / EVENTS)
    return found


def show(console: Console, title: str, found: dict[str, list[float]], ours: str | None = "ours") -> None:
    """Print a table, and whether ours is at least as fast as the faster of the others with the same guarantees."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("ns per event, median (lowest…highest)", justify="right")
    table.add_column("÷ ours", justify="right")
    for name, took in found.items():
        ratio = "" if ours is None else f"{statistics.median(took) / statistics.median(found[ours]):.2f}"
        table.add_row(name, f"{statistics.median(took):.0f} ({min(took):.0f}…{max(took):.0f})", ratio)
    console.print(table)
    if ours is not None:
        best = min(statistics.median(took) for name, took in found.items() if name.endswith("guarded"))
        verdict = "met" if statistics.median(found[ours]) <= best else "missed"
        console.print(f"at least as fast as the faster of pyee and blinker with the same guarantees: {verdict}\n")


def main() -> None:
    """Measure and print."""
    console = Console()
    rounds = f"{ROUNDS} rounds of {EVENTS} events, one handler"
    show(console, f"Inline handler ({rounds})", measure_inline())
    publishing, whole = asyncio.run(measure_async())
    show(console, f"Asynchronous handler: what the publisher waits ({rounds})", publishing)
    show(console, f"Asynchronous handler: all work until the event is handled ({rounds})", whole)
    show(console, "Nobody listens: what a request pays for each event it does not send", measure_off(), None)


if __name__ == "__main__":
    main()
