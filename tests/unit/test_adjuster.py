"""From a prediction to limits: what each setting does."""

from __future__ import annotations

import math

import pytest

from triton_lifecycle.config import ErrorHandling, TimeoutHandling
from triton_lifecycle.engine.supervisor import Course, Supervisor
from triton_lifecycle.timeouts.adjuster import adjust
from triton_lifecycle.timeouts.limits import Limits, choose
from triton_lifecycle.timeouts.predictor import Interval, Prediction


def interval(value):
    """Return an interval whose upper bound is ``value``."""
    return Interval(value / 2, value / 4, value, value / 2, value / 2)


def prediction(first=10.0, per_token=1.0, total=60.0):
    """Return a prediction with these upper bounds."""
    return Prediction(interval(first), interval(per_token), interval(total))


BOTH = frozenset({"first_token", "stall"})


def test_a_prediction_bounds_silence_and_the_total_stays_max_timeout():
    """The upper bounds times the safety margin for silences; nothing predicted ends a request that goes on."""
    limits = adjust(TimeoutHandling(), None, prediction())
    assert limits == Limits(first_token=15.0, stall=16.5, total=300.0, slow=60.0, patient=BOTH)


def test_off_means_the_default_timeout():
    """enable_intelligent_timeout false: the prediction changes nothing."""
    settings = TimeoutHandling(enable_intelligent_timeout=False)
    assert adjust(settings, None, prediction()) == choose(settings, None) == Limits(total=30.0)
    assert adjust(TimeoutHandling(enabled=False), 7.0, prediction()) == Limits(total=7.0)


def test_min_timeout_is_the_shortest_derived_limit():
    """However short the prediction."""
    limits = adjust(TimeoutHandling(min_timeout=4.0), None, prediction(0.01, 0.001, 1.0))
    assert (limits.first_token, limits.stall) == (4.0, 4.0)


def test_max_timeout_is_the_longest_limit():
    """However long the prediction, and whatever the caller allows."""
    limits = adjust(TimeoutHandling(max_timeout=40.0), 1000.0, prediction(100.0))
    assert (limits.first_token, limits.stall, limits.total) == (40.0, 40.0, 40.0)


@pytest.mark.parametrize(("margin", "first"), [(1.0, 10.0), (3.0, 30.0)])
def test_safety_margin_stretches_the_derived_limits(margin, first):
    """Times the predicted bound."""
    assert adjust(TimeoutHandling(safety_margin=margin), None, prediction()).first_token == first


@pytest.mark.parametrize(("factor", "share", "first"), [(1.0, 0.5, 22.5), (0.0, 0.5, 15.0), (2.0, 1.0, 45.0)])
def test_load_factor_stretches_them_with_the_share_that_waits(factor, share, first):
    """A queue may still grow."""
    assert adjust(TimeoutHandling(load_factor=factor), None, prediction(), waiting_share=share).first_token == first


def test_a_silence_that_is_usual_is_no_stall():
    """The derived limits lie above the longest after which the engine went on."""
    limits = adjust(TimeoutHandling(), None, prediction(), usual_silence=20.0)
    assert (limits.first_token, limits.stall) == (30.0, 31.5)


@pytest.mark.parametrize(("caller", "total"), [(None, 300.0), (2.0, 2.0), (0.3, 0.3), (60.0, 60.0), (1000.0, 300.0)])
def test_the_callers_bound_wins_when_it_is_shorter(caller, total):
    """A longer one counts up to max_timeout."""
    assert adjust(TimeoutHandling(), caller, prediction()).total == total
    assert adjust(TimeoutHandling(), caller, None).total == total


def test_the_cold_start_falls_back_to_the_default_timeout():
    """Without a prediction: the default for the first token and each further one; the caller's own bound alone."""
    assert adjust(TimeoutHandling(), None, None) == Limits(first_token=30.0, stall=30.0, total=300.0)
    assert adjust(TimeoutHandling(), 60.0, None) == Limits(total=60.0)


def test_configured_limits_stand_firm():
    """first_token_timeout and stall_timeout are neither changed nor patient."""
    settings = TimeoutHandling(first_token_timeout=1.0, stall_timeout=2.0)
    limits = adjust(settings, None, prediction())
    assert (limits.first_token, limits.stall, limits.patient) == (1.0, 2.0, frozenset())
    limits = adjust(TimeoutHandling(stall_timeout=2.0), None, prediction())
    assert (limits.stall, limits.patient) == (2.0, frozenset({"first_token"}))


@pytest.mark.parametrize("every", [0.01, 0.5])
def test_a_long_silence_is_forgotten_with_time_not_with_tokens(every):
    """A minute after a silence of 40 s a third of it is left, whether tokens came every 10 ms or every half second."""
    now = 0.0
    supervisor = Supervisor(None, ErrorHandling(), clock=lambda: now)  # type: ignore[arg-type]
    course = Course()
    now = 40.0
    supervisor.progress(course)
    assert supervisor.usual_silence == 40.0
    while now < 100.0:
        now += every
        supervisor.progress(course)
    assert supervisor.usual_silence == pytest.approx(40.0 / math.e, rel=0.02)
