"""From a prediction to a request's limits: a pure function.

A prediction may be wrong, so none ends a request that goes on. It sets how long a *silence* may last, and when a
request counts as slow; the end comes with ``max_timeout`` or the caller's own bound.
"""

from __future__ import annotations

from triton_lifecycle.config import TimeoutHandling
from triton_lifecycle.timeouts.limits import Limits, choose
from triton_lifecycle.timeouts.predictor import Prediction


def adjust(
    settings: TimeoutHandling,
    caller: float | None,
    prediction: Prediction | None,
    *,
    waiting_share: float = 0.0,
    usual_silence: float = 0.0,
) -> Limits:
    """Return the limits of a request that is being admitted.

    Args:
        settings: the ``timeout_handling`` section; limits that it names stand as they are.
        caller: seconds the caller allows for the whole request, or ``None``.
        prediction: what the request is expected to take; ``None`` while too little is known.
        waiting_share: of all live requests, how many wait, 0…1: such a queue may still grow.
        usual_silence: the longest that the engine has lately made no token for anybody and then gone on: a long prefill
            of somebody else is no stall.

    """
    if not settings.enabled or not settings.enable_intelligent_timeout:
        return choose(settings, caller)
    configured = {"first_token": settings.first_token_timeout, "stall": settings.stall_timeout}
    total = settings.max_timeout if caller is None else min(caller, settings.max_timeout)
    if prediction is None:
        # Without a bound of its own a request has the default for its first token and for each further one.
        patience = settings.default_timeout if caller is None else None
        return Limits(
            first_token=_first(settings.first_token_timeout, patience),
            stall=_first(settings.stall_timeout, patience),
            total=total,
        )
    factor = settings.safety_margin * (1 + settings.load_factor * waiting_share)
    first, per_token = max(prediction.first_token.high, usual_silence), prediction.per_token.high
    # One that was preempted waits and is prefilled again, as if it were new.
    return Limits(
        first_token=_first(settings.first_token_timeout, _bounded(settings, factor * first)),
        stall=_first(settings.stall_timeout, _bounded(settings, factor * (first + per_token))),
        total=total,
        slow=prediction.total.high,
        patient=frozenset(name for name, value in configured.items() if value is None),
    )


def _bounded(settings: TimeoutHandling, seconds: float) -> float:
    return min(max(seconds, settings.min_timeout), settings.max_timeout)


def _first(configured: float | None, derived: float | None) -> float | None:
    return derived if configured is None else configured
