"""Requests to Triton's tensors, parameters and JSON; Triton's answers back to chunks. Knows no transport."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from triton_lifecycle.errors import InvalidInput

from .errors import ProtocolError, translate
from .types import Chunk, ControlRequest, GenerateRequest, Parameter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

T = TypeVar("T")

# Triton itself acts on these or keeps them from the model.
_RESERVED = frozenset(
    {"id", "sequence_id", "sequence_start", "sequence_end", "headers", "binary_data_output", "priority", "timeout"}
)


Tensor = str | bool | tuple[int, ...]
"""An input's value; all but whole numbers have one element."""


def tensors(request: GenerateRequest | ControlRequest) -> dict[str, Tensor]:
    """Return the input tensors by name."""
    if isinstance(request, ControlRequest):
        return {"text_input": "", "stream": False}
    values: dict[str, Tensor] = {
        "text_input": _sendable("prompt", request.prompt),
        "stream": request.stream,
        # Always sent: without it the server takes the request parameters for sampling parameters.
        "sampling_parameters": _sendable("sampling", _dump(request.sampling.as_dict())),
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
    }
    if not request.stream:
        values["exclude_input_in_output"] = True
    if request.continued:
        values["continue_token_ids"] = request.continued
    return values


def parameters(request: GenerateRequest | ControlRequest) -> dict[str, Parameter]:
    """Return the request parameters that are ours, without ``timeout`` and ``priority``, which each transport places.

    Raises:
        InvalidInput: a parameter has a name that Triton keeps for itself or a type that it cannot carry.

    """
    if isinstance(request, ControlRequest):
        values: dict[str, Parameter] = {"control": request.control}
        also = {"control_id": request.control_id, "control_token": request.token}
        return values | {name: value for name, value in also.items() if value is not None}
    for name, value in request.parameters.items():
        if name in _RESERVED or name.startswith("triton_"):
            hint = f"; use the option {name!r} instead" if name in {"timeout", "priority"} else ""
            raise InvalidInput(f"parameter {name!r} is kept by Triton for itself{hint}")
        if not isinstance(value, (int, float, bool, str)):
            raise InvalidInput(
                f"parameter {name!r} must be a number, a boolean or a string, got {type(value).__name__}; "
                "lists and objects belong into sampling"
            )
    ours: dict[str, Parameter | None] = {
        "tenant": request.tenant,
        "traceparent": request.traceparent,
        "tracestate": request.tracestate,
        # Another server than ours takes no notice of it.
        "return_token_ids": request.return_token_ids or None,
    }
    return request.parameters | {name: value for name, value in ours.items() if value is not None}


def timeout_us(request: GenerateRequest) -> int:
    """Return the request's timeout in Triton's unit."""
    return max(1, round(request.timeout * 1e6))


def http_body(request: GenerateRequest | ControlRequest) -> bytes:
    """Return the body for ``/generate`` and ``/generate_stream``."""
    ours = parameters(request)
    body: dict[str, Any] = {**tensors(request), "parameters": ours}
    if isinstance(request, GenerateRequest):
        body["id"] = request.request_id
        ours["timeout"] = timeout_us(request)
        if request.priority is not None:
            ours["priority"] = request.priority
    return _dump(body).encode()


def http_chunk(event: object, *, http_status: int | None = None) -> Chunk | None:
    """Turn one JSON object of an HTTP answer into a chunk; ``None`` for an empty one that only marks the end.

    Raises:
        LifecycleError: the object is an error of the server.
        ProtocolError: it is not an object.

    """
    if not isinstance(event, dict):
        raise ProtocolError(f"expected a JSON object in the answer, got {str(event)[:80]!r}")
    if "error" in event:
        raise translate(str(event["error"]), http_status=http_status)
    # Triton writes a tensor of one element as a scalar.
    return chunk({name: value if isinstance(value, list) else [value] for name, value in event.items()})


def chunk(outputs: Mapping[str, list[Any]]) -> Chunk | None:
    """Turn output tensors by name into a chunk; ``None`` if there is no text and no finish reason among them."""
    texts = tuple(str(text) for text in outputs.get("text_output", ()))
    reasons = tuple(None if reason in {"None", ""} else str(reason) for reason in outputs.get("finish_reason", ()))
    if not texts and not reasons:
        return None
    counts = tuple(int(count) for count in outputs.get("num_output_tokens", ()))
    prompt = outputs.get("num_input_tokens", ())
    ids = tuple(int(token) for token in outputs.get("token_ids", ()))
    return Chunk(texts, reasons, counts, int(prompt[0]) if prompt else None, ids)


def document(answer: Chunk | None, kind: type[T]) -> T:
    """Read the JSON document that answers a control request.

    Raises:
        ProtocolError: it is missing or of another shape, which is so when the model's backend is not ours.

    """
    text = "" if answer is None else answer.text
    try:
        return msgspec.json.decode(text, type=kind, strict=False)
    except msgspec.MsgspecError as error:
        raise ProtocolError(
            f"the model answered a control request with {text[:80]!r} ({error}); is it served by the lifecycle backend?"
        ) from None


class EventStream:
    """Decoder of server-sent events that bear JSON. Feeds may be cut anywhere, in the middle of a character too."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[object]:
        """Return the JSON value of each event that is now complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield parse(line[5:])

    def finish(self) -> Iterator[object]:
        """Return what a last line without an end holds."""
        yield from self.feed(b"\n")


def parse(data: bytes) -> object:
    """Parse JSON from the server.

    Raises:
        ProtocolError: it is none.

    """
    try:
        return json.loads(data)
    except ValueError:
        raise ProtocolError(f"expected JSON in the answer, got {data[:80]!r}") from None


def _dump(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"the request cannot be written as JSON: {error}") from None


def _sendable(name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"{name} holds a lone surrogate at position {error.start}, which no UTF-8 text can; decode the source again"
        ) from None
    return text
