"""Whether the aims were met."""

from __future__ import annotations

import statistics
from typing import Final

from load.overload.crowd import Outcome

AIM_GOODPUT: Final = 0.95
AIM_REFUSAL_MS: Final = 50.0
AIM_HINT: Final = 0.25


def share(values: list[float], part: float) -> float:
    """Return the value below which this part of them lies; 0 of nothing."""
    return sorted(values)[int(part * (len(values) - 1))] if values else 0.0


def judge(outcomes: list[Outcome]) -> dict[str, tuple[float, bool]]:
    """Return each aim's figure at the highest load with limits, and whether it was met."""
    limited = [outcome for outcome in outcomes if outcome.limits]
    top = limited[-1]
    best = max(outcome.goodput for outcome in limited[:-1])
    kept, slow, error = (
        top.goodput / best,
        share(top.refusals_ms, 0.99),
        statistics.median(top.hint_errors or [float("inf")]),
    )
    return {
        f"goodput, share of the best at a lower load (aim ≥ {AIM_GOODPUT})": (kept, kept >= AIM_GOODPUT),
        f"refusals, p99 in ms (aim ≤ {AIM_REFUSAL_MS:g})": (slow, slow <= AIM_REFUSAL_MS),
        f"retry hint, median error (aim ≤ {AIM_HINT})": (error, error <= AIM_HINT),
    }
