"""Whether something grows: a slope that a few wild values cannot bend, and how sure it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from scipy.stats import theilslopes  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCKS: Final = 30
LEAST: Final = 6
"""Points; through fewer no slope is worth a word."""
HOUR_S: Final = 3600.0


class Trend(msgspec.Struct, frozen=True):
    """How a figure went.

    Attributes:
        first: median of its first block.
        last: median of its last block.
        most: the largest value seen.
        slope: per hour (Theil and Sen's: the median over all pairs of points).
        low: of the interval that holds the slope 19 times in 20.
        high: likewise.

    """

    first: float
    last: float
    most: float
    slope: float
    low: float
    high: float

    def verdict(self, most: float) -> str:
        """Say whether the slope is at most so much: ``met``, ``missed``, or ``undecided`` where noise may be why."""
        if self.slope <= most:
            return "met"
        return "missed" if self.low > most else "undecided"


def trend(times: Sequence[float], values: Sequence[float], blocks: int = BLOCKS) -> Trend | None:
    """Return the trend of a figure; ``None`` if there are too few values.

    Neighbouring values tell nearly the same, and would make the interval look narrower than it is. So the values are
    put together in blocks of equal duration, and each block counts once, by its median.

    Args:
        times: seconds, ascending.
        values: one for each time.
        blocks: at most.

    """
    if len(times) < LEAST:
        return None
    count = min(blocks, len(times))
    edges = np.linspace(times[0], times[-1], count + 1)
    place = np.clip(np.searchsorted(edges, times, side="right") - 1, 0, count - 1)
    at, of = np.asarray(times), np.asarray(values, dtype=float)
    used = np.unique(place)
    if len(used) < LEAST:
        return None
    x = [float(at[place == block].mean()) for block in used]
    y = [float(np.median(of[place == block])) for block in used]
    slope, _, low, high = (float(each) * HOUR_S for each in theilslopes(y, x, alpha=0.95))
    return Trend(y[0], y[-1], float(of.max()), slope, low, high)


def growth_words(found: Trend | None) -> str:
    """Return a slope and its interval in words."""
    return "too short to say" if found is None else f"{found.slope:+.2f} ({found.low:+.2f}…{found.high:+.2f})"
