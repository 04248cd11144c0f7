"""How well is a request's time predicted? ``python -m load.prediction`` tells.

Two recorded worlds: a trace of the real engine (``load/traces``, made by ``python -m load.traces.record``), and the
simulated engine in virtual time, both under load steps with prompts and answers of mixed lengths. Each request is
predicted when it was admitted, by a model that has learned from exactly those that had ended by then. Beside the two
models stand a plain running mean, and a fixed timeout.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import numpy as np
from tests.fakes import pb_utils
from tests.fakes.harness import Harness

from load import traces
from triton_lifecycle.config import Config
from triton_lifecycle.engine.simulated import SimulatedEngine
from triton_lifecycle.simulation.virtual_time import run
from triton_lifecycle.timeouts.predictor import Features, Interval, Observation, Online, Prediction
from triton_lifecycle.timeouts.predictor.online import COLD, Model

KINDS: Final = Prediction.__struct_fields__
FIXED_S: Final = 30.0
ONE_STEP_S: Final = 0.01
STEPS_A_SECOND: Final = 40.0
"""Any number: it keeps the values of one order."""
SIMULATED: Final[dict[str, Any]] = {
    "max_num_seqs": 32,
    "base_ms": 20.0,
    "per_sequence_us": 1000.0,
    "prefill_tokens_per_s": 4000.0,
    "token_sigma": 0.05,
    "first_token_sigma": 0.05,
    "max_num_batched_tokens": 2048,
    "mean_output_tokens": 40.0,
    "prefix_cache": False,
    "kv_blocks": 8192,
}
SIMULATED_STEPS: Final = (2, 8, 1, 16, 4, 32, 12, 48, 24, 8, 16, 4)


class Predicting(Protocol):
    """What is compared."""

    def predict(self, features: Features) -> Prediction | None:
        """Return what a request will take."""
        ...

    def learn(self, seen: Observation, told: Prediction | None) -> None:
        """Take in what one took."""
        ...


class RunningMean:
    """The mean of the last 200, whatever the load; nine in ten of them lie within the interval."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[float]] = {kind: deque(maxlen=200) for kind in KINDS}

    def predict(self, features: Features) -> Prediction | None:  # noqa: ARG002 - it looks at nothing
        """Return the means."""
        if any(len(seen) < COLD for seen in self._seen.values()):
            return None
        return Prediction(*[_spread(sorted(self._seen[kind])) for kind in KINDS])

    def learn(self, seen: Observation, told: Prediction | None) -> None:  # noqa: ARG002
        """Take in one request."""
        for kind in KINDS:
            if (value := getattr(seen, kind)) is not None:
                self._seen[kind].append(value)


def _spread(ordered: list[float]) -> Interval:
    last = len(ordered) - 1
    low, high = ordered[round(0.05 * last)], ordered[round(0.95 * last)]
    return Interval(sum(ordered) / len(ordered), low, high, low, high)


class Score(msgspec.Struct):
    """How one of them did."""

    name: str
    mape: dict[str, float]
    coverage: dict[str, float]
    predict_us: float
    learn_us: float


def judge(name: str, model: Predicting, seen: list[Observation]) -> Score:
    """Let a model meet the requests as they were admitted and ended."""
    moments = [(each.admitted, 1, index) for index, each in enumerate(seen)]
    moments += [(each.ended, 0, index) for index, each in enumerate(seen)]
    told: dict[int, Prediction | None] = {}
    errors: dict[str, list[float]] = {kind: [] for kind in KINDS}
    inside: dict[str, list[bool]] = {kind: [] for kind in KINDS}
    predicting = learning = 0.0
    for _, admitted, index in sorted(moments):
        began = time.perf_counter()
        if admitted:
            told[index] = model.predict(seen[index].features)
            predicting += time.perf_counter() - began
            continue
        model.learn(seen[index], told[index])
        learning += time.perf_counter() - began
        for kind in KINDS:
            actual, made = getattr(seen[index], kind), told[index]
            if actual and made is not None:
                interval = getattr(made, kind)
                errors[kind].append(abs(interval.value - actual) / actual)
                inside[kind].append(interval.low <= actual <= interval.high)
    return Score(
        name=name,
        mape={kind: 100 * _mean(errors[kind]) for kind in KINDS},
        coverage={kind: 100 * _mean(inside[kind]) for kind in KINDS},
        predict_us=predicting / len(seen) * 1e6,
        learn_us=learning / len(seen) * 1e6,
    )


def judge_met(model: Model, seen: list[Observation], slots: int) -> Score:
    """Judge a model that is told the load: up to the first token for this one, over the whole life for the rest."""
    first, rest = (judge(f"{model}, met", Online(model, slots), met(seen, whole=whole)) for whole in (False, True))
    return msgspec.structs.replace(
        rest,
        mape=rest.mape | {"first_token": first.mape["first_token"]},
        coverage=rest.coverage | {"first_token": first.coverage["first_token"]},
    )


def _mean(values: list[Any]) -> float:
    return sum(values) / len(values) if values else float("nan")


