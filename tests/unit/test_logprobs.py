"""What vLLM reports of probabilities, on its way to JSON."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from triton_lifecycle.engine.vllm import _chunk


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@pytest.mark.parametrize("value", [float("-inf"), float("inf"), float("nan")])
def test_what_json_cannot_write_becomes_null(value: float):
    """A token that may not come has minus infinity; the answer stays valid JSON."""
    entry = {
        5: SimpleNamespace(logprob=-0.5, rank=1, decoded_token=" a"),
        6: SimpleNamespace(logprob=value, rank=2, decoded_token=" b"),
    }
    completion = SimpleNamespace(
        index=0, text=" a", token_ids=[5], finish_reason="length", cumulative_logprob=-0.5, logprobs=[entry]
    )
    output = SimpleNamespace(
        outputs=[completion], finished=True, metrics=None, num_cached_tokens=0, prompt_token_ids=[1, 2]
    )
    [delta] = _chunk(output).deltas
    assert json.loads(json.dumps(delta.logprobs), parse_constant=refuse) == [
        {
            "5": {"logprob": -0.5, "rank": 1, "decoded_token": " a"},
            "6": {"logprob": None, "rank": 2, "decoded_token": " b"},
        }
    ]
