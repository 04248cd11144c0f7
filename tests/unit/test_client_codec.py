"""Client: values into requests, answers into chunks, texts into errors, addresses into endpoints. No network."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triton_lifecycle import errors as tree
from triton_lifecycle_client import codec
from triton_lifecycle_client.errors import ModelNotFound, ProtocolError, translate
from triton_lifecycle_client.retry import NO_RETRY, RetryPolicy
from triton_lifecycle_client.transport import endpoint
from triton_lifecycle_client.types import ControlRequest, GenerateRequest, SamplingOptions, ServerState


def make(**changes: object) -> GenerateRequest:
    """Return a request with some fields changed."""
    fields: dict[str, object] = {"model": "m", "prompt": "hi", "request_id": "r", "timeout": 2.0}
    return GenerateRequest(**(fields | changes))  # type: ignore[arg-type]


@given(st.lists(st.text(), max_size=5), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_events_are_whole_however_the_bytes_are_cut(texts: list[str], cuts: list[int]):
    """Any split of an event stream, through characters too, gives the same events."""
    data = b"".join(b"data: " + json.dumps({"t": text}, ensure_ascii=False).encode() + b"\n\n" for text in texts)
    decoder, found = codec.EventStream(), []
    for step in itertools.cycle(cuts):
        found += decoder.feed(data[:step])
        data = data[step:]
        if not data:
            break
    assert found + list(decoder.finish()) == [{"t": text} for text in texts]


def test_events_without_a_last_line_end_and_with_carriage_returns():
    """Line ends of both kinds, comments and a missing last line end are all understood."""
    decoder = codec.EventStream()
    assert list(decoder.feed(b': hello\r\ndata:{"a":1}\r\n\r\ndata: {"a":2}')) == [{"a": 1}]
    assert list(decoder.finish()) == [{"a": 2}]


def test_an_event_that_is_no_json_is_a_protocol_error():
    """Something else than Triton on the other side is named as such."""
    with pytest.raises(ProtocolError, match="expected JSON"):
        list(codec.EventStream().feed(b"data: <html>\n"))


def test_a_request_as_http_json():
    """The body holds tensors by name, the caller's id, and the parameters that are ours."""
    request = make(
        sampling=SamplingOptions(max_tokens=4, stop=("a",), extra={"min_p": 0.1}),
        priority=-2,
        tenant="t",
        parameters={"x": True},
        stream=False,
    )
    body = json.loads(codec.http_body(request))
    assert json.loads(body.pop("sampling_parameters")) == {"max_tokens": 4, "stop": ["a"], "min_p": 0.1}
    assert body == {
        "text_input": "hi",
        "stream": False,
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "id": "r",
        "parameters": {"x": True, "tenant": "t", "timeout": 2_000_000, "priority": -2},
    }


def test_a_stream_asks_for_its_tokens_and_may_bring_them_back():
    """As a parameter, which other servers overlook, and as an input; the answer's are in the chunk, one or several."""
    body = json.loads(codec.http_body(make(return_token_ids=True, continued=(5, 6))))
    assert body["parameters"]["return_token_ids"] is True
    assert body["continue_token_ids"] == [5, 6]
    plain = json.loads(codec.http_body(make()))
    assert "continue_token_ids" not in plain
    assert "return_token_ids" not in plain["parameters"]
    for told, ids in ((7, (7,)), ([7, 8], (7, 8))):
        found = codec.http_chunk({"text_output": "x", "finish_reason": "None", "token_ids": told})
        assert found is not None
        assert found.token_ids == ids


def test_streaming_does_not_ask_to_leave_out_the_prompt():
    """The official contract makes exclude_input_in_output an error while streaming."""
    assert "exclude_input_in_output" not in codec.tensors(make())


def test_a_control_request_bears_an_empty_prompt():
    """Triton requires text_input; control and its target are parameters."""
    body = json.loads(codec.http_body(ControlRequest(model="m", control="cancel", control_id="r")))
    assert body == {"text_input": "", "stream": False, "parameters": {"control": "cancel", "control_id": "r"}}


@pytest.mark.parametrize("name", ["timeout", "priority", "triton_x", "headers", "id"])
def test_parameters_that_triton_keeps_are_refused(name: str):
    """A name that would never reach the model is refused before anything is sent."""
    with pytest.raises(tree.InvalidInput, match=name):
        codec.parameters(make(parameters={name: 1}))


def test_a_parameter_of_a_wrong_type_is_refused():
    """A list cannot be a Triton parameter; the message says where it belongs."""
    with pytest.raises(tree.InvalidInput, match=r"'x' must be .* got list.*sampling"):
        codec.parameters(make(parameters={"x": [1]}))


def test_text_that_no_utf8_can_hold_is_refused():
    """A lone surrogate is named with its position."""
    with pytest.raises(tree.InvalidInput, match="lone surrogate at position 1"):
        codec.http_body(make(prompt="a\ud800"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object()])
def test_sampling_that_no_json_can_hold_is_refused(value: object):
    """NaN and objects are refused before anything is sent."""
    with pytest.raises(tree.InvalidInput, match="JSON"):
        codec.http_body(make(sampling=SamplingOptions(extra={"x": value})))


