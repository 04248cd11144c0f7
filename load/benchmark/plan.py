"""From options and seed to cells, and from a cell to its requests: the same seed, the same load."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from load.benchmark.options import CLOSED, Options, TargetSpec
from load.mixes import Ask, Mix, Phase, arrivals, lengths, shape

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG_EVERY: Final = 10
LONG_TIMES: Final = 8.0
LOADS: Final = {"normal": 0.5, "high": 0.9, "extreme": 0.9, "long": 0.5}
"""Mean arrivals as multiples of capacity. ``long`` asks for 1.7 times the tokens of normal: 0.85 of capacity."""
EXTREME: Final = f"bursts:3,{LOADS['extreme']:g}"


class Cell(msgspec.Struct, frozen=True, order=True):
    """One measurement.

    Attributes:
        target: who is asked, by its kind.
        scenario: an open loop's name, or ``closed``.
        concurrency: callers of a closed loop; 0 for an open one.
        timeout: seconds each caller allows.

    """

    target: str
    scenario: str
    concurrency: int
    timeout: float

    @property
    def load(self) -> str:
        """What all targets' cells of the same load have in common."""
        name = f"{CLOSED}-{self.concurrency}" if self.scenario == CLOSED else self.scenario
        return f"{name}, {self.timeout:g} s"

    @property
    def id(self) -> str:
        """The name of its file."""
        return f"{self.target}_{self.scenario}{self.concurrency or ''}_{self.timeout:g}s"


class Planned(msgspec.Struct, frozen=True):
    """One request and when it is due, in seconds from its cell's beginning."""

    at: float
    ask: Ask


def cells(options: Options) -> list[tuple[TargetSpec, list[Cell]]]:
    """Return each target's cells, in the order in which they are measured."""
    return [
        (
            spec,
            [Cell(spec.kind, name, 0, limit) for limit in options.timeout for name in options.scenarios]
            + [Cell(spec.kind, CLOSED, callers, limit) for limit in options.timeout for callers in options.concurrency],
        )
        for spec in options.targets
    ]


def mix(options: Options, scenario: str) -> Mix:
    """Return what is asked in a scenario."""
    every = LONG_EVERY if scenario == "long" else 0
    return Mix(
        lengths(options.input_len), lengths(options.output_len), options.seed, long_every=every, long_times=LONG_TIMES
    )


def requests(options: Options, cell: Cell, capacity: float) -> Iterator[Planned]:
    """Yield a cell's requests; those of a closed loop are due at once.

    Args:
        options: of the run.
        cell: which.
        capacity: requests/s that are 1x.

    """
    asks = mix(options, cell.scenario)
    if cell.scenario == CLOSED:
        return (Planned(0.0, ask) for ask in islice(asks, options.num_requests))
    return map(Planned, _times(options, cell, capacity), asks)


def _times(options: Options, cell: Cell, capacity: float) -> Iterator[float]:
    seconds = options.num_requests / (capacity * LOADS[cell.scenario])
    if cell.scenario == "extreme":
        phases, rate = shape(EXTREME, seconds), capacity
    else:
        phases, rate = [Phase(seconds, 1.0)], capacity * LOADS[cell.scenario]
    # Chance may bring fewer than wanted within the time: the shape goes on until all have come.
    return islice(arrivals(phases * 4, rate, options.seed), options.num_requests)
