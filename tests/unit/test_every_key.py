"""Every key of the promised file does what it says. A key without a test fails."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.fakes import pb_utils
from tests.fakes.harness import Harness, Step
from tests.waiting import until
from triton_lifecycle import logs
from triton_lifecycle.bus import Bus, NoBus
from triton_lifecycle.config import (
    Admission,
    Cancellation,
    Config,
    ContextManagement,
    ErrorHandling,
    EventDriven,
    Monitoring,
    PerformanceOptimization,
    Shutdown,
    TimeoutHandling,
)
from triton_lifecycle.config.keys import KEYS
from triton_lifecycle.context import Context
from triton_lifecycle.engine import open_engine
from triton_lifecycle.errors import UnknownRequest
from triton_lifecycle.events import Received
from triton_lifecycle.manager import Manager
from triton_lifecycle.simulation.virtual_time import run
from triton_lifecycle.stages import receive as receive_stage
from triton_lifecycle.triton import LANE, Lanes

SAMPLE = Path(__file__).parents[2] / "model_repository" / "smollm2" / "request_lifecycle.yaml"
PROMISED = [
    f"{section}.{key}"
    for section, keys in yaml.safe_load(SAMPLE.read_text())["request_lifecycle"].items()
    for key in keys
]
ELSEWHERE = {
    "context_management.enable_layered_storage": "tests.unit.test_contexts:test_only_a_summary_is_kept_without_layers",
    "context_management.storage_backend": "tests.contract.test_store_contract:test_what_was_written_is_read",
    "distributed.context_sync_interval": (
        "tests.unit.test_mirror:test_a_live_request_is_written_at_each_interval_and_only_what_changed"
    ),
    "timeout_handling.enable_intelligent_timeout": "tests.unit.test_adjuster:test_off_means_the_default_timeout",
    "timeout_handling.min_timeout": "tests.unit.test_adjuster:test_min_timeout_is_the_shortest_derived_limit",
    "timeout_handling.safety_margin": "tests.unit.test_adjuster:test_safety_margin_stretches_the_derived_limits",
    "timeout_handling.timeout_prediction_model": "tests.unit.test_predictor:test_both_models_learn_a_linear_world",
    "distributed.num_nodes": "tests.unit.test_envoy:test_so_many_replicas_are_started_as_the_configuration_says",
    "distributed.load_balancing_strategy": "tests.unit.test_envoy:test_the_strategy_is_the_configurations",
    "monitoring.tracing_enabled": "tests.unit.test_tracing:test_off_nothing_is_made",
    "monitoring.tracing_endpoint": "tests.unit.test_tracing:test_spans_reach_a_collector",
    "monitoring.tracing_protocol": "tests.unit.test_tracing:test_spans_reach_a_collector",
    "monitoring.tracing_sample_ratio": "tests.unit.test_tracing:test_a_ratio_keeps_its_share",
    "monitoring.log_to": "tests.unit.test_logs:test_lines_go_through_tritons_logger_at_its_levels",
    "security.control_token": "tests.unit.test_security:test_control_requests_need_the_token_where_one_is_set",
    "distributed.enabled": "tests.unit.test_sinks:test_local_is_no_sink",
    "distributed.event_bus_backend": "tests.unit.test_sinks:test_the_backend_is_chosen_by_name_and_tokens_by_a_switch",
}
"""Keys whose effect a test in another module shows."""
TESTED: set[str] = set(ELSEWHERE)


def shows(*keys):
    """Say which keys a test shows the effect of."""
    TESTED.update(keys)
    return lambda test: test


@contextmanager
def serving(config, **engine):
    """Run a manager on the simulated engine."""
    manager = Manager(config, open_engine("simulated", {"base_ms": 1.0, **engine}, ""), "test", "1", pb_utils)
    manager.start()
    try:
        yield manager
    finally:
        manager.stop()


def ask(manager, text="hello", parameters=None, *, name="", stream=False, wait=True):
    request = pb_utils.InferenceRequest({"text_input": text, "stream": stream}, parameters, name)
    manager.submit([request])
    if wait:
        until(lambda: request.sender.finals)
    return request


def on_loop(manager, function, *args):
    async def call():
        return function(*args)

    return asyncio.run_coroutine_threadsafe(call(), manager._loop).result(timeout=60)


def event(seq=0):
    return Received(request_id="r", seq=seq, at=0.0, caller_id="", model="m", wall=0.0)


# ---- event_driven


@shows("event_driven.enabled")
def test_events_can_be_switched_off():
    """Off: there is no bus, and requests are served all the same."""
    for enabled, kind in ((True, Bus), (False, NoBus)):
        with serving(Config(event_driven=EventDriven(enabled=enabled))) as manager:
            assert isinstance(manager._bus, kind)
            assert ask(manager).sender.errors == []


@shows("event_driven.event_queue_size", "event_driven.event_processing_timeout")
def test_a_handlers_queue_and_time_are_limited():
    """More events than fit are dropped, and a handler that hangs is given up at its time limit."""
    config = Config(event_driven=EventDriven(event_queue_size=3, event_processing_timeout=0.05))
    with serving(config) as manager:

        async def hangs(_):
            await asyncio.sleep(600)

        subscription = on_loop(manager, manager._bus.subscribe, hangs, [Received])
        on_loop(manager, lambda: [manager._bus.publish(event(seq)) for seq in range(10)])
        assert subscription.counts.dropped == 7
        until(lambda: subscription.counts.timed_out == 3)


@shows("event_driven.max_event_handlers")
def test_the_number_of_handlers_is_limited():
    """One handler more than allowed is refused; the predictor and the metrics are one each as well."""
    config = Config(
        event_driven=EventDriven(max_event_handlers=2),
        timeout_handling=TimeoutHandling(enable_intelligent_timeout=False),
        monitoring=Monitoring(metrics_enabled=False),
    )
    with serving(config) as manager:
        for _ in range(2):
            on_loop(manager, manager._bus.subscribe, lambda _: None)
        with pytest.raises(ValueError, match="at most 2 handlers"):
            on_loop(manager, manager._bus.subscribe, lambda _: None)


# ---- context_management


@shows("context_management.enabled")
def test_keeping_finished_requests_can_be_switched_off():
    """On, a finished request is found by its id; off, it is forgotten with its end."""
    with serving(Config()) as manager:
        ask(manager, name="r")
        assert on_loop(manager, manager._contexts.find, "r").status == "finished"
    with serving(Config(context_management=ContextManagement(enabled=False))) as manager:
        ask(manager, name="r")
        with pytest.raises(UnknownRequest):
            on_loop(manager, manager._contexts.find, "r")


@shows("context_management.max_contexts")
def test_no_more_requests_are_live_than_allowed():
    """The request beyond the limit is refused at once; the live ones go on."""
    with serving(Config(context_management=ContextManagement(max_contexts=2)), mean_output_tokens=None) as manager:
        live = [ask(manager, parameters={"max_tokens": 2000}, wait=False) for _ in range(2)]
        until(lambda: manager._admission.out == 2)
        assert ask(manager).sender.errors[0].message().startswith("queue_full: ")
        assert [request.sender.finals for request in live] == [0, 0]
        for ctx in on_loop(manager, manager._contexts.live):
            assert isinstance(ctx, Context)
            on_loop(manager, ctx.interrupt, UnknownRequest("enough"))


@shows("context_management.context_cleanup_interval", "context_management.expired_context_timeout")
def test_what_is_kept_too_long_is_cleaned_up_by_itself():
    """A finished request is kept for its time, and then goes without anybody asking for it."""
    kept = ContextManagement(context_cleanup_interval=0.02, expired_context_timeout=1.0)
    with serving(Config(context_management=kept)) as manager:
        ask(manager)
        ended = time.monotonic()
        assert len(manager._contexts.ended) == 1
        until(lambda: len(manager._contexts.ended) == 0)
        assert 0.5 < time.monotonic() - ended < 30
    rare = ContextManagement(context_cleanup_interval=60.0, expired_context_timeout=0.01)
    with serving(Config(context_management=rare)) as manager:
        ask(manager)
        time.sleep(0.1)
        assert len(manager._contexts.ended) == 1, "nobody has looked yet"


# ---- timeout_handling


def ended_after(timeouts, parameters=None):
    """Return the virtual seconds until a request that never makes progress ends, and how it does."""

    async def scenario():
        harness = Harness(Config(timeout_handling=timeouts))
        harness.engine.scripts["p"] = [Step("token", after=10_000.0)]
        request = pb_utils.InferenceRequest({"text_input": "p"}, parameters or {})
        began = asyncio.get_running_loop().time()
        await harness.serve(request)
        return asyncio.get_running_loop().time() - began, [error.message() for error in request.sender.errors]

    return run(scenario)


@shows("timeout_handling.default_timeout")
def test_the_default_limit_ends_a_request_without_one():
    """A request that brings no limit has the configured one: in all, or under predictions for each silence."""
    for intelligent, slug in ((False, "total_timeout: "), (True, "first_token_timeout: ")):
        limits = TimeoutHandling(default_timeout=12.0, enable_intelligent_timeout=intelligent)
        took, (message,) = ended_after(limits)
        assert took == pytest.approx(12, abs=0.1)
        assert message.startswith(slug)


@shows("timeout_handling.max_timeout")
def test_no_caller_gets_more_than_the_longest_limit():
    """A caller that asks for more gets the longest."""
    took, _ = ended_after(TimeoutHandling(default_timeout=10.0, max_timeout=40.0), {"timeout_ms": 500_000})
    assert took == pytest.approx(40, abs=0.1)


@shows("timeout_handling.enabled")
def test_limits_can_be_switched_off():
    """Off, only the caller's own limit counts, and without one the request takes its time."""
    off = TimeoutHandling(enabled=False, default_timeout=12.0)
    assert ended_after(off)[0] == pytest.approx(10_000, abs=1)
    assert ended_after(off, {"timeout_ms": 500_000})[0] == pytest.approx(500, abs=0.1)


