"""The failure table: what others have published, what we aim at, and what a run measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from load.benchmark.options import SCENARIOS

if TYPE_CHECKING:
    from load.benchmark.result import Found, Result
    from load.benchmark.statistics import Interval

PUBLISHED: Final = {
    "vLLM": {"normal": 0.001, "high": 0.005, "extreme": 0.015, "long": 0.003},
    "TensorRT-LLM": {"normal": 0.005, "high": 0.02, "extreme": 0.05, "long": 0.01},
    "SGLang": {"normal": 0.012, "high": 0.045, "extreme": 0.10, "long": 0.025},
    "LMDeploy": {"normal": 0.008, "high": 0.03, "extreme": 0.07, "long": 0.015},
}
"""Shares of failed requests on their makers' machines: something to compare with, not figures of a run."""
AIMS: Final = {"normal": 0.0, "high": 0.001, "extreme": 0.005, "long": 0.0}
OURS: Final = frozenset({"ours", "ours-http"})


class Entry(msgspec.Struct, frozen=True):
    """One target's measured share in one scenario.

    Attributes:
        verdict: for ours, of its aim: ``met``, ``missed``, or ``met, not proven`` where the interval reaches beyond.

    """

    target: str
    failed: Interval
    asked: int
    whole: bool
    verdict: str | None


class Line(msgspec.Struct, frozen=True):
    """One scenario of the table at one time limit."""

    scenario: str
    timeout: float
    published: dict[str, float]
    aim: float
    entries: list[Entry]


def table(result: Result) -> list[Line]:
    """Return the table, a line for each scenario and time limit that was measured."""
    found: dict[tuple[str, float], list[Entry]] = {}
    for item in result.cells:
        if item.cell.scenario in SCENARIOS:
            found.setdefault((item.cell.scenario, item.cell.timeout), []).append(_entry(item))
    published = {name: {who: shares[name] for who, shares in PUBLISHED.items()} for name in SCENARIOS}
    return [
        Line(scenario, timeout, published[scenario], AIMS[scenario], entries)
        for (scenario, timeout), entries in sorted(
            found.items(), key=lambda item: (item[0][1], SCENARIOS.index(item[0][0]))
        )
    ]


def _entry(item: Found) -> Entry:
    failed, aim = item.figures.failed, AIMS[item.cell.scenario]
    verdict = None
    if item.cell.target in OURS:
        # With an aim of 0 no number of requests proves more than "less than so much".
        proven = failed.high <= aim or (aim == 0 and failed.value == 0)
        verdict = "missed" if failed.value > aim else "met" if proven else "met, not proven"
    return Entry(item.cell.target, failed, item.figures.asked, item.figures.whole, verdict)
