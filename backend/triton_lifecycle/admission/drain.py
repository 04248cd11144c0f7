"""How fast the engine lets go of what it has: the source of every retry hint and of the simple prediction.

The estimator: sequences released per second, over the last releases that fell into times in which the engine was full.
Idle times do not count; releases in clusters (continuous batching lets equal answers end together) even out over
several times what the engine runs at once. Before there are two such releases, the mean length of an answer stands in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

FORGET: Final = 0.95
"""What earlier answers count for after each further one."""
WINDOW: Final = (32, 1024)
"""Fewest and most releases that are looked at; in between, four times what the engine runs at once."""
MOST_PROMISES: Final = 10_000
SPREAD: Final = 0.2
"""Callers spread their return: our client waits for the hint and, by chance, up to so much of it more."""
HINT_S: Final = (0.1, 60.0)
"""Shortest and longest hint."""
NO_EXPERIENCE_S: Final = 1.0
"""The hint of a server that has not finished anything yet."""


class Drain:
    """Observes live sequences and releases; predicts when there is room.

    Args:
        full: live sequences from which on the engine has all that it can run at once.
        clock: monotonic seconds.

    """

    def __init__(self, full: int, clock: Callable[[], float]) -> None:
        self._full = full
        self._clock = clock
        self._live = 0
        self._busy_before = 0.0
        self._full_since: float | None = None
        least, most = WINDOW
        self._released: deque[tuple[float, int]] = deque(maxlen=max(least, min(most, 4 * full)))
        self._promised: deque[tuple[float, float]] = deque()
        self._ahead = 0.0
        # Sums, so that a request cut short after its first token weighs no more than its token.
        self._answers = self._tokens = self._worked = 0.0

    def admitted(self, sequences: int) -> None:
        """Sequences became live."""
        self._move(sequences)

    def released(self, sequences: int, *, tokens: float = 0.0, worked: float | None = None) -> None:
        """Sequences are live no more.

        Args:
            sequences: how many.
            tokens: made by each of them.
            worked: seconds that the engine worked on them; ``None`` when it never did.

        """
        was_full = self._full_since is not None
        self._move(-sequences)
        if worked is None:
            # It waited, and left its place in the queue: the engine got no further by that.
            return
        if was_full:
            self._released.append((self._busy(), sequences))
        if tokens:
            self._answers = FORGET * self._answers + 1
            self._tokens = FORGET * self._tokens + tokens
            self._worked = FORGET * self._worked + worked

    def rate(self) -> float | None:
        """Return sequences per second while the engine is full; ``None`` without experience."""
        if len(self._released) >= 2:
            first, _ = self._released[0]
            last, _ = self._released[-1]
            count = sum(sequences for _, sequences in self._released) - self._released[0][1]
            # An engine that has come to a halt releases nothing: that counts once it lasts longer than usual.
            span = max(last - first, self._busy() - first - 2 * (last - first) / count)
            if span > 0:
                return count / span
        return self._full * self._answers / self._worked if self._worked > 0 else None

    def hint(self, places: int, sequences: int = 1, left: float | None = None) -> float:
        """Return seconds after which a refused caller finds room; it is counted as one who comes back then.

        Args:
            places: sequences that must go before it fits.
            sequences: its own.
            left: seconds after which it does not come back.

        """
        now = self._clock()
        while self._promised and self._promised[0][0] <= now:
            self._ahead = max(0.0, self._ahead - self._promised.popleft()[1])
        rate = self.rate()
        shortest, longest = HINT_S
        seconds = NO_EXPERIENCE_S if rate is None else (self._ahead + places) / rate
        hint = min(max(seconds, shortest), longest)
        # Who would be back only behind its deadline does not come.
        comes = 1.0 if left is None else min(max((left / hint - 1) / SPREAD, 0.0), 1.0)
        if hint < longest and comes:
            if len(self._promised) == MOST_PROMISES:
                self._ahead -= self._promised.popleft()[1]
            self._promised.append((now + hint, sequences * comes))
            self._ahead += sequences * comes
        return hint

    def expected(self, ahead: int, max_tokens: int | None) -> float | None:
        """Return seconds in which a request would be done whose turn comes after ``ahead`` releases.

        The length of an answer cannot be known beforehand: the mean of those before it stands in, up to ``max_tokens``.
        """
        rate = self.rate()
        if rate is None or not self._tokens:
            return None
        return ahead / rate + self.length(max_tokens) * self._worked / self._tokens

    def length(self, max_tokens: int | None) -> float:
        """Return the tokens that an answer is expected to have."""
        if not self._answers:
            return float(max_tokens or 1)
        mean = self._tokens / self._answers
        return mean if max_tokens is None else min(mean, max_tokens)

    def _busy(self) -> float:
        return self._busy_before + (0.0 if self._full_since is None else self._clock() - self._full_since)

    def _move(self, by: int) -> None:
        self._live += by
        if self._live >= self._full and self._full_since is None:
            self._full_since = self._clock()
        elif self._live < self._full and self._full_since is not None:
            self._busy_before = self._busy()
            self._full_since = None
