"""Sampling parameters: from JSON text to values of the types that the engine declares."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from triton_lifecycle.errors import InvalidInput


def parse_object(field: str, text: str) -> dict[str, Any]:
    """Parse a JSON object; an empty text counts as an empty object, as it does for the official backend's clients.

    Raises:
        InvalidInput: the text is not JSON, not an object, or holds NaN or an infinity.

    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{field}: not valid JSON: {error} (found {_short(text)})") from None
    if not isinstance(value, dict):
        raise InvalidInput(f"{field}: expected a JSON object, found {_kind(value)}")
    return value


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
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(fields))}"
            raise InvalidInput(f"sampling_parameters: unknown key {_short(name)}{hint}")
        typed[name] = _convert(name, value, fields[name])
    return typed


def _convert(name: str, value: Any, declared: Any) -> Any:  # noqa: ANN401
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidInput(f"sampling_parameters.{name}: must be finite, found {value}")
    try:
        return msgspec.convert(value, declared, strict=isinstance(value, bool))
    except msgspec.ValidationError as error:
        reason = str(error).replace("`", "")
        raise InvalidInput(
            f"sampling_parameters.{name}: {reason[:1].lower()}{reason[1:]}, found {_short(value)}"
        ) from None
    except TypeError:
        # A type that msgspec cannot judge (arrays, vLLM's own classes): the engine will.
        return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _kind(value: Any) -> str:  # noqa: ANN401
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list"}
    return names.get(type(value), type(value).__name__)


def _short(value: Any, limit: int = 60) -> str:  # noqa: ANN401
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else text[: limit - 1] + "…"
