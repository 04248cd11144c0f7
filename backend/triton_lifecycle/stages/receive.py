"""Stage 1: from tensors and parameters to frozen metadata and input; every value is parsed once, here."""

from __future__ import annotations

import asyncio
import functools
import math
from typing import Any, Final

from triton_lifecycle.chat import Conversation, conversation
from triton_lifecycle.config import RequestLimits, TimeoutHandling
from triton_lifecycle.context import Context, Input, Metadata, Wants
from triton_lifecycle.embedding import Embedding
from triton_lifecycle.embedding import parse as parse_embedding
from triton_lifecycle.errors import InvalidInput
from triton_lifecycle.events import Traced
from triton_lifecycle.images import measure
from triton_lifecycle.sampling import REQUEST_PARAMETERS, parse_object
from triton_lifecycle.timeouts.limits import choose
from triton_lifecycle.tracing import Tracing
from triton_lifecycle.tracing.w3c import bounded, parse
from triton_lifecycle.triton import RawRequest

OFF_LOOP_CHARS: Final = 64 * 1024
"""Texts longer than this are parsed in a thread."""

MAX_TRACESTATE: Final = 8192
"""Characters: as much as proxies let a header have. It is the caller's affair only in part, so it is hardly refused."""
TIMEOUTS: Final = {"timeout": 1_000_000, "timeout_ms": 1000, "x-request-timeout": 1}
"""Where a caller's limit may stand, and its units per second: Triton's own parameter, ours, and the header that a
gateway sets and Triton forwards (``--grpc-header-forward-pattern``)."""
MAX_TIMEOUT_S: Final = 7 * 24 * 3600.0
MAX_PRIORITY: Final = 2**31 - 1


class Receive:
    """Reads, measures and types a request's values; behind it nothing is text that might be wrong.

    Args:
        limits: how large values may be.
        timeouts: what a request's limits are made of.
        strict: whether to refuse what harms nobody but is surely meant otherwise.
        off_loop: whether long texts are parsed in a thread.
        tracing: chooses where a request's span stands; ``None`` when requests are not traced.

    """

    def __init__(
        self,
        limits: RequestLimits,
        timeouts: TimeoutHandling,
        *,
        strict: bool = True,
        off_loop: bool = True,
        tracing: Tracing | None = None,
    ) -> None:
        self._limits = limits
        self._timeouts = timeouts
        self._strict = strict
        self._tracing = tracing
        self._most_on_loop = OFF_LOOP_CHARS if off_loop else math.inf

    async def __call__(self, ctx: Context) -> None:
        """Fill the metadata and input layers, and start the deadline: all that follows counts.

        Raises:
            InvalidInput: a value breaks a rule; the message names the field.

        """
        raw = ctx.call.read()
        stream = bool(raw.tensors.get("stream", False))
        ctx.metadata = Metadata(
            caller_id=ctx.call.id,
            stream=stream,
            priority=_priority(raw.parameters.get("request_priority", raw.parameters.get("priority", 0))),
            timeout=_timeout(raw.parameters),
            tenant=_text(raw.parameters, "tenant"),
            traceparent=_text(raw.parameters, "traceparent"),
            tracestate=bounded(_text(raw.parameters, "tracestate", MAX_TRACESTATE)),
            partial=_flag(raw.parameters, "partial"),
        )
        if self._tracing is not None:
            _trace(ctx, self._tracing)
        ctx.start_deadline(choose(self._timeouts, ctx.metadata.timeout))
        large = any(isinstance(value, str) and len(value) > self._most_on_loop for value in raw.tensors.values())
        read = functools.partial(self._input, raw, stream=stream)
        ctx.input = await asyncio.to_thread(read) if large else read()

    def _input(self, raw: RawRequest, *, stream: bool) -> Input:
        parameters = self._parameters(raw)
        source = self._source(raw, parameters)
        images = self._images(raw, source)
        exclude = raw.tensors.get("exclude_input_in_output")
        if stream and exclude is False:
            # The official backend's own words, which its users may match on.
            raise InvalidInput("When streaming, `exclude_input_in_output` = False is not allowed.")
        if exclude is None:
            exclude = stream or not isinstance(source, str)
        continued = tuple(raw.tensors.get("continue_token_ids") or ())
        if continued and isinstance(source, Embedding):
            raise InvalidInput("continue_token_ids: they go with text_input or messages, not with embedding_request")
        wants = {name: bool(raw.tensors.get(f"return_{name}", False)) for name in Wants.__struct_fields__}
        # A parameter, so that a server that does not know it takes no notice.
        wants["token_ids"] = _flag(raw.parameters, "return_token_ids")
        return Input(
            source=source,
            parameters=parameters,
            wants=Wants(**wants),
            exclude_prompt=bool(exclude),
            images=images,
            continued=continued,
        )

    def _images(self, raw: RawRequest, source: str | Conversation | Embedding) -> tuple[str, ...]:
        given = tuple(raw.tensors.get("image") or ())
        if given and isinstance(source, Embedding):
            raise InvalidInput("image: images go with text_input or messages, not with embedding_request")
        if isinstance(source, Conversation):
            if given and source.images:
                raise InvalidInput("image: given as an input and within the messages; give them once")
            if len(given) != source.places:
                raise InvalidInput(
                    f"image: the messages have {source.places} parts of type image, and {len(given)} images are given"
                )
            given = given or source.images
        measure(given, self._limits)
        return given

    def _source(self, raw: RawRequest, parameters: dict[str, Any]) -> str | Conversation | Embedding:
        """Return what is asked; takes ``messages`` and ``tools`` out of the parameters."""
        most = self._limits.max_prompt_bytes
        messages = _take(raw, parameters, "messages")
        tools = _take(raw, parameters, "tools")
        embedding, prompt = raw.tensors.get("embedding_request"), raw.tensors.get("text_input")
        if embedding:
            if messages is not None or prompt:
                raise InvalidInput("embedding_request: give it alone, without text_input and messages")
            _measure("embedding_request", embedding, most)
            return parse_embedding(embedding)
        if messages is not None:
            if prompt:
                raise InvalidInput("messages: give them alone, with text_input empty or left out")
            _measure("messages", messages, most)
            _measure("tools", tools, most)
            return conversation(messages, tools)
        if tools is not None:
            raise InvalidInput("tools: they are for requests with messages")
        return _prompt(prompt, most, strict=self._strict)

    def _parameters(self, raw: RawRequest) -> dict[str, Any]:
        most = self._limits.max_parameters_bytes
        text = raw.tensors.get("sampling_parameters")
        if text is None:
            parameters = {
                k: v for k, v in raw.parameters.items() if k not in REQUEST_PARAMETERS and not _is_transport(k)
            }
            for name in parameters.keys() - {"messages", "tools"}:
                _measure(name, parameters[name], most)
        else:
            _measure("sampling_parameters", text, most)
            parameters = parse_object("sampling_parameters", text)
        for name, words in _lists(raw.tensors).items():
            if parameters.get(name):
                raise InvalidInput(f"{name}: given as an input and among the sampling parameters; give it once")
            parameters[name] = words
        for name, value in parameters.items():
            if isinstance(value, list | dict) and len(value) > self._limits.max_list_items and name not in _UNCOUNTED:
                raise InvalidInput(
                    f"sampling_parameters.{name[:60]}: at most {self._limits.max_list_items} items, found {len(value)}"
                )
        return parameters


