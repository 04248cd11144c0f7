"""The one movable deadline, and the limits it is made of."""

from __future__ import annotations

import asyncio

import pytest

from triton_lifecycle.config import TimeoutHandling
from triton_lifecycle.errors import FirstTokenTimeout, StallTimeout, TotalTimeout
from triton_lifecycle.simulation.virtual_time import run
from triton_lifecycle.timeouts.deadline import Deadline
from triton_lifecycle.timeouts.limits import Limits, choose


@pytest.mark.parametrize(
    ("limits", "tokens_at", "kind", "when"),
    [
        (Limits(total=5.0), [], TotalTimeout, 5.0),
        (Limits(total=5.0), [1.0, 4.9], TotalTimeout, 5.0),
        (Limits(first_token=1.0, total=5.0), [], FirstTokenTimeout, 1.0),
        (Limits(first_token=1.0, total=5.0), [0.5], TotalTimeout, 5.0),
        (Limits(stall=1.0, total=9.0), [], TotalTimeout, 9.0),
        (Limits(stall=1.0, total=9.0), [2.0], StallTimeout, 3.0),
        (Limits(stall=1.0, total=9.0), [2.0, 2.5, 3.4], StallTimeout, 4.4),
        (Limits(first_token=5.0, stall=1.0), [0.5], StallTimeout, 1.5),
        (Limits(first_token=1.0, stall=20.0, total=6.0), [0.5], TotalTimeout, 6.0),
        (Limits(), [1.0], None, None),
    ],
)
def test_the_limit_that_passes_first_ends_the_request_at_its_time(limits, tokens_at, kind, when):
    """The right error at the right time, exactly once, naming the limit's value and the tokens."""

    async def scenario():
        loop = asyncio.get_running_loop()
        began, fired = loop.time(), []
        deadline = Deadline(limits, lambda error: fired.append((error, loop.time() - began)))
        for at in tokens_at:
            await asyncio.sleep(began + at - loop.time())
            deadline.progress(1)
        await asyncio.sleep(60)
        deadline.close()
        if kind is None:
            assert fired == []
            return
        [(error, at)] = fired
        assert type(error) is kind
        assert at == pytest.approx(when, abs=0.002)
        assert f"{len([t for t in tokens_at if t < when])} tokens" in error.message

    run(scenario)


@pytest.mark.parametrize("early", [0.0, 0.0004, 0.003])
@pytest.mark.parametrize("waited", [0.0, 0.05])
def test_no_request_is_ended_before_its_time(early, waited):
    """Where the loop's timer comes early, it is set again; the time before the limits were set counts."""

    class Hasty:
        """A loop whose timers come early, as uvloop's do, which counts in whole milliseconds."""

        def __init__(self, loop):
            self.time, self.loop = loop.time, loop

        def call_later(self, delay, callback):
            return self.loop.call_later(max(0.0001, delay - early), callback)

    async def scenario():
        loop = asyncio.get_running_loop()
        began, fired = loop.time() - waited, []
        deadline = Deadline(Limits(), lambda _: fired.append(loop.time() - began), clock=loop.time, began=began)
        deadline._loop = Hasty(loop)
        deadline.adjust(Limits(total=0.6))
        await asyncio.sleep(2)
        [at] = fired
        assert 0.6 - 1e-6 <= at < 0.602

    run(scenario)


def test_a_closed_deadline_never_fires():
    """After close nothing happens."""

    async def scenario():
        fired = []
        deadline = Deadline(Limits(total=1.0), fired.append)
        deadline.close()
        await asyncio.sleep(5)
        assert fired == []

    run(scenario)


@pytest.mark.parametrize(("caller", "total"), [(None, 30.0), (2.0, 2.0), (0.3, 0.3), (60.0, 60.0), (1000.0, 300.0)])
def test_the_callers_shorter_bound_wins(caller, total):
    """The caller's own time counts, up to max_timeout; without one the default applies."""
    assert choose(TimeoutHandling(), caller).total == total


def test_with_limits_off_only_the_caller_counts():
    """timeout_handling.enabled false leaves the caller's bound alone."""
    assert choose(TimeoutHandling(enabled=False), None) == Limits()
    assert choose(TimeoutHandling(enabled=False), 1000.0) == Limits(total=1000.0)


def test_slow_is_told_once_and_nothing_else_happens():
    """After the expected time the request counts as slow; it goes on to its limits."""

    async def scenario():
        loop = asyncio.get_running_loop()
        began, slow, fired = loop.time(), [], []
        limits = Limits(total=9.0, slow=2.0)
        deadline = Deadline(limits, fired.append, lambda after, tokens: slow.append((after, tokens)))
        for _ in range(8):
            deadline.progress(1)
            await asyncio.sleep(1)
        assert slow == [(pytest.approx(2.0, abs=0.01), 2)] or slow == [(pytest.approx(2.0, abs=0.01), 3)]
        assert fired == []
        await asyncio.sleep(2)
        assert [type(error) for error in fired] == [TotalTimeout]
        assert loop.time() - began == pytest.approx(10.0)

    run(scenario)


@pytest.mark.parametrize(("kind", "tokens"), [(FirstTokenTimeout, 0), (StallTimeout, 1)])
def test_a_patient_limit_counts_from_the_engines_last_token(kind, tokens):
    """While others have tokens a request waits its turn; once the engine is silent it ends after the limit."""

    async def scenario():
        loop = asyncio.get_running_loop()
        began, fired = loop.time(), []
        last = began
        deadline = Deadline(Limits(total=60.0), lambda error: fired.append((error, loop.time() - began)))
        limits = Limits(first_token=1.0, stall=1.0, total=60.0, patient=frozenset({"first_token", "stall"}))
        deadline.adjust(limits, lambda: loop.time() - last)
        if tokens:
            deadline.progress(tokens)
        while last < began + 5.0:
            await asyncio.sleep(0.3)
            last = loop.time()
        silent_from = last - began
        await asyncio.sleep(10)
        [(error, at)] = fired
        assert type(error) is kind
        assert at == pytest.approx(silent_from + 1.0, abs=0.002)

    run(scenario)


def test_a_patient_request_still_ends_at_its_total():
    """The caller's own bound counts, whatever the engine does for others."""

    async def scenario():
        fired = []
        deadline = Deadline(Limits(), fired.append)
        deadline.adjust(Limits(first_token=1.0, total=3.0, patient=frozenset({"first_token"})), lambda: 0.0)
        await asyncio.sleep(2.9)
        assert fired == []
        await asyncio.sleep(0.2)
        assert [type(error) for error in fired] == [TotalTimeout]

    run(scenario)


def test_adjusted_limits_count_from_the_beginning():
    """What passed before admission is not given anew."""

    async def scenario():
        loop = asyncio.get_running_loop()
        began, fired = loop.time(), []
        deadline = Deadline(Limits(total=30.0), lambda _: fired.append(loop.time() - began))
        await asyncio.sleep(1)
        deadline.adjust(Limits(total=3.0))
        await asyncio.sleep(5)
        assert fired == [pytest.approx(3.0, abs=0.002)]

    run(scenario)
