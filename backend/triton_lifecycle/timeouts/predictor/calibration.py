"""Bounds that are broken as often as promised, whatever the errors look like and however they drift.

Adaptive conformal inference (Gibbs & Candès 2021, *Adaptive Conformal Inference Under Distribution Shift*): the bound
is a quantile of recent scores, and its level moves a little after each hit and each miss. The share of misses then
tends to the promised one without any assumption about the data.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from typing import Final

WINDOW: Final = 200
"""Scores of which the quantile is taken."""
STEP: Final = 0.01
"""How far the level moves (gamma in the paper)."""
_WIDEN: Final = 0.1
"""Added beyond the largest score seen, for each further step, when not even that is enough."""


class Bound:
    """An upper bound on a score, exceeded with probability ``alpha``.

    Args:
        alpha: the share of misses that is promised.
        start: the bound before anything was seen.

    """

    def __init__(self, alpha: float, start: float = 0.5) -> None:
        self._alpha = alpha
        self._level = alpha
        self._start = start
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    @property
    def value(self) -> float:
        """The bound for the next score."""
        count = len(self._sorted)
        if count < 2 / self._alpha:
            return max(self._start, self._sorted[-1]) if count else self._start
        if self._level <= 0:
            return self._sorted[-1] + _WIDEN * (1 - self._level / STEP)
        position = (1 - min(self._level, 1.0)) * (count + 1) - 1
        below = min(max(int(position), 0), count - 1)
        above = min(below + 1, count - 1)
        part = min(max(position - below, 0.0), 1.0)
        return self._sorted[below] + part * (self._sorted[above] - self._sorted[below])

    @property
    def middle(self) -> float:
        """The median of the recent scores; 0 while there are few."""
        count = len(self._sorted)
        return self._sorted[count // 2] if count >= 2 / self._alpha else 0.0

    def learn(self, score: float, *, missed: bool) -> None:
        """Take in a score, and whether it lay beyond the bound that had been told."""
        if len(self._recent) == WINDOW:
            gone = self._recent.popleft()
            del self._sorted[bisect_left(self._sorted, gone)]
        self._recent.append(score)
        insort(self._sorted, score)
        # Bounded: a long surprise must not be paid for by an equally long time of bounds that are too wide.
        self._level = min(max(self._level + STEP * (self._alpha - missed), -10 * STEP), 1.5 * self._alpha)
