"""The supervisor: notices an engine that is dead or stuck, loads it again, and finds the request that kills it.

A request goes through the engine in one or more *attempts*. Each waits here until the engine runs, and reports
progress. When the engine dies, every attempt fails with ``EngineDied``; ``stages/execute.py`` decides what becomes of
its request, and a next attempt waits here for the engine to come back.

Who kills the engine? A request in whose attempt no token was made when the engine died is a *suspect*; tokens clear
it. A suspect of two deaths goes on *trial*: it is let in once nobody else in the engine is suspect, and nobody enters
before it has made a token or died. If the engine dies then, or dies for the second time with a single suspect, that
request is quarantined. So a request that kills costs at most three deaths, and never another request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable
from typing import Final, Protocol

import msgspec

from triton_lifecycle import heap
from triton_lifecycle.config import ErrorHandling
from triton_lifecycle.engine import Load
from triton_lifecycle.errors import EngineDied, EngineRestarting, GenerationFailed

log = logging.getLogger(__name__)

LOOK_S: Final = 0.25
"""How often the engine is looked at."""
FAILURES_IN_A_ROW: Final = 10
"""Requests on which the engine failed, one after the other and none succeeding, before it counts as broken."""
LONGEST_BACKOFF_S: Final = 60.0
DEATHS_BEFORE_TRIAL: Final = 2
FADES_S: Final = 60.0
"""Seconds of work after which the memory of the longest silence has shrunk to a third."""


class Restartable(Protocol):
    """What the supervisor needs of an engine."""

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        ...

    async def start(self) -> None:
        """Load it for the first time."""
        ...

    async def restart(self) -> None:
        """Load it again."""
        ...

    def load(self) -> Load:
        """Return how busy it is."""
        ...


class Course:
    """One request's way through the engine, over all its attempts."""

    __slots__ = ("attempts", "deaths", "progressed", "quarantined")

    def __init__(self) -> None:
        self.attempts = 0
        self.deaths = 0
        """Deaths of the engine, one after the other, in which this request had made no token."""
        self.progressed = False
        """Whether the present attempt has made tokens."""
        self.quarantined = False


class EngineState(msgspec.Struct, frozen=True):
    """What the supervisor knows."""

    status: str
    """``ready``, ``restarting``, or ``dead`` when nothing restarts it."""
    restarts: int
    reason: str | None
    """Why it was last restarted, or is."""
    expected_in: float | None
    """Seconds until it should be ready again."""


