"""The event loop's pulse: whether it moves, and how late it gets to what is due."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

EVERY_S: Final = 0.05
WINDOW_S: Final = 60.0
"""How far back the lag is known."""


class Beat:
    """Looks twenty times a second how late the loop wakes.

    A loop that is held for a second misses twenty looks. Each of them counts with the time that it had to wait, so the
    percentiles are those of work that falls due at any moment, and one long halt is not hidden behind many quick ones.

    Args:
        loop: whose pulse.
        clock: seconds; safe to read from any thread.
        every: seconds between two looks.
        window: seconds over which :meth:`state` counts.

    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        clock: Callable[[], float] = time.monotonic,
        every: float = EVERY_S,
        window: float = WINDOW_S,
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._every = every
        self._lags: deque[float] = deque(maxlen=max(1, round(window / every)))
        self._last = self._due = clock()

    def start(self) -> None:
        """Beat from now on, as long as the loop runs. Event-loop thread only."""
        self._last = self._clock()
        self._await(self._last + self._every)

    @property
    def stalled(self) -> float:
        """Seconds since the loop moved last. Any thread."""
        return self._clock() - self._last

    def state(self) -> dict[str, Any]:
        """Return by how many milliseconds the loop was late within the last minute. Event-loop thread only."""
        lags = sorted(self._lags)
        return {
            "lag_p50_ms": _at(lags, 0.5),
            "lag_p99_ms": _at(lags, 0.99),
            "lag_max_ms": _at(lags, 1.0),
            "looks": len(lags),
        }

    def _await(self, due: float) -> None:
        self._due = due
        self._loop.call_later(max(0.0, due - self._clock()), self._look)

    def _look(self) -> None:
        now = self._last = self._clock()
        # Halts longer than the window fill it once; what would fall out of it at once need not be counted.
        due = max(self._due, now - self._every * (self._lags.maxlen or 1))
        self._lags.append(max(0.0, now - due))
        while (due := due + self._every) <= now:
            self._lags.append(now - due)
        self._await(due)


def _at(ordered: list[float], share: float) -> float | None:
    if not ordered:
        return None
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1e3, 3)
