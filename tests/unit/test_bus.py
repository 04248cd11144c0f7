"""The event bus: isolation, bounds, counts."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.virtual_time import run
from triton_lifecycle.bus import FAILURES_BEFORE_REMOVAL, Bus, NoBus
from triton_lifecycle.events import TYPES, FirstToken, Received, decode, encode

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
    """A handler that keeps raising is counted and removed; the others see every event."""
    bus, seen = Bus(), []
    bad = bus.subscribe(lambda event: 1 / 0, name="bad")
    bus.subscribe(seen.append)
    for _ in range(FAILURES_BEFORE_REMOVAL + 5):
        bus.publish(EVENT)
    assert len(seen) == FAILURES_BEFORE_REMOVAL + 5
    assert bad.counts.failed == FAILURES_BEFORE_REMOVAL
    assert bad.counts.removed
    assert "bad" not in bus.counts()


def test_unsubscribing_during_publish_is_safe():
    """A handler may close itself and others while an event is being handed out."""
    bus, seen = Bus(), []
    first = bus.subscribe(lambda event: (seen.append(1), first.close(), second.close()))
    second = bus.subscribe(lambda event: seen.append(2))
    bus.publish(EVENT)
    bus.publish(EVENT)
    assert seen[0] == 1
    assert len(seen) == 2
    assert not bus.wants(FirstToken)


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


def test_closing_counts_what_was_never_handled():
    """published = handled + dropped + failed + timed out, also when a subscription closes early."""

    async def scenario():
        bus = Bus()

        async def handler(event):
            await asyncio.sleep(100)

        subscription = bus.subscribe(handler)
        for _ in range(5):
            bus.publish(EVENT)
        await asyncio.sleep(0)
        await subscription.aclose()
        counts = subscription.counts
        assert counts.handled + counts.dropped + counts.failed + counts.timed_out == 5

    run(scenario)


def test_the_number_of_handlers_is_bounded():
    """One handler too many is refused with the configuration key in the message."""
    bus = Bus(max_handlers=1)
    bus.subscribe(print)
    with pytest.raises(ValueError, match="max_event_handlers"):
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