# ---- performance_optimization


def sending_threads(manager):
    """Serve one streamed request and return the names of the threads that its responses were sent from."""
    seen = set()
    request = pb_utils.InferenceRequest({"text_input": "x", "stream": True}, {"max_tokens": 5})
    send = request.sender.send

    def noting(*args, **kwargs):
        seen.add(threading.current_thread().name)
        send(*args, **kwargs)

    request.sender.send = noting
    manager.submit([request])
    until(lambda: request.sender.finals)
    return seen


@shows("performance_optimization.enable_async_processing", "performance_optimization.enabled")
def test_blocking_work_is_done_on_threads_or_on_the_loop():
    """On, answers are sent from threads; off, or all off, on the event loop."""
    for off in ({"enable_async_processing": False}, {"enabled": False}):
        with serving(Config(performance_optimization=PerformanceOptimization(**off))) as manager:
            assert sending_threads(manager) == {"lifecycle-loop"}
    with serving(Config()) as manager:
        assert all(name.startswith(LANE) for name in sending_threads(manager))


@pytest.mark.parametrize("on", [True, False])
def test_long_texts_are_parsed_where_the_option_says(on, monkeypatch):
    """On, a long prompt is parsed in a thread; off, on the event loop."""
    seen = []
    real = receive_stage._prompt
    monkeypatch.setattr(
        receive_stage, "_prompt", lambda *a, **k: (seen.append(threading.current_thread().name), real(*a, **k))[1]
    )
    performance = PerformanceOptimization(enable_async_processing=on)
    with serving(Config(performance_optimization=performance), max_model_len=4096) as manager:
        ask(manager, text="word " * 40_000)
    assert (seen != ["lifecycle-loop"]) is on


