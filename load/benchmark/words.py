"""Figures as people read them, the same in the terminal and on the page."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from load.benchmark.statistics import Interval


def percent(value: float | None) -> str:
    """Return a share: ``0 %``, ``0.13 %``, ``12 %``."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value * 100:.3g} %" if value < 0.9995 else f"{value * 100:.4g} %"


def share(value: Interval) -> str:
    """Return a share with its interval."""
    return f"{percent(value.value)} ({percent(value.low)}…{percent(value.high)})"


def rate(value: Interval) -> str:
    """Return a rate with its interval."""
    digits = 0 if value.value >= 100 else 1 if value.value >= 10 else 2
    return f"{value.value:,.{digits}f} ({value.low:,.{digits}f}…{value.high:,.{digits}f})"


def times(found: dict[str, float]) -> str:
    """Return the median and the 99th percentile, in milliseconds."""
    if not found:
        return "-"
    return f"{found['p50'] * 1e3:,.0f} / {found['p99'] * 1e3:,.0f}"


def change(value: Interval, metric: str) -> str:
    """Return a difference of shares in points, any other as a ratio, with its interval."""
    if metric == "failed":
        return f"{value.value * 100:+.3g} ({value.low * 100:+.3g}…{value.high * 100:+.3g}) points"
    if math.isnan(value.value):
        return "-"
    return f"x {value.value:.3g} ({value.low:.3g}…{value.high:.3g})"
