"""When a request may be sent again, and after how long."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from triton_lifecycle.errors import LifecycleError


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Exponential pauses with jitter; the server's own hint goes first.

    The caller of :meth:`pause` sees to it that sending again is safe: nothing of an answer has arrived yet, or what has
    can be left out of the new one (``resume.py``).

    Attributes:
        attempts: how often a request is sent at most; 1 means never again.
        base_s: first pause; doubles with each attempt.
        cap_s: longest pause; a server that asks for more is not asked again.

    """

    attempts: int = 3
    base_s: float = 0.2
    cap_s: float = 10.0

    def pause(self, error: LifecycleError, attempt: int) -> float | None:
        """Return the seconds to wait before the next attempt, or ``None`` to give up.

        Args:
            error: how the attempt ended.
            attempt: its number, from 1.

        """
        if not error.retryable or attempt >= self.attempts:
            return None
        if error.retry_after is not None:
            # Spread upwards only: earlier than asked would be refused again.
            wait = error.retry_after * random.uniform(1.0, 1.2)  # noqa: S311 - no secret hangs on it
            return wait if error.retry_after <= self.cap_s else None
        return min(self.cap_s, self.base_s * 2.0 ** (attempt - 1)) * random.uniform(0.5, 1.0)  # noqa: S311


NO_RETRY = RetryPolicy(attempts=1)
