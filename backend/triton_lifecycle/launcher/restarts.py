"""How often something that ends unasked may be started again."""

from __future__ import annotations

from collections import deque
from typing import Final

MOST_RESTARTS: Final = 5
RESTART_WINDOW_S: Final = 600.0


class Restarts:
    """The latest restarts of one thing.

    Args:
        most: how many there may be within :data:`RESTART_WINDOW_S`.

    """

    def __init__(self, most: int = MOST_RESTARTS) -> None:
        self.most = most
        self._at: deque[float] = deque()

    def one_more(self, now: float) -> bool:
        """Count a restart, if it is not one too many.

        Args:
            now: seconds on the monotonic clock.

        """
        while self._at and now - self._at[0] > RESTART_WINDOW_S:
            self._at.popleft()
        if len(self._at) >= self.most:
            return False
        self._at.append(now)
        return True

    def __str__(self) -> str:
        return f"{len(self._at)} of {self.most}"