def simulate(requests_per_step: int, seed: int = 1) -> list[Observation]:
    """Return what the simulated engine did under load steps, in the order of the requests' ends."""
    return run(_simulated, requests_per_step, seed)


async def _simulated(requests_per_step: int, seed: int) -> list[Observation]:
    engine = SimulatedEngine.from_settings(SIMULATED)
    await engine.start()
    harness = Harness(Config(), engine)
    assert harness.predictor is not None  # noqa: S101 - the default configuration has one
    chance = random.Random(seed)  # noqa: S311 - repeatable, not secret
    observations: list[Observation] = []
    number = 0
    for callers in SIMULATED_STEPS:
        left = max(requests_per_step, 2 * callers)

        async def caller() -> None:
            nonlocal left, number
            while left > 0:
                left -= 1
                number += 1
                # The first word tells every prompt from the others.
                words = [f"w{number}", *["river"] * chance.choice((8, 32, 64, 128, 256, 512))]
                parameters = {"max_tokens": chance.choice((4, 8, 16, 32, 64)), "temperature": 1.0}
                await harness.serve(
                    pb_utils.InferenceRequest({"text_input": " ".join(words), "stream": True}, parameters, f"{number}")
                )

        await asyncio.gather(*[caller() for _ in range(callers)])
        before = observations[-1].ended if observations else 0.0
        observations += [seen for seen in harness.predictor.kept if seen.ended > before]
    await harness.close()
    return observations


def met(seen: list[Observation], *, whole: bool) -> list[Observation]:
    """Let each request's features tell the load that it lived under: known only in the end, from the others' times.

    Prompt tokens of others by step, not by second: by second would tell the time that is to be predicted.

    Args:
        seen: the requests.
        whole: whether sequences are counted over the request's whole life, or up to its first token.

    """
    admitted = np.array([each.admitted for each in seen])
    ended = np.array([each.ended for each in seen])
    first = np.array([each.admitted + (each.first_token or 0.0) for each in seen])
    prompts = np.array([each.features.prompt_tokens for each in seen])
    found = []
    for index, each in enumerate(seen):
        until = ended[index] if whole else first[index]
        lived = until - admitted[index]
        overlap = np.minimum(ended, until) - np.maximum(admitted, admitted[index])
        others = float(np.clip(overlap, 0, None).sum()) / lived - 1 if lived > 0 else 0.0
        # First tokens of one step come within some milliseconds.
        before = (first > admitted[index]) & (first <= first[index] + ONE_STEP_S)
        during = (first > first[index] + ONE_STEP_S) & (first <= ended[index] + ONE_STEP_S)
        features = msgspec.structs.replace(
            each.features,
            running=max(0.0, others),
            waiting=0.0,
            pending=float(prompts[before].sum()) - each.features.prompt_tokens,
            arriving=float(prompts[during].sum()) / max(1.0, (each.tokens or 1.0) - 1) * STEPS_A_SECOND,
        )
        found.append(msgspec.structs.replace(each, features=features))
    return found


def report(title: str, seen: list[Observation], slots: int) -> list[Score]:
    """Judge everybody on one world, and print a table."""
    fixed = 100 * _mean([abs(FIXED_S - each.total) / each.total for each in seen if each.total])
    within = 100 * _mean([each.total <= FIXED_S for each in seen if each.total])
    scores = [
        judge("linear", Online("linear", slots), seen),
        judge("ml", Online("ml", slots), seen),
        judge("running mean", RunningMean(), seen),
        judge_met("linear", seen, slots),
        judge_met("ml", seen, slots),
    ]
    print(f"\n{title}: {len(seen)} requests")
    print(f"{'':14}{'MAPE %':^33}{'coverage of the 90 % interval %':^36}{'µs':^16}")
    names = f"{'first':>9}{'per token':>12}{'total':>9}"
    print(f"{'':14}{names}   {names}      predict learn")
    for score in scores:
        cells = "".join(f"{score.mape[kind]:>{width}.1f}" for kind, width in zip(KINDS, (9, 12, 9), strict=True))
        covered = "".join(f"{score.coverage[kind]:>{width}.1f}" for kind, width in zip(KINDS, (9, 12, 9), strict=True))
        print(f"{score.name:14}{cells}   {covered}      {score.predict_us:7.1f}{score.learn_us:6.0f}")
    print(f"{f'fixed {FIXED_S:g} s':14}{'-':>9}{'-':>12}{fixed:>9.0f}   {'-':>9}{'-':>12}{within:>9.1f}")
    return scores


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=traces.FOLDER / "smollm2.csv", help="recorded from a real engine")
    parser.add_argument("--slots", type=int, default=64, help="max_num_seqs of the engine that was recorded")
    parser.add_argument("--requests", type=int, default=200, help="simulated requests in each load step")
    options = parser.parse_args(arguments)
    report(f"real engine ({options.trace.name})", traces.read(options.trace), options.slots)
    report("simulated engine", simulate(options.requests), int(SIMULATED["max_num_seqs"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
