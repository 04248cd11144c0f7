"""The official contract on the real server with the real model, in all four ways that it can be asked.

What is right is written down here from the contract's rules. ``docs/compatibility.md`` names these tests row by row.
"""

from __future__ import annotations

import asyncio
import json
import queue
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path

import httpx
import psutil
import pytest
import tritonclient.grpc as triton_grpc

from tests.e2e.asking import WAYS, RefusedError, Response, ask, joined, refusal, tensor
from tests.e2e.conftest import StartServer
from tests.waiting import TRIES, eventually, in_time, until
from triton_lifecycle import errors
from triton_lifecycle.launcher.server import TritonServer
from triton_lifecycle_client import AsyncClient, Client

PROMPT = "The capital of France is"
COUNTING = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,"
"""Its greedy answer is clear at every token, in any batch."""
GREEDY = {"max_tokens": 6, "temperature": 0}
EVERYTHING = {
    "return_finish_reason": True,
    "return_cumulative_logprob": True,
    "return_logprobs": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
}
OFFICIAL_INPUTS = {
    "text_input": ("TYPE_STRING", [1]),
    "image": ("TYPE_STRING", [-1]),
    "stream": ("TYPE_BOOL", [1]),
    "sampling_parameters": ("TYPE_STRING", [1]),
    "exclude_input_in_output": ("TYPE_BOOL", [1]),
    "return_finish_reason": ("TYPE_BOOL", [1]),
    "return_cumulative_logprob": ("TYPE_BOOL", [1]),
    "return_logprobs": ("TYPE_BOOL", [1]),
    "return_num_input_tokens": ("TYPE_BOOL", [1]),
    "return_num_output_tokens": ("TYPE_BOOL", [1]),
    "embedding_request": ("TYPE_STRING", [1]),
}
OFFICIAL_OUTPUTS = {
    "text_output": ("TYPE_STRING", [-1]),
    "finish_reason": ("TYPE_STRING", [-1]),
    "cumulative_logprob": ("TYPE_FP32", [-1]),
    "logprobs": ("TYPE_STRING", [-1]),
    "num_input_tokens": ("TYPE_UINT32", [1]),
    "num_output_tokens": ("TYPE_UINT32", [-1]),
}


@pytest.fixture(scope="module")
def server(start_server: StartServer, repository: Path) -> Iterator[TritonServer]:
    """Run the real model beside one whose engine dies when it is told to."""
    version = repository / "mortal" / "1"
    version.mkdir(parents=True)
    parameters = {"LIFECYCLE_ENGINE": "simulated", "ENABLE_VLLM_HEALTH_CHECK": "true"}
    lines = [
        f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}' for name, value in parameters.items()
    ]
    (version.parent / "config.pbtxt").write_text("\n".join(['backend: "vllm"', *lines]) + "\n", encoding="utf-8")
    fault = {"do": "die", "on": {"prompt_contains": "poison"}}
    (version / "model.json").write_text(json.dumps({"faults": [fault]}), encoding="utf-8")
    running = start_server("smollm2", "mortal")
    yield running
    time.sleep(1.5)  # see compatibility.md: SIGTERM within a second of a closed HTTP stream
    assert running.stop() == 0, running.log()[-4000:]
    assert running.leftovers == []


# ---- inputs and outputs


@pytest.mark.parametrize("way", WAYS)
def test_text(server: TritonServer, way: str):
    """A unary answer is one response, the prompt before it; a stream brings deltas, the reason with the last."""
    asked = {"text_input": PROMPT, "sampling_parameters": GREEDY, "return_finish_reason": True}
    responses = ask(server, way, **asked, return_num_output_tokens=True, return_num_input_tokens=True)
    text = joined(responses)
    if way.endswith("-stream"):
        assert len(responses) > 2
        assert [response["finish_reason"] for response in responses] == [["None"]] * (len(responses) - 1) + [["length"]]
    else:
        assert len(responses) == 1
        assert text.startswith(PROMPT)
        text = text.removeprefix(PROMPT)
        assert responses[0]["finish_reason"] == ["length"]
    assert text.startswith(" Paris")
    assert sum(response["num_output_tokens"][0] for response in responses) == 6
    assert {response["num_input_tokens"][0] for response in responses} == {5}