def responses(config, send_delay):
    """Return how many responses a stream of 40 steps makes when each send takes its time."""

    async def scenario():
        harness = Harness(
            config, engine=open_engine("simulated", {"mean_output_tokens": None}, ""), send_delay=send_delay
        )
        await harness.engine.start()
        request = pb_utils.InferenceRequest({"text_input": "x", "stream": True}, {"max_tokens": 40})
        await harness.serve(request)
        await harness.engine.stop()
        assert request.sender.errors == []
        return len(request.sender.sent), request.sender.text()

    return run(scenario)


@shows("performance_optimization.enable_batch_optimization")
def test_a_slow_sender_gets_fewer_larger_responses_or_one_for_each_step():
    """On, what is made during a send goes out together; off, each step is a response. The text is the same."""
    each = Config(performance_optimization=PerformanceOptimization(enable_batch_optimization=False))
    merged, text = responses(Config(), send_delay=0.1)
    assert merged < 10
    assert responses(each, send_delay=0.1) == (40, text)
    assert responses(Config(), send_delay=0.0) == (40, text)


def test_without_merging_the_responses_that_wait_are_bounded():
    """With a sender that hardly moves, what waits stays within its bound and the rest merges after all."""
    from triton_lifecycle.stages.respond import AHEAD

    each = Config(performance_optimization=PerformanceOptimization(enable_batch_optimization=False))

    async def scenario():
        engine = open_engine("simulated", {"mean_output_tokens": None}, "")
        harness = Harness(each, engine=engine, send_delay=5.0)
        await engine.start()
        request = pb_utils.InferenceRequest({"text_input": "x", "stream": True}, {"max_tokens": 1000, "timeout": 0})
        await harness.serve(request)
        await engine.stop()
        return request

    each = each.model_copy(update={"timeout_handling": TimeoutHandling(enabled=False)})
    request = run(scenario)
    assert request.sender.errors == []
    assert AHEAD < len(request.sender.sent) < AHEAD + 5


