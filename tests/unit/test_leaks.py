"""Leak accounting: every kind of leak is found while the server is idle, named, and forgotten once it is mended."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import tempfile
import threading
import time
from contextlib import ExitStack

import pytest

from tests.fakes import pb_utils
from tests.waiting import until
from triton_lifecycle import leaks
from triton_lifecycle.admission import Ask
from triton_lifecycle.bus import Bus
from triton_lifecycle.config import Config, Monitoring
from triton_lifecycle.engine import EngineRequest, open_engine
from triton_lifecycle.events import Received
from triton_lifecycle.leaks import Accounts, SelfCheck
from triton_lifecycle.manager import Manager
from triton_lifecycle.simulation.virtual_time import run
from triton_lifecycle.triton import Call

SETTLE_S = 0.03


@pytest.fixture(scope="module")
def manager():
    """Run a manager with the simulated engine that checks itself all the time it is idle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaks, "ALLOWANCES", {"descriptors": 8.0, "threads": 4.0, "tasks": 4.0, "shm_bytes": 2.0**20})
        config = Config(monitoring=Monitoring(leak_check_interval=SETTLE_S))
        made = Manager(config, open_engine("simulated", {"base_ms": 1.0}, ""), "test", "1", pb_utils)
        made.start()
        yield made
        made.stop()


def on_loop(manager, function):
    """Run a function on the manager's loop and return its result."""

    async def call():
        return function()

    return asyncio.run_coroutine_threadsafe(call(), manager._loop).result(timeout=60)


def a_context(manager, held):
    call = Call(pb_utils.InferenceRequest({"text_input": "x"}), pb_utils, manager._lanes.pick())
    ctx = manager._contexts.open(call, "test", manager._bus)
    held.callback(manager._contexts._live.pop, ctx.id)


def a_permit(manager, held):
    held.callback(manager._admission.admit(Ask()).release)


def a_pipeline_task(manager, held):
    async def forever():
        await asyncio.sleep(600)

    task = manager._loop.create_task(forever())
    manager._tasks.add(task)
    # It is counted as a live request too, so it must look as if it had been forgotten by those who count.
    held.callback(lambda: (task.cancel(), manager._tasks.discard(task)))


def a_watched_call(manager, held):
    request = pb_utils.InferenceRequest({"text_input": "x"})
    call = Call(request, pb_utils, manager._lanes.pick())
    manager._watch.add(call, lambda: None)
    held.callback(manager._watch.discard, call)


def a_send_that_hangs(manager, held):
    release = threading.Event()
    manager._lanes.pick().submit(lambda: release.wait(30) and None)
    held.callback(release.set)


def a_bus_queue(manager, held):
    async def hangs(event):
        await asyncio.sleep(600)

    subscription = manager._bus.subscribe(hangs, [Received])
    manager._bus.publish(Received(request_id="r", seq=0, at=0.0, caller_id="", model="m", wall=0.0))
    held.callback(subscription.close)


def an_engine_request(manager, held):
    engine = manager._engine
    sampling = engine.sampling({"max_tokens": 2000, "ignore_eos": True})
    live = engine._submit(EngineRequest("lost", [300, 301, 302], sampling))
    # Nobody reads it, and it would end by itself: let it stand still.
    engine._stalled_until = asyncio.get_running_loop().time() + 600
    held.callback(lambda: (engine._drop(live), setattr(engine, "_stalled_until", 0.0)))


def descriptors(manager, held):
    for _ in range(10):
        for descriptor in os.pipe():
            held.callback(os.close, descriptor)


def some_threads(manager, held):
    release = threading.Event()
    for _ in range(6):
        threading.Thread(target=release.wait, args=(30,), daemon=True).start()
    held.callback(release.set)


def tasks(manager, held):
    for _ in range(6):
        held.callback(manager._loop.create_task(asyncio.sleep(600)).cancel)


def shm_bytes(manager, held):
    file = held.enter_context(tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="test_leaks_"))  # noqa: SIM115 - entered right here
    file.write(bytes(2**21))
    file.flush()
    held.enter_context(mmap.mmap(file.fileno(), 2**21))


def a_sink_queue(manager, held):
    queue = [1, 2, 3]
    manager.accounts.add("sink.test", lambda: len(queue))
    held.callback(queue.clear)


