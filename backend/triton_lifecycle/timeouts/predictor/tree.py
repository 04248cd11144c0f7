"""What the line leaves over, learned by an adaptive Hoeffding tree (Bifet & Gavaldà 2009) from ``river``."""

from __future__ import annotations

import math
from typing import Any, Final

from triton_lifecycle.errors import ConfigError
from triton_lifecycle.timeouts.predictor.rates import Linear

_MOST: Final = 1.0
"""Bound on the logarithm of the correction."""
_FADE: Final = 0.01


class Corrected:
    """The line times what a tree says; the tree is heard while it has of late been right more often than not.

    Args:
        names: of the numbers of an observation.

    Raises:
        ConfigError: ``river`` is not installed.

    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._line = Linear(len(names))
        self._names = names
        self._tree = _tree()
        self._loss_line = self._loss_tree = 0.0

    def predict(self, x: list[float]) -> float:
        """Return seconds."""
        seconds = self._line.predict(x)
        return seconds if self._loss_line <= self._loss_tree else seconds * math.exp(self._correction(x))

    def learn(self, x: list[float], seconds: float) -> None:
        """Take in one observation: the tree what the line missed, then the line."""
        missed = math.log(seconds / self._line.predict(x))
        self._loss_line += _FADE * (abs(missed) - self._loss_line)
        self._loss_tree += _FADE * (abs(missed - self._correction(x)) - self._loss_tree)
        self._tree.learn_one(dict(zip(self._names, x, strict=True)), min(max(missed, -_MOST), _MOST))
        self._line.learn(x, seconds)

    def _correction(self, x: list[float]) -> float:
        said = float(self._tree.predict_one(dict(zip(self._names, x, strict=True))))
        return min(max(said, -_MOST), _MOST)


def _tree() -> Any:  # noqa: ANN401 - river is not typed for us
    try:
        from river import tree  # noqa: PLC0415 - it is heavy, and only this model needs it
    except ImportError as error:
        raise ConfigError(
            "timeout_handling.timeout_prediction_model: 'ml' needs the package river, which cannot be imported "
            f"({error}); install it (pip install 'triton-lifecycle[ml]') or choose 'linear'"
        ) from error
    return tree.HoeffdingAdaptiveTreeRegressor(grace_period=50, leaf_prediction="mean", max_depth=6, seed=1)
