"""What requests leave to the garbage collector: nothing."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.fakes import pb_utils
from tests.waiting import until
from triton_lifecycle import heap
from triton_lifecycle.config import Config
from triton_lifecycle.context import Context
from triton_lifecycle.engine import open_engine
from triton_lifecycle.engine.simulated.sequence import Sequence
from triton_lifecycle.manager import Manager
from triton_lifecycle.timeouts.deadline import Deadline
from triton_lifecycle.triton import Call

OF_A_REQUEST = (Context, Call, Deadline, Sequence)
FATES = {
    "completed": {"max_tokens": 20, "ignore_eos": True},
    "timed out": {"max_tokens": 2000, "ignore_eos": True, "timeout_ms": 30},
    "rejected": {"max_tokens": -1},
    "left by its caller": {"max_tokens": 2000, "ignore_eos": True},
}


@pytest.fixture
def collector() -> Iterator[None]:
    """Let nothing be collected unasked, and what is collected be kept for a look."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def left() -> Counter[str]:
    """Return what only the collector would have freed."""
    gc.collect()
    return Counter(type(each).__name__ for each in gc.garbage if isinstance(each, OF_A_REQUEST))


@pytest.mark.parametrize("fate", FATES)
def test_no_request_waits_for_the_collector(fate: str, collector: None):
    """What a request was made of is gone with it: no cycle is left to be collected."""
    manager = Manager(Config(), open_engine("simulated", {"base_ms": 1.0}, ""), "test", "1", pb_utils)
    manager.start()
    try:
        requests = [pb_utils.InferenceRequest({"text_input": f"hi {n}", "stream": True}, FATES[fate]) for n in range(5)]
        manager.submit(requests)
        if fate == "left by its caller":
            until(lambda: all(request.sender.sent for request in requests))
            for request in requests:
                request.cancelled = True
        until(lambda: all(request.sender.finals for request in requests))
        until(lambda: not manager.accounts.read()["pipelines"])
        assert not left()
    finally:
        manager.stop()


def test_what_is_there_is_left_out_until_it_is_done_again():
    """After settling the objects of before are frozen; again, and those of since are too; without it, never."""
    threshold = gc.get_threshold()
    assert gc.get_freeze_count() == 0
    heap.resettle()
    assert gc.get_freeze_count() == 0
    try:
        heap.settle()
        first = gc.get_freeze_count()
        assert first > 10_000
        assert gc.get_threshold() == heap.THRESHOLDS
        since = [asyncio.Queue() for _ in range(1000)]
        heap.resettle()
        assert gc.get_freeze_count() >= first + len(since)
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)
