"""The three limits of a request, chosen once when it is admitted."""

from __future__ import annotations

import msgspec

from triton_lifecycle.config import TimeoutHandling


class Limits(msgspec.Struct, frozen=True):
    """Seconds, each ``None`` when off."""

    first_token: float | None = None
    stall: float | None = None
    total: float | None = None
    slow: float | None = None
    """After so long the request counts as slow; that is told, and no more."""
    patient: frozenset[str] = frozenset()
    """Which of ``first_token`` and ``stall`` count only while the engine makes no token for anybody: a request that
    waits its turn, or was preempted, is no stalled one."""

    def named(self) -> dict[str, float]:
        """Return the limits that are on, by name."""
        found = {"first_token": self.first_token, "stall": self.stall, "total": self.total}
        return {name: value for name, value in found.items() if value is not None}


def choose(settings: TimeoutHandling, caller: float | None) -> Limits:
    """Combine the configuration with the caller's own bound.

    Args:
        settings: the ``timeout_handling`` section.
        caller: seconds the caller allows for the whole request, or ``None``.

    Returns:
        The caller's bound when it is shorter than what is configured; a longer one counts up to ``max_timeout``. With
        ``timeout_handling`` off only the caller's bound remains.

    """
    if not settings.enabled:
        return Limits(total=caller)
    total = settings.default_timeout if caller is None else min(caller, settings.max_timeout)
    return Limits(first_token=settings.first_token_timeout, stall=settings.stall_timeout, total=total)