class Supervisor:
    """Watches one engine; everything on the event loop.

    Args:
        engine: started, or to be started by ``start``.
        settings: the ``error_handling`` section.
        startup: seconds that the engine took to start, when somebody else started it.
        clock: monotonic seconds.
        on_change: called after each death and each return.

    """

    def __init__(
        self,
        engine: Restartable,
        settings: ErrorHandling,
        *,
        startup: float = 0.0,
        clock: Callable[[], float],
        on_change: Callable[[EngineState], None] = lambda _: None,
    ) -> None:
        self._engine = engine
        self._heals = settings.enabled and settings.enable_auto_recovery
        self._delay = settings.recovery_delay
        self._most = settings.max_recovery_attempts
        self._patience = settings.engine_stall_timeout
        self._startup = startup
        self._clock = clock
        self._on_change = on_change
        self._inside: dict[Course, asyncio.Timeout] = {}
        """Who is in the engine, and what makes it leave."""
        self._accused: list[Course] = []
        """Those that wait for their trial, and the one on trial."""
        self._on_trial: Course | None = None
        self._progress_at = clock()
        self._silent = 0.0
        """Seconds of work without a token, over all times in which it had work since its last token."""
        self.usual_silence = 0.0
        """The longest that the engine has lately been silent, with work, before it went on."""
        self._failures = 0
        self._restart: asyncio.Task[None] | None = None
        self._restart_began = 0.0
        self._hopeless: str | None = None
        self._restarts = 0
        self._reason: str | None = None
        self._changed = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the engine, learn how long that takes, and watch it from then on."""
        began = self._clock()
        await self._engine.start()
        self._startup = self._clock() - began
        self.watch()

    @property
    def state(self) -> EngineState:
        """What is known of the engine now."""
        if self._restart is not None:
            return EngineState("restarting", self._restarts, self._reason, self.expected_in)
        return EngineState("ready" if self._engine.alive else "dead", self._restarts, self._reason, None)

    @property
    def expected_in(self) -> float:
        """Seconds until the engine should be ready; 0 when it is."""
        if self._restart is None:
            return 0.0
        return max(0.5, self._restart_began + self._startup - self._clock())

    @contextlib.asynccontextmanager
    async def attempt(self, course: Course, *, left: float | None = None) -> AsyncIterator[None]:
        """Be in the engine for the length of the block, which begins once the engine runs and lets this request in.

        Args:
            course: the request's.
            left: seconds that the request has; ``None`` when it has no limit.

        Raises:
            EngineRestarting: the engine will not be ready before that, or does not come back.
            EngineDied: it is dead and nothing restarts it.

        """
        await self._let_in(course, left)
        course.progressed = False
        course.attempts += 1
        if not self._inside:
            self._progress_at = self._clock()
        life = self._restarts
        leave = self._inside[course] = asyncio.timeout(None)
        try:
            async with leave:
                yield
        except TimeoutError:
            if not leave.expired():
                raise
            raise EngineDied("the engine was loaded again, and this attempt had not heard of its death") from None
        except EngineDied:
            if life == self._restarts:
                self._notice("its process has died")
            raise
        except GenerationFailed:
            self._failures += 1
            if self._failures >= FAILURES_IN_A_ROW:
                self._notice(f"it failed on {self._failures} requests one after the other")
            raise
        finally:
            del self._inside[course]
            if not self._inside:
                self._silent += self.silence()
            self._acquit(course)

    def silence(self) -> float:
        """Return the seconds since the engine's last token, or since it was given its first request after idling.

        An engine that is away is not silent: it cannot speak.
        """
        return 0.0 if self._restart is not None else self._clock() - self._progress_at

    @property
    def admits(self) -> bool:
        """Whether a request enters at once: the engine runs, and nobody is tried or waits for a trial."""
        return self._restart is None and self._engine.alive and not self._accused

    @property
    def reads_again(self) -> bool:
        """Whether the engine has still to read again what it had read before its death, perhaps all of it at once."""
        return any(course.attempts > 1 and not course.progressed for course in self._inside)

    def progress(self, course: Course) -> None:
        """Tokens were made for this request."""
        now = self._clock()
        quiet = now - self._progress_at
        self.usual_silence = max(quiet, math.exp(-quiet / FADES_S) * self.usual_silence)
        self._progress_at, self._silent = now, 0.0
        self._failures = 0
        if not course.progressed:
            course.progressed = True
            course.deaths = 0
            self._acquit(course)

    def watch(self) -> None:
        """Look at the engine from now on; else its death is noticed by the next request only."""
        if self._heals:
            self._watcher = asyncio.create_task(self._watch(), name="engine-watch")

    async def stop(self) -> None:
        """Watch no more, and give up a restart that is under way."""
        tasks = [task for task in (self._watcher, self._restart) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _let_in(self, course: Course, left: float | None) -> None:
        tried = course.deaths >= DEATHS_BEFORE_TRIAL
        if tried:
            self._accused.append(course)
        try:
            while not self._may_enter(course, left, tried=tried):
                changed = self._changed
                await changed.wait()
        except BaseException:
            self._acquit(course)
            raise
        if tried:
            self._on_trial = course

    def _may_enter(self, course: Course, left: float | None, *, tried: bool) -> bool:
        if not self._engine.alive or self._restart is not None:
            self._must_wait(left)
            return False
        if not tried:
            return self.admits
        if self._on_trial is not None or self._accused[0] is not course:
            return False
        return all(other.progressed for other in self._inside)

    def _must_wait(self, left: float | None) -> None:
        """Raise where waiting for the engine is no use."""
        if not self._heals:
            raise EngineDied("the engine's process has died, and error_handling does not let it be restarted")
        if self._restart is None:
            self._notice("its process has died")
        if self._hopeless is not None:
            raise EngineRestarting(
                f"the engine does not come back: {self._hopeless}; it goes on being tried",
                retry_after=LONGEST_BACKOFF_S,
            )
        expected = self.expected_in
        if left is not None and left < expected:
            raise EngineRestarting(
                f"the engine is being restarted, which takes about {expected:.1f} s more, and the request has "
                f"{left:.1f} s",
                retry_after=expected,
            )

    def _acquit(self, course: Course) -> None:
        """A trial is over, or an accused one has left."""
        if self._on_trial is course:
            self._on_trial = None
        if course in self._accused:
            self._accused.remove(course)
        self._wake()

    def _notice(self, why: str) -> None:
        """Begin a restart, unless one is under way."""
        if self._restart is not None or not self._heals:
            return
        self._judge()
        self._reason = why
        self._failures = 0
        self._restart_began = self._clock()
        log.error("the engine is restarted: %s", why)
        self._restart = asyncio.create_task(self._bring_back(), name="engine-restart")
        self._restart.add_done_callback(self._brought_back)
        self._on_change(self.state)
        self._wake()

    def _judge(self) -> None:
        suspects = [course for course in self._inside if not course.progressed]
        for course in suspects:
            course.deaths += 1
        repeated = [course for course in suspects if course.deaths >= DEATHS_BEFORE_TRIAL]
        if self._on_trial is not None:
            self._on_trial.quarantined = True
        elif len(suspects) == 1 and repeated:
            repeated[0].quarantined = True

    async def _bring_back(self) -> None:
        backoff = max(self._delay, 0.1)
        failed = 0
        while True:
            began = self._clock()
            try:
                await self._engine.restart()
                heap.resettle()
            except Exception as error:  # noqa: BLE001 - whatever it is, the engine is still needed
                failed += 1
                log.error("the engine could not be restarted (try %d): %s", failed, error)  # noqa: TRY400
                if failed >= max(1, self._most):
                    self._hopeless = f"{type(error).__name__}: {error}"
                    self._wake()
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, LONGEST_BACKOFF_S)
            else:
                self._startup = self._clock() - began
                return

    def _brought_back(self, task: asyncio.Task[None]) -> None:
        self._restart = None
        if task.cancelled():
            return
        self._restarts += 1
        self._hopeless = None
        self._progress_at, self._silent = self._clock(), 0.0
        for leave in self._inside.values():
            # Nobody has entered meanwhile: it waits for an engine that is no more.
            leave.reschedule(asyncio.get_running_loop().time())
        log.warning("the engine is back after %.1f s", self._clock() - self._restart_began)
        self._on_change(self.state)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if self._restart is not None:
                continue
            if not self._engine.alive:
                self._notice("its process has died")
            elif self._is_stuck():
                self._notice(f"it has made no token for {self._patience:g} s while it had work")

    def _is_stuck(self) -> bool:
        return bool(self._inside) and self._silent + self.silence() > self._patience