def test_a_chunk_of_one_and_of_several_sequences():
    """Triton writes one element as a scalar, several as a list; "None" is no finish reason."""
    one = codec.http_chunk(
        {"text_output": "a", "finish_reason": "None", "num_output_tokens": 2, "num_input_tokens": 5, "id": "r"}
    )
    assert one is not None
    assert (one.text, one.finish_reason, one.output_tokens, one.prompt_tokens) == ("a", None, 2, 5)
    two = codec.http_chunk({"text_output": ["a", "b"], "finish_reason": ["stop", "None"], "num_output_tokens": [1, 2]})
    assert two is not None
    assert (two.texts, two.finish_reasons, two.output_tokens) == (("a", "b"), ("stop", None), 3)


def test_an_empty_response_is_no_chunk():
    """A response that only marks the end brings nothing."""
    assert codec.http_chunk({"model_name": "m", "model_version": "1"}) is None


def test_a_control_answer_of_another_backend_is_named():
    """A backend that knows no control requests answers with text: say so."""
    with pytest.raises(ProtocolError, match="lifecycle backend"):
        codec.document(codec.http_chunk({"text_output": "Paris"}), ServerState)


@pytest.mark.parametrize("error", [
    tree.QueueFull("64 wait", retry_after=1.5),
    tree.StallTimeout("no token for 1 s"),
    tree.PromptTooLong("9 > 8: shorten it"),
    tree.UnknownRequest("no 'x'"),
])  # fmt: skip
@pytest.mark.parametrize(
    "prefix", ["", "in ensemble 'e', ", "Failed to process the request(s) for model 'm', message: "]
)
def test_our_errors_come_back_whatever_triton_puts_before_them(error: tree.LifecycleError, prefix: str):
    """Slug, message and retry hint survive the wire."""
    back = translate(prefix + error.wire(), http_status=400)
    assert type(back) is type(error)
    assert (back.message, back.retry_after) == (error.message, error.retry_after)


@pytest.mark.parametrize(("text", "status", "kind"), [
    ("Request for unknown model: 'x' is not found", 404, ModelNotFound),
    ("Request for unknown model: 'x' has no available versions", None, tree.Draining),
    ("Request for unknown model: 'x' is not found", None, ModelNotFound),
    ("Server is stopping, scheduler for model has stopped accepting new inference requests", None, tree.Draining),
    ("failed to parse the request JSON buffer: Invalid value. at 14", 500, tree.InvalidInput),
    ("busy", 503, tree.Overloaded),
    ("no such feature", 501, tree.Unsupported),
    ("expected 1 inputs but got 0", 400, tree.RequestError),
    ("boom", 500, tree.LifecycleError),
    ("", None, tree.LifecycleError),
])  # fmt: skip
def test_tritons_own_errors_find_a_class(text: str, status: int | None, kind: type[tree.LifecycleError]):
    """What Triton or a proxy says itself becomes the nearest class, with a message in any case."""
    error = translate(text, http_status=status)
    assert type(error) is kind
    assert error.message


@pytest.mark.parametrize(("url", "protocol", "expected"), [
    (None, None, "grpc://127.0.0.1:8001"),
    (None, "http", "http://127.0.0.1:8000"),
    ("h:1", None, "grpc://h:1"),
    ("http://h:1/", None, "http://h:1"),
    ("https://h:443/triton", None, "https://h:443/triton"),
    ("grpcs://h:1", "grpc", "grpcs://h:1"),
    ("[::1]:8001", None, "grpc://[::1]:8001"),
])  # fmt: skip
def test_addresses(monkeypatch: pytest.MonkeyPatch, url: str | None, protocol: str | None, expected: str):
    """Scheme, protocol and default ports make up the endpoint."""
    monkeypatch.delenv("LIFECYCLE_URL", raising=False)
    assert str(endpoint(url, protocol)) == expected


def test_the_address_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    """LIFECYCLE_URL stands in for a missing address."""
    monkeypatch.setenv("LIFECYCLE_URL", "http://h:9")
    assert str(endpoint()) == "http://h:9"


@pytest.mark.parametrize(("url", "protocol", "said"), [
    ("h", None, "host:port"),
    ("h:port", None, "host:port"),
    ("h:99999", None, "host:port"),
    ("ftp://h:1", None, "grpc://, http://"),
    ("http://h:1", "grpc", "says http, but grpc"),
    ("h:1", "quic", "one of grpc, http"),
])  # fmt: skip
def test_wrong_addresses(url: str, protocol: str | None, said: str):
    """A malformed address says how it should look."""
    with pytest.raises(tree.InvalidInput, match=said):
        endpoint(url, protocol)


def test_retry_only_what_may_be_retried():
    """Attempts end at the limit; an error that waiting does not mend is final."""
    policy = RetryPolicy(attempts=3)
    assert policy.pause(tree.QueueFull("x"), 1) is not None
    assert policy.pause(tree.QueueFull("x"), 3) is None
    assert policy.pause(tree.InvalidInput("x"), 1) is None
    assert NO_RETRY.pause(tree.QueueFull("x"), 1) is None


def test_the_servers_hint_is_honoured():
    """Never earlier than asked; a hint beyond the cap means giving up."""
    policy = RetryPolicy(cap_s=2.0)
    assert 1.0 <= (policy.pause(tree.QueueFull("x", retry_after=1.0), 1) or 0) <= 1.2
    assert policy.pause(tree.QueueFull("x", retry_after=3.0), 1) is None
