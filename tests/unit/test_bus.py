"""The event bus: isolation, bounds, counts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from triton_lifecycle.bus import EARLIER, FAILURES_BEFORE_REMOVAL, Bus, NoBus
from triton_lifecycle.events import TYPES, Cancelled, Event, FirstToken, Received, Rejected, decode, encode
from triton_lifecycle.simulation.virtual_time import run

EVENT = FirstToken(request_id="r", seq=0, at=1.0)


def test_only_subscribed_types_arrive_in_order_of_subscription():
    """A handler sees its types only; handlers run in the order in which they came."""
    bus, seen = Bus(), []
    bus.subscribe(lambda event: seen.append(("a", event)), [FirstToken])
    bus.subscribe(lambda event: seen.append(("b", event)))
    bus.publish(EVENT)
    received = Received(request_id="r", seq=0, at=0.0, caller_id="", model="m", wall=0.0)
    bus.publish(received)
    assert seen == [("a", EVENT), ("b", EVENT), ("b", received)]
    assert bus.wants(Received)
    assert dict(bus.published) == {"FirstToken": 1, "Received": 1}


def test_a_raising_handler_hurts_nobody_and_is_removed():
    """A handler that keeps raising is counted and removed, its counts stay; the others see every event."""
    bus, seen = Bus(), []
    bad = bus.subscribe(lambda event: 1 / 0, name="bad")
    bus.subscribe(seen.append)
    for _ in range(FAILURES_BEFORE_REMOVAL + 5):
        bus.publish(EVENT)
    assert len(seen) == FAILURES_BEFORE_REMOVAL + 5
    assert bad.counts.failed == FAILURES_BEFORE_REMOVAL
    assert bus.counts()["bad"]["removed"]
    assert bus.counts()["bad"]["types"]["FirstToken"]["failed"] == FAILURES_BEFORE_REMOVAL


@pytest.mark.parametrize("fault", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
def test_publish_never_raises_whatever_a_handler_does(fault):
    """Also what is no Exception stays with the handler that raised it."""
    bus, seen = Bus(), []

    def bad(event):
        raise fault

    subscription = bus.subscribe(bad)
    bus.subscribe(seen.append)
    bus.publish(EVENT)
    assert seen == [EVENT]
    assert subscription.counts.failed == 1


def test_only_failures_in_a_row_remove_a_handler():
    """One success between failures starts the count anew."""
    bus, calls = Bus(), []

    def handler(event):
        calls.append(event)
        if len(calls) % FAILURES_BEFORE_REMOVAL:
            raise ValueError

    subscription = bus.subscribe(handler)
    for _ in range(5 * FAILURES_BEFORE_REMOVAL):
        bus.publish(EVENT)
    assert not subscription.removed
    assert (subscription.counts.handled, subscription.counts.failed) == (5, 5 * (FAILURES_BEFORE_REMOVAL - 1))


def test_a_handler_that_was_closed_during_publish_gets_nothing_more():
    """A handler may close itself and others while an event is handed out; what they miss is counted as dropped."""
    bus, seen = Bus(), []
    first = bus.subscribe(lambda event: (seen.append(1), first.close(), second.close()))
    second = bus.subscribe(lambda event: seen.append(2))
    bus.publish(EVENT)
    bus.publish(EVENT)
    assert seen == [1]
    assert (first.counts.handled, second.counts.handled, second.counts.dropped) == (1, 0, 1)
    assert not bus.wants(FirstToken)
    assert bus.published == {"FirstToken": 1}


def test_a_handler_may_subscribe_another_during_publish():
    """The new one sees the next event, not the one at hand."""
    bus, seen = Bus(), []
    first = bus.subscribe(lambda event: (first.close(), bus.subscribe(seen.append)))
    bus.publish(EVENT)
    assert seen == []
    bus.publish(EVENT)
    assert seen == [EVENT]


def test_a_base_class_stands_for_every_type_below_it():
    """Subscribing to Event is the wildcard; a type that was named twice arrives once."""
    bus, seen = Bus(), []
    bus.subscribe(seen.append, [Event, FirstToken])
    assert all(bus.wants(kind) for kind in TYPES)
    bus.publish(EVENT)
    assert seen == [EVENT]


def test_the_counts_of_more_handlers_than_may_exist_are_added_up():
    """Names and their figures are bounded; what ended longest ago is one row, and nothing vanishes from the sums."""
    bus = Bus(max_handlers=2)
    for _ in range(5):
        subscription = bus.subscribe(lambda event: None, [FirstToken], name="same")
        bus.publish(EVENT)
        subscription.close()
    counts = bus.counts()
    assert len(counts) == 3
    assert counts[EARLIER]["handled"] == 3
    assert sum(row["types"]["FirstToken"]["handled"] for row in counts.values()) == bus.published["FirstToken"] == 5


def test_an_event_published_by_a_handler_stands_behind_the_first_in_every_queue():
    """Inline handlers may publish; queued subscribers see events in the order of their publication."""

    async def scenario():
        bus, seen = Bus(), []

        async def slow(event):
            seen.append(event.seq)

        bus.subscribe(lambda event: event.seq or bus.publish(FirstToken(request_id="r", seq=1, at=0.0)))
        bus.subscribe(slow)
        bus.publish(EVENT)
        await bus.aclose()
        assert seen == [0, 1]

    run(scenario)


def test_a_slow_handler_fills_its_own_queue_only():
    """A full queue drops and counts; publishing never waits; the rest is handled in order."""

    async def scenario():
        bus, seen, quick = Bus(queue_size=3, time_limit=10), [], []

        async def slow(event):
            await asyncio.sleep(1)
            seen.append(event.seq)

        subscription = bus.subscribe(slow)
        bus.subscribe(quick.append)
        began = asyncio.get_running_loop().time()
        for seq in range(10):
            bus.publish(FirstToken(request_id="r", seq=seq, at=0.0))
        assert asyncio.get_running_loop().time() == began
        await asyncio.sleep(20)
        assert len(quick) == 10
        assert seen == [0, 1, 2]
        assert (subscription.counts.handled, subscription.counts.dropped) == (3, 7)
        await bus.aclose()

    run(scenario)


def test_a_hung_handler_meets_its_time_limit():
    """An event whose handler hangs is given up after the limit; the next one is handled."""

    async def scenario():
        bus, seen = Bus(time_limit=2), []

        async def hangs_once(event):
            if event.seq == 0:
                await asyncio.Event().wait()
            seen.append(event.seq)

        subscription = bus.subscribe(hangs_once)
        bus.publish(FirstToken(request_id="r", seq=0, at=0.0))
        bus.publish(FirstToken(request_id="r", seq=1, at=0.0))
        await asyncio.sleep(1.9)
        assert seen == []
        await asyncio.sleep(0.2)
        assert seen == [1]
        assert subscription.counts.timed_out == 1
        await bus.aclose()

    run(scenario)


def test_a_handler_that_will_not_be_cancelled_is_asked_again():
    """One that swallows its first cancel is counted as over its limit once, and the next event is handled."""

    async def scenario():
        bus, seen = Bus(time_limit=1), []

        async def stubborn(event):
            if event.seq == 0:
                for _ in range(3):
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.Event().wait()
            seen.append(event.seq)

        subscription = bus.subscribe(stubborn)
        for seq in range(2):
            bus.publish(FirstToken(request_id="r", seq=seq, at=0.0))
        await asyncio.sleep(3.5)
        assert seen == [0, 1]
        assert (subscription.counts.timed_out, subscription.counts.handled) == (1, 1)
        await bus.aclose()

    run(scenario)


def test_a_handlers_own_cancel_and_timeout_are_its_failures():
    """CancelledError and TimeoutError that a handler raises by itself end nothing but that event."""

    async def scenario():
        bus = Bus(time_limit=1)

        async def handler(event):
            raise (asyncio.CancelledError, TimeoutError, SystemExit, ValueError)[event.seq]

        subscription = bus.subscribe(handler)
        for seq in range(4):
            bus.publish(FirstToken(request_id="r", seq=seq, at=0.0))
        await subscription.drained(5)
        assert (subscription.counts.failed, subscription.counts.timed_out) == (4, 0)
        await bus.aclose()

    run(scenario)


def test_a_backlog_does_not_keep_the_loop():
    """Others get their turn within some milliseconds while a handler that never waits works off its queue."""

    async def scenario():
        bus = Bus()

        async def busy(event):
            time.sleep(0.0005)  # noqa: ASYNC251 - keeping the loop is what is tested

        subscription = bus.subscribe(busy)
        for _ in range(200):
            bus.publish(EVENT)
        turns = 0
        while subscription.backlog:
            await asyncio.sleep(0)
            turns += 1
        assert turns > 30
        await bus.aclose()

    run(scenario)


def test_closing_counts_what_was_never_handled():
    """What waits is dropped; what is in hand is counted once, whether it ends by its cancel or after it."""

    async def scenario(*, swallow):
        bus = Bus()

        async def handler(event):
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                if not swallow:
                    raise

        subscription = bus.subscribe(handler)
        for _ in range(5):
            bus.publish(EVENT)
        await asyncio.sleep(0)
        assert subscription.counts.backlog == 5
        await subscription.aclose()
        counts = subscription.counts
        assert (counts.handled, counts.dropped, counts.backlog) == ((1, 4, 0) if swallow else (0, 5, 0))

    run(scenario, swallow=False)
    run(scenario, swallow=True)


def test_a_queued_handler_may_close_itself():
    """The event in hand counts as handled, the rest as dropped, and nothing is lost from the sum."""

    async def scenario():
        bus = Bus()

        async def once(event):
            await subscription.aclose()

        subscription = bus.subscribe(once)
        for _ in range(3):
            bus.publish(EVENT)
        await asyncio.sleep(1)
        assert (subscription.counts.handled, subscription.counts.dropped) == (1, 2)

    run(scenario)


def test_an_object_whose_call_is_a_coroutine_is_asynchronous():
    """It gets a queue and a task, as a coroutine function does."""

    async def scenario():
        seen = []

        class Handler:
            async def __call__(self, event):
                seen.append(event)

        bus = Bus()
        bus.subscribe(Handler())
        bus.publish(EVENT)
        await bus.aclose()
        assert seen == [EVENT]

    run(scenario)


script = st.lists(
    st.tuples(st.sampled_from(["publish"] * 6 + ["wait", "close"]), st.sampled_from(TYPES[-3:] + TYPES[5:6])),
    max_size=60,
)


@settings(max_examples=max(200, settings().max_examples))
@example(
    script=[("publish", Cancelled), ("publish", Cancelled), ("wait", Cancelled), ("close", Rejected)],
    size=3,
    faults=["h"],
)
@given(script=script, size=st.sampled_from([1, 3, 100]), faults=st.lists(st.sampled_from("okrhc"), min_size=1))
def test_every_event_is_accounted_for_by_type(script, size, faults):
    """Published per type = handled + failed + timed out + dropped + backlog, for each handler, at every moment."""

    async def scenario():
        bus, turn = Bus(queue_size=size, time_limit=1), itertools.cycle(faults)

        def inline(event):
            if next(turn) == "r":
                raise ValueError

        async def queued(event):
            match next(turn):
                case "r":
                    raise ValueError
                case "h":
                    await asyncio.sleep(5)
                case "c":
                    raise asyncio.CancelledError
                case "k":
                    await asyncio.sleep(0.3)

        handlers = [bus.subscribe(handler, name=handler.__name__) for handler in (inline, queued)]
        ended = {}

        def check():
            for subscription in handlers:
                if subscription._closed:
                    ended.setdefault(subscription.name, bus.published)
                row = bus.counts()[subscription.name]
                found = {name: sum(figures.values()) for name, figures in row["types"].items()}
                assert found == ended.get(subscription.name, bus.published)

        bus.subscribe(lambda event: None)
        for do, kind in script:
            if do == "publish":
                bus.publish(made(kind))
            elif do == "wait":
                await asyncio.sleep(1.7)
            else:
                handlers[kind is TYPES[-1]].close()
            check()
        await bus.aclose()
        check()
        assert not any(row["backlog"] for row in bus.counts().values())

    run(scenario)


def made(kind):
    """Return an event of a type, with any values."""
    return kind(**{field.name: "x" if field.type is str else 0 for field in msgspec.structs.fields(kind)})


def test_the_number_of_handlers_is_bounded():
    """One handler too many is refused with the configuration key in the message."""
    bus = Bus(max_handlers=1)
    bus.subscribe(print)
    with pytest.raises(ValueError, match="max_event_handlers"):
        bus.subscribe(print)
    bus.subscribe(print, counted=False)


def test_the_servers_own_parts_take_no_handlers_place():
    """However many of them there are, as many handlers as were configured still find room."""
    bus = Bus(max_handlers=1)
    for _ in range(3):
        bus.subscribe(print, counted=False)
    bus.subscribe(print)


def test_the_bus_that_is_off_wants_nothing():
    """With events off nobody wants any type and publishing does nothing."""
    bus = NoBus()
    assert not any(bus.wants(kind) for kind in TYPES)
    bus.publish(EVENT)
    assert bus.counts() == {}


def test_events_survive_their_codec():
    """Every event comes back from JSON as the same type with the same values."""
    for event in (EVENT, Received(request_id="r", seq=0, at=0.5, caller_id="c", model="m", wall=1.0)):
        assert decode(encode(event)) == event
