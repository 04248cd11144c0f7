"""Tracing: a request's spans, where they belong, which are kept, and a collector that fails."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from types import SimpleNamespace

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.fakes import pb_utils
from tests.fakes.harness import Harness, Step, VirtualLane
from tests.otlp import Receiver, otlp_receiver
from tests.services import free_port
from tests.unit.test_every_key import ask, on_loop, serving, until
from triton_lifecycle import tracing as package
from triton_lifecycle.config import Config, ErrorHandling, EventDriven, Monitoring, TimeoutHandling
from triton_lifecycle.config.urls import OtlpUrl
from triton_lifecycle.context import fresh_identity
from triton_lifecycle.errors import ConfigError, InvalidInput, QueueFull
from triton_lifecycle.simulation.virtual_time import run
from triton_lifecycle.tracing import Tracing, open_tracing
from triton_lifecycle.tracing.target import target, tell_engine
from triton_lifecycle.tracing.w3c import MAX_STATE, TraceContext, parse
from triton_lifecycle.triton import Call
from triton_lifecycle_client import AsyncClient
from triton_lifecycle_client.types import Chunk

PARENT = "00-" + "1a" * 16 + "-" + "2b" * 8 + "-01"
STAGES = ["receive", "preprocess", "schedule", "execute"]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """No variable of the machine decides; spans are sent at once."""
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


@pytest.fixture(scope="module")
def receiver():
    with otlp_receiver() as running:
        yield running


def traced(receiver: Receiver, protocol: str = "grpc", **settings) -> Config:
    url = receiver.grpc_url if protocol == "grpc" else receiver.http_url
    monitoring = Monitoring(tracing_enabled=True, tracing_endpoint=OtlpUrl(url), tracing_protocol=protocol, **settings)
    return Config(monitoring=monitoring)


def spans_of(script, parameters=None, config=None, **request):
    """Return the spans of one request to a scripted engine, in virtual time, by name; and the request."""
    config = config or Config()
    exporter = InMemorySpanExporter()

    async def scenario():
        tracing = Tracing(config, exporter)
        harness = Harness(config, tracing=tracing)
        harness.engine.scripts["p"] = script
        asked = pb_utils.InferenceRequest({"text_input": "p", **request}, parameters, "r")
        await harness.serve(asked)
        assert tracing.counts()["live"] == 0
        tracing._sdk.close()
        return asked, harness.engine

    asked, engine = run(scenario)
    return {span.name: span for span in exporter.get_finished_spans()}, asked, engine


# ---- the caller's context


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "00-" + "0" * 32 + "-" + "2" * 16 + "-01",
        "00-" + "1" * 32 + "-" + "0" * 16 + "-01",
        "ff-" + "1" * 32 + "-" + "2" * 16 + "-01",
        "00-" + "1" * 32 + "-" + "2" * 16 + "-01-more",
        "00-" + "A" * 32 + "-" + "2" * 16 + "-01",
    ],
)
def test_what_is_no_traceparent_begins_a_new_trace(text):
    """Malformed values are ignored, as the standard says; they cost nobody his request."""
    assert parse(text) is None
    spans, asked, _ = spans_of([Step("token")], {"traceparent": text, "max_tokens": 1})
    assert asked.sender.errors == []
    assert spans["text_completion test"].parent is None


def test_a_later_version_is_read_as_far_as_it_is_known():
    """A version to come may append; its first four parts mean the same."""
    found = parse("01-" + "1" * 32 + "-" + "2" * 16 + "-00-more", "a=b")
    assert (found.trace_id, found.span_id, found.sampled, found.state) == ("1" * 32, "2" * 16, False, "a=b")


def test_the_state_is_carried_on_unless_it_is_too_long():
    """What vendors put beside the trace reaches the engine."""
    assert parse(PARENT, "a=" + "b" * MAX_STATE).state == ""
    own = TraceContext("1" * 32, "2" * 16, sampled=True, state="a=b")
    assert own.headers() == {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01", "tracestate": "a=b"}


# ---- spans


def test_a_request_is_a_span_with_one_below_it_for_each_stage():
    """They stand below the caller's span, within each other in time, with what was asked and made."""
    script = [Step("token", after=2.0), Step("token", after=1.0)]
    given = {"traceparent": PARENT, "tracestate": "a=b", "tenant": "t", "max_tokens": 2}
    spans, _, engine = spans_of(script, given, stream=True)
    own = spans.pop("text_completion test")
    assert list(spans) == STAGES
    assert f"{own.context.trace_id:032x}" == "1a" * 16
    assert f"{own.parent.span_id:016x}" == "2b" * 8
    assert (own.end_time - own.start_time) / 1e9 == pytest.approx(3.0, abs=0.01)
    for stage in spans.values():
        assert stage.parent == own.context
        assert own.start_time <= stage.start_time <= stage.end_time <= own.end_time
    attributes = dict(own.attributes)
    assert attributes["gen_ai.request.model"] == "test"
    assert attributes["gen_ai.request.max_tokens"] == 2
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (1, 2)
    assert attributes["gen_ai.response.time_to_first_chunk"] == pytest.approx(2.0, abs=0.01)
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert (attributes["lifecycle.tenant"], attributes["lifecycle.caller_id"]) == ("t", "r")
    assert "error.type" not in attributes
    assert own.status.is_unset
    notes = {event.name: (event.timestamp - own.start_time) / 1e9 for event in own.events}
    assert notes["first_token"] == pytest.approx(2.0, abs=0.01)
    assert engine.traces == [{"traceparent": f"00-{'1a' * 16}-{own.context.span_id:016x}-01", "tracestate": "a=b"}]


