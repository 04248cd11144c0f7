"""One movable deadline per request, absolute, on the request's own clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from triton_lifecycle.errors import DeadlineExceeded, FirstTokenTimeout, StallTimeout, TotalTimeout
from triton_lifecycle.timeouts.limits import Limits

_TICK = 1e-3
"""Seconds to wait again when the loop's timer, which counts in whole milliseconds, came early."""

_SAME = 1e-8
"""Seconds by which two times may differ by rounding alone."""

_ERRORS: dict[str, type[DeadlineExceeded]] = {
    "first_token": FirstTokenTimeout,
    "stall": StallTimeout,
    "total": TotalTimeout,
}


class Deadline:
    """The earliest of a request's limits; moves as tokens arrive.

    Moving it costs two assignments: the timer is not touched, and when it fires early it arms itself for the rest.

    Args:
        limits: the request's limits.
        expire: called once with the error when the deadline passes, on the event loop, never before.
        on_slow: called once with the seconds passed and the tokens made, when the request counts as slow.
        clock: seconds, read anew by each call; ``None`` for the loop's, which may be as old as its present turn.
        began: when the limits began to count, on that clock; ``None`` for now.

    """

    def __init__(
        self,
        limits: Limits,
        expire: Callable[[DeadlineExceeded], object],
        on_slow: Callable[[float, int], object] = lambda *_: None,
        *,
        clock: Callable[[], float] | None = None,
        began: float | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time if clock is None else clock
        self._expire = expire
        self._on_slow = on_slow
        self._tokens = 0
        self._began = self._clock() if began is None else began
        self._handle: asyncio.TimerHandle | None = None
        self.moves = {"progress": 0, "prediction": 0, "patience": 0, "recovery": 0}
        """How often it moved, by what moved it."""
        self._set(limits, lambda: 0.0)

    def adjust(self, limits: Limits, silence: Callable[[], float] = lambda: 0.0) -> None:
        """Replace the limits; all count from the beginning. Before the first token.

        Args:
            limits: the new ones.
            silence: returns the seconds since the engine's last token for anybody; patient limits ask for it.

        """
        self.moves["prediction"] += limits != self._limits
        self._set(limits, silence)

    def _set(self, limits: Limits, silence: Callable[[], float]) -> None:
        self._limits = limits
        self._silence = silence
        self._total_at, self._next_at, self._slow_at = (
            None if value is None else self._began + value for value in (limits.total, limits.first_token, limits.slow)
        )
        self._arm()

    @property
    def due(self) -> float | None:
        """When it passes, on its clock; ``None`` when no limit is on."""
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
        self._next_at = None if stall is None else self._clock() + stall
        self.moves["progress"] += stall is not None
        if rearm:
            # Only here can the deadline move to an earlier time than the timer's.
            self._arm()

    @property
    def left(self) -> float | None:
        """Seconds until the total limit; ``None`` when it is off."""
        return None if self._total_at is None else self._total_at - self._clock()

    def suspend(self) -> None:
        """Let only the total limit count: the engine is away or lets nobody in, and no token can come."""
        self._next_at = None
        self._arm()

    def resume(self) -> None:
        """Let the limit for the next token begin anew."""
        limit = self._limits.stall if self._tokens else self._limits.first_token
        self.moves["recovery"] += limit is not None
        self._next_at = None if limit is None else self._clock() + limit
        self._arm()

    def close(self) -> None:
        """Never fire again, and let go of whoever would have been told: they hold this deadline."""
        self._disarm()
        self._expire = self._on_slow = _nobody

    def _disarm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _arm(self, least: float = 0.0) -> None:
        self._disarm()
        due = min((at for at in (self.due, self._slow_at) if at is not None), default=None)
        if due is not None:
            self._handle = self._loop.call_later(max(least, due - self._clock()), self._fire)

    def _fire(self) -> None:
        self._handle = None
        now = self._clock()
        if self._slow_at is not None and self._slow_at <= now + _SAME:
            self._slow_at = None
            self._on_slow(now - self._began, self._tokens)
        self._be_patient(now)
        if self.due is None or now + _SAME < self.due:
            self._arm(_TICK)
            return
        name = self.limit
        value = self._limits.named()[name]
        label = {"first_token": "first-token limit", "stall": "stall limit", "total": "total limit"}[name]
        self._expire(_ERRORS[name](f"the {label} of {value:g} s passed; {self._tokens} tokens were produced before"))

    def _be_patient(self, now: float) -> None:
        """Put off a patient limit while others have tokens: it counts from the engine's last one."""
        name = "stall" if self._tokens else "first_token"
        if self._next_at is not None and name in self._limits.patient:
            patient = now - self._silence() + self._limits.named()[name]
            if patient > self._next_at:
                self._next_at = patient
                self.moves["patience"] += 1


def _nobody(*_: object) -> None:
    return
