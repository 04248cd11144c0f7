"""What a cell's records come to: a function of the records alone, so that every report can be made again."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from load.benchmark.records import COMPLETE, Measured, Record
from load.benchmark.statistics import Histogram, Interval, interval, jain, quantile, resampled, total, wilson

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

SLICES: Final = 20
"""Of a cell's time; how much they differ says how sure its rates are."""
LAG_S: Final = 0.1
"""A tool that was later than this for one in a hundred was perhaps the bottleneck itself."""
POINTS: Final = 60


class Slice(msgspec.Struct, frozen=True):
    """A stretch of a cell: per second, but for ``live``."""

    at: float
    arrived: float
    complete: float
    failed: float
    live: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One cell's figures; times are seconds, rates per second, shares from 0 to 1.

    Attributes:
        failed: share of the requests whose caller had no complete answer by its own deadline.
        goodput: complete answers within the deadline, per second.
        throughput: tokens received, per second, of failed answers too.
        first: time to the first token; by quantile, of all that had one.
        between: time between two chunks.
        total: time of complete answers.
        refusals: attempts that were refused for overload.
        retries: attempts beyond the first.
        wasted_received: share of the tokens received that belong to answers that did not become complete.
        wasted_made: share of the tokens made by the server that are in no complete answer; ``None``: it does not say.
        fairness: Jain's index over the callers' shares of complete answers.
        lag_p99: how late this tool itself was.
        whole: whether the cell was measured to its end.

    """

    asked: int
    complete: int
    failed: Interval
    seconds: float
    goodput: Interval
    throughput: Interval
    first: dict[str, float]
    between: dict[str, float]
    total: dict[str, float]
    refusals: int
    retries: int
    wasted_received: float
    wasted_made: float | None
    fairness: float
    slugs: dict[str, int]
    lag_p99: float | None
    whole: bool
    slices: list[Slice]

    @property
    def tool_was_late(self) -> bool:
        """Whether the tool may have been the bottleneck."""
        return self.lag_p99 is not None and self.lag_p99 > LAG_S


def of(measured: Measured) -> Figures:
    """Return a cell's figures."""
    records, end = measured.records, measured.end
    complete = [record for record in records if record.outcome == COMPLETE]
    seconds = span(records)
    received = sum(record.tokens for record in records)
    used = sum(record.tokens for record in complete)
    made = end.made if end is not None else None
    gaps = Histogram(end.gaps if end is not None else None)
    return Figures(
        asked=len(records),
        complete=len(complete),
        failed=wilson(len(records) - len(complete), len(records)),
        seconds=seconds,
        goodput=interval(len(complete) / seconds, goodput_resamples(records)),
        throughput=interval(received / seconds, resampled(_sliced(records, seconds, tokens=True), total) / seconds),
        first=_quantiles(first_times(records)),
        between={name: value for name, share in _SHARES.items() if (value := gaps.quantile(share)) is not None},
        total=_quantiles(total_times(records)),
        refusals=sum(record.refusals for record in records),
        retries=sum(max(0, record.attempts - 1) for record in records),
        wasted_received=(received - used) / received if received else 0.0,
        # Tokens that were made are counted when a request ends there; a moment's difference must not show as waste.
        wasted_made=None if not made else max(0.0, 1 - used / made),
        fairness=jain(_shares_of_tenants(records)),
        slugs=dict(Counter(record.slug for record in records if record.slug is not None).most_common()),
        lag_p99=end.lag_p99 if end is not None else None,
        whole=end is not None,
        slices=_slices(records, seconds),
    )


_SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def span(records: Sequence[Record]) -> float:
    """Return the seconds from a cell's beginning until its last request ended."""
    return max([1e-9, *(record.end for record in records)])


def first_times(records: Sequence[Record]) -> list[float]:
    """Return each request's time to its first token, counted from when it was due."""
    return [
        record.first - min(record.sent, record.due or record.sent) for record in records if record.first is not None
    ]


def total_times(records: Sequence[Record]) -> list[float]:
    """Return the complete requests' times, counted from when they were due."""
    return [
        record.end - min(record.sent, record.due or record.sent) for record in records if record.outcome == COMPLETE
    ]


def goodput_resamples(records: Sequence[Record]) -> NDArray[np.float64]:
    """Return the goodput of resamples, made of the cell's slices."""
    seconds = span(records)
    return resampled(_sliced(records, seconds, tokens=False), total) / seconds


def quantile_resamples(values: Sequence[float], share: float) -> NDArray[np.float64]:
    """Return a quantile of resamples."""
    return resampled(values, quantile(share))


def _sliced(records: Sequence[Record], seconds: float, *, tokens: bool) -> list[float]:
    found = [0.0] * SLICES
    for record in records:
        if tokens or record.outcome == COMPLETE:
            found[min(SLICES - 1, int(record.end / seconds * SLICES))] += record.tokens if tokens else 1
    return found


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    found = np.quantile(values, list(_SHARES.values()))
    return dict(zip(_SHARES, map(float, found), strict=True))


def _shares_of_tenants(records: Sequence[Record]) -> list[float]:
    asked: Counter[int] = Counter(record.tenant for record in records)
    got: Counter[int] = Counter(record.tenant for record in records if record.outcome == COMPLETE)
    return [got[tenant] / count for tenant, count in sorted(asked.items())]


def _slices(records: Sequence[Record], seconds: float) -> list[Slice]:
    width = seconds / POINTS
    arrived, complete, failed = [0] * POINTS, [0] * POINTS, [0] * POINTS
    moves = [0] * (POINTS + 1)
    for record in records:
        begin = min(POINTS - 1, int(record.sent / width))
        end = min(POINTS - 1, int(record.end / width))
        arrived[begin] += 1
        (complete if record.outcome == COMPLETE else failed)[end] += 1
        moves[begin] += 1
        moves[end + 1] -= 1
    live, found = 0, []
    for index in range(POINTS):
        live += moves[index]
        rates = (arrived[index] / width, complete[index] / width, failed[index] / width)
        found.append(Slice((index + 0.5) * width, *rates, live))
    return found
