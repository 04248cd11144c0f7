"""Keeps a server in the foreground of a terminal or a service manager."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from triton_lifecycle.launcher import LauncherError, Progress

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from triton_lifecycle.launcher.server import TritonServer

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Asked(Exception):
    """A signal came while the server was starting."""


class Foreground:
    """Turns this process's signals into the server's orderly end.

    The first signal drains: tritonserver alone gets SIGTERM, running requests go on, new ones are refused. A second one
    ends everything at once. While the server is still starting there is nothing to drain, and the first one ends it.

    Args:
        server: a server that is not started yet.
        say: receives progress and messages.

    """

    def __init__(self, server: TritonServer, say: Progress) -> None:
        self._server = server
        self._say = say
        self._signals = 0
        self._waiting_for_ready = False

    def run(self, *, ready_timeout_s: float = 600.0, on_ready: Callable[[], None] | None = None) -> int:
        """Start, serve until a signal comes, stop; returns tritonserver's exit code. For the main thread only.

        Args:
            ready_timeout_s: how long the models may take to load.
            on_ready: called once when the server is ready.

        Raises:
            LauncherError: the server did not start, or ended unasked.

        """
        before = {number: signal.signal(number, self._count) for number in SIGNALS}
        try:
            try:
                self._start(ready_timeout_s)
            except _Asked:
                self._say("stopping: the server was still starting")
                return 130
            if on_ready is not None:
                on_ready()
            return self._serve()
        finally:
            self._server.kill()
            for number, handler in before.items():
                signal.signal(number, handler)
            for line in self._server.leftovers:
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

    def _serve(self) -> int:
        # Waiting in short steps lets Python run the signal handler in between.
        while self._signals == 0:
            if self._server.wait(0.2) is not None:
                raise LauncherError(self._server.end_story())
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