def test_the_trace_that_begins_with_a_request_has_its_id():
    """Who knows a request's id from a log finds its trace."""
    spans, _, _ = spans_of([Step("token")])
    own = spans["text_completion test"]
    assert own.attributes["gen_ai.response.id"] == f"{own.context.trace_id:032x}"


def test_a_deadline_that_moves_and_a_retry_are_seen():
    """Another limit that became the next one is an event, however many tokens move it; so is each attempt."""
    limits = TimeoutHandling(
        enable_intelligent_timeout=False, first_token_timeout=20.0, stall_timeout=5.0, default_timeout=30.0
    )
    script = [Step("token", after=1.0), *[Step("token")] * 20, Step("raise", times=1), Step("token")]
    spans, asked, _ = spans_of(script, config=Config(timeout_handling=limits, error_handling=ErrorHandling()))
    assert asked.sender.errors == []
    names = [event.name for event in spans["text_completion test"].events]
    assert names == ["admitted", "scheduled", "first_token", "deadline_moved", "retrying"]
    assert spans["text_completion test"].attributes["lifecycle.retries"] == 1


def test_a_refusal_is_a_span_below_the_callers_with_the_stage_that_refused():
    """Bad input names its slug, and neither what was wrong in it nor any word of the prompt."""
    spans, asked, _ = spans_of([], {"max_tokenz": "secret", "traceparent": PARENT})
    assert len(asked.sender.errors) == 1
    own = spans["text_completion test"]
    assert f"{own.context.trace_id:032x}" == "1a" * 16
    assert own.attributes["error.type"] == "invalid_input"
    assert own.attributes["lifecycle.outcome"] == "rejected"
    assert own.status.description == "invalid_input"
    assert [name for name in spans if name in STAGES] == ["receive", "preprocess"]
    assert not spans["preprocess"].status.is_unset
    assert "secret" not in "".join(span.to_json() for span in spans.values())


def test_no_span_holds_a_prompt_or_an_answer():
    """Neither stands in any attribute or event."""
    exporter = InMemorySpanExporter()

    async def scenario():
        tracing = Tracing(Config(), exporter)
        harness = Harness(Config(), tracing=tracing)
        harness.engine.scripts["my secret prompt"] = [Step("token"), Step("token")]
        await harness.serve(pb_utils.InferenceRequest({"text_input": "my secret prompt"}))
        tracing._sdk.close()

    run(scenario)
    told = "".join(span.to_json() for span in exporter.get_finished_spans())
    assert "text_completion" in told
    assert "secret" not in told


def test_tritons_own_span_comes_before_the_callers():
    """Where Triton traces, its span for the model is the one above ours; where it does not, the parameter counts."""
    by_triton = json.dumps({"traceparent": PARENT.replace("2b", "3c")})
    for told, above in ((by_triton, "3c"), (None, "2b"), ("", "2b"), ("no JSON", "2b")):
        request = pb_utils.InferenceRequest({"text_input": "p"}, {"traceparent": PARENT})
        request.trace = lambda told=told: SimpleNamespace(get_context=lambda: told)
        found = Call(request, pb_utils, VirtualLane()).read().parameters["traceparent"]
        assert parse(found).span_id == above * 8


# ---- sampling


def test_the_callers_decision_is_followed_and_the_ratio_counts_for_the_rest():
    """A caller's sampled trace is kept at ratio 0, and its unsampled one is not at ratio 1; the engine is told."""
    for ratio, flag, kept in ((0.0, "01", True), (1.0, "00", False), (0.0, "", False), (1.0, "", True)):
        config = Config(monitoring=Monitoring(tracing_enabled=True, tracing_sample_ratio=ratio))
        given = {"traceparent": PARENT[:-2] + flag} if flag else {}
        spans, _, engine = spans_of([Step("token")], given, config)
        assert bool(spans) is kept, (ratio, flag)
        assert engine.traces[0]["traceparent"].endswith("01" if kept else "00")