def test_a_send_that_fails_fails_its_request_also_without_merging():
    """The error of a send that nobody waited for still ends the request as failed."""
    each = Config(performance_optimization=PerformanceOptimization(enable_batch_optimization=False))

    async def scenario():
        harness = Harness(each)
        harness.engine.scripts["p"] = [Step("token", after=0.1)] * 5
        request = pb_utils.InferenceRequest({"text_input": "p", "stream": True})
        send, calls = request.sender.send, []

        def fails_once(*args, **kwargs):
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("no shared memory")
            send(*args, **kwargs)

        request.sender.send = fails_once
        await harness.serve(request)
        return request

    request = run(scenario)
    assert request.sender.errors[0].message().startswith("internal: ")
    assert request.sender.finals == 1


@shows("performance_optimization.enable_resource_pooling", "performance_optimization.resource_pool_size")
def test_the_pool_of_sending_threads_grows_only_while_all_are_busy_and_to_its_size():
    """A busy pool gets one more thread until it is full; an idle one none; without pooling there is one."""

    async def lanes_when_busy(performance):
        lanes = Lanes(asyncio.get_running_loop(), performance.pool_size)
        release = threading.Event()
        waiting = [lanes.pick().submit(lambda: release.wait(60) and None) for _ in range(60)]
        count = len(lanes)
        release.set()
        await asyncio.gather(*waiting)
        lanes.close()
        return count

    for size in (1, 3):
        assert asyncio.run(lanes_when_busy(PerformanceOptimization(resource_pool_size=size))) == size
    alone = PerformanceOptimization(resource_pool_size=3, enable_resource_pooling=False)
    assert asyncio.run(lanes_when_busy(alone)) == 1
    with serving(Config()) as manager:
        for _ in range(5):
            ask(manager)
        assert len(manager._lanes) == 1, "one after the other they need no second thread"


# ---- error_handling


def answer_to(errors, parameters, text="p"):
    async def scenario():
        harness = Harness(Config(error_handling=errors))
        harness.engine.scripts[text] = [Step("token")]
        request = pb_utils.InferenceRequest({"text_input": text}, parameters)
        await harness.serve(request)
        return [error.message() for error in request.sender.errors]

    return run(scenario)


@shows("error_handling.enable_request_validation", "error_handling.enabled")
def test_values_that_help_nobody_are_refused_or_left_out():
    """On, an unknown parameter and a NUL are refused; off, or all off, the request is served without and with them."""
    for off in ({"enable_request_validation": False}, {"enabled": False}):
        errors = ErrorHandling(**off)
        assert answer_to(errors, {"max_tokenz": 4}) == []
        assert answer_to(errors, {}, text="a\0b") == []
    assert "did you mean 'max_tokens'" in answer_to(ErrorHandling(), {"max_tokenz": 4})[0]
    assert "NUL" in answer_to(ErrorHandling(), {}, text="a\0b")[0]


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"n": 10_000}, "p"),
        ({"max_tokens": "many"}, "p"),
        ({}, ""),
        ({}, "x" * 5_000_000),
        ({"timeout_ms": "soon"}, "p"),
    ],
)
def test_without_validation_nobody_can_hurt_others(parameters, text):
    """What is too large, would choke the engine, or steers the request's life is refused all the same."""
    assert answer_to(ErrorHandling(enable_request_validation=False), parameters, text)


