"""The three predictions of a request, each with an interval that covers 90 %, and how good they have been."""

from __future__ import annotations

import math
from typing import Any, Final, Literal

import msgspec

from triton_lifecycle.timeouts.predictor.calibration import Bound
from triton_lifecycle.timeouts.predictor.features import FIRST, RATE, Features, first_vector, rate_vector
from triton_lifecycle.timeouts.predictor.lengths import Lengths
from triton_lifecycle.timeouts.predictor.rates import Linear, Rate

Model = Literal["linear", "ml"]

COLD: Final = 30
"""Observations before the first prediction."""
_TRIAL: Final = 15
"""Observations before predictions are made for the sake of the intervals alone."""
SIDE: Final = 0.05
"""Share of what may lie on either side of an interval."""
HORIZON: Final = 500
"""Requests over which accuracy is averaged."""


class Interval(msgspec.Struct, frozen=True, gc=False):
    """Seconds: the value expected, and the bounds between which nine in ten lie."""

    value: float
    low: float
    high: float
    raw_low: float
    """Before calibration, as is :attr:`raw_high`: what a miss is measured from."""
    raw_high: float


class Prediction(msgspec.Struct, frozen=True):
    """What a request will take, counted from its admission."""

    first_token: Interval
    per_token: Interval
    total: Interval


class Observation(msgspec.Struct, frozen=True, gc=False):
    """What a request took. ``None`` where it ended before that was known."""

    features: Features
    first_token: float | None
    per_token: float | None = None
    total: float | None = None
    """Of an answer that came to its end."""
    tokens: float | None = None
    """Of each sequence, likewise."""
    admitted: float = 0.0
    """Monotonic seconds."""
    ended: float = 0.0


class Accuracy(msgspec.Struct):
    """Over about the last :data:`HORIZON` requests."""

    seen: int = 0
    mape: float = 0.0
    """Mean absolute error in per cent of what it was."""
    coverage: float = 0.0
    """Per cent of what was within the interval."""
    predicted: float = 0.0
    """The last one, in seconds."""
    actual: float = 0.0

    def add(self, told: Interval, actual: float) -> None:
        """Count one prediction whose outcome is known."""
        self.seen += 1
        share = 1 / min(self.seen, HORIZON)
        self.mape += share * (100 * abs(told.value - actual) / actual - self.mape)
        self.coverage += share * (100 * (told.low <= actual <= told.high) - self.coverage)
        self.predicted, self.actual = told.value, actual


class Online:
    """Predicts and learns. Not for several threads.

    Args:
        model: which.
        slots: sequences that the engine runs at once; further ones wait.

    Raises:
        ConfigError: the model's package is not installed.

    """

    def __init__(self, model: Model, slots: int) -> None:
        self._slots = slots
        self._first = _rate(model, FIRST)
        self._per_token = _rate(model, RATE)
        self._lengths = Lengths()
        self._bounds = {name: (Bound(SIDE), Bound(SIDE)) for name in Prediction.__struct_fields__}
        self.accuracy = {name: Accuracy() for name in Prediction.__struct_fields__}
        self.observations = 0

    def predict(self, features: Features) -> Prediction | None:
        """Return what the request will take; ``None`` while too little was seen."""
        return self._predict(features) if self.observations >= COLD else None

    def learn(self, seen: Observation, told: Prediction | None) -> None:
        """Take in what became of a request, and of what was predicted for it."""
        made = told
        if told is None and self.observations >= _TRIAL:
            made = self._predict(seen.features)
        self.observations += 1
        outcomes = {"first_token": seen.first_token, "per_token": seen.per_token, "total": seen.total}
        for name, actual in outcomes.items():
            if actual is None or actual <= 0 or made is None:
                continue
            interval: Interval = getattr(made, name)
            self._calibrate(name, interval, actual)
            if told is not None:
                self.accuracy[name].add(interval, actual)
        self._fit(seen)

    def _fit(self, seen: Observation) -> None:
        features = seen.features
        if seen.first_token is not None and seen.first_token > 0:
            rate = self._per_token.predict(rate_vector(features, self._slots))
            self._first.learn(first_vector(features, self._slots, rate, self._lengths.mean), seen.first_token)
        if seen.per_token is not None and seen.per_token > 0:
            self._per_token.learn(rate_vector(features, self._slots), seen.per_token)
        if seen.tokens is not None:
            self._lengths.learn(features.max_tokens, seen.tokens)

    def _predict(self, features: Features) -> Prediction:
        rates = rate_vector(features, self._slots)
        per_token = self._per_token.predict(rates)
        first = self._first.predict(first_vector(features, self._slots, per_token, self._lengths.mean))
        length = self._lengths.predict(features.max_tokens)
        return Prediction(
            first_token=self._interval("first_token", first, first, first),
            per_token=self._interval("per_token", per_token, per_token, per_token),
            total=self._interval(
                "total",
                first + per_token * max(0.0, length.mean - 1),
                first + per_token * max(0.0, length.low - 1),
                first + per_token * max(0.0, length.high - 1),
            ),
        )

    def _interval(self, name: str, value: float, low: float, high: float) -> Interval:
        """Widen (or narrow) an interval by what was missed of late, as factors: conformalized quantiles."""
        below, above = self._bounds[name]
        if low == high:
            # Least squares give the mean, which a few long times draw up; what is told is what half of them exceed.
            value *= math.exp(above.middle)
        return Interval(value, low * math.exp(-below.value), high * math.exp(above.value), low, high)

    def _calibrate(self, name: str, told: Interval, actual: float) -> None:
        below, above = self._bounds[name]
        below.learn(math.log(told.raw_low / actual), missed=actual < told.low)
        above.learn(math.log(actual / told.raw_high), missed=actual > told.high)

    def report(self) -> dict[str, Any]:
        """Return how many requests were seen, and the accuracy of the three predictions."""
        return {
            "observations": self.observations,
            "ready": self.observations >= COLD,
            **{name: msgspec.structs.asdict(accuracy) for name, accuracy in self.accuracy.items()},
        }


def _rate(model: Model, names: tuple[str, ...]) -> Rate:
    if model == "linear":
        return Linear(len(names))
    from triton_lifecycle.timeouts.predictor.tree import Corrected  # noqa: PLC0415 - imports river

    return Corrected(names)
