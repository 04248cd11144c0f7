"""Notices what Triton does not tell: callers that left."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from triton_lifecycle.threads import named
from triton_lifecycle.triton import Call

log = logging.getLogger(__name__)

NAME: Final = "cancel-watch"


class Watch:
    """Asks Triton in turn whether the caller of each live call has left.

    Every call is asked once per ``interval``, but all together no more than ``max_rate`` times a second, so with many
    live calls the interval grows instead of the load (a question costs about 130 µs of CPU in stub and server). Callers
    seldom leave alone: once one has, the rest are asked without a pause, until a round finds nobody gone.

    Args:
        loop: where ``on_cancel`` callbacks run.
        interval: seconds between two questions about one call.
        max_rate: questions per second over all calls.

    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, interval: float, max_rate: int) -> None:
        self._loop = loop
        self._interval = interval
        self._pause = 1 / max_rate
        self._calls: dict[Call, Callable[[], object]] = {}
        self._wake = threading.Event()
        self._closed = False
        self._hurry = False
        self._thread = threading.Thread(target=named(NAME, self._run), name=NAME, daemon=True)
        self._thread.start()

    def add(self, call: Call, on_cancel: Callable[[], object]) -> None:
        """Watch a call; ``on_cancel`` runs on the event loop at most once. Event-loop thread only."""
        self._calls[call] = on_cancel
        self._wake.set()

    def discard(self, call: Call) -> None:
        """Watch the call no more. Event-loop thread only."""
        self._calls.pop(call, None)

    def __len__(self) -> int:
        """Return how many calls are watched."""
        return len(self._calls)

    def close(self) -> None:
        """End the thread (waits at most 5 s)."""
        self._closed = True
        self._wake.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait()
            self._wake.clear()
            while self._calls and not self._closed:
                self._round()

    def _round(self) -> None:
        began = time.monotonic()
        hurry, self._hurry = self._hurry, False
        for call in list(self._calls):
            if self._closed:
                return
            if call not in self._calls:
                continue
            asked = time.monotonic()
            if _has_left(call) and (on_cancel := self._calls.pop(call, None)) is not None:
                self._hurry = hurry = True
                self._loop.call_soon_threadsafe(on_cancel)
            if not hurry:
                time.sleep(max(0.0, self._pause - (time.monotonic() - asked)))
        if not self._hurry:
            time.sleep(max(0.001, self._interval - (time.monotonic() - began)))


def _has_left(call: Call) -> bool:
    try:
        return call.is_cancelled()
    except Exception:
        log.exception("is_cancelled failed for request %r", call.id)
        return False
