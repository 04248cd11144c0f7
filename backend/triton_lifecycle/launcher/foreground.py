"""Keeps a server in the foreground of a terminal or a service manager."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from triton_lifecycle.launcher import LauncherError, Progress
from triton_lifecycle.launcher.restarts import MOST_RESTARTS, Restarts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType
    from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Serves(Protocol):
    """What can be kept in the foreground: one tritonserver, or a fleet of them; each says more about these."""

    leftovers: list[str]
    swept: list[str]

    @property
    def exit_timeout_s(self) -> float: ...  # noqa: D102
    @property
    def log_path(self) -> Path: ...  # noqa: D102
    @property
    def stub_died(self) -> bool: ...  # noqa: D102

    def start(self) -> Any: ...  # noqa: ANN401, D102
    def wait_ready(self, timeout: float, on_progress: Progress) -> Any: ...  # noqa: ANN401, D102
    def wait(self, timeout: float) -> int | None: ...  # noqa: D102
    def again(self) -> Self: ...  # noqa: D102
    def stop(self) -> int: ...  # noqa: D102
    def kill(self) -> None: ...  # noqa: D102
    def abort(self) -> None: ...  # noqa: D102
    def end_story(self) -> str: ...  # noqa: D102
    def exit_timed_out(self) -> bool: ...  # noqa: D102


S = TypeVar("S", bound=Serves)


class _Asked(Exception):
    """A signal came while the server was starting."""


class Foreground(Generic[S]):
    """Turns this process's signals into the server's orderly end.

    The first signal drains: tritonserver alone gets SIGTERM, running requests go on, new ones are refused. A second one
    ends everything at once. While the server is still starting there is nothing to drain, and the first one ends it.

    A server that ends unasked, or whose model's process dies, is started again on the same ports: its callers get an
    error within seconds instead of waiting for ever, and the next ones are served.

    Args:
        server: a server that is not started yet.
        say: receives progress and messages.
        restarts: how often within ten minutes it may be started again.

    """

    def __init__(self, server: S, say: Progress, *, restarts: int = MOST_RESTARTS) -> None:
        self._server = server
        self._say = say
        self._restarts = Restarts(restarts)
        self._signals = 0
        self._waiting_for_ready = False

    def run(self, *, ready_timeout_s: float = 600.0, on_ready: Callable[[S], None] | None = None) -> int:
        """Start, serve until a signal comes, stop; returns tritonserver's exit code. For the main thread only.

        Args:
            ready_timeout_s: how long the models may take to load.
            on_ready: called each time a server is ready.

        Raises:
            LauncherError: the server did not start, or ended unasked more often than it may.

        """
        before = {number: signal.signal(number, self._count) for number in SIGNALS}
        try:
            while True:
                try:
                    self._start(ready_timeout_s)
                except _Asked:
                    self._say("stopping: the server was still starting")
                    return 130
                if on_ready is not None:
                    on_ready(self._server)
                fault = self._serve()
                if fault is None:
                    return self._stop()
                self._begin_again(fault)
        finally:
            self._server.kill()
            for number, handler in before.items():
                signal.signal(number, handler)
            for line in (*self._server.swept, *self._server.leftovers):
                self._say(f"cleaned up: {line}")

    def _start(self, timeout: float) -> None:
        self._server.start()
        self._waiting_for_ready = True
        try:
            if self._signals:
                raise _Asked
            self._server.wait_ready(timeout, self._say)
        finally:
            self._waiting_for_ready = False

    def _serve(self) -> str | None:
        """Wait for a signal, and return ``None``; or what has happened to the server before."""
        # Waiting in short steps lets Python run the signal handler in between.
        while self._signals == 0:
            if self._server.wait(0.2) is not None:
                return self._server.end_story()
            if self._server.stub_died:
                return f"a model's process has died; the server's log: {self._server.log_path}"
        return None

    def _begin_again(self, fault: str) -> None:
        if not self._restarts.one_more(time.monotonic()):
            raise LauncherError(fault)
        self._say(f"the server is started again ({self._restarts}): {fault}")
        # Whoever waits for an answer of the dead is told by the closed connection.
        self._server.kill()
        self._server = self._server.again()

    def _stop(self) -> int:
        limit = self._server.exit_timeout_s
        self._say(f"draining: running requests have {limit:.0f} s to finish; press Ctrl-C again to end them at once")
        code = self._server.stop()
        self._say(self._end_of(code) if self._signals == 1 else "ended at once, as asked")
        return code

    def _end_of(self, code: int) -> str:
        if code == 0:
            return "stopped"
        if self._server.exit_timed_out():
            limit = self._server.exit_timeout_s
            return f"stopped; requests that were still running after the exit timeout of {limit:.0f} s were cut"
        return f"stopped, but not in order (exit code {code}); the server's log: {self._server.log_path}"

    def _count(self, _number: int, _frame: FrameType | None) -> None:
        # Only what is safe in a handler: no printing, no locks.
        self._signals += 1
        if self._waiting_for_ready:
            self._waiting_for_ready = False
            raise _Asked
        if self._signals > 1:
            self._server.abort()
