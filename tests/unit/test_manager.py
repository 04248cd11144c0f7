"""The manager with the simulated engine, fed as Triton feeds it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import pytest

from tests.fakes import pb_utils
from tests.waiting import TRIES, until
from triton_lifecycle import control
from triton_lifecycle import manager as manager_module
from triton_lifecycle.config import OFFICIAL, Config, Shutdown, TimeoutHandling
from triton_lifecycle.engine import open_engine
from triton_lifecycle.engine.simulated import Fault
from triton_lifecycle.errors import Draining, EngineRestarting
from triton_lifecycle.manager import Manager


@pytest.fixture
def manager() -> Iterator[Manager]:
    """Run a manager as the model would."""
    engine = open_engine("simulated", {}, "")
    made = Manager(OFFICIAL, engine, "test", "1", pb_utils)
    made.start()
    yield made
    made.stop()


class Unreadable(pb_utils.InferenceRequest):
    """A request whose parameters cannot be had."""

    def parameters(self) -> str:
        raise RuntimeError("lost")


class Mute(pb_utils.InferenceRequest):
    """A request that has no way back."""

    def get_response_sender(self) -> pb_utils.ResponseSender:
        raise RuntimeError("lost")


def test_a_request_that_cannot_be_begun_hurts_no_other_of_its_batch(manager: Manager):
    """Of five requests handed over together one cannot be read and one not be answered: the other three are served."""
    batch = [kind({"text_input": ["hi"]}) for kind in (Mute, pb_utils.InferenceRequest, Unreadable)]
    batch += [pb_utils.InferenceRequest({"text_input": ["hi"]}) for _ in range(2)]
    manager.submit(batch)
    answered = [batch[1], *batch[3:]]
    until(lambda: all(request.sender.finals for request in batch[1:]))
    assert [request.sender.finals for request in batch[1:]] == [1, 1, 1, 1]
    assert all(response.error is None for request in answered for response, _ in request.sender.sent if response)
    error = batch[2].sender.sent[-1][0].error
    assert error.code() == pb_utils.TritonError.INTERNAL
    assert "RuntimeError" in error.message()


def ask(manager: Manager, **parameters: str) -> tuple[str | None, str | None]:
    """Send a control request; return its answer or its error."""
    request = pb_utils.InferenceRequest({"text_input": [""]}, parameters)
    manager.submit([request])
    until(lambda: request.sender.finals)
    errors = [error.message() for error in request.sender.errors]
    return (None, errors[0]) if errors else (request.sender.text(), None)


def test_readiness_tells_the_truth():
    """Not before the start, while the engine is away, while the loop is blocked, or at the end; and why."""
    engine = open_engine("simulated", {"startup_s": 1.5}, "")
    manager = Manager(OFFICIAL, engine, "test", "1", pb_utils)
    assert "not loaded" in manager.fault().message
    manager.start()
    try:
        assert manager.fault() is None
        assert ask(manager, control="ready") == ('{"ready":true}', None)

        for _ in range(TRIES):  # again, should the machine falter just then
            manager._loop.call_soon_threadsafe(lambda: engine.inject(Fault(do="die")))
            killed = time.monotonic()
            until(lambda: manager.fault() is not None)
            if (took := time.monotonic() - killed) < 1.0:
                break
            until(lambda: manager.fault() is None)
        assert took < 1.0
        until(lambda: isinstance(manager.fault(), EngineRestarting))
        answer, error = ask(manager, control="ready")
        assert answer is None
        assert error.startswith("engine_restarting: the engine is being restarted: its process has died; retry after")
        until(lambda: manager.fault() is None)
        manager._loop.call_soon_threadsafe(lambda: time.sleep(1.5))
        until(lambda: manager.fault() is not None)
        assert "event loop has not moved" in manager.fault().message
        until(lambda: manager.fault() is None)
    finally:
        manager.stop()
    assert isinstance(manager.fault(), Draining)


def serve(manager: Manager, requests: list[pb_utils.InferenceRequest]) -> None:
    """Serve requests to their ends."""
    manager.submit(requests)
    until(lambda: all(request.sender.finals for request in requests))


def state_of(manager: Manager) -> dict:
    """Return what the control request ``state`` answers."""
    request = pb_utils.InferenceRequest({}, {"control": "state"})
    serve(manager, [request])
    return json.loads(request.sender.text())


def test_what_the_predictor_saw_outlives_a_restart_and_its_accuracy_shows_in_state(tmp_path):
    """state_path: the next process predicts from its first request on."""
    config = Config(timeout_handling=TimeoutHandling(state_path="kept/seen.json"))
    for known in (0, 40):
        engine = open_engine("simulated", {"base_ms": 1.0}, "")
        manager = Manager(config, engine, "test", "1", pb_utils, directory=tmp_path)
        manager.start()
        try:
            assert state_of(manager)["prediction"]["observations"] == known
            assert state_of(manager)["prediction"]["ready"] is (known > 0)
            for _ in range(4):
                serve(
                    manager, [pb_utils.InferenceRequest({"text_input": ["hi"]}, {"max_tokens": 3}) for _ in range(10)]
                )
            seen = state_of(manager)["prediction"]
            assert seen["model"] == "linear"
            assert seen["observations"] == known + 40
            assert seen["total"].keys() >= {"mape", "coverage", "predicted", "actual", "seen"}
            assert seen["total"]["seen"] == (40 if known else 10)
        finally:
            manager.stop()
        assert (tmp_path / "kept" / "seen.json").exists()


def test_a_control_request_under_way_is_answered_when_the_model_goes(monkeypatch):
    """One that waits for a store or another replica ends with ``draining``, neither silent nor kept for ever."""

    async def hangs(*_) -> str:
        await asyncio.sleep(3600)
        return ""

    monkeypatch.setattr(control, "answer", hangs)
    monkeypatch.setattr(manager_module, "ANSWER_LIMIT_S", 0.05)
    manager = Manager(OFFICIAL, open_engine("simulated", {}, ""), "test", "1", pb_utils)
    manager.start()
    request = pb_utils.InferenceRequest({"text_input": [""]}, {"control": "status", "control_id": "x"})
    manager.submit([request])
    until(lambda: manager._asked)
    manager.stop()
    assert request.sender.finals == 1
    assert [error.message().partition(":")[0] for error in request.sender.errors] == ["draining"]


def test_a_drain_by_order_ends_what_outlasts_it_and_can_be_taken_back():
    """New requests are refused at once, those under way end with ``draining`` at the limit, and it resumes."""
    config = Config(timeout_handling=TimeoutHandling(enabled=False), shutdown=Shutdown(drain_timeout=0.2))
    manager = Manager(config, open_engine("simulated", {"base_ms": 20.0}, ""), "test", "1", pb_utils)
    manager.start()
    try:
        long = pb_utils.InferenceRequest({"text_input": ["hi"]}, {"max_tokens": 900, "ignore_eos": True})
        manager.submit([long])
        until(lambda: state_of(manager)["live"] == 1)
        assert ask(manager, control="drain") == ('{"draining":true,"live":1,"limit":0.2}', None)
        assert "drains" in str(ask(manager, control="ready")[1])
        late = pb_utils.InferenceRequest({"text_input": ["hi"]}, {"max_tokens": 1})
        serve(manager, [late])
        until(lambda: long.sender.finals)
        assert [one.sender.errors[0].message().partition(":")[0] for one in (late, long)] == ["draining", "draining"]
        assert "limit of 0.2 s" in long.sender.errors[0].message()
        assert '"live":0' in str(ask(manager, control="drain"))
        assert ask(manager, control="resume") == ('{"draining":false,"live":0,"limit":0.2}', None)
        assert ask(manager, control="ready") == ('{"ready":true}', None)
        again = pb_utils.InferenceRequest({"text_input": ["hi"]}, {"max_tokens": 1})
        serve(manager, [again])
        assert again.sender.errors == []
    finally:
        manager.stop()


def test_a_drain_that_is_taken_back_ends_nobody():
    """Who was under way when it began has no limit any more."""
    config = Config(timeout_handling=TimeoutHandling(enabled=False), shutdown=Shutdown(drain_timeout=0.1))
    manager = Manager(config, open_engine("simulated", {"base_ms": 5.0}, ""), "test", "1", pb_utils)
    manager.start()
    try:
        long = pb_utils.InferenceRequest({"text_input": ["hi"]}, {"max_tokens": 100, "ignore_eos": True})
        manager.submit([long])
        until(lambda: state_of(manager)["live"] == 1)
        ask(manager, control="drain")
        ask(manager, control="resume")
        until(lambda: long.sender.finals)
        assert long.sender.errors == []
    finally:
        manager.stop()


def test_without_intelligent_timeouts_nothing_is_predicted(manager: Manager):
    """The official contract has no limits to follow predictions."""
    assert state_of(manager)["prediction"] is None
