"""How many tokens an answer will have: not predictable from a prompt, but bounded, and distributed as before.

What is kept is the share of ``max_tokens`` that was used, apart for each power of two of ``max_tokens``: so answers
that always use all of it, and answers that end by themselves, are each told as they are.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from typing import Final

import msgspec

WINDOW: Final = 128
_FEW: Final = 8


class Length(msgspec.Struct, frozen=True, gc=False):
    """Tokens of a sequence."""

    mean: float
    low: float
    """One in twenty is shorter."""
    high: float
    """One in twenty is longer."""


class Lengths:
    """The observed distribution."""

    def __init__(self) -> None:
        self._shares: dict[int, _Shares] = {}
        self._mean = 0.0
        self._seen = 0

    @property
    def mean(self) -> float:
        """Tokens of a sequence, whatever its bound, of late."""
        return self._mean

    def predict(self, max_tokens: int) -> Length:
        """Return the length of an answer with this bound; anything up to the bound where nothing is known."""
        shares = self._shares.get(max_tokens.bit_length())
        if shares is None or len(shares.ordered) < _FEW:
            return Length(max_tokens / 2, 1.0, max_tokens)
        ordered = shares.ordered
        last = len(ordered) - 1
        low, high = ordered[int(0.05 * last)], ordered[-int(0.05 * last) - 1]
        return Length(shares.total / len(ordered) * max_tokens, low * max_tokens, high * max_tokens)

    def learn(self, max_tokens: int, tokens: float) -> None:
        """Take in the length of an answer that came to its end."""
        self._seen += 1
        self._mean += (tokens - self._mean) / min(self._seen, WINDOW)
        self._shares.setdefault(max_tokens.bit_length(), _Shares()).add(min(1.0, tokens / max_tokens))


class _Shares:
    """The last :data:`WINDOW` shares of one class of bounds."""

    def __init__(self) -> None:
        self.recent: deque[float] = deque()
        self.ordered: list[float] = []
        self.total = 0.0

    def add(self, share: float) -> None:
        if len(self.recent) == WINDOW:
            gone = self.recent.popleft()
            del self.ordered[bisect_left(self.ordered, gone)]
            self.total -= gone
        self.recent.append(share)
        insort(self.ordered, share)
        self.total += share
