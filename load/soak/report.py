"""What a soak is asked for, what it came to, and its tables."""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from load.holdings import Holding
from load.swarm.protocol import Over
from load.trend import Trend, growth_words

GROWS: Final = ("stub_mib", "triton_mib", "engine_mib", "shm_mib", "shm_files", "descriptors", "threads")
JUDGED: Final = ("stub_mib", "engine_mib")
"""Memory whose growth is ours; tritonserver's own is shown beside it."""


class Engine(Enum):
    """What computes."""

    simulated = "simulated"
    real = "real"


MODELS: Final = {Engine.simulated: "simulated", Engine.real: "smollm2"}


class Setup(msgspec.Struct, frozen=True):
    """What is run."""

    minutes: float
    warm_up: float
    """Minutes of these that do not count."""
    engine: str
    load: float
    """Share of what the server can carry."""
    chaos: float
    """Share of callers that misbehave."""
    every: float
    """Seconds between two looks."""
    over: dict[Over, float]
    seed: int


class Report(msgspec.Struct):
    """What the run came to.

    Attributes:
        setup: what was asked for.
        seconds: how long load was put on, warm-up included.
        capacity: tokens/s that the server made while callers asked without a pause.
        rate: requests/s that were sent.
        tokens: that arrived.
        ends: by deed, how its requests ended: ``whole``, or the error's slug.
        errors: requests that ended as they should not have, and the first few of them in words.
        late_p99_ms: how much later than due requests were sent, 99th percentile.
        tool_lag_p99_ms: of this program's own event loop.
        trends: by figure, after the warm-up; per hour.
        looks: all that was seen.
        problems: what else is wrong; none when all is well.
        interrupted: whether somebody ended it early.

    """

    setup: Setup
    seconds: float = 0.0
    capacity: float = 0.0
    rate: float = 0.0
    tokens: int = 0
    ends: dict[str, Counter[str]] = {}
    errors: int = 0
    examples: list[str] = []
    late_p99_ms: float = 0.0
    tool_lag_p99_ms: float = 0.0
    trends: dict[str, Trend] = {}
    looks: list[Holding] = []
    problems: list[str] = []
    interrupted: bool = False

    @property
    def requests(self) -> int:
        """How many ended."""
        return sum(counter.total() for counter in self.ends.values())


def verdicts(report: Report, slope: float) -> dict[str, str]:
    """Return what became of each bound: ``met``, ``missed`` or ``undecided``."""
    found = {"errors: 0": "missed" if report.errors else "met"}
    for name in JUDGED:
        if name in report.trends and report.trends[name].most > 0:
            found[f"{name} per hour ≤ {slope:g}"] = report.trends[name].verdict(slope)
    if "stub_mib" not in report.trends:
        found[f"stub_mib per hour ≤ {slope:g}"] = "undecided"
    found["everything came back"] = "missed" if report.problems else "met"
    return found


def ends_table(report: Report) -> Table:
    """Return how the callers ended."""
    shown = Table(
        title=f"{report.requests:,} requests, {report.tokens:,} tokens in {report.seconds / 60:.1f} min: "
        f"{report.rate:.2f} requests/s, {report.setup.load:.0%} of {report.capacity:,.0f} tokens/s"
    )
    for heading in ("caller", "requests", "how they ended"):
        shown.add_column(heading, justify="right" if heading == "requests" else "left")
    for deed, counter in report.ends.items():
        shown.add_row(deed, f"{counter.total():,}", ", ".join(f"{slug} {n:,}" for slug, n in counter.most_common()))
    return shown


def growth_table(report: Report) -> Table:
    """Return what the server held."""
    shown = Table(title=f"held, after {report.setup.warm_up:g} min of warm-up (slope: 95 % interval)")
    for heading in ("", "first", "last", "most", "per hour"):
        shown.add_column(heading, justify="right" if heading else "left")
    for name, found in report.trends.items():
        figures = [f"{value:,.1f}" for value in (found.first, found.last, found.most)]
        shown.add_row(name.replace("_mib", ", MiB").replace("_", " "), *figures, growth_words(found))
    return shown


def show(report: Report, slope: float, console: Console) -> None:
    """Print the tables and the verdicts."""
    console.print(ends_table(report), growth_table(report))
    worst = max((look.lag_p99_ms or 0.0 for look in report.looks), default=0.0)
    console.print(
        f"the server's loop lag, p99 of a minute: at most {worst:.1f} ms; this tool's own p99 "
        f"{report.tool_lag_p99_ms:.1f} ms, requests sent late p99 {report.late_p99_ms:.1f} ms"
    )
    for bound, verdict in verdicts(report, slope).items():
        console.print(f"{bound}: {verdict}", markup=False)
    for line in (*report.problems, *report.examples):
        console.print(f"  {line}", markup=False)
