"""One movable deadline per request, absolute, on the event loop's clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from triton_lifecycle.errors import DeadlineExceeded, FirstTokenTimeout, StallTimeout, TotalTimeout
from triton_lifecycle.timeouts.limits import Limits

_ERRORS: dict[str, type[DeadlineExceeded]] = {
    "first_token": FirstTokenTimeout,
    "stall": StallTimeout,
    "total": TotalTimeout,
}


class Deadline:
    """The earliest of a request's limits; moves as tokens arrive.

    Moving it costs two assignments: the timer is not touched, and when it fires early it arms itself for the rest.

    Args:
        limits: the request's limits; the clock starts now.
        expire: called once with the error when the deadline passes, on the event loop.

    """

    def __init__(self, limits: Limits, expire: Callable[[DeadlineExceeded], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._expire = expire
        self._tokens = 0
        now = self._loop.time()
        self._total_at = None if limits.total is None else now + limits.total
        self._next_at = None if limits.first_token is None else now + limits.first_token
        self._handle: asyncio.TimerHandle | None = None
        self._arm()

    @property
    def due(self) -> float | None:
        """When it passes, on the loop's clock; ``None`` when no limit is on."""
        return min((at for at in (self._next_at, self._total_at) if at is not None), default=None)

    @property
    def limit(self) -> str:
        """Which limit is the next to pass."""
        if self._next_at is None or (self._total_at is not None and self._total_at <= self._next_at):
            return "total"
        return "stall" if self._tokens else "first_token"

    def progress(self, tokens: int) -> None:
        """Tokens arrived: the first-token limit is over, the stall limit starts anew."""
        stall = self._limits.stall
        rearm = not self._tokens
        self._tokens += tokens
        self._next_at = None if stall is None else self._loop.time() + stall
        if rearm:
            # Only here can the deadline move to an earlier time than the timer's.
            self._arm()

    def close(self) -> None:
        """Never fire again."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _arm(self) -> None:
        self.close()
        due = self.due
        if due is not None:
            self._handle = self._loop.call_at(due, self._fire)

    def _fire(self) -> None:
        due = self.due
        # loop.time() may lie a clock tick before the time that the timer was set for.
        if due is not None and self._loop.time() + 1e-3 < due:
            self._handle = self._loop.call_at(due, self._fire)
            return
        self._handle = None
        name = self.limit
        value = self._limits.named()[name]
        label = {"first_token": "first-token limit", "stall": "stall limit", "total": "total limit"}[name]
        self._expire(_ERRORS[name](f"the {label} of {value:g} s passed; {self._tokens} tokens were produced before"))
