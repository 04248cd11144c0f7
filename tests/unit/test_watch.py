"""Callers that left are noticed, and Triton is asked no more than it may be."""

from __future__ import annotations

import asyncio

from tests.fakes import pb_utils
from triton_lifecycle.triton import Call
from triton_lifecycle.watch import Watch


class NoLane:
    """Nothing is sent in these tests."""


def call_of():
    request = pb_utils.InferenceRequest({}, None)
    return request, Call(request, pb_utils, NoLane())


def test_a_caller_that_left_is_reported_once():
    """The watch calls back on the loop, once, and asks no more; one broken call does not stop it."""

    async def scenario():
        watch = Watch(asyncio.get_running_loop(), interval=0.01, max_rate=10_000)
        left, seen = asyncio.Event(), []
        broken, broken_call = call_of()
        broken.is_cancelled = lambda: 1 / 0
        watch.add(broken_call, lambda: seen.append("broken"))
        request, call = call_of()
        other, other_call = call_of()
        watch.add(call, lambda: (seen.append("left"), left.set()))
        watch.add(other_call, lambda: seen.append("other"))
        request.cancelled = True
        await asyncio.wait_for(left.wait(), 2)
        asked = request.polls
        await asyncio.sleep(0.05)
        assert seen == ["left"]
        assert request.polls == asked
        assert other.polls > 1
        watch.discard(other_call)
        await asyncio.to_thread(watch.close)

    asyncio.run(scenario())


def test_the_watch_keeps_to_its_rate():
    """However many calls are live, no more questions a second are asked than allowed."""

    async def scenario():
        watch = Watch(asyncio.get_running_loop(), interval=0.001, max_rate=200)
        requests = [call_of() for _ in range(50)]
        for _, call in requests:
            watch.add(call, lambda: None)
        await asyncio.sleep(0.5)
        polls = sum(request.polls for request, _ in requests)
        assert 0 < polls <= 110
        await asyncio.to_thread(watch.close)

    asyncio.run(scenario())


def test_callers_that_leave_together_are_noticed_together():
    """Once one caller has left, the others are asked without a pause, whatever the rate."""

    async def scenario():
        watch = Watch(asyncio.get_running_loop(), interval=0.01, max_rate=20)
        requests, left = [call_of() for _ in range(100)], []
        for request, call in requests:
            request.cancelled = True
            watch.add(call, lambda: left.append(1))
        await asyncio.sleep(0.5)
        assert len(left) == 100, "at twenty a second this would take five seconds"
        await asyncio.to_thread(watch.close)

    asyncio.run(scenario())
