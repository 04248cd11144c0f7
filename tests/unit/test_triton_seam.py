"""The Triton seam: reading requests, and ordered sends off the loop."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from tests.fakes import pb_utils
from triton_lifecycle.errors import InvalidInput, QueueFull
from triton_lifecycle.triton import Call, Lanes


class Inline:
    """Does a job on the spot."""

    def submit(self, job):
        job()
        future = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future


def call_of(tensors=None, parameters=None, **kwargs):
    request = pb_utils.InferenceRequest(tensors, parameters, **kwargs)
    return request, Call(request, pb_utils, Inline())


def test_tensors_become_plain_values():
    """Strings, booleans and lists come out as Python values; unknown tensors are left out."""
    _, call = call_of({"text_input": "é🎉", "stream": True, "image": ["a", "b"], "other": "x"}, {"max_tokens": 4})
    raw = call.read()
    assert raw.tensors == {"text_input": "é🎉", "stream": True, "image": ["a", "b"]}
    assert raw.parameters == {"max_tokens": 4}


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (b"\xff\xfe", "not valid UTF-8 at byte 0"),
        (b"ab\xed\xa0\x80", "not valid UTF-8 at byte 2"),
        (np.array([b"a", b"b"], dtype=np.object_), "exactly one element, found 2"),
        (np.array([], dtype=np.object_), "exactly one element, found 0"),
    ],
)
def test_values_that_cannot_be_read_are_the_callers_fault(value, part):
    """Invalid UTF-8, lone surrogates and wrong element counts are InvalidInput naming the tensor."""
    with pytest.raises(InvalidInput, match=f"text_input: .*{part}"):
        call_of({"text_input": value})[1].read()


@pytest.mark.parametrize(
    ("parameters", "control"),
    [({}, False), ({"max_tokens": 1}, False), ({"control": "state"}, True), ({"note": 'a "control" word'}, False)],
)
def test_control_requests_are_recognised(parameters, control):
    """Only a parameter named control makes a control request."""
    assert (call_of({}, parameters)[1].control() is not None) is control


def test_an_error_goes_out_with_its_code_and_final():
    """An error response carries slug, message, hint and code, and is the last."""

    async def scenario():
        request, call = call_of({})
        await call.fail(QueueFull("full", retry_after=2.0))
        [(response, final)] = request.sender.sent
        assert final
        assert response.error.code() == pb_utils.TritonError.UNAVAILABLE
        assert response.error.message() == "queue_full: full; retry after 2.0 s"

    asyncio.run(scenario())


def test_nothing_can_follow_final():
    """A second end is refused before it reaches Triton, and Triton is never asked about an ended request."""

    async def scenario():
        request, call = call_of({})
        await call.end()
        with pytest.raises(RuntimeError, match="twice"):
            await call.end()
        assert call.is_cancelled() is False
        assert request.polls == 0

    asyncio.run(scenario())


def test_lanes_keep_the_order_and_free_the_loop():
    """Jobs of one call run in order on another thread; errors come back through the future."""

    async def scenario():
        lanes = Lanes(asyncio.get_running_loop(), 2)
        done, lane = [], lanes.pick()
        futures = [
            lane.submit(lambda n=n: (time.sleep(0.001), done.append((n, threading.current_thread().name))))
            for n in range(20)
        ]
        failing = lane.submit(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await failing
        await asyncio.gather(*futures)
        assert [n for n, _ in done] == list(range(20))
        assert {name for _, name in done}.isdisjoint({threading.main_thread().name})
        await asyncio.to_thread(lanes.close)

    asyncio.run(scenario())


def test_lanes_survive_a_future_nobody_waits_for():
    """An interrupted send is finished all the same, and later ones are unharmed."""

    async def scenario():
        lanes = Lanes(asyncio.get_running_loop(), 1)
        lane, done = lanes.pick(), []
        lane.submit(lambda: done.append(1)).cancel()
        await lane.submit(lambda: done.append(2))
        assert done == [1, 2]
        await asyncio.to_thread(lanes.close)

    asyncio.run(scenario())


@pytest.mark.parametrize("broken", ["build", "send"])
def test_an_answer_that_cannot_be_built_or_sent_still_ends_the_request(broken, monkeypatch):
    """Whatever fails on the last response, the caller gets an error and FINAL, once; the failure is told."""

    async def scenario():
        request, call = call_of({})
        if broken == "build":
            outputs = {"no_such_output": ["x"]}
        else:
            outputs, send, first = {"text_output": ["x"]}, request.sender.send, [True]

            def fails_once(*args, **kwargs):
                if first.pop() if first else False:
                    raise RuntimeError("no shared memory")
                send(*args, **kwargs)

            monkeypatch.setattr(request.sender, "send", fails_once)
        with pytest.raises((KeyError, RuntimeError)):
            await call.send(outputs, final=True)
        [(response, final)] = request.sender.sent
        assert final
        assert response.error.code() == pb_utils.TritonError.INTERNAL

    class Lane:
        def submit(self, job):
            future = asyncio.get_running_loop().create_future()
            try:
                job()
                future.set_result(None)
            except Exception as error:  # noqa: BLE001
                future.set_exception(error)
            return future

    monkeypatch.setattr(Inline, "submit", Lane.submit)
    asyncio.run(scenario())


def test_bytes_that_are_no_text_hurt_nobody():
    """An id or parameters that are not UTF-8: the id counts as none, the parameters are the caller's fault."""

    def no_text():
        raise UnicodeDecodeError("utf-8", b"a\xff", 1, 2, "invalid start byte")

    request = pb_utils.InferenceRequest({"text_input": "x"}, None)
    request.request_id = request.parameters = no_text
    call = Call(request, pb_utils, Inline())
    assert call.id == ""
    assert call.control() is None
    with pytest.raises(InvalidInput, match="parameters: not valid UTF-8 at byte 1"):
        call.read()


def test_half_a_surrogate_in_the_parameters_is_the_callers_fault():
    """JSON can write half a character that no message can carry."""
    request = pb_utils.InferenceRequest({"text_input": "x"}, None)
    request.parameters = lambda: '{"tenant": "\\ud800"}'
    with pytest.raises(InvalidInput, match=r"parameters\.tenant: not valid Unicode"):
        Call(request, pb_utils, Inline()).read()
