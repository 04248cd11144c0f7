"""Contexts: how many may be live, what equal ones share, and what is kept of them."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json

import msgspec
import pytest

from tests.fakes import pb_utils
from tests.fakes.harness import Harness, Step
from triton_lifecycle import control
from triton_lifecycle.bus import NoBus
from triton_lifecycle.chat import Conversation
from triton_lifecycle.config import Config
from triton_lifecycle.context import Contexts, Input, Wants
from triton_lifecycle.engine import open_engine
from triton_lifecycle.events import Finished
from triton_lifecycle.simulation.virtual_time import run
from triton_lifecycle.store.archive import Archive
from triton_lifecycle.store.history import History
from triton_lifecycle.store.records import MAX_TEXT_BYTES, beginning, read_summary


class Caller:
    def __init__(self, name=""):
        self.id = name


def asked(source="the same prompt", *, exclude=True, **parameters):
    return Input(source=source, parameters=parameters, wants=Wants(), exclude_prompt=exclude)


def open_with(contexts, what):
    ctx = contexts.open(Caller(), "m", NoBus())
    ctx.input = what
    return ctx


def test_live_requests_that_ask_the_same_hold_one_object_until_the_last_has_gone():
    """A thousand with equal inputs hold one; it goes with them."""
    contexts = Contexts()
    live = [open_with(contexts, asked("".join(["long ", "prompt"]), temperature=0.5, stop=["a"])) for _ in range(1000)]
    assert len({id(ctx.input) for ctx in live}) == 1
    assert len({id(ctx.input.source) for ctx in live}) == 1
    assert len(contexts._inputs) == 1
    for ctx in live:
        contexts.close(ctx, Finished, finish_reason="length", output_tokens=0)
    del live, ctx
    gc.collect()
    assert len(contexts._inputs) == 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (asked("a"), asked("b")),
        (asked(n=1), asked(n=True)),
        (asked(n=1), asked(n=1.0)),
        (asked(exclude=True), asked(exclude=False)),
        (asked(stop=["a"]), asked(stop=["a", "b"])),
        (
            asked(Conversation([{"role": "user", "content": "a"}])),
            asked(Conversation([{"role": "user", "content": "b"}])),
        ),
        (asked("x"), asked(Conversation([{"role": "user", "content": "x"}]))),
    ],
)
def test_inputs_that_differ_in_anything_are_not_shared(one, other):
    """Also where Python holds the values for equal."""
    contexts = Contexts()
    first, second = open_with(contexts, one), open_with(contexts, other)
    assert first.input is not second.input
    assert first.input.parameters == one.parameters
    assert second.input.parameters == other.parameters
    assert [type(v) for v in second.input.parameters.values()] == [type(v) for v in other.parameters.values()]


def test_conversations_are_shared_too_and_by_their_hash_when_long():
    """Equal conversations are one object, without their text being held a second time as the key."""
    contexts = Contexts()
    live = [open_with(contexts, asked(Conversation([{"role": "user", "content": "x" * 5000}]))) for _ in range(3)]
    assert len({id(ctx.input) for ctx in live}) == 1
    [(text, rest)] = contexts._inputs._shared.keys()
    assert len(text) + len(rest) <= 64


def test_what_is_shared_cannot_be_changed_in_place():
    """A plug-in that changes parameters puts another input there, which changes nobody else's."""
    contexts = Contexts()
    first, second = open_with(contexts, asked(n=1)), open_with(contexts, asked(n=1))
    with pytest.raises(TypeError):
        first.input.parameters["n"] = 2
    first.input = msgspec.structs.replace(first.input, parameters={**first.input.parameters, "n": 2})
    assert (first.input.parameters, second.input.parameters) == ({"n": 2}, {"n": 1})
    third = open_with(contexts, asked(n=2))
    assert third.input is first.input


def test_what_cannot_be_compared_is_not_shared_and_does_no_harm():
    """A plug-in's own object among the parameters is left alone."""
    contexts = Contexts()
    first, second = (open_with(contexts, asked(own=object())) for _ in range(2))
    assert first.input is not second.input


def test_no_more_are_held_than_may_be_also_before_admission():
    """Five that wait in a stage before admission are all there is room for; the others are refused and counted."""

    async def scenario():
        stages = ["receive", f"{__name__}:linger", "preprocess", "schedule", "execute", "postprocess", "respond"]
        config = Config.model_validate(
            {
                "timeout_handling": {"enabled": False},
                "context_management": {"max_contexts": 5},
                "pipeline": {"stages": stages},
            }
        )
        harness = Harness(config)
        harness.engine.scripts["p"] = [Step("token", 0.1)]
        requests = [pb_utils.InferenceRequest({"text_input": "p"}, None, f"r{n}") for n in range(12)]
        began = asyncio.get_running_loop().time()
        tasks = [asyncio.create_task(harness.serve(request)) for request in requests]
        await asyncio.sleep(0.5)
        assert len(harness.contexts) == 5
        assert [request.sender.finals for request in requests] == [0] * 5 + [1] * 7
        for request in requests[5:]:
            [error] = request.sender.errors
            assert error.message().startswith("queue_full: 5 requests are live, and no more are held")
            assert "retry after" in error.message()
            assert error.code() == pb_utils.TritonError.UNAVAILABLE
        await asyncio.gather(*tasks)
        assert asyncio.get_running_loop().time() - began < 2
        assert not any(request.sender.errors for request in requests[:5])
        counts = harness.contexts.counts
        assert (counts["received"], counts["completed"], counts["rejected"]) == (12, 5, 7)
        assert harness.contexts.find("r11").slug == "queue_full"

    run(scenario)


