"""Stage 1: from tensors and parameters to frozen metadata and input; every value is parsed once, here."""

from __future__ import annotations

import math
from typing import Any, Final

from triton_lifecycle.context import Context, Input, Metadata, Wants
from triton_lifecycle.errors import InvalidInput, Unsupported
from triton_lifecycle.sampling import parse_object
from triton_lifecycle.triton import RawRequest

OURS: Final = frozenset(
    {"id", "timeout", "timeout_ms", "priority", "request_priority", "tenant", "traceparent", "control", "control_id"}
)
"""Request parameters that steer the request's life and are never sampling parameters. (Triton's HTTP front end copies
the ``id`` of a generate request into its parameters.)"""

MAX_TIMEOUT_S: Final = 7 * 24 * 3600.0
MAX_PRIORITY: Final = 2**31 - 1


async def receive(ctx: Context) -> None:
    """Fill the metadata and input layers.

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
    ctx.input = _input(raw, stream=stream)


def _input(raw: RawRequest, *, stream: bool) -> Input:
    for name in ("image", "embedding_request"):
        if raw.tensors.get(name):
            raise Unsupported(f"{name}: not supported by the loaded model")
    prompt = raw.tensors.get("text_input")
    if prompt is None:
        raise InvalidInput("text_input: missing")
    if not prompt:
        raise InvalidInput("text_input: the prompt is empty; at least one token is needed")
    if "\0" in prompt:
        raise InvalidInput(f"text_input: NUL character at position {prompt.index(chr(0))}")
    exclude = raw.tensors.get("exclude_input_in_output")
    if stream and exclude is False:
        # The official backend's own words, which its users may match on.
        raise InvalidInput("When streaming, `exclude_input_in_output` = False is not allowed.")
    return Input(
        prompt=prompt,
        parameters=_sampling_parameters(raw),
        wants=Wants(**{name: bool(raw.tensors.get(f"return_{name}", False)) for name in Wants.__struct_fields__}),
        exclude_prompt=stream if exclude is None else bool(exclude),
    )


def _sampling_parameters(raw: RawRequest) -> dict[str, Any]:
    text = raw.tensors.get("sampling_parameters")
    if text is not None:
        return parse_object("sampling_parameters", text)
    return {key: value for key, value in raw.parameters.items() if key not in OURS and not _is_transport(key)}


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
