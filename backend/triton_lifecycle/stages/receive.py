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
from triton_lifecycle.errors import InvalidInput, Unsupported
from triton_lifecycle.sampling import parse_object
from triton_lifecycle.timeouts.limits import choose
from triton_lifecycle.triton import RawRequest

OURS: Final = frozenset(
    {"id", "timeout", "timeout_ms", "priority", "request_priority", "tenant", "traceparent", "control", "control_id"}
)
"""Request parameters that steer the request's life and are never sampling parameters. (Triton's HTTP front end copies
the ``id`` of a generate request into its parameters.)"""

OFF_LOOP_CHARS: Final = 64 * 1024
"""Texts longer than this are parsed in a thread."""

MAX_TIMEOUT_S: Final = 7 * 24 * 3600.0
MAX_PRIORITY: Final = 2**31 - 1


class Receive:
    """Reads, measures and types a request's values; behind it nothing is text that might be wrong."""

    def __init__(self, limits: RequestLimits, timeouts: TimeoutHandling) -> None:
        self._limits = limits
        self._timeouts = timeouts

    async def __call__(self, ctx: Context) -> None:
        """Fill the metadata and input layers, and start the deadline: all that follows counts.

        Raises:
            InvalidInput: a value breaks a rule; the message names the field.
            Unsupported: the request asks for what this release or model does not do.

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
        )
        ctx.start_deadline(choose(self._timeouts, ctx.metadata.timeout))
        large = any(isinstance(value, str) and len(value) > OFF_LOOP_CHARS for value in raw.tensors.values())
        read = functools.partial(self._input, raw, stream=stream)
        ctx.input = await asyncio.to_thread(read) if large else read()

    def _input(self, raw: RawRequest, *, stream: bool) -> Input:
        if raw.tensors.get("image"):
            raise Unsupported("image: not supported by the loaded model")
        parameters = self._parameters(raw)
        source = self._source(raw, parameters)
        exclude = raw.tensors.get("exclude_input_in_output")
        if stream and exclude is False:
            # The official backend's own words, which its users may match on.
            raise InvalidInput("When streaming, `exclude_input_in_output` = False is not allowed.")
        if exclude is None:
            exclude = stream or not isinstance(source, str)
        return Input(
            source=source,
            parameters=parameters,
            wants=Wants(**{name: bool(raw.tensors.get(f"return_{name}", False)) for name in Wants.__struct_fields__}),
            exclude_prompt=bool(exclude),
        )

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
        return _prompt(prompt, most)

    def _parameters(self, raw: RawRequest) -> dict[str, Any]:
        most = self._limits.max_parameters_bytes
        text = raw.tensors.get("sampling_parameters")
        if text is None:
            parameters = {k: v for k, v in raw.parameters.items() if k not in OURS and not _is_transport(k)}
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


def _prompt(prompt: str | None, most: int) -> str:
    if prompt is None:
        raise InvalidInput("text_input: missing; give text_input, messages or embedding_request")
    if not prompt:
        raise InvalidInput("text_input: the prompt is empty; at least one token is needed")
    _measure("text_input", prompt, most)
    if "\0" in prompt:
        raise InvalidInput(f"text_input: NUL character at position {prompt.index(chr(0))}")
    return prompt


def _is_transport(key: str) -> bool:
    """Forwarded headers ("x-…") and Triton's own marks arrive among the parameters too."""
    return "-" in key or key.startswith("triton_")


def _timeout(parameters: dict[str, Any]) -> float | None:
    """Return the shorter of ``timeout`` (µs, as in Triton) and ``timeout_ms``, in seconds; 0 means none."""
    found = []
    for name, scale in (("timeout", 1e-6), ("timeout_ms", 1e-3)):
        value = parameters.get(name)
        if value is None or (value == 0 and not isinstance(value, bool)):
            continue
        number = _number(name, value) * scale
        if not 0 < number <= MAX_TIMEOUT_S:
            raise InvalidInput(f"{name}: must be between 0 and {MAX_TIMEOUT_S / scale:.0f}, found {value!r}")
        found.append(number)
    return min(found, default=None)


def _number(name: str, value: Any) -> float:  # noqa: ANN401
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidInput(f"{name}: expected a number, found {value!r}")
    return number


def _priority(value: Any) -> int:  # noqa: ANN401
    number = _number("priority", value)
    if number != int(number) or abs(number) > MAX_PRIORITY:
        raise InvalidInput(f"priority: expected a whole number of at most 31 bits, found {value!r}")
    return int(number)


def _text(parameters: dict[str, Any], name: str, limit: int = 256) -> str:
    value = parameters.get(name, "")
    if not isinstance(value, str) or len(value) > limit:
        raise InvalidInput(f"{name}: expected a text of at most {limit} characters")
    return value
