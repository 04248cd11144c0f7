"""What a caller asks and gets, over both protocols, on the real server with the real model."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import aclosing
from itertools import zip_longest

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import Tracer

from tests.e2e.conftest import until_idle
from tests.otlp import Receiver, otlp_receiver
from triton_lifecycle import errors
from triton_lifecycle.launcher.server import TritonServer
from triton_lifecycle_client import AsyncClient, Client

PROMPT = "The capital of France is"
GREEDY = {"max_tokens": 24, "temperature": 0.0}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    """Return a collector, to which this module's server sends its traces."""
    with otlp_receiver() as running:
        yield running


@pytest.fixture(scope="module")
def server_environment(receiver: Receiver) -> dict[str, str]:
    """Have every request of this module traced."""
    return {
        "LIFECYCLE__MONITORING__TRACING_ENABLED": "true",
        "LIFECYCLE__MONITORING__TRACING_ENDPOINT": receiver.grpc_url,
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }


@pytest.fixture
def tracer(receiver: Receiver) -> Iterator[Tracer]:
    """Return a caller's tracer, which sends to the same collector; it is this process's own while the test runs."""
    provider = TracerProvider(resource=Resource.create({"service.name": "caller"}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=receiver.grpc_url)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "_TRACER_PROVIDER", provider)
        yield provider.get_tracer("caller")
    provider.shutdown()


def post(server: TritonServer, path: str, body: dict, model: str = "smollm2") -> httpx.Response:
    return httpx.post(f"http://{server.http_url}/v2/models/{model}/{path}", json=body, timeout=60)


def test_the_model_knows_paris(client: Client):
    """A real model answers; the streamed text is the unary text, token for token."""
    for _ in range(4):  # where the machine falters tokens come together
        with client.stream(PROMPT, **GREEDY) as stream:
            chunks = list(stream)
        if len(chunks) > 8:
            break
    assert "Paris" in "".join(chunk.text for chunk in chunks)
    assert len(chunks) > 8, "tokens come one by one, not all at the end"
    unary = client.generate(PROMPT, **GREEDY)
    assert unary.text == "".join(chunk.text for chunk in chunks)
    assert (unary.finish_reason, unary.output_tokens) == ("length", 24)
    assert sum(chunk.output_tokens for chunk in chunks) == 24
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "length"
    assert unary.prompt_tokens == 5


def test_every_requests_time_is_explained(client: Client):
    """The milestones of a finished request are known by the caller's id, in order."""
    answer = client.generate(PROMPT, **GREEDY)
    status = client.status(answer.request_id)
    times = [status.times_ms[name] for name in ("received", "admitted", "scheduled", "first_token", "finished")]
    assert times == sorted(times)
    assert times[0] == 0
    assert times[-1] <= answer.total_s * 1e3 + 5
    assert (status.status, status.output_tokens, status.prompt_tokens) == ("finished", 24, 5)


def test_optional_outputs_come_only_when_asked(server: TritonServer):
    """Without the return_… inputs an answer holds the text alone; with them, what they name."""
    plain = post(server, "generate", {"text_input": PROMPT, "parameters": {"max_tokens": 2}}).json()
    assert set(plain) == {"model_name", "model_version", "text_output"}
    asked = post(
        server,
        "generate",
        {
            "text_input": PROMPT,
            "sampling_parameters": json.dumps({"max_tokens": "2", "temperature": "0", "logprobs": 1}),
            "exclude_input_in_output": True,
            "return_finish_reason": True,
            "return_num_input_tokens": True,
            "return_num_output_tokens": True,
            "return_cumulative_logprob": True,
            "return_logprobs": True,
        },
    ).json()
    assert asked["text_output"].startswith(" Paris")
    assert (asked["finish_reason"], asked["num_input_tokens"], asked["num_output_tokens"]) == ("length", 5, 2)
    assert asked["cumulative_logprob"] < 0
    logprobs = json.loads(asked["logprobs"])
    assert len(logprobs) == 2
    assert {"logprob", "rank", "decoded_token"} == set(next(iter(logprobs[0].values())))


@pytest.mark.parametrize(("exclude", "begins"), [(None, PROMPT), (False, PROMPT), (True, " Paris")])
def test_the_prompt_is_repeated_unless_excluded(server: TritonServer, exclude, begins):
    """A unary answer repeats the prompt unless exclude_input_in_output is true."""
    body = {"text_input": PROMPT, "parameters": GREEDY}
    if exclude is not None:
        body["exclude_input_in_output"] = exclude
    assert post(server, "generate", body).json()["text_output"].startswith(begins)


