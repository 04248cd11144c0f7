"""What reading and proving a request costs, without Triton and without an engine: ``python -m load.validation``.

The stages ``receive`` and ``preprocess`` run on a request that lies ready in memory, with vLLM's own SamplingParams.
What Triton's objects cost to read is not in it, nor is tokenizing.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from triton_lifecycle.bus import NoBus
from triton_lifecycle.config import RequestLimits, TimeoutHandling
from triton_lifecycle.context import Contexts
from triton_lifecycle.engine import Limits
from triton_lifecycle.engine.vllm import VLLMEngine
from triton_lifecycle.stages.preprocess import Preprocess
from triton_lifecycle.stages.receive import Receive
from triton_lifecycle.triton import RawRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

ROUNDS = 5
TIMES = 2000
AIM_US = 100.0

REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {
        "text_input": "The capital of France is",
        "sampling_parameters": json.dumps({"max_tokens": 16, "temperature": 0.7}),
    },
    "every output, ten parameters": {
        "text_input": "The capital of France is",
        "return_finish_reason": True,
        "return_logprobs": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "sampling_parameters": json.dumps(
            {
                "max_tokens": "16",
                "temperature": "0.7",
                "top_p": 0.9,
                "top_k": 40,
                "min_p": 0.01,
                "seed": 7,
                "stop": ["a", "b"],
                "presence_penalty": 0.1,
                "logprobs": 2,
                "ignore_eos": "false",
            }
        ),
    },
    "100 kB prompt": {"text_input": "word " * 20_000, "sampling_parameters": '{"max_tokens": 16}'},
}


class Ready:
    """Stands where a Triton request is: its values lie ready."""

    id = ""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._raw = RawRequest({"stream": True, **tensors}, {})

    def read(self) -> RawRequest:
        """Return the values."""
        return self._raw


async def measure(engine: VLLMEngine, tensors: Mapping[str, Any]) -> float:
    """Return the median microseconds of both stages."""
    contexts, limits = Contexts(), RequestLimits()
    receive, preprocess = Receive(limits, TimeoutHandling(enabled=False)), Preprocess(engine, limits)
    took = []
    for _ in range(TIMES):
        ctx = contexts.open(Ready(tensors), "model", NoBus())
        began = time.perf_counter()
        await receive(ctx)
        await preprocess(ctx)
        took.append(time.perf_counter() - began)
        contexts = Contexts()
    return statistics.median(took) * 1e6


def main() -> None:
    """Measure in turn, several rounds, and print the table."""
    engine = VLLMEngine({"model": "none"}, ".")
    engine._limits = Limits(max_model_len=4096, vocab_size=49_152)  # noqa: SLF001 - an engine that is never started
    found: dict[str, list[float]] = {name: [] for name in REQUESTS}
    for _ in range(ROUNDS):
        for name, tensors in REQUESTS.items():
            found[name].append(asyncio.run(measure(engine, tensors)))
    table = Table(title=f"Validation of a request, {ROUNDS} rounds of {TIMES}")
    table.add_column("request")
    table.add_column("µs, median (lowest…highest)", justify="right")
    for name, took in found.items():
        table.add_row(name, f"{np.median(took):.0f} ({min(took):.0f}…{max(took):.0f})")
    console = Console()
    console.print(table)
    verdict = "met" if np.median(found["plain"]) <= AIM_US else "missed"
    console.print(f"plain: {np.median(found['plain']):.0f} µs; aim ≤ {AIM_US:.0f} µs: {verdict}")


if __name__ == "__main__":
    main()
