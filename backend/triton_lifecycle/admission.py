"""Admission: a request gets its permit at once or is refused at once; nothing is held here.

The only queue is the engine's own. Refusals say which limit was met and when to try again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from triton_lifecycle.errors import Draining, QueueFull

SMOOTHING = 0.1
"""Weight of the newest interval in the running mean of intervals between two released permits."""


class Admission:
    """Counts the permits that are out and refuses beyond the limit.

    Args:
        max_live: permits that may be out at once.
        clock: monotonic seconds.

    """

    def __init__(self, *, max_live: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_live = max_live
        self._clock = clock
        self._released_at: float | None = None
        self._interval = 1.0
        self._out = 0
        self._draining = False

    @property
    def out(self) -> int:
        """Permits that are out."""
        return self._out

    @property
    def draining(self) -> bool:
        """Whether all new work is refused because the server is stopping."""
        return self._draining

    def drain(self) -> None:
        """Refuse all new work from now on."""
        self._draining = True

    @contextmanager
    def permit(self) -> Iterator[None]:
        """Hold a permit for the length of the block.

        Raises:
            Draining: the server is stopping.
            QueueFull: as many requests as allowed are live.

        """
        if self._draining:
            raise Draining("the model is being unloaded and takes no new requests; send it to another replica")
        if self._out >= self._max_live:
            raise QueueFull(
                f"{self._out} requests are live, and no more are allowed", retry_after=max(0.1, self._interval)
            )
        self._out += 1
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        self._out -= 1
        now = self._clock()
        if self._released_at is not None:
            self._interval += SMOOTHING * (now - self._released_at - self._interval)
        self._released_at = now
