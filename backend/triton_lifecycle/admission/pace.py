"""How often requests end, for hints that need no more than that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

SMOOTHING: Final = 0.1
"""Weight of the newest interval in the running mean of intervals between two ends."""


class Pace:
    """How often something ends: the best guess of when there is room again."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: float | None = None
        self._interval = 1.0

    @property
    def retry_after(self) -> float:
        """Seconds after which to try again."""
        return max(0.1, self._interval)

    def tick(self) -> None:
        """Take note that one has ended now."""
        now = self._clock()
        if self._last is not None:
            self._interval += SMOOTHING * (now - self._last - self._interval)
        self._last = now
