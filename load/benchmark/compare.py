"""Two measurements of the same load side by side: what differs, and whether that is more than chance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from load.benchmark import figures
from load.benchmark.statistics import Interval, ratio, share_difference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from load.benchmark.records import Record
    from load.benchmark.result import Found, Result

LESS_IS_BETTER: Final = frozenset({"failed", "first token p50", "first token p99", "total p50"})


class Difference(msgspec.Struct, frozen=True):
    """One figure of two measurements.

    Attributes:
        load: what both were asked.
        one: name of the reference; ``other`` is compared with it.
        metric: which figure.
        change: a difference of shares for ``failed``, else the ratio other ÷ one.

    """

    load: str
    one: str
    other: str
    metric: str
    values: tuple[float, float]
    change: Interval

    @property
    def verdict(self) -> str:
        """``better``, ``worse``, or that chance may have made the difference."""
        same = 0.0 if self.metric == "failed" else 1.0
        if not (self.change.low > same or self.change.high < same):
            return "no difference shown"
        less = self.change.high < same
        return "better" if less == (self.metric in LESS_IS_BETTER) else "worse"


def targets(result: Result) -> list[Difference]:
    """Compare each target of a run with the first one, load by load."""
    by_load: dict[str, list[Found]] = {}
    for found in result.cells:
        by_load.setdefault(found.cell.load, []).append(found)
    return [
        difference
        for load, (first, *others) in by_load.items()
        for other in others
        for difference in pair(load, (first.cell.target, first), (other.cell.target, other))
    ]


def runs(results: Sequence[Result]) -> list[Difference]:
    """Compare each run's cells with the same cells of the first run."""
    if len(results) < 2:
        return []
    first, *others = results
    reference = {found.cell: found for found in first.cells}
    return [
        difference
        for other in others
        for found in other.cells
        if found.cell in reference
        for difference in pair(
            f"{found.cell.target}: {found.cell.load}", (first.name, reference[found.cell]), (other.name, found)
        )
    ]


def pair(load: str, one: tuple[str, Found], other: tuple[str, Found]) -> list[Difference]:
    """Compare two cells."""
    names, cells = (one[0], other[0]), (one[1], other[1])
    shares = [cell.figures.failed for cell in cells]
    found = [
        Difference(load, *names, "failed", (shares[0].value, shares[1].value), share_difference(shares[0], shares[1]))
    ]
    sides = [_figures(cell.measured.records, cell.figures) for cell in cells]
    for metric in sides[0]:
        if metric in sides[1]:
            left, right = sides[0][metric], sides[1][metric]
            found.append(Difference(load, *names, metric, (left[0], right[0]), ratio(left, right)))
    return found


def _figures(records: Sequence[Record], known: figures.Figures) -> dict[str, tuple[float, NDArray[np.float64]]]:
    found = {"goodput": (known.goodput.value, figures.goodput_resamples(records))}
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        if known.first:
            times = figures.first_times(records)
            found[f"first token {name}"] = (known.first[name], figures.quantile_resamples(times, share))
    if known.total:
        found["total p50"] = (known.total["p50"], figures.quantile_resamples(figures.total_times(records), 0.5))
    return found