def test_structured_outputs_bind_the_text(client: Client):
    """A regular expression given as an object binds what the real model may say."""
    sampling = {"structured_outputs": {"regex": "(red|green) [0-9]"}}
    text = client.generate("A colour and a digit:", sampling=sampling, max_tokens=8, temperature=0.0).text
    assert re.fullmatch("(red|green) [0-9]", text.strip()), text


def test_several_sequences(client: Client):
    """n = 3 gives three texts, each with its own end."""
    answer = client.generate(PROMPT, n=3, max_tokens=4, seed=1)
    assert len(answer.texts) == 3
    assert answer.finish_reasons == ("length",) * 3


BAD = [
    ({"text_input": ""}, "invalid_input", "text_input"),
    ({"text_input": "a\0b"}, "invalid_input", "NUL"),
    ({"text_input": "x " * 4096}, "prompt_too_long", "4095"),
    ({"text_input": "x", "sampling_parameters": "{"}, "invalid_input", "JSON"),
    ({"text_input": "x", "sampling_parameters": "[]"}, "invalid_input", "JSON object"),
    ({"text_input": "x", "sampling_parameters": "null"}, "invalid_input", "null"),
    ({"text_input": "x", "parameters": {"max_tokenz": 3}}, "invalid_input", "'max_tokens'"),
    ({"text_input": "x", "parameters": {"max_tokens": 0}}, "invalid_input", "max_tokens"),
    ({"text_input": "x", "parameters": {"max_tokens": "abc"}}, "invalid_input", "max_tokens"),
    ({"text_input": "x", "parameters": {"temperature": -1}}, "invalid_input", "temperature"),
    (
        {"text_input": "x", "sampling_parameters": '{"stop_token_ids":[9999999],"min_tokens":2}'},
        "invalid_input",
        "vocab",
    ),
    ({"text_input": "x", "sampling_parameters": '{"logit_bias":{"9999999":1}}'}, "invalid_input", "logit_bias"),
    ({"text_input": "x", "parameters": {"timeout": -5}}, "invalid_input", "timeout"),
    ({"text_input": "x", "parameters": {"priority": "high"}}, "invalid_input", "priority"),
    ({"text_input": "x", "parameters": {"lora_name": "nobody"}}, "unknown_adapter", "LoRA feature is not enabled."),
    ({"text_input": "x", "stream": True, "exclude_input_in_output": False}, "invalid_input", "not allowed"),
    ({"embedding_request": '{"input": "x"}'}, "unsupported", "embedding_request"),
    ({"text_input": "x", "embedding_request": '{"input": "x"}'}, "invalid_input", "give it alone"),
    ({"text_input": "x", "sampling_parameters": '{"\\ud800": 1}'}, "invalid_input", "surrogate"),
    ({"text_input": "x", "sampling_parameters": '{"stop": ["\\ud800"]}'}, "invalid_input", "stop[0]"),
    ({"text_input": "x", "parameters": {"seed": "1" + "0" * 20}}, "invalid_input", "64 bits"),
    (
        {"text_input": "x", "sampling_parameters": '{"structured_outputs": {"regex": "a", "json": "{}"}}'},
        "invalid_input",
        "structured",
    ),
    ({"text_input": "", "parameters": {"control": "reboot"}}, "invalid_input", "control"),
    ({"text_input": "", "parameters": {"control": "status", "control_id": "nobody"}}, "unknown_request", "nobody"),
]
GENERATE_ERROR_STATUS = 400
"""What Triton 2.51 answers on its generate routes to whatever error a backend sends, INTERNAL included; only `infer`,
which refuses decoupled models, tells codes apart. So the slug in the message is what a caller can rely on."""


