"""Sampling parameters: from JSON text to values of the types that the engine declares."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from triton_lifecycle.errors import InvalidInput

MAX_DEPTH: Final = 64
MAX_PATH: Final = 120
MAX_VALUES: Final = 200_000
"""Far more than a model's length in token ids; checking so many takes 0.1 s."""
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

REQUEST_PARAMETERS: Final = frozenset(
    {
        "id",
        "timeout",
        "timeout_ms",
        "priority",
        "request_priority",
        "tenant",
        "traceparent",
        "tracestate",
        "control",
        "control_id",
        "control_token",
        "partial",
        "return_token_ids",
    }
)
"""Request parameters that steer the request's life and are never sampling parameters. (Triton's HTTP front end copies
the ``id`` of a generate request into its parameters.)"""


def parse_object(field: str, text: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        InvalidInput: the text is not JSON, not an object, or holds what :func:`check_plain` refuses.

    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{field}: not valid JSON: {error} (found {_short(text)})") from None
    if not isinstance(value, dict):
        raise InvalidInput(f"{field}: expected a JSON object, found {_kind(value)}")
    check_plain(field, value)
    return value


def as_type(field: str, value: Any, kind: Any, *, strict: bool = True) -> Any:  # noqa: ANN401
    """Give plain values a declared type.

    Raises:
        InvalidInput: the message names the place, what was expected there and what was found.

    """
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).replace("`", "'").partition(" - at '$")
        raise InvalidInput(f"{field}{place.rstrip(chr(39))}: {reason[:1].lower()}{reason[1:]}") from None


def check_plain(field: str, value: Any) -> None:  # noqa: ANN401
    """Refuse what JSON can write but nothing behind it can carry: neither Triton's messages nor vLLM's.

    Raises:
        InvalidInput: half of a surrogate pair in a text, a number beyond 64 bits or beyond a float's range, more than
            :data:`MAX_DEPTH` levels or more than :data:`MAX_VALUES` values.

    """
    todo: list[tuple[Any, int, _Place | None]] = [(value, 0, None)]
    seen = 0
    while todo:
        item, depth, place = todo.pop()
        seen += 1
        if seen > MAX_VALUES:
            raise InvalidInput(f"{field}: more than {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            raise InvalidInput(f"{_path(field, place)}: nested deeper than {MAX_DEPTH} levels")
        if fault := _fault(item):
            raise InvalidInput(f"{_path(field, place)}: {fault}")
        if isinstance(item, dict):
            for key, element in item.items():
                if fault := _fault(key):
                    raise InvalidInput(f"{_path(field, place)}, a key: {fault}")
                todo.append((element, depth + 1, (place, key)))
        elif isinstance(item, list | tuple):
            if len(item) > MAX_VALUES:
                raise InvalidInput(f"{_path(field, place)}: more than {MAX_VALUES} values")
            todo.extend((element, depth + 1, (place, index)) for index, element in enumerate(item))


_Place = tuple[Any, str | int]
"""Where a value is: the place around it, and its key or position there. Written out only in a refusal."""


def _path(field: str, place: _Place | None) -> str:
    steps: list[str] = []
    while place is not None:
        place, step = place
        steps.append(f"[{step}]" if isinstance(step, int) else f".{step[:MAX_PATH]}")
    return f"{field}{''.join(reversed(steps))}"[:MAX_PATH]


def _fault(value: Any) -> str | None:  # noqa: ANN401
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return f"not valid Unicode: half of a surrogate pair at position {error.start}"
    elif isinstance(value, int) and not INT64_MIN <= value <= INT64_MAX:
        return f"must fit into 64 bits, found a number of {value.bit_length()} bits"
    elif isinstance(value, float) and not math.isfinite(value):
        return f"must be finite, found {value}"
    return None


def type_values(parameters: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Give each parameter the type that its engine declares; numbers and booleans may come as texts.

    Args:
        parameters: name → value as parsed from JSON.
        fields: name → type, from :attr:`Engine.sampling_fields`.

    Raises:
        InvalidInput: a name is unknown (the nearest known one is named) or a value does not fit its type.

    """
    typed = {}
    for name, value in parameters.items():
        if name not in fields:
            raise InvalidInput(f"sampling_parameters: unknown key {_short(name)}; {_instead(name, fields)}")
        typed[name] = _convert(name, value, fields[name])
    return typed


def _instead(name: str, fields: Iterable[str]) -> str:
    if name in REQUEST_PARAMETERS:
        return "it is a request parameter: send it beside sampling_parameters, not within"
    near = difflib.get_close_matches(name, [*fields, *REQUEST_PARAMETERS], n=1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(fields))}"


def _convert(name: str, value: Any, declared: Any) -> Any:  # noqa: ANN401
    try:
        typed = msgspec.convert(value, declared, strict=isinstance(value, bool))
    except msgspec.ValidationError as error:
        reason = str(error).replace("`", "")
        raise InvalidInput(
            f"sampling_parameters.{name}: {reason[:1].lower()}{reason[1:]}, found {_short(value)}"
        ) from None
    except OverflowError:
        raise InvalidInput(f"sampling_parameters.{name}: too large, found {_short(value)}") from None
    except TypeError:
        # A type that msgspec cannot judge (arrays, vLLM's own classes): the engine will.
        return value
    except Exception as error:  # noqa: BLE001 - what a class of the engine's finds wrong with its fields
        raise InvalidInput(f"sampling_parameters.{name}: {error}") from None
    # A text may have become a number only now.
    check_plain(f"sampling_parameters.{name}", typed)
    return typed


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _kind(value: Any) -> str:  # noqa: ANN401
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list"}
    return names.get(type(value), type(value).__name__)


def _short(value: Any, limit: int = 60) -> str:  # noqa: ANN401
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else text[: limit - 1] + "…"
