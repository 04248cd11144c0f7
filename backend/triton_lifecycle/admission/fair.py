"""Start-time fair queuing: each tenant gets the same share of the engine while it has work, whatever the others send.

After P. Goyal, H. Vin and H. Cheng, "Start-time fair queuing" (1996): a request starts, in virtual time, where its
tenant's last one finishes, or now if that lies behind; the virtual time is where what is being served started. Y. Sheng
and others ("Fairness in serving large language models", 2024) show the same idea with tokens as the cost of a request.
"""

from __future__ import annotations

from typing import Final

MOST_TENANTS: Final = 1000
"""Tenants with work that are told apart; further ones share one place."""
OTHERS: Final = "\0others"


class FairShare:
    """Virtual start times by tenant, in tokens."""

    def __init__(self) -> None:
        self._now = 0.0
        self._finish: dict[str, float] = {}

    @property
    def tenants(self) -> int:
        """How many are told apart at present."""
        return len(self._finish)

    def start(self, tenant: str, cost: float) -> int:
        """Return where a request of this cost (tokens) starts; its tenant's next one starts behind it."""
        if tenant not in self._finish and len(self._finish) >= MOST_TENANTS:
            # Who has nothing ahead of the virtual time is as good as unknown.
            self._finish = {name: end for name, end in self._finish.items() if end > self._now}
            if len(self._finish) >= MOST_TENANTS:
                tenant = OTHERS
        start = max(self._now, self._finish.get(tenant, 0.0))
        self._finish[tenant] = start + max(1.0, cost)
        return round(start)

    def served(self, start: float) -> None:
        """Move the virtual time to where a request started that has been served."""
        self._now = max(self._now, start)