@pytest.mark.parametrize("way", WAYS)
def test_parameters_stand_in_for_the_tensor(server: TritonServer, way: str):
    """Without sampling_parameters the request's own parameters are the sampling parameters; numbers may be texts."""
    right = joined(ask(server, way, text_input=PROMPT, sampling_parameters=GREEDY))
    assert joined(ask(server, way, text_input=PROMPT, parameters=GREEDY)) == right
    texts = {"max_tokens": "6", "temperature": "0", "top_p": "1.0", "ignore_eos": "false"}
    assert joined(ask(server, way, text_input=PROMPT, parameters=texts)) == right
    assert joined(ask(server, way, text_input=PROMPT, sampling_parameters=texts)) == right
    beside = ask(server, way, text_input=PROMPT, sampling_parameters=GREEDY, parameters={"max_tokens": 1, "n": 3})
    assert joined(beside) == right, "with the tensor the parameters are not looked at"


@pytest.mark.parametrize("way", WAYS)
def test_the_prompt_is_repeated_unless_excluded(server: TritonServer, way: str):
    """In a unary answer; a stream never repeats it, and asking it to is an error in the official words."""
    asked = {"text_input": PROMPT, "sampling_parameters": GREEDY}
    assert joined(ask(server, way, **asked, exclude_input_in_output=True)).startswith(" Paris")
    if way.endswith("-stream"):
        assert joined(ask(server, way, **asked)).startswith(" Paris")
        said = refusal(server, way, **asked, exclude_input_in_output=False)
        assert "When streaming, `exclude_input_in_output` = False is not allowed." in said
    else:
        for extra in ({}, {"exclude_input_in_output": False}):
            assert joined(ask(server, way, **asked, **extra)).startswith(PROMPT + " Paris")


@pytest.mark.parametrize("way", WAYS)
def test_several_sequences(server: TritonServer, way: str):
    """With n = 2 each output has an element a sequence, but the prompt's length."""
    sampling = {"n": 2, "max_tokens": 4, "temperature": 1, "seed": 3, "ignore_eos": True, "logprobs": 0}
    responses = ask(server, way, text_input=PROMPT, sampling_parameters=sampling, **EVERYTHING)
    for response in responses:
        lengths = {name: len(values) for name, values in response.items()}
        assert lengths == {name: 1 if name == "num_input_tokens" else 2 for name in OFFICIAL_OUTPUTS}
    assert responses[-1]["finish_reason"] == ["length", "length"]
    assert [sum(response["num_output_tokens"][i] for response in responses) for i in (0, 1)] == [4, 4]
    assert joined(responses, 0) != joined(responses, 1)


@pytest.mark.parametrize("way", WAYS)
def test_probabilities(server: TritonServer, way: str):
    """A JSON list over tokens of {id: {logprob, rank, decoded_token}}; they add up to the cumulative one."""
    responses = ask(server, way, text_input=PROMPT, sampling_parameters=GREEDY | {"logprobs": 2}, **EVERYTHING)
    tokens = [token for response in responses for token in json.loads(response["logprobs"][0])]
    assert len(tokens) == 6
    assert all(
        id_.isdigit() and set(entry) == {"logprob", "rank", "decoded_token"} for t in tokens for id_, entry in t.items()
    )
    best = [min(token.values(), key=lambda entry: entry["rank"]) for token in tokens]
    assert sum(entry["logprob"] for entry in best) == pytest.approx(responses[-1]["cumulative_logprob"][0], abs=1e-3)
    assert "".join(entry["decoded_token"] for entry in best).startswith(" Paris")