async def linger(ctx):
    """A plug-in that takes its time."""
    await asyncio.sleep(1.0)


def served(section, parameters=None, prompt="what is kept?"):
    """Serve one request with this ``context_management``; return what is stored of it and its status."""

    async def scenario():
        config = Config.model_validate({"context_management": section, "timeout_handling": {"default_timeout": 40.0}})
        history = History(config)
        harness = Harness(config, engine=open_engine("simulated", {}, ""))
        harness.contexts = harness.pipeline._contexts = history.contexts
        await harness.engine.start()
        values = {"max_tokens": 5, "ignore_eos": True, "priority": 7, "tenant": "t", "timeout_ms": 30000}
        request = pb_utils.InferenceRequest({"text_input": [prompt]}, values | (parameters or {}), "mine")
        await harness.serve(request)
        await harness.engine.stop()
        found = history.contexts.ended
        layers = found.get(found.claimant("mine") or "")
        answer = None
        if layers:
            answer = json.loads(
                await control.answer(
                    {"control": "status", "control_id": "mine"}, history.contexts, Archive(found), dict
                )
            )
        return {name: json.loads(value) for name, value in layers.items()}, answer, request.sender.text()

    return run(scenario)


def test_five_layers_are_kept_without_words():
    """By default nothing of what was asked and answered is kept but its measures."""
    layers, status, _ = served({})
    assert set(layers) == {"metadata", "input", "execution", "kv_cache", "output"}
    metadata = layers["metadata"]
    assert (metadata["caller_id"], metadata["priority"], metadata["tenant"], metadata["timeout"]) == (
        "mine",
        7,
        "t",
        30,
    )
    assert metadata["status"] == "finished"
    assert list(metadata["times_ms"]) == ["received", "admitted", "scheduled", "first_token", "finished"]
    assert layers["input"]["parameters"] == {"max_tokens": 5, "ignore_eos": True}
    assert layers["execution"]["generated_tokens"] == layers["output"]["tokens"] == status["output_tokens"] == 5
    assert layers["execution"]["limits"] == {"total": 30.0}
    assert "kept" not in json.dumps(layers)
    assert status["node"] == metadata["node"]
    assert (status["finish_reason"], status["kind"]) == ("length", "prompt")


def test_cached_and_created_tokens_are_told_as_the_engine_reports_them():
    """A prompt of three blocks and a bit adds its whole blocks to the prefix cache."""
    layers, status, _ = served({}, prompt="word " * 60)
    created = layers["kv_cache"]["created_tokens"]
    assert layers["kv_cache"]["cached_tokens"] == 0
    assert created == status["prompt_tokens"] // 16 * 16 > 0
    assert (status["cached_tokens"], status["created_tokens"]) == (0, created)


def test_texts_are_kept_only_as_configured():
    """As text, or as its SHA-256."""
    layers, status, text = served({"keep_prompts": "text", "keep_outputs": "hash"}, {"stop": ["zz"]})
    assert layers["input"]["prompt"] == status["prompt"] == "what is kept?"
    assert layers["input"]["parameters"]["stop"] == ["zz"]
    answer = text.removeprefix("what is kept?")
    assert layers["output"]["hashes"] == [hashlib.sha256(answer.encode()).hexdigest()]
    assert "texts" not in layers["output"]
    layers, status, text = served({"keep_prompts": "hash", "keep_outputs": "text"})
    assert layers["input"]["prompt_hash"] == hashlib.sha256(b"what is kept?").hexdigest()
    assert status["outputs"] == [text.removeprefix("what is kept?")]
    assert status["prompt"] is None


def test_a_long_text_is_kept_in_part_with_the_hash_of_the_whole():
    """Cut at a character, told as cut."""
    text = "ü" * MAX_TEXT_BYTES
    kept = beginning(text, MAX_TEXT_BYTES)
    assert kept == "ü" * (MAX_TEXT_BYTES // 2)
    assert beginning("short", 100) == "short"
    layers, status, _ = served({"keep_prompts": "text"}, prompt="ü" * MAX_TEXT_BYTES)
    assert layers["input"]["truncated"]
    assert status["truncated"]
    assert status["prompt"] == kept
    assert status["prompt_hash"] == hashlib.sha256(text.encode()).hexdigest()


def test_only_a_summary_is_kept_without_layers():
    """``enable_layered_storage: false``: one record in memory, no words whatever else is set."""
    layers, status, _ = served({"enable_layered_storage": False, "keep_prompts": "text", "storage_backend": "redis"})
    assert set(layers) == {"summary"}
    assert (status["status"], status["output_tokens"], status["prompt"]) == ("finished", 5, None)


def test_nothing_is_kept_when_it_is_switched_off():
    """``context_management.enabled: false``: with its end a request is forgotten."""
    assert served({"enabled": False, "storage_backend": "redis"})[:2] == ({}, None)


def test_a_status_is_told_from_whatever_layers_are_left():
    """With the metadata gone, the rest is still told; with all gone, nothing is."""
    layers, _, _ = served({})
    left = {"output": json.dumps(layers["output"]).encode()}
    told = read_summary("x", left)
    assert (told.id, told.status, told.output_tokens, told.finish_reason) == ("x", "unknown", 5, "length")
    assert read_summary("x", {}) is None
