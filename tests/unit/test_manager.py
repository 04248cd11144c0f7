"""The manager with the simulated engine, fed as Triton feeds it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.fakes import pb_utils
from triton_lifecycle.config import OFFICIAL
from triton_lifecycle.engine import open_engine
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
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not all(request.sender.finals for request in batch[1:]):
        time.sleep(0.01)
    assert [request.sender.finals for request in batch[1:]] == [1, 1, 1, 1]
    assert all(response.error is None for request in answered for response, _ in request.sender.sent if response)
    error = batch[2].sender.sent[-1][0].error
    assert error.code() == pb_utils.TritonError.INTERNAL
    assert "RuntimeError" in error.message()
