"""The sampling parameters of the simulated engine: names, types, defaults and rules of vLLM's ``SamplingParams``."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from triton_lifecycle.engine import Sampling
from triton_lifecycle.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping

GREEDY_BELOW = 1e-5
"""Temperatures below this mean: always the most likely token."""


def _integer_keys(value: Any) -> Any:  # noqa: ANN401 - whatever the caller sent
    """JSON has only text as keys; token ids written so are meant as numbers."""
    if isinstance(value, dict):
        return {int(k) if isinstance(k, str) and k.isascii() and k.isdigit() else k: v for k, v in value.items()}
    return value


class Values(BaseModel):
    """One request's sampling parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    n: int = Field(1, ge=1, le=16_384)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, allow_inf_nan=False)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = Field(16, ge=1)
    min_tokens: int = Field(0, ge=0)
    logprobs: int | None = Field(None, ge=-1)
    prompt_logprobs: int | None = Field(None, ge=-1)
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_integer_keys)] = None
    bad_words: list[str] | None = None

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def greedy(self) -> bool:
        """Whether always the most likely token is taken."""
        return self.temperature < GREEDY_BELOW

    @model_validator(mode="after")
    def _together(self) -> Values:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}")
        if not all(self.stops):
            raise ValueError("stop cannot contain an empty string")
        if self.stops and not self.detokenize:
            raise ValueError("stop strings need detokenize to be true")
        if not all(self.bad_words or []):
            raise ValueError("bad_words cannot contain an empty string")
        if self.greedy and self.n > 1:
            raise ValueError(f"n must be 1 with temperature 0, got {self.n}")
        return self


FIELDS: Mapping[str, Any] = {name: field.annotation for name, field in Values.model_fields.items()}
"""Name → type of every parameter."""


def parse(values: Mapping[str, Any], *, vocab_size: int, max_logprobs: int) -> Sampling:
    """Check sampling parameters against their own rules and the model's.

    Raises:
        InvalidInput: naming each field that is wrong, its value and the rule.

    """
    try:
        native = Values.model_validate(dict(values))
    except ValidationError as error:
        found = {str(e["loc"][0]) if e["loc"] else "": e for e in reversed(error.errors())}
        raise InvalidInput("; ".join(_explain(name, e) for name, e in reversed(found.items()))) from None
    for name, ids in (("stop_token_ids", native.stop_token_ids), ("logit_bias", native.logit_bias)):
        if outside := [i for i in ids or () if not 0 <= i < vocab_size]:
            raise InvalidInput(f"{name}: token ids {outside[:5]} are outside the vocabulary (0 … {vocab_size - 1})")
    for name, asked in (("logprobs", native.logprobs), ("prompt_logprobs", native.prompt_logprobs)):
        if asked is not None and (vocab_size if asked == -1 else asked) > max_logprobs:
            raise InvalidInput(f"{name}: {asked} asks for more than the {max_logprobs} that this model allows")
    return Sampling(n=native.n, max_tokens=native.max_tokens, native=native)


def _explain(name: str, problem: Any) -> str:  # noqa: ANN401 - pydantic's ErrorDetails
    if problem["type"] == "extra_forbidden":
        near = get_close_matches(name, FIELDS, 1)
        return f"{name} is not a sampling parameter" + (f"; did you mean {near[0]}?" if near else "")
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    return f"{name}: {problem['msg']} (found {problem['input']!r:.60})"