@shows("error_handling.enable_exception_capture")
@pytest.mark.parametrize("capture", [True, False])
def test_an_unexpected_exception_stays_with_its_request_or_also_leaves_it(capture, caplog, monkeypatch):
    """The caller is answered and the trace is logged either way; without capture the exception goes on to the loop."""
    errors = ErrorHandling(enable_exception_capture=capture)

    async def scenario():
        harness = Harness(Config(error_handling=errors))
        harness.pipeline._capture = errors.captures
        harness.engine.scripts["p"] = [Step("bug")]
        request = pb_utils.InferenceRequest({"text_input": "p"})
        raised = []
        try:
            await harness.serve(request)
        except ZeroDivisionError as error:
            raised.append(error)
        await asyncio.sleep(1)
        assert request.sender.finals == 1
        assert request.sender.errors[0].message().startswith("internal: ")
        assert len(harness.contexts) == 0
        assert harness.admission.out == 0
        return raised

    assert bool(run(scenario)) is not capture
    assert any(record.exc_info for record in caplog.records)


def test_without_capture_the_server_goes_on(monkeypatch):
    """The loop's own handler is told of the exception, with its trace, and the next request is served."""
    told = []
    with serving(Config(error_handling=ErrorHandling(enable_exception_capture=False))) as manager:
        manager._loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
        monkeypatch.setattr(manager._engine, "tokenize", lambda *_, **__: 1 / 0)
        assert ask(manager).sender.errors[0].message().startswith("internal: ")
        until(lambda: told)
        assert isinstance(told[0], ZeroDivisionError)
        monkeypatch.undo()
        assert ask(manager).sender.errors == []


# ---- monitoring


@pytest.fixture
def stderr_of(capsys):
    """Return what the package writes to standard error under given settings."""

    def written(settings):
        logs.configure(settings)
        child = logging.getLogger(f"{logs.ROOT}.test")
        child.debug("fine")
        child.info("plain")
        child.error("grave")
        return capsys.readouterr().err.splitlines()

    return written


@shows("monitoring.enabled", "monitoring.logging_enabled")
def test_logs_can_be_switched_off(stderr_of):
    """Logging off, or monitoring off, writes nothing."""
    assert len(stderr_of(Monitoring())) == 2
    assert stderr_of(Monitoring(logging_enabled=False)) == []
    assert stderr_of(Monitoring(enabled=False)) == []


@shows("monitoring.log_level")
def test_less_severe_records_are_left_out(stderr_of):
    """Only records of the level and above are written."""
    for level, count in (("debug", 3), ("info", 2), ("warning", 1), ("error", 1)):
        assert len(stderr_of(Monitoring(log_level=level))) == count


@shows("monitoring.log_format")
def test_logs_are_json_or_text(stderr_of):
    """JSON gives one object per line, text does not."""
    records = [json.loads(line) for line in stderr_of(Monitoring(log_format="json"))]
    assert [record["message"] for record in records] == ["plain", "grave"]
    for line in stderr_of(Monitoring(log_format="text")):
        with pytest.raises(ValueError, match=r"Expecting value|Extra data"):
            json.loads(line)


# ---- what this project adds


@shows("monitoring.leak_check_interval")
def test_the_self_check_keeps_its_interval_or_is_off():
    """Checks come by themselves; 0, or monitoring off, makes none."""
    with serving(Config(monitoring=Monitoring(leak_check_interval=0.02))) as manager:
        until(lambda: manager.accounts.checks > 3)
    for off in (Monitoring(leak_check_interval=0.0), Monitoring(enabled=False, leak_check_interval=0.02)):
        with serving(Config(monitoring=off)) as manager:
            time.sleep(0.2)
            assert manager.accounts.checks == 0


@shows("admission.max_live_requests")
def test_live_requests_can_be_limited_below_the_contexts():
    """The admission limit counts before ``max_contexts``."""
    with serving(Config(admission=Admission(max_live_requests=1)), mean_output_tokens=None) as manager:
        ask(manager, parameters={"max_tokens": 2000}, wait=False)
        until(lambda: manager._admission.out == 1)
        assert ask(manager).sender.errors[0].message().startswith("queue_full: ")
        on_loop(manager, lambda: [ctx.interrupt(UnknownRequest("enough")) for ctx in manager._contexts.live()])


