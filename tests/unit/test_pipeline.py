"""One request through the stages, and the contexts that remember it, in virtual time."""

from __future__ import annotations

import asyncio
import json
from asyncio import CancelledError
from unittest.mock import Mock

import msgspec
import pytest

from tests.fakes import pb_utils
from tests.fakes.harness import Harness, Step
from triton_lifecycle import control
from triton_lifecycle.config import Admission, Config, Pipeline, TimeoutHandling
from triton_lifecycle.context import Contexts
from triton_lifecycle.errors import CallerLeft, InvalidInput, UnknownRequest
from triton_lifecycle.events import Finished, Received
from triton_lifecycle.simulation.virtual_time import run
from triton_lifecycle.store.archive import Archive
from triton_lifecycle.store.memory import MemoryStore
from triton_lifecycle.store.records import SUMMARY

TOKENS = [Step("token", 0.1)] * 5


def request_of(prompt="p", *, stream=True, parameters=None, request_id="r", **tensors):
    return pb_utils.InferenceRequest({"text_input": prompt, "stream": stream, **tensors}, parameters, request_id)


def test_the_last_response_goes_out_after_everything_was_given_back():
    """Whoever has the whole answer finds no permit out, no live context, and the ending known."""

    async def scenario():
        harness = Harness(send_delay=0.5)
        harness.engine.scripts["p"] = TOKENS
        request = request_of()
        seen = []
        original = request.sender.send

        def send(response=None, flags=0):
            original(response, flags)
            if flags:
                seen.append((harness.admission.out, len(harness.contexts), harness.contexts.find("r").status))

        request.sender.send = send
        await harness.serve(request)
        assert seen == [(0, 0, "finished")]

    run(scenario)


def test_a_caller_that_left_is_told_nothing():
    """A closed stream gets its FINAL and no response; other cancels say why."""

    async def scenario():
        harness = Harness()
        harness.engine.scripts["p"] = [Step("token", 0.1)] * 50
        request = request_of()
        task = asyncio.create_task(harness.serve(request))
        await asyncio.sleep(0.35)
        assert harness.contexts.find("r").interrupt(CallerLeft("left"))
        await task
        assert request.sender.sent[-1] == (None, True)
        assert request.sender.errors == []
        assert harness.engine.known == {}

    run(scenario)


def test_one_request_too_many_is_refused_at_once():
    """Beyond the limit the answer is queue_full with a hint, before any time has passed."""

    async def scenario():
        harness = Harness(
            Config(timeout_handling=TimeoutHandling(enabled=False), admission=Admission(max_live_requests=1))
        )
        harness.engine.scripts["p"] = TOKENS
        first = asyncio.create_task(harness.serve(request_of(request_id="a")))
        await asyncio.sleep(0.01)
        second, began = request_of(request_id="b"), asyncio.get_running_loop().time()
        await harness.serve(second)
        [error] = second.sender.errors
        assert error.message().startswith("queue_full: 1 requests are live")
        assert "retry after" in error.message()
        assert asyncio.get_running_loop().time() - began < 0.01
        await first

    run(scenario)


def test_a_plug_in_stage_takes_its_place():
    """A stage named module:attribute runs where the list says, and its name is in its events and errors."""

    async def scenario():
        stages = ("receive", f"{__name__}:shout", "preprocess", "schedule", "execute", "postprocess", "respond")
        harness = Harness(Config(timeout_handling=TimeoutHandling(enabled=False), pipeline=Pipeline(stages=stages)))
        harness.engine.scripts["P"] = TOKENS
        good, bad = request_of("p", request_id="good"), request_of("boom", request_id="bad")
        await harness.serve(good)
        assert good.sender.text() == "01234"
        await harness.serve(bad)
        assert f"{__name__}:shout" in bad.sender.errors[0].message()
        assert bad.sender.errors[0].code() == pb_utils.TritonError.INTERNAL

    run(scenario)


async def shout(ctx):
    """A plug-in: upper-cases the prompt, and fails on one."""
    if ctx.input.source == "boom":
        raise ZeroDivisionError
    ctx.input = msgspec.structs.replace(ctx.input, source=ctx.input.source.upper())


async def misbehave(ctx):
    """A plug-in: waits for ever, or raises what no stage should."""
    if ctx.input.source == "wait":
        await asyncio.Event().wait()
    raise {"exit": SystemExit, "generator": GeneratorExit, "interrupt": KeyboardInterrupt, "cancel": CancelledError}[
        ctx.input.source
    ]


def misbehaving():
    stages = ("receive", f"{__name__}:misbehave", "preprocess", "schedule", "execute", "postprocess", "respond")
    return Harness(Config(timeout_handling=TimeoutHandling(enabled=False), pipeline=Pipeline(stages=stages)))


@pytest.mark.parametrize("prompt", ["exit", "generator", "interrupt", "cancel"])
def test_whatever_a_plug_in_raises_costs_its_own_request_alone(prompt):
    """Also what is no Exception: one ending, one FINAL, its name in the error, nothing held."""

    async def scenario():
        harness = misbehaving()
        request = request_of(prompt)
        await harness.serve(request)
        [error] = request.sender.errors
        assert error.code() == pb_utils.TritonError.INTERNAL
        assert f"{__name__}:misbehave" in error.message()
        assert (request.sender.finals, len(harness.contexts), harness.contexts.counts["failed"]) == (1, 0, 1)

    run(scenario)


