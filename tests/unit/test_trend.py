"""The slope of the soak's figures, and how sure it is."""

from __future__ import annotations

from random import Random

import pytest
from load.trend import trend

HOUR = 3600.0


def test_a_steady_growth_is_found_through_noise_and_wild_values():
    """Two a hour under noise of a tenth and a value in twenty that is far off: within its interval, and a tight one."""
    random = Random(1)
    times = [5.0 * number for number in range(720)]
    values = [60 + 2 * at / HOUR + random.gauss(0, 0.1) + (40 if random.random() < 0.05 else 0) for at in times]
    found = trend(times, values)
    assert found.low <= 2 <= found.high
    assert found.slope == pytest.approx(2, abs=0.2)
    assert found.most > 90
    assert (found.verdict(3), found.verdict(1)) == ("met", "missed")


def test_noise_alone_proves_no_growth():
    """Over twenty seeds an interval of 95 % is above zero at most a few times, and then the slope is small."""
    wrong = 0
    for seed in range(20):
        random = Random(seed)
        found = trend([5.0 * number for number in range(120)], [60 + random.gauss(0, 0.5) for _ in range(120)])
        wrong += found.low > 0
    assert wrong <= 3


def test_what_is_not_known_better_is_undecided():
    """A slope above the bound whose interval reaches below it is no proof."""
    random = Random(3)
    found = trend([5.0 * number for number in range(40)], [60 + random.gauss(0, 1) for _ in range(40)])
    assert found.verdict(found.slope) == "met"
    assert found.verdict((found.low + found.slope) / 2) == "undecided"


@pytest.mark.parametrize("times", [[], [1.0, 2.0, 3.0], [1.0] * 10])
def test_too_little_has_no_slope(times: list[float]):
    """A few values, or all of one moment, are no trend."""
    assert trend(times, [1.0] * len(times)) is None


def test_what_stays_the_same_has_none():
    """A flat line has a slope of nothing, surely."""
    found = trend([float(number) for number in range(100)], [7.0] * 100)
    assert (found.slope, found.low, found.high, found.first, found.last) == (0, 0, 0, 7, 7)