@pytest.mark.parametrize(("body", "slug", "part"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_bad_input_is_answered_clearly_and_hurts_nobody(server: TritonServer, body, slug, part):
    """Each fault of a caller has its code and a message that names it; the next request is served."""
    answer = post(server, "generate", body)
    error = errors.from_wire(answer.json()["error"])
    assert answer.status_code == GENERATE_ERROR_STATUS, answer.text
    assert error is not None
    assert error.slug == slug
    assert part in error.message
    good = post(server, "generate", {"text_input": PROMPT, "parameters": {"max_tokens": 1, "temperature": 0}})
    assert "Paris" in good.json()["text_output"]


def test_a_model_that_is_not_there_is_named(client: Client):
    """Asking for an unknown model says so and lists those that there are."""
    with pytest.raises(errors.LifecycleError, match=r"nobody.*smollm2"):
        client.generate("x", model="nobody")


def test_a_callers_time_limit_ends_the_request(client: Client):
    """The limit is kept by the server to the step, named in the error, and what was made before was sent."""
    ends = []
    for _ in range(8):
        got = []
        with (
            pytest.raises(errors.TotalTimeout, match=r"total limit of 0\.6 s"),
            client.stream(PROMPT, max_tokens=400, ignore_eos=True, timeout=0.6) as stream,
        ):
            got.extend(stream)
        status = client.status(stream.request_id)
        assert status.status == "timed_out"
        assert status.times_ms["finished"] >= 600
        ends.append((status.times_ms["finished"], len(got)))
        if ends[-1][0] < 800 and got:
            return
    raise AssertionError(f"not once to the step, with what was made before: {ends}")


def test_two_requests_with_one_id_both_get_their_own_answer(server: TritonServer):
    """The caller's id is a label: concurrent requests may share it."""
    with (
        Client(server.grpc_url, model="smollm2") as one,
        one.stream(PROMPT, request_id="same", **GREEDY) as first,
        one.stream("Two plus two is", request_id="same", **GREEDY) as second,
    ):
        texts = ["", ""]
        for a, b in zip_longest(first, second):
            texts = [texts[0] + (a.text if a else ""), texts[1] + (b.text if b else "")]
        assert "Paris" in texts[0]
        assert "Paris" not in texts[1]


def test_fifty_callers_leave_at_once(server: TritonServer):
    """Fifty streams are left after three events; everything returns to zero and the server serves on."""

    async def one(client: AsyncClient) -> None:
        stream = client.stream("Tell me a story", max_tokens=400, ignore_eos=True)
        async with aclosing(stream):
            for _ in range(3):
                await anext(stream)

    async def scenario() -> None:
        for url, protocol in ((server.grpc_url, "grpc"), (server.http_url, "http")):
            async with AsyncClient(url, model="smollm2", protocol=protocol) as client:
                await asyncio.gather(*[one(client) for _ in range(50)])
                await until_idle(client)
                assert (await client.generate("Hello", max_tokens=4, ignore_eos=True)).output_tokens == 4

    asyncio.run(scenario())


STAGES = ("receive", "preprocess", "schedule", "execute")


@pytest.mark.parametrize("model", ["simulated", "smollm2"])
def test_a_request_is_one_trace_from_the_caller_to_the_engine(
    client: Client, tracer: Tracer, receiver: Receiver, model: str
):
    """Program → client → request → stages → vLLM, in three processes: one trace, one below the other."""
    with tracer.start_as_current_span("program") as program:
        client.generate(PROMPT, model=model, **GREEDY)
    trace_id = f"{program.get_span_context().trace_id:032x}"
    made_by_vllm = ("llm_request",) if model == "smollm2" else ()
    name = f"text_completion {model}"
    receiver.trace(trace_id, "program", name, *STAGES, *made_by_vllm)
    spans = receiver.until(lambda spans: sum(s.trace_id == trace_id for s in spans) >= 7 + len(made_by_vllm))
    own = [span for span in spans if span.trace_id == trace_id]
    [asked] = [span for span in own if span.name == name and span.service == "caller"]
    [served] = [span for span in own if span.name == name and span.service == "triton-lifecycle"]
    by_name = {span.name: span for span in own if span.name != name}
    assert asked.parent_id == by_name["program"].span_id
    assert served.parent_id == asked.span_id
    assert {by_name[stage].parent_id for stage in (*STAGES, *made_by_vllm)} == {served.span_id}
    assert len(own) == 7 + len(made_by_vllm)
    assert served.attributes["gen_ai.usage.output_tokens"] == 24
    assert [note for note, _ in served.events if note == "first_token"]
    assert "France" not in str(own)


def test_a_refused_request_is_in_the_callers_trace_too(client: Client, tracer: Tracer, receiver: Receiver):
    """An error has its span below the caller's, with its slug and without its words."""
    with tracer.start_as_current_span("program") as program, pytest.raises(errors.InvalidInput):
        client.generate(PROMPT, sampling={"max_tokenz": 3})
    trace_id = f"{program.get_span_context().trace_id:032x}"
    spans = receiver.until(
        lambda spans: [s for s in spans if s.trace_id == trace_id and s.service == "triton-lifecycle" and s.error]
    )
    refused = {span.name: span.error for span in spans if span.trace_id == trace_id}
    assert refused["text_completion smollm2"] == "invalid_input"
    assert "max_tokenz" not in str([span for span in spans if span.trace_id == trace_id])