def test_the_callers_limit_counts_from_the_beginning():
    """A stage before admission that never returns is ended by it, too."""

    async def scenario():
        harness = misbehaving()
        request = request_of("wait", parameters={"timeout_ms": 500})
        began = asyncio.get_running_loop().time()
        await harness.serve(request)
        assert asyncio.get_running_loop().time() - began < 0.6
        assert request.sender.errors[0].message().startswith("total_timeout: the total limit of 0.5 s")

    run(scenario)


def test_an_id_is_kept_only_when_it_is_of_bearable_length():
    """A caller's id stays in memory after its request: a long one is refused and not kept."""

    async def scenario():
        harness = Harness()
        request = request_of(request_id="x" * 257)
        await harness.serve(request)
        assert request.sender.errors[0].message() == "invalid_input: id: at most 256 characters, found 257"
        assert harness.contexts.ended._callers == {}
        harness.engine.scripts["p"] = TOKENS
        good = request_of(request_id="x" * 256)
        await harness.serve(good)
        assert harness.contexts.find("x" * 256).status == "finished"

    run(scenario)


def test_status_tells_a_live_request_and_an_ended_one():
    """The same question is answered before and after the end, by the caller's id and by ours."""

    async def scenario():
        harness = Harness()
        harness.engine.scripts["p"] = TOKENS
        task = asyncio.create_task(harness.serve(request_of()))
        await asyncio.sleep(0.25)

        archive = Archive(harness.contexts.ended)

        async def ask(key):
            asked = {"control": "status", "control_id": key}
            return json.loads(await control.answer(asked, harness.contexts, archive, Mock(control.Served)))

        live = await ask("r")
        assert (live["status"], live["output_tokens"], live["stage"]) == ("live", 2, "execute")
        await task
        ended = await ask(live["id"])
        assert (ended["status"], ended["output_tokens"], ended["finish_reason"]) == ("finished", 5, "length")
        assert ended["times_ms"]["finished"] == pytest.approx(500, abs=1)
        assert ended == await ask("r")

    run(scenario)


def test_all_live_requests_are_cancelled_with_one_order():
    """Each of three ends as cancelled, the order tells how many there were, and a second one finds none."""

    async def scenario():
        harness = Harness()
        harness.engine.scripts["p"] = TOKENS
        requests = [request_of() for _ in range(3)]
        tasks = [asyncio.create_task(harness.serve(request)) for request in requests]
        await asyncio.sleep(0.25)

        async def order():
            asked = {"control": "cancel_all"}
            return json.loads(
                await control.answer(asked, harness.contexts, Archive(harness.contexts.ended), Mock(control.Served))
            )

        assert await order() == {"cancelled": 3}
        await asyncio.gather(*tasks)
        assert harness.contexts.counts["cancelled"] == 3
        assert all("with all others" in request.sender.errors[0].message() for request in requests)
        assert await order() == {"cancelled": 0}

    run(scenario)


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ({"control": "reboot"}, InvalidInput),
        ({"control": 5}, InvalidInput),
        ({"control": "cancel"}, InvalidInput),
        ({"control": "status", "control_id": "nobody"}, UnknownRequest),
    ],
)
def test_a_control_request_with_a_fault_is_refused(parameters, error):
    """A wrong verb, a missing id and an unknown id each have their error."""
    contexts = Contexts()
    with pytest.raises(error):
        asyncio.run(control.answer(parameters, contexts, Archive(contexts.ended), Mock(control.Served)))


def test_what_is_kept_is_bounded_by_number_and_age():
    """The oldest summary goes first; all go with age; live requests are never dropped."""

    class NoCall:
        def __init__(self, name):
            self.id = name

    class Nobody:
        def wants(self, kind):
            return kind in (Received, Finished)

        def publish(self, event):
            events.append(event)

    now, events = [0.0], []
    contexts = Contexts(ended=MemoryStore({SUMMARY: 10.0}, max_requests=2, clock=lambda: now[0]), clock=lambda: now[0])
    opened = [contexts.open(NoCall(f"c{n}"), "m", Nobody()) for n in range(4)]
    for ctx in opened[:3]:
        contexts.close(ctx, Finished, finish_reason="length", output_tokens=0)
        now[0] += 1
    assert len(contexts.ended) == 2
    with pytest.raises(UnknownRequest):
        contexts.find("c0")
    assert contexts.find("c2").status == "finished"
    assert contexts.find("c3") is opened[3]
    now[0] += 8.5
    assert contexts.ended.expire(10) == 1
    assert len(contexts.ended) == 1
    now[0] += 1000
    assert contexts.find("c3") is opened[3]
    with pytest.raises(RuntimeError, match="twice"):
        contexts.close(opened[0], Finished, finish_reason="length", output_tokens=0)
    assert len(events) == 7
