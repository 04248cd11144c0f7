"""The event loop's pulse, in virtual time and on a loop that is held."""

from __future__ import annotations

import asyncio

from triton_lifecycle.beat import Beat
from triton_lifecycle.simulation.virtual_time import run


def test_a_loop_that_nothing_holds_is_never_late():
    """Ten quiet seconds bring two hundred looks, none of them late."""

    async def scenario():
        loop = asyncio.get_running_loop()
        beat = Beat(loop, clock=loop.time)
        assert beat.state() == {"lag_p50_ms": None, "lag_p99_ms": None, "lag_max_ms": None, "looks": 0}
        beat.start()
        await asyncio.sleep(10.01)
        assert beat.state() == {"lag_p50_ms": 0.0, "lag_p99_ms": 0.0, "lag_max_ms": 0.0, "looks": 200}
        assert beat.stalled < 0.05

    run(scenario)


class Held:
    """A clock that can be put forward while the loop does nothing, as if something held it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.held = 0.0

    def __call__(self) -> float:
        return self._loop.time() + self.held


def test_a_halt_counts_with_all_that_had_to_wait_for_it():
    """Of sixty seconds one is lost in one piece: nothing in the median, but a p99 of most of that second."""

    async def scenario():
        loop = asyncio.get_running_loop()
        clock = Held(loop)
        beat = Beat(loop, clock=clock)
        beat.start()
        await asyncio.sleep(29.0)
        clock.held += 1.0
        assert 1.0 <= beat.stalled <= 1.06
        await asyncio.sleep(30.0)
        found = beat.state()
        assert found["looks"] == 1200
        assert found["lag_p50_ms"] == 0.0
        assert 350 <= found["lag_p99_ms"] <= 450
        assert 950 <= found["lag_max_ms"] <= 1000

    run(scenario)


def test_it_keeps_no_more_than_its_window():
    """After an hour's halt, and after hours, it holds a minute."""

    async def scenario():
        loop = asyncio.get_running_loop()
        clock = Held(loop)
        beat = Beat(loop, clock=clock)
        beat.start()
        await asyncio.sleep(1.0)
        clock.held += 3600.0
        await asyncio.sleep(0.1)
        assert beat.state()["looks"] == 1200
        assert beat.state()["lag_max_ms"] <= 60_000
        await asyncio.sleep(61.0)
        assert beat.state() == {"lag_p50_ms": 0.0, "lag_p99_ms": 0.0, "lag_max_ms": 0.0, "looks": 1200}

    run(scenario)