def _trace(ctx: Context, tracing: Tracing) -> None:
    """Put the request's span below the caller's, so that also a refusal is seen there."""
    trace = ctx.trace = tracing.begin(ctx.id, parse(ctx.metadata.traceparent, ctx.metadata.tracestate))
    ctx.publish(
        Traced,
        trace_id=trace.trace_id,
        span_id=trace.span_id,
        parent_id=trace.parent_id,
        sampled=trace.sampled,
        state=trace.state,
    )


_UNCOUNTED: Final = frozenset(
    {"messages", "tools", "structured_outputs", "guided_decoding", "prompt_logprob_token_ids"}
)
"""Measured in bytes."""


def _lists(tensors: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the sampling parameters that came as inputs of their own; an empty word means nothing."""
    stop = [*tensors.get("stop", ()), *(word for word in tensors.get("stop_words", ()) if word)]
    found = {
        "stop": stop,
        "stop_token_ids": tensors.get("stop_token_ids"),
        "bad_words": [word for word in tensors.get("bad_words", ()) if word],
    }
    return {name: values for name, values in found.items() if values}


def _take(raw: RawRequest, parameters: dict[str, Any], name: str) -> Any:  # noqa: ANN401 - as the caller wrote it
    given = [found for found in (parameters.pop(name, None), raw.parameters.get(name)) if found is not None]
    if len(given) > 1 and given[0] != given[1]:
        raise InvalidInput(f"{name}: given in sampling_parameters and as a request parameter; give it once")
    return given[0] if given else None


def _measure(name: str, text: Any, most: int) -> None:  # noqa: ANN401
    """Refuse a text of too many bytes; values that are no text were measured with the text they came in."""
    if not isinstance(text, str):
        return
    # A character is one byte at least and four at most: only what may be too long is counted in full.
    if len(text) > most or (len(text) * 4 > most and len(text.encode()) > most):
        raise InvalidInput(f"{name}: at most {most} bytes are taken, found {len(text.encode())}")


def _prompt(prompt: str | None, most: int, *, strict: bool) -> str:
    if prompt is None:
        raise InvalidInput("text_input: missing; give text_input, messages or embedding_request")
    if not prompt:
        raise InvalidInput("text_input: the prompt is empty; at least one token is needed")
    _measure("text_input", prompt, most)
    if strict and "\0" in prompt:
        raise InvalidInput(f"text_input: NUL character at position {prompt.index(chr(0))}")
    return prompt


def _is_transport(key: str) -> bool:
    """Forwarded headers ("x-…") and Triton's own marks arrive among the parameters too."""
    return "-" in key or key.startswith("triton_")


def _timeout(parameters: dict[str, Any]) -> float | None:
    """Return the shortest that any of :data:`TIMEOUTS` says, in seconds; 0 means none."""
    found = []
    for name, units in TIMEOUTS.items():
        value = parameters.get(name)
        if value is None or (value == 0 and not isinstance(value, bool)):
            continue
        number = _number(name, value) / units
        if not 0 < number <= MAX_TIMEOUT_S:
            raise InvalidInput(f"{name}: must be between 0 and {MAX_TIMEOUT_S * units:.0f}, found {value!r:.100}")
        found.append(number)
    return min(found, default=None)


def _number(name: str, value: Any) -> float:  # noqa: ANN401
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidInput(f"{name}: expected a number, found {value!r:.100}")
    return number


def _priority(value: Any) -> int:  # noqa: ANN401
    number = _number("priority", value)
    if number != int(number) or abs(number) > MAX_PRIORITY:
        raise InvalidInput(f"priority: expected a whole number of at most 31 bits, found {value!r}")
    return int(number)


def _flag(parameters: dict[str, Any], name: str) -> bool:
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise InvalidInput(f"{name}: expected true or false, found {value!r}")
    return value


def _text(parameters: dict[str, Any], name: str, limit: int = 256) -> str:
    value = parameters.get(name, "")
    if not isinstance(value, str) or len(value) > limit:
        raise InvalidInput(f"{name}: expected a text of at most {limit} characters")
    return value
