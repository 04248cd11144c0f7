"""What can be set about the simulated engine: the content of its ``model.json``."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from triton_lifecycle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class When(BaseModel):
    """Which requests a fault strikes: those that meet every condition given."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    nth_request: Count | None = None
    """The n-th request, counted from 1 over the life of the engine object, restarts included."""
    prompt_contains: Annotated[str, Field(min_length=1)] | None = None
    probability: Annotated[float, Field(gt=0, le=1)] | None = None
    """Drawn once per request from the seed, so that the same run strikes the same requests."""
    token: Count | None = None
    """Strike once the request has made this many tokens, those of earlier attempts included; without it, before its
    first token."""

    @property
    def anything(self) -> bool:
        """Whether no condition is given at all."""
        return self == When()


class Fault(BaseModel):
    """Something that goes wrong."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    do: Literal["raise", "stall", "die", "slow"]
    """``raise`` fails the request; ``stall`` stops all tokens for ``for_s``; ``slow`` stretches the steps of ``for_s``
    by ``factor``; ``die`` ends every request and the engine."""
    on: When = When()
    for_s: Positive | None = None
    factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    times: Count | None = None
    """How many requests it may strike; ``None`` means all that match."""

    @model_validator(mode="after")
    def _complete(self) -> Fault:
        if self.do in {"stall", "slow"} and self.for_s is None:
            raise ValueError(f"do: {self.do} needs for_s (seconds)")
        if self.do == "slow" and self.factor is None:
            raise ValueError("do: slow needs factor (> 1)")
        return self


class SimulatedSettings(BaseModel):
    """All settings; each has a default, so ``{}`` is a working engine."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    seed: int = 0
    max_model_len: Annotated[int, Field(ge=2)] = 2048
    vocab_size: Annotated[int, Field(ge=1024, le=200_000)] = 2048
    max_num_seqs: Count = 64
    """Sequences that run at once; further ones wait."""
    max_num_batched_tokens: Count = 2048
    """Tokens that one step may compute: the budget of chunked prefill."""
    block_size: Count = 16
    kv_blocks: Count = 4096
    prefix_cache: bool = True
    max_logprobs: Annotated[int, Field(ge=0)] = 20
    image_tokens: Annotated[int, Field(ge=0)] = 0
    """What an image adds to the prompt, before its text; 0 for a model that takes no images."""

    base_ms: NotNegative = 5.0
    """Duration of a step apart from what follows."""
    per_sequence_us: NotNegative = 50.0
    """What each sequence of the batch adds to a step."""
    prefill_tokens_per_s: Positive = 20_000.0
    """What each prompt token adds to a step, as a rate."""
    tokens_per_s: Positive | None = None
    """All sequences together, at any load; in the place of ``base_ms`` and ``per_sequence_us``."""
    token_sigma: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Spread of the step's duration (sigma of a lognormal factor with mean 1)."""
    first_token_sigma: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Spread of the prefill's duration, likewise."""
    max_lag_ms: NotNegative = 4.0
    """Steps shorter than this are run several at one wake-up, so that 50,000 tokens/s cost little."""

    mean_output_tokens: Positive | None = 200.0
    """Mean of the natural length (geometric: an end that depended on where the answer began could not be continued
    exactly); ``None`` means that only ``max_tokens`` ends an answer."""
    startup_s: NotNegative = 0.0
    faults: Annotated[tuple[Fault, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _consistent(self) -> SimulatedSettings:
        problems = []
        if self.kv_blocks * self.block_size < self.max_model_len:
            problems.append(
                f"kv_blocks * block_size is {self.kv_blocks * self.block_size}, less than max_model_len "
                f"{self.max_model_len}: the longest request would never fit"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            problems.append(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): each running sequence needs one token a step"
            )
        if self.tokens_per_s is not None and self.model_fields_set & {"base_ms", "per_sequence_us"}:
            problems.append("tokens_per_s stands in the place of base_ms and per_sequence_us: give one or the other")
        problems += [
            f"faults.{i}: name at least one condition under 'on' (faults without one are for engine.inject())"
            for i, fault in enumerate(self.faults)
            if fault.on.anything
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def step_cost(self) -> tuple[float, float]:
        """Seconds per step, and per sequence in it."""
        if self.tokens_per_s is not None:
            return 0.0, 1.0 / self.tokens_per_s
        return self.base_ms / 1e3, self.per_sequence_us / 1e6


def parse(values: Mapping[str, Any]) -> SimulatedSettings:
    """Check the content of a ``model.json``.

    Raises:
        ConfigError: the message lists every problem with its path.

    """
    try:
        return SimulatedSettings.model_validate(dict(values))
    except ValidationError as error:
        lines = [f"  {_where(e['loc'])}: {_what(e)}" for e in error.errors()]
        raise ConfigError(f"model.json (simulated engine): {len(lines)} problem(s):\n" + "\n".join(lines)) from None


def _where(loc: tuple[int | str, ...]) -> str:
    return ".".join(map(str, loc)) or "(all)"


def _what(problem: Any) -> str:  # noqa: ANN401 - pydantic's ErrorDetails
    if problem["type"] == "extra_forbidden":
        near = get_close_matches(str(problem["loc"][-1]), list(SimulatedSettings.model_fields), 1)
        return "unknown key" + (f"; did you mean {near[0]}?" if near else "")
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    return f"{problem['msg']} (found {problem['input']!r:.60})"
