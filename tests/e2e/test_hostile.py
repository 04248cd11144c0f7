"""Requests that are right, nearly right and hostile, over both protocols: nobody dies, hangs or blames the server."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import grpc.aio
import httpx
import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.waiting import until
from triton_lifecycle.launcher.server import TritonServer
from triton_lifecycle_client import Client

BATCH = 100
AT_ONCE = 16
LIMIT_S = 60.0

TEXTS = st.one_of(
    st.sampled_from(
        ["hi", "", " ", "\0", "a\0b", "\ud800", "🎉世界", "\u202e", "x" * 5000, "{", "null", "%s", "../../etc"]
    ),
    st.text(max_size=40),
)
NUMBERS = st.one_of(
    st.integers(-5, 40),
    st.sampled_from([2**31, 2**63 - 1, 2**63, 2**70, -(2**63), 1.5, -0.0, 1e300, "3", "x", "", True, None]),
)
_NAMES = """
n temperature top_p top_k min_p seed stop stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs
presence_penalty logit_bias bad_words structured_outputs lora_name output_kind messages tools timeout timeout_ms
priority request_priority tenant traceparent control control_id max_tokenz __class__
"""
NAMES = st.sampled_from(_NAMES.split())
JSON = st.recursive(
    st.one_of(NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
SAMPLING = st.dictionaries(NAMES, st.one_of(NUMBERS, JSON), max_size=4).map(lambda given: {"max_tokens": 3} | given)
SAMPLING_TEXTS = st.one_of(
    SAMPLING.map(json.dumps), st.sampled_from(["", "{", "[]", "null", "5", "{}{}", "[" * 5000, '{"a":' * 300]), TEXTS
)
FLAGS = st.sampled_from([True, False, None, "true", 1, [True, False], "maybe"])
INPUTS: dict[str, st.SearchStrategy[Any]] = {
    "text_input": st.one_of(st.just("hi"), TEXTS, st.lists(TEXTS, max_size=2), NUMBERS),
    "stream": FLAGS,
    "sampling_parameters": SAMPLING_TEXTS,
    "exclude_input_in_output": FLAGS,
    "return_finish_reason": FLAGS,
    "return_logprobs": FLAGS,
    "return_num_input_tokens": FLAGS,
    "return_num_output_tokens": FLAGS,
    "return_cumulative_logprob": FLAGS,
    "embedding_request": st.one_of(TEXTS, JSON.map(json.dumps)),
    "image": st.lists(TEXTS, max_size=2),
    "stop": st.lists(TEXTS, max_size=3),
    "stop_token_ids": st.lists(NUMBERS, max_size=3),
    "continue_token_ids": st.lists(NUMBERS, max_size=3),
    "stop_words": st.lists(TEXTS, max_size=3),
    "bad_words": st.lists(TEXTS, max_size=3),
    "nonsense": JSON,
}
MOSTLY_PLAIN = st.fixed_dictionaries(
    {"text_input": st.one_of(st.just("hi"), INPUTS["text_input"])},
    optional={name: kind for name, kind in INPUTS.items() if name != "text_input"} | {"parameters": SAMPLING},
)


def _sparse(values: dict[str, Any]) -> dict[str, Any]:
    """Keep at most four keys, so that more than the first fault of a request is met now and then."""
    kept = sorted(values)[:: max(1, len(values) // 4)]
    return {name: values[name] for name in {"text_input", *kept}}


BODIES = st.one_of(
    MOSTLY_PLAIN.map(_sparse).map(lambda body: json.dumps(body).encode()),
    st.binary(max_size=40),
    st.sampled_from(
        [b"", b"{}", b"[]", b'{"text_input":"\xff"}', b'{"text_input":"\\ud800"}', b'{"text_input":"hi"' * 50]
    ),
)
TYPES = st.sampled_from(["BYTES", "BOOL", "INT64", "FP32", "UINT8", "NOTHING"])
RAW_TENSORS = st.tuples(
    st.sampled_from([*INPUTS, "text_input", "sampling_parameters"]),
    TYPES,
    st.lists(st.sampled_from([0, 1, 2, -1, 2**40]), max_size=2),
    st.one_of(
        st.binary(max_size=12),
        TEXTS.map(lambda text: _element(text.encode(errors="surrogatepass"))),
        SAMPLING_TEXTS.map(lambda text: _element(text.encode(errors="surrogatepass"))),
        st.just(b"\x02\x00\x00\x00hi"),
    ),
)
MESSAGES = st.tuples(st.lists(RAW_TENSORS, max_size=3), SAMPLING, st.booleans())


def _element(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


def _message(model: str, tensors: list[Any], parameters: dict[str, Any], plain: bool) -> Any:  # noqa: FBT001
    """Build a gRPC request as no client library would let one."""
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, value in parameters.items():
        slot = request.parameters[name]
        if isinstance(value, bool):
            slot.bool_param = value
        elif isinstance(value, int) and -(2**63) <= value < 2**63:
            slot.int64_param = value
        elif isinstance(value, float):
            slot.double_param = value
        else:
            slot.string_param = json.dumps(value)
    if plain:
        request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        request.raw_input_contents.append(_element(b"hi"))
    for name, datatype, shape, content in tensors:
        if not (plain and name == "text_input"):
            request.inputs.add(name=name, datatype=datatype, shape=shape)
            request.raw_input_contents.append(content)
    return request


class Outcome:
    """What came of all requests."""

    def __init__(self) -> None:
        self.answered = 0
        self.served = 0
        self.bad: list[str] = []

    def http(self, response: httpx.Response, body: bytes) -> None:
        self.answered += 1
        self.served += response.status_code == 200 and b'"error"' not in response.content
        if "internal: " in response.text or (response.status_code >= 500 and not _tritons_own(response.text)):
            self.bad.append(f"{response.status_code} {response.text[:200]} to {body[:300]!r}")

    def grpc(self, error: str, message: Any) -> None:
        self.answered += 1
        self.served += not error
        if "internal: " in error:
            self.bad.append(f"{error[:200]} to {str(message)[:300]}")


def _tritons_own(text: str) -> bool:
    """Triton calls JSON that does not parse, or whose values have another type, a server error by itself."""
    return any(
        sign in text
        for sign in ("parse", "JSON", "convert", "Converting", "generate expects", "unexpected", "non-object")
    )


async def _over_http(client: httpx.AsyncClient, base: str, path: str, body: bytes, outcome: Outcome) -> None:
    outcome.http(await client.post(f"{base}/{path}", content=body, timeout=LIMIT_S), body)


async def _over_grpc(stub: Any, message: Any, outcome: Outcome) -> None:
    call = stub.ModelStreamInfer(timeout=LIMIT_S)
    await call.write(message)
    await call.done_writing()
    error = ""
    while (answer := await call.read()) is not grpc.aio.EOF:
        error = error or answer.error_message
    assert await call.code() is grpc.StatusCode.OK, await call.details()
    outcome.grpc(error, message)


async def _storm(server: TritonServer, model: str, bodies: list[bytes], messages: list[Any], outcome: Outcome) -> None:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(work: Any) -> None:
        async with gate:
            await work

    async with httpx.AsyncClient() as client, grpc.aio.insecure_channel(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        base = f"http://{server.http_url}/v2/models/{model}"
        async with asyncio.TaskGroup() as group:
            for number, body in enumerate(bodies):
                path = "generate" if number % 2 else "generate_stream"
                group.create_task(one(_over_http(client, base, path, body, outcome)))
            for tensors, parameters, plain in messages:
                message = _message(model, tensors, parameters, plain)
                group.create_task(one(_over_grpc(stub, message, outcome)))


def _footprint(server: TritonServer) -> tuple[int, int, int]:
    """Return bytes of memory and open files of server and stub, and the names in shared memory."""
    family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    ours = [process for process in family if not process.name().startswith("VLLM")]
    shared = sum(os.stat(f"/dev/shm/{name}").st_blocks * 512 for name in os.listdir("/dev/shm"))
    return sum(p.memory_info().rss for p in ours), sum(p.num_fds() for p in ours), shared


def _known(server: TritonServer) -> set[int]:
    return {process.pid for process in psutil.Process(server.pid).children(recursive=True)}


@pytest.mark.parametrize(("model", "hundreds"), [("simulated", 100), ("smollm2", 10)])
def test_no_request_hurts_anybody(server: TritonServer, model: str, hundreds: int, record_property):
    """Each is answered, none as the server's fault, and after each hundred a good one gets its right answer."""
    outcome = Outcome()
    before = _known(server)
    sizes: list[tuple[int, int, int]] = []

    with Client(server.grpc_url, model=model) as client:
        right = client.generate("The capital of France is", max_tokens=4, temperature=0.0).text

        @settings(
            max_examples=hundreds,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(
            st.lists(BODIES, min_size=BATCH // 2, max_size=BATCH // 2),
            st.lists(MESSAGES, min_size=BATCH // 2, max_size=BATCH // 2),
        )
        def storm(bodies: list[bytes], messages: list[Any]) -> None:
            asyncio.run(_storm(server, model, bodies, messages, outcome))
            assert client.generate("The capital of France is", max_tokens=4, temperature=0.0).text == right
            sizes.append(_footprint(server))

        storm()
        # Of a caller that has its error already a part may still be on its way out.
        state = until(lambda: None if (now := client.state()).live or now.engine["requests"] else now)
    assert outcome.answered == hundreds * BATCH
    record_property("served", outcome.served)
    print(f"{model}: {outcome.answered} answered, {outcome.served} served, {len(outcome.bad)} bad; memory, files, shm:")
    print(f"{sizes[0]} … {sizes[-1]}")
    assert outcome.bad == [], "\n".join(sorted(set(outcome.bad)))
    assert 0.05 < outcome.served / outcome.answered < 0.95, "some are right and some are wrong"
    assert _known(server) == before, "no process has died or been added"
    assert state.counts["received"] == sum(count for name, count in state.counts.items() if name != "received")
    middle, last = sizes[len(sizes) // 2], sizes[-1]
    assert last[0] < middle[0] + 64 * 2**20, "memory is flat"
    assert last[1] <= middle[1] + 16, "open files are flat"
    assert last[2] <= middle[2] + 2**20, "shared memory is flat"
