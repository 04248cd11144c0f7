"""Whether the tool itself kept up: a load tool that did not measures itself, and must not report."""

from __future__ import annotations

from typing import Final

import msgspec

LAG_SERIES: Final = "loop lag"
LATE_SERIES: Final = "late arrivals"
LOCUST_SERIES: Final = "greenlet lag"
CPU_SERIES: Final = "cpu (percent of a core)"
TOOL: Final = "tool"
"""The request type of these series."""

CPU_LIMIT: Final = 95.0
"""Percent of a core; Python uses no more than one for this."""
SAMPLES: Final = 20
"""Fewer say nothing about a 99th percentile."""


class Health(msgspec.Struct, frozen=True):
    """How the tool was, over all its processes.

    Attributes:
        lag_ms: 99th percentile of by how much the drivers' loops woke too late.
        greenlet_ms: the same of Locust's greenlets; no time is measured there, but users ask again late.
        late_ms: 99th percentile of how much later than due requests were sent; 0 in a closed loop.
        cpu: median percent of a core that a driver used.
        dropped: arrivals that were never sent, since as many as allowed were under way.
        samples: how often the loops were looked at.
        deaths: drivers that ended unasked.

    """

    lag_ms: float
    greenlet_ms: float
    late_ms: float
    cpu: float
    dropped: int
    samples: int
    deaths: int = 0


def faults(health: Health, limit_ms: float) -> list[str]:
    """Return why the tool must not report; empty when it kept up.

    Args:
        health: how it was.
        limit_ms: by how much it may be late, 99 times in a hundred.

    """
    found = []
    if health.deaths:
        found.append(f"{health.deaths} of the processes that make the requests died")
    if health.samples < SAMPLES:
        found.append(f"its lag was looked at only {health.samples} times, at least {SAMPLES} are needed: run longer")
    for what, value in (
        ("its event loop woke", health.lag_ms),
        ("its greenlets woke", health.greenlet_ms),
        ("requests were sent", health.late_ms),
    ):
        if value > limit_ms:
            found.append(f"{what} {value:g} ms late (99th percentile; {limit_ms:g} ms are allowed)")
    if health.cpu > CPU_LIMIT:
        found.append(f"the process that makes the requests used {health.cpu:g} % of a core, all that it can")
    if health.dropped:
        found.append(f"{health.dropped} arrivals were never sent, since --max-in-flight requests were under way")
    return found


def refusal(found: list[str]) -> str:
    """Return what is said instead of a report."""
    return (
        "REFUSED: this run says nothing about the server, because the load tool was the bottleneck: "
        + "; ".join(found)
        + ". Add workers (--master/--worker, or --processes), put them on other machines than the server, lower the "
        "load, or, if you know what you do, raise --max-lag-ms."
    )
