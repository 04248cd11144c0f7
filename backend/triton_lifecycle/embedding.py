"""Embedding requests: what the ``embedding_request`` tensor says, checked once."""

from __future__ import annotations

from typing import Any

import msgspec

from triton_lifecycle.errors import InvalidInput
from triton_lifecycle.sampling import as_type, parse_object


class Embedding(msgspec.Struct, frozen=True):
    """A text or token ids to be turned into one vector."""

    source: str | list[int]
    dimensions: int | None = None
    """Of the vector, for models that can shorten it; ``None`` means the model's own."""


class _Pooling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dimensions: int | list[int] | None = None


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    input: str | list[int]
    pooling_params: _Pooling | None = None


def parse(text: str) -> Embedding:
    """Read ``{"input": text or token ids, "pooling_params": {"dimensions": n or [n]}}``.

    Raises:
        InvalidInput: the message names the place, what was expected there and what was found.

    """
    document = parse_object("embedding_request", text)
    wire: _Wire = as_type("embedding_request", document, _Wire, strict=False)
    if not wire.input:
        raise InvalidInput("embedding_request.input: empty; at least one token is needed")
    if isinstance(wire.input, str) and "\0" in wire.input:
        raise InvalidInput(f"embedding_request.input: NUL character at position {wire.input.index(chr(0))}")
    return Embedding(wire.input, _dimensions(None if wire.pooling_params is None else wire.pooling_params.dimensions))


def _dimensions(value: Any) -> int | None:  # noqa: ANN401 - one number, or a list that holds one
    if isinstance(value, list):
        if len(value) != 1:
            raise InvalidInput(
                f"embedding_request.pooling_params.dimensions: expected one number, found a list of {len(value)}"
            )
        value = value[0]
    if value is not None and value < 1:
        raise InvalidInput(f"embedding_request.pooling_params.dimensions: must be at least 1, found {value}")
    return None if value is None else int(value)
