"""The one movable deadline, and the limits it is made of."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.virtual_time import run
from triton_lifecycle.config import TimeoutHandling
from triton_lifecycle.errors import FirstTokenTimeout, StallTimeout, TotalTimeout
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
