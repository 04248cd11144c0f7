"""One Locust process's part of a run: its driver, its turn in the plan, what is under way, and its end."""

from __future__ import annotations

import itertools
import logging
import time
from random import Random
from typing import TYPE_CHECKING, Any, Final

import gevent

from load.mixes import share
from load.swarm.health import LAG_SERIES, LATE_SERIES, TOOL
from load.swarm.link import DriverEnded, Link
from load.swarm.protocol import CHAOS, UNEXPECTED, Order
from load.swarm.series import DIED, NOT_SENT, Series

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from load.swarm.protocol import Beat, Deed, Outcome, Over
    from load.swarm.settings import Settings

LOOK_S: Final = 0.05
AHEAD_S: Final = 0.25
"""Arrivals are handed to the driver so long before they are due."""
PAUSE_S: Final = 0.1
READY_S: Final = 30.0
"""A driver is ready after a second or two; a busy machine takes longer."""

log = logging.getLogger(__name__)


class Campaign:
    """This process's part of one run.

    Args:
        environment: Locust's.
        settings: what is to be done.
        index: of this process, from 0.
        count: of processes that take turns.

    """

    def __init__(self, environment: Any, settings: Settings, index: int = 0, count: int = 1) -> None:  # noqa: ANN401
        self.settings = settings
        self.closing = False
        """Whether nothing new is asked any more."""
        self._series = Series(environment)
        self._numbers: Iterator[int] = share(itertools.count(), index, count)
        self._turn = (index, count)
        self._scheduled = False
        self._plan_over = not settings.open_loop
        self._counting = True
        self._told: set[str] = set()
        self.drained = False
        """Whether nothing is asked any more, and what was under way has ended or had its time."""
        self._link = Link(settings.hello, self._beat, self._died)
        self._watch = gevent.spawn(self._look)
        if not self._link.wait_ready(READY_S) and not self._link.over:
            self._died()  # one that has ended has told so itself

    def ask(self, over: Over | None, deed: Deed) -> None:
        """Make the next request of this process's turn, count it, and return when it has ended."""
        try:
            self._count(self._link.ask(self._order(next(self._numbers), over, deed)))
        except DriverEnded:
            gevent.sleep(PAUSE_S)  # said once already; users must not spin

    def schedule(self, who: Callable[[Random], tuple[Over | None, Deed]]) -> None:
        """Let this process's share of the arrivals come, each when it is due; returns at their end.

        Only the first caller does it; the others return at once.
        """
        if self._scheduled:
            return
        self._scheduled = True
        try:
            self._send_arrivals(who)
        finally:
            self._plan_over = True

    def _send_arrivals(self, who: Callable[[Random], tuple[Over | None, Deed]]) -> None:
        begin = time.monotonic() + AHEAD_S
        for number, at in share(enumerate(self.settings.times()), *self._turn):
            due = begin + at
            while not self.closing and (early := due - AHEAD_S - time.monotonic()) > 0:
                gevent.sleep(min(early, PAUSE_S))
            if self.closing:
                return
            if self._link.live >= self.settings.max_in_flight:
                self._series.fail(TOOL, LATE_SERIES, NOT_SENT)
                continue
            over, deed = who(_dice(self.settings.seed, number))
            self._link.order(self._order(number, over, deed, due), self._done)

    def drain(self) -> None:
        """Ask nothing more, and wait for what is under way as long as the settings allow.

        A plan that began later than the run, since its driver had to start, comes to its end first.
        """
        until = time.monotonic() + READY_S
        while not self._plan_over and time.monotonic() < until:
            gevent.sleep(PAUSE_S)
        self.closing = True
        until = time.monotonic() + self.settings.drain
        while self._link.live and time.monotonic() < until:
            gevent.sleep(PAUSE_S)
        self.drained = True

    def end(self) -> None:
        """Leave what is under way, at once: a worker's last figures must reach its master within half a second."""
        self.closing = True
        self._counting = False
        self._watch.kill()
        if left := self._link.drop_all():
            log.warning("%d requests were still under way at the end; they were left and are not counted", left)

    def close(self) -> None:
        """End the driver; may take seconds."""
        self.end()
        self._link.close()

    def _order(self, number: int, over: Over | None, deed: Deed, due: float | None = None) -> Order:
        ask = self.settings.mix.ask(number)
        return Order(
            id=self._link.next_id(),
            number=number,
            over=over or self.settings.over_of(number),
            prompt=ask.prompt,
            output_tokens=ask.output_tokens,
            deed=deed,
            timeout=ask.timeout,
            due=due,
        )

    def _done(self, outcome: Outcome | None) -> None:
        if outcome is not None:
            self._count(outcome)

    def _beat(self, beat: Beat) -> None:
        if self._counting:
            self._series.beat(beat)

    def _died(self) -> None:
        log.error("the process that makes the requests ended unasked; this run is refused")
        self._series.fail(TOOL, LAG_SERIES, DIED)

    def _count(self, outcome: Outcome) -> None:
        self._series.outcome(outcome)
        known = outcome.deed != "ask" and not (outcome.slug or "").startswith(UNEXPECTED)
        if outcome.slug is not None and not known and outcome.slug not in self._told:
            self._told.add(outcome.slug)
            log.warning("first failure of its kind: %s over %s: %s", outcome.slug, outcome.over, outcome.message)

    def _look(self) -> None:
        while True:
            before = time.monotonic()
            gevent.sleep(LOOK_S)
            self._series.greenlet_lag(max(0.0, time.monotonic() - before - LOOK_S) * 1e3)


def _dice(seed: int, number: int) -> Random:
    return Random(f"{seed}/who/{number}")  # noqa: S311 - repeatable, not secret


def arrival(random: Random, chaos: float) -> tuple[Over | None, Deed]:
    """Return what an arrival does: in earnest, or one of the kinds of chaos alike."""
    return None, (random.choice(CHAOS) if random.random() < chaos else "ask")
