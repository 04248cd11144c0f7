"""In which order the engine takes what waits, as the one integer that vLLM sorts by (lower is sooner).

vLLM fixes a request's priority when it is submitted. So ageing cannot raise what waits; it must let what comes later
count for less. Both orders here do: the number of a request stands, while those of later ones grow without end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from triton_lifecycle.admission.fair import FairShare

MOST_CLASSES: Final = 10
"""Priorities beyond ±10 count as ±10: what bounds how long a request can be overtaken."""
HORIZON_S: Final = 60.0
"""A request without a deadline, or with a later one, is put in order as if it had this long."""
CLASS_TOKENS: Final = 1000
"""Under fair share, one class of priority is worth so many tokens of a tenant's service."""


class Order(Protocol):
    """Gives a request its place."""

    def place(self, priority: int, left: float | None, tenant: str, cost: float) -> int:
        """Return vLLM's priority.

        Args:
            priority: the caller's; lower is sooner.
            left: seconds until its deadline, if it has one.
            tenant: whose it is.
            cost: tokens that it is expected to take.

        """
        ...

    def served(self, place: int, priority: int) -> None:
        """Take note that a request of this place and the caller's priority has been worked on."""
        ...


class AsAsked:
    """The caller's own priority, as the official backend has it; among equals, the first to come."""

    def place(self, priority: int, left: float | None, tenant: str, cost: float) -> int:  # noqa: ARG002 - see Order
        """Return the caller's number."""
        return priority

    def served(self, place: int, priority: int) -> None:
        """Nothing follows from it."""


class VirtualDeadline:
    """Earliest deadline first; a class of priority is worth ``ageing`` seconds of it.

    A request is overtaken only by those that come within ``HORIZON_S + 2 · MOST_CLASSES · ageing`` seconds after it.

    Args:
        ageing: seconds.
        clock: monotonic seconds.

    """

    def __init__(self, ageing: float, clock: Callable[[], float]) -> None:
        self._ageing = ageing
        self._clock = clock
        self._origin = clock()

    def place(self, priority: int, left: float | None, tenant: str, cost: float) -> int:  # noqa: ARG002 - see Order
        """Return the virtual deadline in ms since the start."""
        allowed = HORIZON_S if left is None else min(left, HORIZON_S)
        return round((self._clock() - self._origin + allowed + _bounded(priority) * self._ageing) * 1e3)

    def served(self, place: int, priority: int) -> None:
        """Nothing follows from it."""


class ByShare:
    """Fair share of the engine's tokens by tenant; priority counts by :data:`CLASS_TOKENS`."""

    def __init__(self) -> None:
        self._fair = FairShare()

    def place(self, priority: int, left: float | None, tenant: str, cost: float) -> int:  # noqa: ARG002 - see Order
        """Return the start tag in tokens, moved by the caller's priority."""
        return self._fair.start(tenant, cost) + _bounded(priority) * CLASS_TOKENS

    def served(self, place: int, priority: int) -> None:
        """Move the virtual time on."""
        self._fair.served(place - _bounded(priority) * CLASS_TOKENS)


def _bounded(priority: int) -> int:
    return max(-MOST_CLASSES, min(MOST_CLASSES, priority))
