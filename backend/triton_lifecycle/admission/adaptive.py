"""The limit on live sequences that follows the load: additive increase, multiplicative decrease.

AIMD (D.-M. Chiu and R. Jain, "Analysis of the increase and decrease algorithms for congestion avoidance", 1989) is what
TCP does with its window, and "concurrency-limits" of Netflix with requests in flight. Controllers on latency alone
(Vegas, gradient) ask for requests of about equal length, which answers of 1 to 4,000 tokens are not; that requests run
out of time is a sign that does not depend on length. As in TCP, one round's losses count once, the window is cut from
what was really in flight, and it does not grow while it is not used (RFC 7661).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

DECREASE: Final = 0.7
SHARE: Final = 0.1
"""Of the requests of a round; when more run out of time, the round counts as overload."""
REPEATED: Final = 2
"""Timeouts of a round below which nothing is concluded."""
SHORTEST_ROUND: Final = 4
PLAUSIBLE_S: Final = 1.0
"""A caller that gives less time than this says nothing about the load."""


class Adaptive:
    """Moves the limit once per round; a round is as many ends as sequences were live in it at most.

    Args:
        ceiling: where the limit starts, and what it never exceeds.
        step: by how much it grows in a good round.
        clock: monotonic seconds.

    """

    def __init__(self, ceiling: int, step: int, clock: Callable[[], float]) -> None:
        self.limit = ceiling
        self._ceiling = ceiling
        self._step = max(1, step)
        self._clock = clock
        self._cut_at = float("-inf")
        self._ends = self._timeouts = self._peak = 0

    def ended(self, live: int, admitted_at: float, *, timed_out: bool) -> tuple[int, int] | None:
        """Take note of a request's end.

        Args:
            live: sequences that were live, its own among them.
            admitted_at: when it got its permit.
            timed_out: whether one of its time limits passed.

        Returns:
            The limit before and after, when it moved.

        """
        now = self._clock()
        if admitted_at < self._cut_at:
            # It was admitted under a limit that has been cut since, and tells nothing about this one.
            return None
        self._ends += 1
        self._peak = max(self._peak, live)
        self._timeouts += timed_out and now - admitted_at >= PLAUSIBLE_S
        if self._ends < max(SHORTEST_ROUND, min(self._peak, self.limit)):
            return None
        before, overload = self.limit, self._timeouts >= max(REPEATED, SHARE * self._ends)
        if overload:
            self.limit = max(1, int(DECREASE * min(self.limit, self._peak)))
            self._cut_at = now
        elif not self._timeouts and 2 * self._peak >= self.limit:
            self.limit = min(self._ceiling, self.limit + self._step)
        self._ends = self._timeouts = self._peak = 0
        return None if self.limit == before else (before, self.limit)
