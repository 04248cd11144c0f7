"""How sure a figure is: intervals of 95 % for shares, quantiles and rates, and for differences between two of them."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

Z: Final = 1.959963984540054
RESAMPLES: Final = 1000
BUCKET: Final = math.log(1.02)
SMALLEST_S: Final = 1e-6


class Interval(msgspec.Struct, frozen=True):
    """An estimate and the interval that holds the true value 19 times in 20."""

    value: float
    low: float
    high: float


def wilson(hits: int, of: int) -> Interval:
    """Return the share ``hits / of`` with Wilson's interval; it is honest at 0 and at 1 too."""
    if of == 0:
        return Interval(math.nan, 0.0, 1.0)
    share = hits / of
    middle = (share + Z * Z / (2 * of)) / (1 + Z * Z / of)
    half = Z / (1 + Z * Z / of) * math.sqrt(share * (1 - share) / of + Z * Z / (4 * of * of))
    return Interval(share, max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half)))


def share_difference(one: Interval, other: Interval) -> Interval:
    """Return ``other`` less ``one``, two shares of different requests (Newcombe's interval)."""
    value = other.value - one.value
    low = value - math.hypot(other.value - other.low, one.high - one.value)
    high = value + math.hypot(other.high - other.value, one.value - one.low)
    return Interval(value, low, high)


def resampled(
    values: Sequence[float], of: Callable[[NDArray[np.float64]], NDArray[np.float64]], seed: int = 0
) -> NDArray[np.float64]:
    """Return a figure of :data:`RESAMPLES` resamples (bootstrap); ``of`` works along the last axis."""
    data = np.asarray(values, dtype=np.float64)
    random = np.random.default_rng(seed)
    # In blocks: a thousand resamples of a million values at once would be gigabytes.
    block = max(1, min(RESAMPLES, 2_000_000 // max(1, data.size)))
    found = []
    for begin in range(0, RESAMPLES, block):
        rows = min(block, RESAMPLES - begin)
        found.append(of(data[random.integers(0, data.size, (rows, data.size))]))
    return np.concatenate(found)


def interval(estimate: float, resamples: NDArray[np.float64]) -> Interval:
    """Return the estimate with the resamples' middle 95 %."""
    low, high = np.quantile(resamples, [0.025, 0.975])
    return Interval(estimate, float(low), float(high))


def ratio(one: tuple[float, NDArray[np.float64]], other: tuple[float, NDArray[np.float64]]) -> Interval:
    """Return ``other / one`` of two figures measured apart, each with its resamples."""
    if one[0] <= 0:
        return Interval(math.nan, 0.0, math.inf)
    floor = one[0] * 1e-9
    return interval(other[0] / one[0], other[1] / np.maximum(one[1], floor))


def quantile(share: float) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """Return the function that takes this quantile along the last axis."""
    return lambda rows: np.asarray(np.quantile(rows, share, axis=-1), dtype=np.float64)


def total(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sums along the last axis."""
    return np.asarray(rows.sum(axis=-1), dtype=np.float64)


def jain(shares: Iterable[float]) -> float:
    """Return Jain's index: 1 when all have alike, 1/n when one has all."""
    found = list(shares)
    squares = sum(value * value for value in found)
    return sum(found) ** 2 / (len(found) * squares) if squares else 1.0


class Histogram:
    """Times in buckets 2 % wide: as many of them as they like to be, in the memory of some hundred numbers."""

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        self.counts: Counter[int] = Counter(counts or {})

    def add(self, seconds: float) -> None:
        """Take one in."""
        self.counts[math.floor(math.log(max(SMALLEST_S, seconds)) / BUCKET)] += 1

    def quantile(self, share: float) -> float | None:
        """Return a quantile, the middle of its bucket; ``None`` of nothing."""
        left = share * self.counts.total()
        for bucket, count in sorted(self.counts.items()):
            left -= count
            if left <= 0:
                return math.exp((bucket + 0.5) * BUCKET)
        return None
