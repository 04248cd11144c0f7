"""What the edge takes: prompts, conversations, embeddings, lists as inputs, and how large each may be."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from tests.fakes import pb_utils
from tests.fakes.harness import Harness
from triton_lifecycle.chat import Conversation, conversation
from triton_lifecycle.config import RequestLimits, TimeoutHandling
from triton_lifecycle.context import Context, Contexts, Input
from triton_lifecycle.embedding import Embedding
from triton_lifecycle.errors import InvalidInput
from triton_lifecycle.stages.receive import Receive
from triton_lifecycle.triton import Call

USER = [{"role": "user", "content": "hi"}]
USUAL = RequestLimits()
SMALL = RequestLimits(max_prompt_bytes=64, max_parameters_bytes=64, max_list_items=3)


class Nobody:
    """Nobody listens."""

    def wants(self, _):
        return False


def received(tensors: dict, parameters: dict | None = None, limits: RequestLimits = USUAL) -> Context:
    """Return a request that has been read."""
    request = pb_utils.InferenceRequest(tensors, parameters)
    ctx = Contexts().open(Call(request, pb_utils, None), "m", Nobody())
    asyncio.run(Receive(limits, TimeoutHandling(enabled=False))(ctx))
    return ctx


def read(tensors: dict, parameters: dict | None = None, limits: RequestLimits = USUAL) -> Input:
    """Return the input layer of a request."""
    ctx = received(tensors, parameters, limits)
    assert ctx.input is not None
    return ctx.input


@pytest.mark.parametrize("given", [USER, json.dumps(USER)])
@pytest.mark.parametrize("where", ["sampling", "parameter"])
def test_messages_come_as_a_list_or_as_its_text(given, where):
    """In sampling_parameters as JSON or text, or as a request parameter; they are no sampling parameter afterwards."""
    if where == "sampling":
        found = read({"sampling_parameters": json.dumps({"messages": given, "max_tokens": 3})})
    else:
        found = read({"text_input": ""} if given is USER else {}, {"messages": json.dumps(USER), "max_tokens": 3})
    assert found.source == Conversation(USER)
    assert found.parameters == {"max_tokens": 3}
    assert found.exclude_prompt, "a conversation is never repeated before the answer"


@pytest.mark.parametrize(
    ("messages", "tools", "says"),
    [
        ([], None, "messages: the list is empty"),
        ("[", None, "messages: not valid JSON"),
        ("{}", None, "messages: expected 'array', got 'object'"),
        ([{"role": "user"}, {"role": "cook", "content": "x"}], None, "messages[1].role: invalid enum value 'cook'"),
        ([{"content": "x"}], None, "messages[0]: object missing required field 'role'"),
        ([{"role": "user", "content": 5}], None, "messages[0].content: expected 'str | array | null', got 'int'"),
        ([{"role": "user", "contents": "x"}], None, "messages[0]: object contains unknown field 'contents'"),
        ([{"role": "user", "content": [{"type": "video", "url": ""}]}], None, "invalid value 'video'"),
        (USER, "x", "tools: not valid JSON"),
        (USER, [5], "tools[0]: expected 'object', got 'int'"),
    ],
)
def test_a_wrong_conversation_names_the_place(messages, tools, says):
    """The message says where, what was expected, and what was found."""
    with pytest.raises(InvalidInput) as caught:
        conversation(messages, tools)
    assert says in caught.value.message


def test_a_conversation_becomes_plain_values():
    """Parts of text are joined, absent content is an empty text, tool calls stay."""
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
    ]
    found = conversation(turns, [{"type": "function", "function": {"name": "f"}}])
    assert [turn["content"] for turn in found.messages] == ["ab", "", "r"]
    assert found.messages[1]["tool_calls"][0]["function"]["name"] == "f"
    assert found.tools == [{"type": "function", "function": {"name": "f"}}]


def test_an_embedding_request_is_read():
    """Text or ids; dimensions as a number, a text, or a list of one."""
    asked = {"input": [1, 2], "pooling_params": {"dimensions": ["8"]}}
    assert read({"embedding_request": json.dumps(asked)}).source == Embedding([1, 2], 8)
    assert read({"embedding_request": '{"input": "x"}', "text_input": ""}).source == Embedding("x")


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({}, "text_input: missing"),
        ({"text_input": ""}, "prompt is empty"),
        ({"embedding_request": "{"}, "embedding_request: not valid JSON"),
        ({"embedding_request": "{}"}, "embedding_request: object missing required field 'input'"),
        ({"embedding_request": '{"input": ""}'}, "embedding_request.input: empty"),
        ({"embedding_request": '{"input": [1.5]}'}, "embedding_request.input[0]: expected 'int', got 'float'"),
        ({"embedding_request": '{"input": "x", "pooling_params": {"dimensions": 0}}'}, "at least 1"),
        ({"embedding_request": '{"input": "x", "pooling_params": {"dims": 1}}'}, "unknown field 'dims'"),
        ({"embedding_request": '{"input": "x"}', "text_input": "y"}, "give it alone"),
        ({"text_input": "y", "sampling_parameters": '{"messages": []}'}, "give them alone"),
        ({"text_input": "y", "sampling_parameters": '{"tools": []}'}, "tools: they are for requests with messages"),
        ({"text_input": "y", "stop": ["a"], "sampling_parameters": '{"stop": "b"}'}, "stop: given as an input and"),
    ],
)
def test_what_contradicts_itself_is_refused(tensors, says):
    """One request asks one thing, once."""
    with pytest.raises(InvalidInput) as caught:
        read(tensors)
    assert says in caught.value.message


def test_lists_may_come_as_inputs():
    """stop, stop_token_ids, and TensorRT-LLM's stop_words and bad_words, whose empty texts mean nothing."""
    ids = np.array([5, 6], dtype=np.int64)
    found = read({"text_input": "x", "stop": ["a"], "stop_words": ["", "b"], "bad_words": ["c"], "stop_token_ids": ids})
    assert found.parameters == {"stop": ["a", "b"], "bad_words": ["c"], "stop_token_ids": [5, 6]}
    assert read({"text_input": "x", "stop_words": [""], "bad_words": [""]}).parameters == {}


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"text_input": "x" * 65}, "text_input: at most 64 bytes are taken, found 65"),
        ({"text_input": "é" * 33}, "text_input: at most 64 bytes are taken, found 66"),
        ({"text_input": "x", "sampling_parameters": json.dumps({"stop": "y" * 64})}, "sampling_parameters: at most"),
        ({"text_input": "x", "stop": list("abcd")}, "sampling_parameters.stop: at most 3 items, found 4"),
        ({"embedding_request": json.dumps({"input": "x" * 64})}, "embedding_request: at most 64 bytes"),
    ],
)
def test_what_is_too_large_is_refused_before_it_costs(tensors, says):
    """Bytes and items have limits, each named in the refusal."""
    with pytest.raises(InvalidInput) as caught:
        read(tensors, limits=SMALL)
    assert says in caught.value.message
    read({"text_input": "x" * 64}, limits=SMALL)
    read({"text_input": "é" * 32}, limits=SMALL)


