"""Variants of one thing that take turns in rounds, and what the difference between them is worth.

Every comparison has a variant that equals the first one: what lies between these two is the machine's own noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

import msgspec

from load.overhead.measure import percentile

COLUMNS: Final = ("tokens/s", "first token p50 ms", "first token p99 ms", "CPU µs per token")
"""What :func:`cells` fills."""


class Round(msgspec.Struct):
    """What one round measured; times in seconds."""

    tokens_per_s: float
    first_p50: float
    first_p99: float
    cpu_per_token: float


T = TypeVar("T")


def take_turns(variants: Iterable[str], rounds: int, run: Callable[[str], T]) -> dict[str, list[T]]:
    """Run every variant once a round: A B C, then C B A, so that what drifts on the machine strikes all alike."""
    found: dict[str, list[T]] = {variant: [] for variant in variants}
    for number in range(rounds):
        for variant in list(found) if number % 2 == 0 else reversed(found):
            found[variant].append(run(variant))
    return found


def lost(first: Sequence[Round], second: Sequence[Round]) -> float:
    """Return the share of throughput that the second lost, in the median of the rounds."""
    return statistics.median(1 - b.tokens_per_s / a.tokens_per_s for a, b in zip(first, second, strict=True))


def later(first: Sequence[Round], second: Sequence[Round]) -> float:
    """Return by how many seconds the second's p99 of the first token is later.

    Whatever else runs on the machine makes a p99 only longer, by far more than what is looked for. So the p99 that is
    compared is the lower quartile over the rounds: that of the rounds that were hardly disturbed.
    """
    before, after = (percentile([each.first_p99 for each in rounds], 25) for rounds in (first, second))
    return after - before


def more_cpu(first: Sequence[Round], second: Sequence[Round]) -> float:
    """Return the CPU seconds for each token that the second needs more, in the median of the rounds."""
    return statistics.median(b.cpu_per_token - a.cpu_per_token for a, b in zip(first, second, strict=True))


def verdict(found: float, noise: float, aim: float) -> str:
    """Say whether an aim is met, which noise beyond the aim leaves open."""
    if abs(noise) > aim:
        return "undecided, the machine's own noise is larger than the aim"
    return "met" if found <= aim else "missed"


def cells(rounds: Sequence[Round]) -> list[str]:
    """Return one variant's cells below :data:`COLUMNS`."""
    return [
        spread([each.tokens_per_s for each in rounds], 0),
        spread([each.first_p50 * 1e3 for each in rounds], 2),
        spread([each.first_p99 * 1e3 for each in rounds], 2),
        spread([each.cpu_per_token * 1e6 for each in rounds], 1),
    ]


def spread(values: Sequence[float], digits: int) -> str:
    """Return the median, and least and most behind it."""
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f}…{max(values):,.{digits}f})"