def test_a_ratio_keeps_its_share():
    """Of traces that begin here about as many are kept as was asked for."""
    config = Config(monitoring=Monitoring(tracing_enabled=True, tracing_sample_ratio=0.3))
    tracing = Tracing(config, InMemorySpanExporter())
    kept = sum(tracing.begin(fresh_identity()[0], None).sampled for _ in range(3000))
    tracing._sdk.close()
    assert 700 < kept < 1100


# ---- where spans go


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_spans_reach_a_collector(receiver, protocol):
    """A real receiver gets a request's spans over either protocol, all counted as sent."""
    name = f"over-{protocol}"
    with serving(traced(receiver, protocol)) as manager:
        ask(manager, name=name)
        until(lambda: on_loop(manager, manager.state)["tracing"]["sent"] == 5)
        counts = on_loop(manager, manager.state)["tracing"]
    assert (counts["requests"], counts["spans"], counts["lost"], counts["waiting"]) == (1, 5, 0, 0)
    [own] = [span for span in receiver.spans if span.attributes.get("lifecycle.caller_id") == name]
    assert own.service == "triton-lifecycle"
    assert {span.name for span in receiver.spans if span.trace_id == own.trace_id} == {own.name, *STAGES}


def test_what_waits_is_sent_at_the_end(receiver, monkeypatch):
    """The last request's spans are not lost with the process."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "named-by-environment")
    with serving(traced(receiver)) as manager:
        ask(manager, name="last")
    [own] = [span for span in receiver.spans if span.attributes.get("lifecycle.caller_id") == "last"]
    assert own.service == "named-by-environment"


def test_a_collector_that_is_down_costs_no_request_and_is_told_once(caplog):
    """Requests are served, spans are counted as lost, the log has one warning, and the end comes in time."""
    down = Monitoring(tracing_enabled=True, tracing_endpoint=OtlpUrl(f"http://127.0.0.1:{free_port()}"))
    with caplog.at_level(logging.WARNING), serving(Config(monitoring=down)) as manager:
        for _ in range(20):
            assert ask(manager).sender.errors == []
        tracing = manager._tracing
        began = time.monotonic()
    assert time.monotonic() - began < 12
    counts = tracing.counts()
    assert (counts["requests"], counts["spans"], counts["sent"], counts["lost"]) == (20, 100, 0, 100)
    told = [record for record in caplog.records if record.name.startswith("triton_lifecycle.tracing")]
    assert [record.getMessage().split(" (")[0] for record in told if "do not reach" in record.message] == [
        f"spans do not reach the collector at {down.tracing_endpoint}"
    ]


def test_a_slow_collector_drops_requests_whole_and_counts_them(monkeypatch):
    """More waits than fits: what is dropped is a request's spans together, and sent + lost is what was made."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "512")
    exporter = InMemorySpanExporter()

    async def scenario():
        tracing = Tracing(Config(), exporter)
        slow = tracing._sdk._exporter.export
        monkeypatch.setattr(tracing._sdk._exporter, "export", lambda spans: (time.sleep(0.3), slow(spans))[1])
        harness = Harness(Config(), tracing=tracing)
        harness.engine.scripts["p"] = [Step("token")]
        for number in range(400):
            await harness.serve(pb_utils.InferenceRequest({"text_input": "p"}, {}, f"r{number}"))
        tracing._sdk.close()
        tracing._sdk.settle()
        return tracing.counts()

    counts = run(scenario)
    assert counts["spans"] == 2000
    assert counts["sent"] + counts["lost"] == 2000
    assert counts["lost"] > 0
    assert counts["lost"] % 5 == 0
    assert len(exporter.get_finished_spans()) == counts["sent"]