def test_messages_are_measured_too():
    """As a request parameter they meet the prompt's limit."""
    with pytest.raises(InvalidInput, match="messages: at most 64 bytes"):
        read({}, {"messages": json.dumps([{"role": "user", "content": "x" * 64}])}, SMALL)


def test_a_model_does_only_its_own_tasks():
    """An embedding asked of a generating model is unsupported, and the answer says what it takes."""

    async def scenario() -> None:
        harness = Harness()
        request = pb_utils.InferenceRequest({"embedding_request": '{"input": "x"}'})
        await harness.serve(request)
        [error] = request.sender.errors
        assert error.code() == pb_utils.TritonError.UNSUPPORTED
        assert error.message() == (
            "unsupported: embedding_request: Model test does not support 'embed' request; "
            "it takes text_input or messages"
        )

    asyncio.run(scenario())


def test_too_many_sequences_are_refused():
    """n has a limit."""

    async def scenario() -> None:
        harness = Harness()
        request = pb_utils.InferenceRequest({"text_input": "x"}, {"n": 129})
        await harness.serve(request)
        assert "sampling_parameters.n: at most 128 sequences, found 129" in request.sender.errors[0].message()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("parameters", "seconds"),
    [
        ({}, None),
        ({"timeout": 2_000_000}, 2.0),
        ({"timeout_ms": "1500"}, 1.5),
        ({"x-request-timeout": "2.5"}, 2.5),
        ({"timeout": 0, "timeout_ms": 700, "x-request-timeout": 5}, 0.7),
        ({"x-request-timeout": 604_800}, 604_800.0),
    ],
)
def test_the_shortest_of_the_callers_limits_counts(parameters, seconds):
    """Triton's, ours, and a gateway's header, each in its own unit; 0 is none."""
    assert received({"text_input": "x"}, parameters).metadata.timeout == seconds


@pytest.mark.parametrize("name", ["timeout", "timeout_ms", "x-request-timeout"])
@pytest.mark.parametrize("value", [-1, "soon", "", True, "nan", "inf", 1e30, [], {}, "9" * 5000])
def test_a_limit_that_is_none_names_itself(name, value):
    """Whatever stands there that is no time: the field, and no more of the value than a line."""
    with pytest.raises(InvalidInput, match=f"^{name}: ") as caught:
        received({"text_input": "x"}, {name: value})
    assert len(str(caught.value)) < 250
