"""A short soak on a real tritonserver: users of every kind at half of what it carries.

LIFECYCLE_SOAK_MINUTES sets how long; the hour is ``python -m load.soak``.
"""

from __future__ import annotations

import os

import pytest
from load.soak.report import Report, Setup
from load.soak.serve import run

MINUTES = float(os.environ.get("LIFECYCLE_SOAK_MINUTES", "4.5"))
WARM_UP = 0.4
"""Of the time: until most of what is bounded (ended requests, the predictor's memory, the prefix cache) is full."""
LEAK_MIB = 60.0
"""Per hour. At the ten requests a second of this load it is 1.7 KiB a request; a context that stays is more. What is
measured in so few minutes is not known better: only a slope that is surely above this fails."""
LEAK_HANDLES = 600.0
"""Per hour, likewise: one in sixty requests."""


@pytest.fixture(scope="module")
def report() -> Report:
    setup = Setup(
        minutes=MINUTES, warm_up=MINUTES * WARM_UP, engine="simulated", load=0.5, chaos=0.2, every=2.0,
        over={"grpc": 4.0, "generate": 1.0}, seed=0,
    )  # fmt: skip
    return run(setup, print)


def test_every_caller_ends_as_it_must(report: Report):
    """No request of a good caller fails, every bad one ends as its kind must, and each kind was there."""
    assert report.errors == 0, report.examples
    assert set(report.ends["ask"]) == {"whole"}
    assert set(report.ends["sends_rubbish"]) == {"invalid_input"}
    assert set(report.ends) == {"ask", "cancels", "reads_slowly", "times_out", "sends_rubbish"}
    assert report.requests > 60 * MINUTES


def test_everything_comes_back(report: Report):
    """When the load ends every account is at zero, received is the sum of the ends, and the server stops in order."""
    assert report.problems == []
    assert not report.interrupted


@pytest.mark.parametrize(
    ("what", "limit"),
    [("stub_mib", LEAK_MIB), ("descriptors", LEAK_HANDLES), ("shm_files", LEAK_HANDLES)],
)
def test_nothing_grows(report: Report, what: str, limit: float):
    """After the warm-up no slope is surely above its limit."""
    assert report.trends[what].low <= limit, report.trends[what]