def test_the_collector_is_found_by_key_environment_and_standard():
    """The configuration comes first, then OpenTelemetry's variables, then the standard port; the path is added."""
    plain, http = Monitoring(), Monitoring(tracing_protocol="http")
    keyed = Monitoring(tracing_endpoint=OtlpUrl("http://c:1"), tracing_protocol="http")
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://e:2", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    assert target(plain, {}).url == "http://127.0.0.1:4317"
    assert target(http, {}).url == "http://127.0.0.1:4318/v1/traces"
    assert target(keyed, env).url == "http://c:1/v1/traces"
    assert target(plain, env) == target(http, env)
    assert target(plain, env).url == "http://e:2/v1/traces"
    assert target(plain, env | {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t:3/x"}).url == "http://t:3/x"
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL: expected grpc"):
        target(plain, {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})


def test_vllm_is_told_of_the_collector_unless_it_has_its_own():
    """The engine exports to the same place, by the same protocol, where requests are traced."""
    on = Monitoring(tracing_enabled=True, tracing_endpoint=OtlpUrl("http://c:1"), tracing_protocol="http")
    environ: dict[str, str] = {}
    assert tell_engine(on, {"model": "m"}, environ) == {"model": "m", "otlp_traces_endpoint": "http://c:1/v1/traces"}
    assert environ == {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    own = {"otlp_traces_endpoint": "http://other"}
    assert tell_engine(on, own, {}) == own
    assert tell_engine(Monitoring(), {"model": "m"}, {}) == {"model": "m"}


def test_the_engine_is_told_of_the_callers_span_where_requests_are_not_traced():
    """Off, the caller's own headers reach the engine as they came."""

    async def scenario():
        harness = Harness(Config())
        harness.engine.scripts["p"] = [Step("token")]
        await harness.serve(pb_utils.InferenceRequest({"text_input": "p"}, {"traceparent": PARENT}))
        return harness.engine.traces

    assert run(scenario) == [{"traceparent": PARENT}]


# ---- switches


def test_off_nothing_is_made():
    """Tracing off, monitoring off, and OTEL_SDK_DISABLED make no tracing."""
    on = Config(monitoring=Monitoring(tracing_enabled=True))
    for config, environ in (
        (Config(), {}),
        (Config(monitoring=Monitoring(enabled=False, tracing_enabled=True)), {}),
        (on, {"OTEL_SDK_DISABLED": "true"}),
    ):
        assert open_tracing(config, environ) is None


def test_without_events_there_is_no_tracing_and_the_log_says_so(caplog):
    """The bus is its source."""
    config = Config(event_driven=EventDriven(enabled=False), monitoring=Monitoring(tracing_enabled=True))
    with caplog.at_level(logging.WARNING), serving(config) as manager:
        assert on_loop(manager, manager.state)["tracing"] is None
    assert any("tracing_enabled needs event_driven.enabled" in record.message for record in caplog.records)


def test_a_missing_package_is_named(monkeypatch):
    """Where OpenTelemetry is not installed the load fails and says what to install."""
    for name in [name for name in sys.modules if name.startswith("triton_lifecycle.tracing.s")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(package, "sdk", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"triton-lifecycle\[tracing\]"):
        Tracing(Config())


# ---- the client


class Wire:
    """A transport that keeps what it is given, and answers as told."""

    def __init__(self, *answers):
        self.requests, self.answers = [], list(answers)

    async def exchange(self, request, limit_s):
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        yield answer

    async def close(self):
        pass


@pytest.fixture
def client_spans(monkeypatch):
    """Set a tracer provider, as a program that uses the client would."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter


def generate(wire, **options):
    async def scenario():
        async with AsyncClient("127.0.0.1:1") as client:
            client._transport = wire
            return await client.generate("a secret", **options)

    return asyncio.run(scenario())


DONE = Chunk(("text",), ("stop",), (1,), 3)


def test_the_client_makes_a_span_and_names_it_to_the_server(client_spans):
    """With a provider set each request is a span of the caller's trace, whatever attempts it takes."""
    wire = Wire(QueueFull("busy", retry_after=0.01), DONE)
    with trace.get_tracer("program").start_as_current_span("program") as above:
        generate(wire)
    [span, _] = client_spans.get_finished_spans()
    assert span.parent.span_id == above.get_span_context().span_id
    expected = f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-{span.context.trace_flags:02x}"
    assert span.context.trace_flags.sampled
    assert [request.traceparent for request in wire.requests] == [expected] * 2
    assert wire.requests[0].trace_headers == {"traceparent": expected}
    assert (span.attributes["lifecycle.attempts"], span.attributes["gen_ai.usage.output_tokens"]) == (2, 1)
    assert "secret" not in span.to_json()


def test_the_clients_span_tells_how_it_failed(client_spans):
    """An error is named by its slug."""
    with pytest.raises(InvalidInput):
        generate(Wire(InvalidInput("max_tokenz: what the caller wrote")))
    [span] = client_spans.get_finished_spans()
    assert span.attributes["error.type"] == "invalid_input"
    assert "wrote" not in span.to_json()


def test_without_a_provider_or_with_a_traceparent_of_ones_own_there_is_no_span(client_spans, monkeypatch):
    """What the caller names is sent as it is; where nobody traces nothing is sent."""
    wire = Wire(DONE, DONE)
    generate(wire, traceparent=PARENT)
    assert client_spans.get_finished_spans() == ()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    generate(wire)
    assert [request.traceparent for request in wire.requests] == [PARENT, None]
