"""Every field of vLLM's ``SamplingParams``, read from vLLM itself: one legal value is served, illegal ones are refused.

A vLLM with another set of fields fails the first test until the new field has its line here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.subjects import Real
from tests.contract.test_engine_contract import _ids

from triton_lifecycle.engine import Chunk, Engine, EngineRequest
from triton_lifecycle.errors import InvalidInput, RequestError
from triton_lifecycle.sampling import type_values

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.real_engine

PROMPT = "The capital of France is"
HUGE = 10**9

FIELDS: dict[str, tuple[Any, list[Any]]] = {
    "n": (2, [0, -1, 1.5, "x", None, HUGE]),
    "presence_penalty": (0.5, [3, "x", [1]]),
    "frequency_penalty": (-0.5, [-3, "x"]),
    "repetition_penalty": (1.1, [0, -1, "x"]),
    "temperature": ("0.7", [-1, "hot", True]),
    "watermarking": (False, ["x", 5]),
    "top_p": (0.9, [0, 1.5, "x"]),
    "top_k": (5, [-2, 1.5, "x"]),
    "min_p": (0.1, [-0.1, 1.5, "x"]),
    "seed": (7, [1.5, "x"]),
    "stop": (["x", "y"], [5, [5], [""]]),
    "stop_token_ids": ([5], [[HUGE], [-1], [None], ["a"], 5]),
    "ignore_eos": ("false", ["maybe", 5]),
    "max_tokens": (2, [0, -1, 1.5, "abc", True]),
    "min_tokens": (1, [-1, 3, "x"]),
    "logprobs": (2, [-2, HUGE, "x"]),
    "prompt_logprobs": (2, [-2, HUGE, "x"]),
    "prompt_logprob_token_ids": (None, [[[5]], "x", [[HUGE]]]),
    "prompt_logprob_start": (None, ["x", -1]),
    "logprob_token_ids": ([5, 6], [[HUGE], [-1], "x"]),
    "flat_logprobs": (False, ["x"]),
    "detokenize": (True, ["x"]),
    "skip_special_tokens": (False, ["x"]),
    "spaces_between_special_tokens": (False, ["x"]),
    "include_stop_str_in_output": (True, ["x"]),
    "stream_interval": (2, [0, "x"]),
    "structured_outputs": ({"choice": ["a", "b"]}, [{}, {"json": "{"}, {"colour": "red"}, "x", 5]),
    "guided_decoding": ({"regex": "[ab]"}, [{"regex": "("}, "x"]),
    "logit_bias": ({"5": 1.0}, [{str(HUGE): 1.0}, {"a": 1.0}, {"5": "x"}, 5]),
    "allowed_token_ids": ([5, 6], [[], [HUGE], [-1], "x"]),
    "bad_words": (["x"], [5, [5], [""]]),
    "skip_reading_prefix_cache": (True, ["x"]),
    "thinking_token_budget": (None, ["x", 5]),
    "repetition_detection": (None, [5, {"max_pattern_size": -1}]),
    "routed_experts_prompt_start": (0, ["x", -1]),
    "trace_decode_token_ids": (None, [[HUGE], "x"]),
    "lora_name": (None, ["nobody", 5]),
}
"""By field: a legal value (with ``None`` where this engine takes no other), and illegal ones."""


async def serve(engine: Engine, values: Mapping[str, Any]) -> list[Chunk]:
    """Do what the stages do with sampling parameters, and read the answer."""
    sampling = engine.sampling(type_values(values, engine.sampling_fields))
    if sampling.structured:
        await engine.prove(sampling, 10.0)
    request = EngineRequest(f"fields-{next(_ids)}", await engine.tokenize(PROMPT), sampling)
    return [chunk async for chunk in engine.generate(request)]


def test_every_field_has_its_line(real: Real):
    """The table above names exactly the fields of the installed vLLM."""

    async def body(engine: Engine) -> None:
        assert set(FIELDS) == set(engine.sampling_fields)

    real.run(body)


@pytest.mark.parametrize("field", FIELDS)
def test_a_legal_value_is_served(real: Real, field: str):
    """It is typed, taken by vLLM, and the request ends by itself."""

    async def body(engine: Engine) -> None:
        got = await serve(engine, {"max_tokens": 2, field: FIELDS[field][0]})
        assert got[-1].finished

    real.run(body)


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, (_, bad) in FIELDS.items() for value in bad])
def test_an_illegal_value_is_the_callers_fault(real: Real, field: str, value: Any):
    """Refused as bad input, before anything is made, and the engine serves the next request."""

    async def body(engine: Engine) -> None:
        with pytest.raises(RequestError) as caught:
            await serve(engine, {"max_tokens": 2, field: value})
        assert isinstance(caught.value, InvalidInput) or field == "lora_name"
        assert len(caught.value.message) < 600
        assert (await serve(engine, {"max_tokens": 1}))[-1].finished

    real.run(body)