@pytest.mark.parametrize("way", WAYS)
def test_probabilities_that_were_not_asked_of_the_engine(server: TritonServer, way: str):
    """Are the text "null"; and an answer holds only what was asked for."""
    asked = {"text_input": PROMPT, "sampling_parameters": GREEDY}
    assert {r["logprobs"][0] for r in ask(server, way, **asked, return_logprobs=True)} == {"null"}
    for name in EVERYTHING:
        for response in ask(server, way, **asked, **{name: True}):
            assert set(response) == {"text_output", name.removeprefix("return_")}
        assert set(ask(server, way, **asked, **{name: False})[0]) == {"text_output"}


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_ends_for_a_reason(server: TritonServer, way: str):
    """At a stop string, which is left out, or at the end of what there is to say."""
    asked = {"text_input": PROMPT, "return_finish_reason": True, "exclude_input_in_output": True}
    stopped = ask(server, way, **asked, sampling_parameters=GREEDY | {"stop": "Paris"})
    assert (joined(stopped), stopped[-1]["finish_reason"]) == (" ", ["stop"])
    bound = ask(server, way, **asked, sampling_parameters=GREEDY | {"structured_outputs": {"choice": ["yes"]}})
    assert (joined(bound), bound[-1]["finish_reason"]) == ("yes", ["stop"])


