"""Callers that left and the beginning of an unload are noticed, and Triton is asked no more than it may be."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.fakes import pb_utils
from triton_lifecycle.triton import Call
from triton_lifecycle.watch import UnloadSign, Watch


class Inline:
    """Does a job on the spot."""

    def submit(self, job):
        job()
        future = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future


def call_of():
    request = pb_utils.InferenceRequest({}, None)
    return request, Call(request, pb_utils, Inline())


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


@pytest.mark.parametrize(
    ("answers", "noticed"),
    [
        ([True, False, False], 1),
        ([RuntimeError("Server not ready"), False], 1),
        ([True, True], 0),
        ([True, RuntimeError("Server not ready")], 0),
    ],
)
def test_an_unload_is_noticed_once(answers, noticed):
    """A model that is ready no more while a call is live is being unloaded; a server that cannot say is no sign."""
    left, seen = list(answers), []

    def is_ready():
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def scenario():
        sign = UnloadSign(is_ready, lambda: seen.append(1), interval=0.01)
        watch = Watch(asyncio.get_running_loop(), interval=0.01, max_rate=10_000, unload=sign)
        watch.add(call_of()[1], lambda: None)
        await asyncio.sleep(0.2)
        await asyncio.to_thread(watch.close)
        assert len(seen) == noticed

    asyncio.run(scenario())


def test_readiness_is_asked_only_while_a_call_is_live():
    """Triton aborts when it is asked while it finalizes a model: never without a live call, nor beside its FINAL."""
    asked, begun, release, ended = [], threading.Event(), threading.Event(), []

    def is_ready():
        asked.append(1)
        begun.set()
        release.wait(2)
        assert not ended
        return True

    async def scenario():
        sign = UnloadSign(is_ready, lambda: None, interval=0.0)
        watch = Watch(asyncio.get_running_loop(), interval=0.001, max_rate=10_000, unload=sign)
        await asyncio.sleep(0.02)
        assert not asked
        request, call = call_of()
        send = request.sender.send
        request.sender.send = lambda *args, **kwargs: (ended.append(1), send(*args, **kwargs))
        watch.add(call, lambda: None)
        assert await asyncio.to_thread(begun.wait, 2)
        loop = asyncio.get_running_loop()
        ending = loop.run_in_executor(None, lambda: call._send(None, final=True))
        await asyncio.sleep(0.05)
        assert not ended, "FINAL waits for the question"
        release.set()
        await ending
        count = len(asked)
        await asyncio.sleep(0.05)
        assert len(asked) == count
        await asyncio.to_thread(watch.close)

    asyncio.run(scenario())