@shows("cancellation.poll_interval", "cancellation.max_polls_per_second")
def test_callers_are_asked_as_often_as_configured():
    """A long interval or a low rate asks seldom, and then a caller that left is noticed late."""
    for settings, least, most in (
        (Cancellation(poll_interval=0.005, max_polls_per_second=10_000), 20, 200),
        (Cancellation(poll_interval=0.2, max_polls_per_second=10_000), 1, 4),
        (Cancellation(poll_interval=0.005, max_polls_per_second=10), 1, 6),
    ):
        with serving(Config(cancellation=settings), mean_output_tokens=None) as manager:
            request = ask(manager, parameters={"max_tokens": 2000}, wait=False)
            time.sleep(0.4)
            assert least <= request.polls <= most
            on_loop(manager, lambda m=manager: [ctx.interrupt(UnknownRequest("enough")) for ctx in m._contexts.live()])


@shows("shutdown.drain_timeout")
def test_running_work_gets_its_time_at_the_end():
    """A request that outlasts the drain ends with its own reason; one that fits is finished."""
    for timeout, error in ((0.05, "draining: "), (20.0, None)):
        with serving(Config(shutdown=Shutdown(drain_timeout=timeout)), mean_output_tokens=None) as manager:
            request = ask(manager, parameters={"max_tokens": 300}, wait=False)
            until(lambda m=manager: m._admission.out == 1)
        until(lambda r=request: r.sender.finals)
        assert [message.message().startswith(error) for message in request.sender.errors] == ([True] if error else [])


def mended(config, script):
    """Return how a request ended whose engine does what the script says: its errors, its attempts, the seconds."""

    async def scenario():
        harness = Harness(config)
        harness.engine.scripts["p"] = script
        request = pb_utils.InferenceRequest({"text_input": "p", "stream": True}, {}, "r")
        began = asyncio.get_running_loop().time()
        await harness.serve(request)
        took = asyncio.get_running_loop().time() - began
        return [error.message() for error in request.sender.errors], harness.contexts.find("r").attempts, took

    return run(scenario)


@shows("error_handling.enable_auto_recovery")
def test_a_dead_engine_is_loaded_again_where_it_may():
    """With recovery the request goes on in a second attempt; without, it ends with the death at once."""
    script = [Step("die", times=1), Step("token")]
    for on in (True, False):
        errors, attempts, _ = mended(Config(error_handling=ErrorHandling(enable_auto_recovery=on)), script)
        assert (errors == [], attempts) == ((True, 2) if on else (False, 1))
        assert all(error.startswith("engine_died: ") for error in errors)


@shows("error_handling.max_recovery_attempts")
@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_failed_request_is_tried_so_often(most):
    """As many further attempts as allowed: one failure fewer is survived, one more is not."""
    config = Config(error_handling=ErrorHandling(max_recovery_attempts=most))
    for failures in (most, most + 1):
        errors, attempts, _ = mended(config, [Step("raise", times=1) for _ in range(failures)] + [Step("token")])
        assert (len(errors), attempts) == (int(failures > most), most + 1)


@shows("error_handling.recovery_delay")
@pytest.mark.parametrize("delay", [0.5, 4.0])
def test_an_attempt_waits_its_delay(delay):
    """Between a failure and the next attempt lies the delay."""
    config = Config(error_handling=ErrorHandling(recovery_delay=delay))
    errors, _, took = mended(config, [Step("raise", times=1), Step("token")])
    assert errors == []
    assert took == pytest.approx(delay, abs=0.1)


@shows("monitoring.metrics_enabled")
@pytest.mark.parametrize("enabled", [True, False])
def test_our_metrics_can_be_switched_off(enabled):
    """On, a request is counted on Triton's page; off, nothing of ours is there."""
    pb_utils.MetricFamily.series.clear()
    with serving(Config(monitoring=Monitoring(metrics_enabled=enabled))) as manager:
        ask(manager)
    series = {name for name, _ in pb_utils.MetricFamily.series}
    if enabled:
        assert pb_utils.MetricFamily.value("lifecycle_requests_ended_total", outcome="completed") == 1
    else:
        assert series == set()


# ---- the account of keys


@pytest.mark.parametrize("name", PROMISED)
def test_every_promised_key_has_its_effect(name):
    """A key is shown to have its effect, above or where this account says."""
    assert name in TESTED, f"{name} has no test that shows its effect"


@pytest.mark.parametrize("test", ELSEWHERE.values(), ids=ELSEWHERE)
def test_what_is_shown_elsewhere_is_there(test):
    """The tests that this account names exist."""
    module, _, name = test.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_the_account_names_only_keys_that_there_are():
    """A key that was renamed or removed leaves no test behind."""
    assert {key.name for key in KEYS} >= TESTED