@pytest.mark.parametrize("way", WAYS)
def test_whole_characters(server: TritonServer, way: str):
    """Emoji and CJK that are several tokens each come whole, in every chunk, and nothing is lost."""
    text = "🎉世界é 🇫🇷"
    sampling = {"max_tokens": 60, "temperature": 0, "guided_decoding": {"choice": [text]}}
    responses = ask(server, way, text_input="Say:", sampling_parameters=sampling, exclude_input_in_output=True)
    assert joined(responses) == text
    assert not any("\ufffd" in response["text_output"][0] for response in responses)


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_goes_on_from_its_tokens(server: TritonServer, way: str):
    """Wherever it is cut, both parts are the undisturbed answer; its tokens come only when they are asked for."""
    asked = {"text_input": COUNTING, "exclude_input_in_output": True, "return_finish_reason": True}
    asked["sampling_parameters"] = GREEDY | {"max_tokens": 24, "ignore_eos": True}
    assert not any("token_ids" in told for told in ask(server, way, **asked))
    wants = {"return_token_ids": True}
    whole = ask(server, "grpc-stream", parameters=wants, **asked)
    assert len(ids_of(whole)) == 24
    for cut in sorted({1, len(whole) // 2, len(whole) - 1} - {0}):
        ids = ids_of(whole[:cut])
        rest = ask(server, way, parameters=wants, **asked, continue_token_ids=ids)
        assert joined(whole[:cut]) + joined(rest) == joined(whole)
        assert ids + ids_of(rest) == ids_of(whole)
        assert rest[-1]["finish_reason"] == ["length"]


def ids_of(responses: list[dict]) -> list[int]:
    return [token for response in responses for token in response.get("token_ids", ())]


# ---- what is refused, and in which words

REFUSED = [
    ({"text_input": ""}, "invalid_input: text_input: the prompt is empty"),
    ({"text_input": "a\0b"}, "invalid_input: text_input: NUL character at position 1"),
    (
        {"text_input": "x", "continue_token_ids": [5, -7]},
        "invalid_input: continue_token_ids: -7 is not in the vocabulary",
    ),
    ({"text_input": "x", "continue_token_ids": [5] * 16}, "invalid_input: continue_token_ids: 16 tokens are given"),
    (
        {"text_input": "x", "continue_token_ids": [5], "stop": ["a"]},
        "unsupported: continue_token_ids: this answer cannot be continued exactly",
    ),
    ({"text_input": " the" * 4096}, "prompt_too_long: text_input: the prompt has 4096 tokens; the model takes 4096"),
    ({"text_input": " the" * 4097}, "prompt_too_long: text_input: the prompt has 4097 tokens; the model takes 4096"),
    *(
        ({"text_input": "x", "sampling_parameters": text}, f"invalid_input: sampling_parameters: {says}")
        for text, says in (
            ("", "not valid JSON"),
            ("{", "not valid JSON"),
            ("[]", "expected a JSON object, found a list"),
            ("null", "expected a JSON object, found null"),
            ("5", "expected a JSON object, found a number"),
            ('{"max_tokenz": 5}', "unknown key \"max_tokenz\"; did you mean 'max_tokens'?"),
            ('{"min_tokens": 9, "max_tokens": 3}', ""),
            ('{"stop_token_ids": [9999999], "min_tokens": 1}', ""),
        )
    ),
    *(
        (
            {"text_input": "x", "sampling_parameters": json.dumps({"max_tokens": value})},
            "invalid_input: sampling_parameters",
        )
        for value in (0, -1, "abc", 1.5, True)
    ),
    ({"text_input": "x", "sampling_parameters": '{"stop": ["\\ud800"]}'}, "half of a surrogate pair"),
    (
        {"text_input": "x", "sampling_parameters": '{"lora_name": "doll"}'},
        "unknown_adapter: lora_name: LoRA feature is not",
    ),
    ({"text_input": "x", "image": ["eA=="]}, "unsupported: image: the loaded model takes no images"),
    ({"embedding_request": '{"input": "x"}'}, "Model smollm2 does not support 'embed' request"),
    ({"text_input": "x", "sampling_parameters": '{"structured_outputs": {"json": "{"}}'}, "Invalid JSON"),
]


@pytest.mark.parametrize(("asked", "says"), REFUSED, ids=[str(number) for number in range(len(REFUSED))])
def test_the_callers_fault_is_named(server: TritonServer, asked: dict, says: str):
    """In all four ways with the same words, never as a fault of the server; the next request is served."""
    texts = {refusal(server, way, **asked) for way in WAYS}
    assert len(texts) == 1, texts
    assert says in texts.pop()
    assert "Paris" in joined(ask(server, "grpc", text_input=PROMPT, sampling_parameters=GREEDY))


@pytest.mark.parametrize("way", WAYS)
def test_without_sampling_parameters_the_defaults_hold(server: TritonServer, way: str):
    """Absent and ``{}`` alike: 16 tokens at most."""
    for extra in ({}, {"sampling_parameters": "{}"}):
        responses = ask(
            server, way, text_input=PROMPT, return_num_output_tokens=True, return_finish_reason=True, **extra
        )
        assert sum(response["num_output_tokens"][0] for response in responses) <= 16
        assert responses[-1]["finish_reason"][0] in {"length", "stop"}


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_up_to_the_models_length(server: TritonServer, way: str):
    """One token below it is served with one token; a huge max_tokens ends where the model does."""
    asked = {"return_finish_reason": True, "return_num_output_tokens": True, "exclude_input_in_output": True}
    sampling = {"max_tokens": 10**9, "temperature": 0, "ignore_eos": True}
    responses = ask(server, way, text_input=" the" * 4095, sampling_parameters=sampling, **asked)
    assert (responses[-1]["finish_reason"], sum(r["num_output_tokens"][0] for r in responses)) == (["length"], 1)


def test_bytes_that_are_no_text(server: TritonServer):
    """Over gRPC, where Triton lets them through; over HTTP Triton's own parser sees them first."""
    for name in ("text_input", "sampling_parameters"):
        said = refusal(server, "grpc", **({"text_input": "x"} | {name: b"\xff\xfe"}))
        assert f"invalid_input: {name}: not valid UTF-8 at byte 0" in said
        lone = refusal(server, "grpc", **({"text_input": "x"} | {name: b"\xed\xa0\x80"}))
        assert f"invalid_input: {name}: not valid UTF-8" in lone


# ---- ends

ENDS = {
    "ok": ({"text_input": PROMPT, "sampling_parameters": GREEDY}, None),
    "empty output": ({"text_input": PROMPT, "sampling_parameters": GREEDY | {"stop": " "}}, None),
    "error": ({"text_input": ""}, "invalid_input"),
    "timeout": (
        {"text_input": PROMPT, "sampling_parameters": {"max_tokens": 4000, "ignore_eos": True}},
        "total_timeout",
    ),
    "cancel": ({"text_input": PROMPT, "sampling_parameters": {"max_tokens": 4000, "ignore_eos": True}}, "cancelled"),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("empty_final", [True, False])
@pytest.mark.parametrize("end", ENDS)
def test_exactly_one_end(server: TritonServer, end: str, empty_final: bool, stream: bool):  # noqa: FBT001
    """Whatever the end: one response is marked final, or one is an error, and nothing follows."""
    asked, slug = ENDS[end]
    answers: queue.Queue = queue.Queue()
    inputs = [
        tensor(name, json.dumps(v) if isinstance(v, dict) else v) for name, v in (asked | {"stream": stream}).items()
    ]
    name = f"{end}-{empty_final}-{stream}"
    parameters = {"timeout_ms": 400} if end == "timeout" else {}
    with triton_grpc.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        client.async_stream_infer(
            "smollm2", inputs, request_id=name, parameters=parameters, enable_empty_final_response=empty_final
        )
        if end == "cancel":
            cancel(server, name)
        ends: list[str] = []
        while not ends:
            result, error = answers.get(timeout=60)
            if error is not None:
                ends.append(error.message())
            elif result.get_response().parameters["triton_final_response"].bool_param:
                ends.append("final")
        time.sleep(0.2)
        assert answers.empty()
        client.stop_stream()
    assert len(ends) == 1
    assert ends == ["final"] if slug is None else f"{slug}: " in ends[0]


@pytest.mark.parametrize("way", WAYS)
def test_a_cancelled_request_is_never_taken_for_a_whole_one(server: TritonServer, way: str):
    """It ends with an error in the official words; a unary one not with a part of its text."""
    asked = {"text_input": PROMPT, "sampling_parameters": {"max_tokens": 4000, "ignore_eos": True}}
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(ask, server, way, **asked, request_id=f"partial-{way}")
        cancel(server, f"partial-{way}")
        with pytest.raises(RefusedError, match="cancelled: Request was cancelled") as caught:
            waits.result(60)
    assert way.endswith("-stream") or caught.value.responses == []


def cancel(server: TritonServer, request_id: str) -> None:
    """Cancel a request as soon as the server knows it."""
    with Client(server.grpc_url, model="smollm2") as client:
        until(lambda: client.cancel(request_id), despite=(errors.UnknownRequest,))


def test_a_cancelled_stream_has_its_tokens_counted(server: TritonServer):
    """Every end is in one count, and what was received is the sum of them and of what is live."""

    async def scenario() -> None:
        async with AsyncClient(server.grpc_url, model="smollm2") as client:
            before = (await client.state()).counts
            stream = client.stream(PROMPT, max_tokens=400, ignore_eos=True, request_id="left")
            async with aclosing(stream):
                for _ in range(3):
                    await anext(stream)
            await client.generate(PROMPT, max_tokens=2)
            with pytest.raises(Exception, match="text_input"):
                await client.generate("")

            async def ended():
                status = await client.status("left")
                return None if status.status == "live" else status

            status = await eventually(ended)
            assert (status.status, status.output_tokens >= 3) == ("cancelled", True)
            state = await client.state()
            gained = {name: count - before[name] for name, count in state.counts.items() if count != before[name]}
            assert gained == {"received": 3, "cancelled": 1, "completed": 1, "rejected": 1}
            assert (
                state.counts["received"]
                == sum(n for name, n in state.counts.items() if name != "received") + state.live
            )

    asyncio.run(scenario())


@pytest.mark.parametrize("way", WAYS)
def test_the_callers_limit_ends_the_request(server: TritonServer, way: str):
    """``timeout`` in microseconds as in Triton, ``timeout_ms``: an error that names the limit, the tokens before it."""
    asked = {"text_input": PROMPT, "sampling_parameters": {"max_tokens": 4000, "ignore_eos": True}}
    for limit in ({"timeout": 400_000}, {"timeout_ms": 400}):

        def refused(limit: dict[str, int] = limit) -> list[Response]:
            with pytest.raises(RefusedError, match=r"total_timeout: the total limit of 0\.4 s") as caught:
                ask(server, way, **asked, parameters=limit)
            return caught.value.responses

        # A machine that falters may have no token within so short a limit.
        for _ in range(TRIES):
            responses = in_time(refused, 2)
            if bool(responses) == way.endswith("-stream"):
                break
        assert bool(responses) == way.endswith("-stream")


@pytest.mark.parametrize("way", WAYS)
def test_ours_are_no_sampling_parameters(server: TritonServer, way: str):
    """Priority, tenant, traceparent and headers that were forwarded are taken for what they are."""
    ours = {
        "request_priority": 3,
        "tenant": "t",
        "traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01",
        "x-header": "y",
    }
    assert "Paris" in joined(ask(server, way, text_input=PROMPT, parameters=GREEDY | ours, request_id="same"))
    with Client(server.grpc_url, model="smollm2") as client:
        assert client.status("same").status == "finished"


def test_unary_routes_of_triton_refuse_decoupled_models(server: TritonServer):
    """Triton's own rule for ``infer``, over HTTP and unary gRPC, before any backend is asked."""
    where = f"http://{server.http_url}/v2/models/smollm2/infer"
    body = {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [PROMPT]}]}
    assert "decoupled" in httpx.post(where, json=body, timeout=10).json()["error"]
    with (
        triton_grpc.InferenceServerClient(server.grpc_url) as client,
        pytest.raises(Exception, match="decoupled"),
    ):
        client.infer("smollm2", [tensor("text_input", PROMPT)])


# ---- configuration


@pytest.mark.parametrize("model", ["smollm2", "mortal"])
def test_the_configuration_is_completed(server: TritonServer, model: str):
    """Every tensor with its type and dims, decoupled answers, no batching; nothing of it is in config.pbtxt."""
    config = httpx.get(f"http://{server.http_url}/v2/models/{model}/config", timeout=10).json()
    inputs = {tensor["name"]: (tensor["data_type"], tensor["dims"]) for tensor in config["input"]}
    outputs = {tensor["name"]: (tensor["data_type"], tensor["dims"]) for tensor in config["output"]}
    assert OFFICIAL_INPUTS.items() <= inputs.items()
    assert outputs == OFFICIAL_OUTPUTS | {"token_ids": ("TYPE_INT64", [-1])}
    assert all(tensor["optional"] for tensor in config["input"])
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert config["max_batch_size"] == 0


# ---- the two tests that end a model come last


@pytest.mark.parametrize("way", WAYS)
def test_a_dead_engine_comes_back(server: TritonServer, way: str):
    """Set or not, ENABLE_VLLM_HEALTH_CHECK: the request that kills the engine gets an error, the next one an answer."""
    with pytest.raises(RefusedError, match="generation_failed: the engine died each time"):
        ask(server, way, model="mortal", text_input="poison", sampling_parameters=GREEDY)
    assert ask(server, way, model="mortal", text_input="Hello", sampling_parameters=GREEDY)


def test_a_model_is_unloaded_after_streams(server: TritonServer):
    """Streams that ended well, badly and early: then the model, its engine and its stub are gone within 30 s."""
    ask(server, "http-stream", text_input=PROMPT, sampling_parameters=GREEDY)
    refusal(server, "http-stream", text_input="")
    with httpx.stream(
        "POST",
        f"http://{server.http_url}/v2/models/smollm2/generate_stream",
        json={"text_input": PROMPT, "stream": True, "parameters": {"max_tokens": 400, "ignore_eos": True}},
        timeout=30,
    ) as answer:
        next(answer.iter_lines())
    below = psutil.Process(server.pid).children(recursive=True)
    engine = [process for process in below if "VLLM" in process.name()]
    assert engine
    assert httpx.post(f"http://{server.http_url}/v2/repository/models/smollm2/unload", timeout=60).status_code == 200
    _, alive = psutil.wait_procs(engine, timeout=60)
    assert alive == []
    assert httpx.get(f"http://{server.http_url}/v2/models/smollm2/ready", timeout=10).status_code != 200