@pytest.mark.parametrize(
    ("inject", "account"),
    [
        (a_context, "contexts"),
        (a_permit, "permits"),
        (a_watched_call, "watched_calls"),
        (a_send_that_hangs, "sends"),
        (a_bus_queue, "bus_queues"),
        (an_engine_request, "engine_requests"),
        (an_engine_request, "engine_sequences"),
        (descriptors, "descriptors"),
        (some_threads, "threads"),
        (tasks, "tasks"),
        (shm_bytes, "shm_bytes"),
        (a_sink_queue, "sink.test"),
    ],
)
def test_a_leak_of_each_kind_is_found_and_named(manager, inject, account, caplog, monkeypatch):
    """What does not come back is in the state, logged once by its name, and gone from both when it is mended."""
    until(lambda: manager.accounts.checks and not manager.accounts.leaks)
    with ExitStack() as stack:
        held = ExitStack()
        stack.callback(lambda: on_loop(manager, held.close))
        on_loop(manager, lambda: inject(manager, held))
        until(lambda: account in manager.accounts.leaks)
        reports, checks = manager.accounts.reports, manager.accounts.checks
        until(lambda: manager.accounts.checks >= checks + 3)
        assert manager.accounts.reports == reports, "one report for each change, not for each check"
        warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert any(f"{account} is" in record.getMessage() for record in warnings)
        state = on_loop(manager, manager.state)["accounts"]
        assert account in state["leaks"]
        assert state["held"][account] > state["leaks"][account]["expected"]
    until(lambda: not manager.accounts.leaks)
    assert manager.accounts.reports > reports


def test_kv_blocks_that_stay_taken_are_found(manager):
    """A sequence that holds KV blocks without a request shows as KV usage."""
    until(lambda: manager.accounts.checks and not manager.accounts.leaks)
    pool = manager._engine._scheduler.pool
    on_loop(manager, lambda: pool.reserve(5))
    until(lambda: "kv_usage" in manager.accounts.leaks)
    on_loop(manager, lambda: pool.release([], 5))
    until(lambda: not manager.accounts.leaks)


def test_a_server_at_work_is_not_checked(manager):
    """While a request is live, what it holds is no leak."""
    until(lambda: manager.accounts.checks)
    held = ExitStack()
    on_loop(manager, lambda: a_pipeline_task(manager, held))
    time.sleep(4 * SETTLE_S)
    checks = manager.accounts.checks
    time.sleep(6 * SETTLE_S)
    assert manager.accounts.checks == checks
    on_loop(manager, held.close)
    until(lambda: manager.accounts.checks > checks)


def test_what_is_only_late_is_no_leak():
    """Something that comes back within the second look is not reported."""

    async def scenario():
        accounts, queue = Accounts(), [1, 2, 3]
        accounts.add("queue", lambda: len(queue))
        check = SelfCheck(accounts, received=lambda: 0, live=lambda: 0, interval=5, settle=1)
        task = asyncio.create_task(check.run())
        await asyncio.sleep(1.5)
        queue.clear()
        await asyncio.sleep(60)
        task.cancel()
        assert accounts.checks >= 8
        assert accounts.reports == 0

    run(scenario)


def test_the_interval_is_kept():
    """A check every ``interval`` and ``settle`` seconds, the first before any request."""

    async def scenario():
        accounts = Accounts()
        check = SelfCheck(accounts, received=lambda: 0, live=lambda: 0, interval=28, settle=2)
        task = asyncio.create_task(check.run())
        await asyncio.sleep(3)
        assert accounts.checks == 1
        await asyncio.sleep(300)
        assert accounts.checks == 11
        task.cancel()

    run(scenario)


def test_an_account_that_cannot_be_read_hurts_no_other(caplog, monkeypatch):
    """It is logged and left out."""
    accounts = Accounts()
    accounts.add("broken", lambda: 1 / 0)
    accounts.add("fine", lambda: 2)
    assert accounts.read() == {"fine": 2}
    assert accounts.check().keys() == {"fine"}
    with pytest.raises(ValueError, match="exists already"):
        accounts.add("fine", lambda: 0)


def test_the_bus_counts_what_waits():
    """The backlog is over all handlers, and zero once they are done."""

    async def scenario():
        bus = Bus()

        async def slow(event):
            await asyncio.sleep(1)

        bus.subscribe(slow)
        bus.subscribe(slow)
        for seq in range(3):
            bus.publish(Received(request_id="r", seq=seq, at=0.0, caller_id="", model="m", wall=0.0))
        assert bus.backlog == 6
        await asyncio.sleep(10)
        assert bus.backlog == 0
        await bus.aclose()

    run(scenario)
