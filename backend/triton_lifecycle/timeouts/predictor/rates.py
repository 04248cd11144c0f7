"""A positive time as a function of a few numbers, learned one observation after the other.

``linear`` is recursive least squares with exponential forgetting (Haykin, *Adaptive Filter Theory*, ch. 10), of the
*relative* error: a millisecond is much for a short time and nothing for a long one.
``ml`` adds a regression tree from ``river`` that learns what the line leaves over (``tree.py``).
"""

from __future__ import annotations

import math
from typing import Final, Protocol

import numpy as np

FORGETTING: Final = 0.998
"""What an observation's weight is multiplied by with each further one: a memory of about 500."""
_DOUBT: Final = 3.0
"""Variance of a weight at the beginning, in units of the squared time over that of the relative error. P never grows
beyond it: directions that no observation touches (the hour, an empty cache) would otherwise explode at their first
touch."""
_DRIFT: Final = 0.4
"""Mean logarithm of actual over predicted, of the last twenty or so, at which the world counts as another one: what was
learned is kept as a start, but no longer trusted."""


class Rate(Protocol):
    """Predicts one time."""

    def predict(self, x: list[float]) -> float:
        """Return seconds, above 0."""
        ...

    def learn(self, x: list[float], seconds: float) -> None:
        """Take in what it was."""
        ...


class Linear:
    """Recursive least squares with forgetting.

    Args:
        size: how many numbers an observation has; the first is always 1.

    """

    def __init__(self, size: int) -> None:
        self._weights = np.zeros(size)
        self._p = np.zeros((size, size))
        self._low = self._high = 0.0
        self._bias = 0.0
        self._most = 0.0

    def predict(self, x: list[float]) -> float:
        """Return seconds, within three times what was seen of late: a line knows nothing of where nobody has been."""
        return self._bounded(float(self._weights @ np.array(x)))

    def learn(self, x: list[float], seconds: float) -> None:
        """Take in one observation, weighted so that relative errors count."""
        vector = np.array(x)
        if not self._high:
            self._begin_anew(seconds)
            self._weights[0] = seconds
        raw = float(self._weights @ vector)
        # By the prediction, not by what came: else the unusually short ones would count for too much.
        weight = 1.0 / min(max(raw, 0.5 * seconds), 2.0 * seconds)
        vector *= weight
        self._look_for_drift(raw, seconds)
        pv = self._p @ vector
        gain = pv / (FORGETTING + float(vector @ pv))
        self._weights += gain * (seconds - raw) * weight
        self._p -= np.outer(gain, pv)
        if float(np.trace(self._p)) < self._most:
            self._p /= FORGETTING
        fade = 0.01
        self._low = min(seconds, self._low + fade * (seconds - self._low)) if self._low else seconds
        self._high = max(seconds, self._high + fade * (seconds - self._high))

    def _look_for_drift(self, raw: float, seconds: float) -> None:
        missed = math.log(seconds / self._bounded(raw)) if self._high else 0.0
        self._bias += 0.05 * (min(max(missed, -1.0), 1.0) - self._bias)
        if abs(self._bias) > _DRIFT:
            self._begin_anew(seconds)

    def _begin_anew(self, seconds: float) -> None:
        """Trust the weights no more than that each is of the order of what is to be predicted."""
        self._p = np.eye(len(self._p)) * (_DOUBT * seconds**2)
        self._most = float(np.trace(self._p))
        self._bias = 0.0

    def _bounded(self, seconds: float) -> float:
        return min(max(seconds, self._low / 3, 1e-6), max(self._high * 3, 1e-6))
