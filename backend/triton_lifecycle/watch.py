"""Notices what Triton does not tell: callers that left, and the beginning of an unload."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from triton_lifecycle.triton import Call

log = logging.getLogger(__name__)


class UnloadSign:
    """Tells when Triton has begun to unload this model.

    Triton calls ``finalize`` only once the last running request has ended, so a drain with a limit must begin earlier:
    when the model is ready no more while requests run. (While tritonserver itself waits for running requests after
    SIGTERM, it still calls its models ready; then its own exit timeout is the limit.)

    Args:
        is_ready: whether Triton calls the model ready; a blocking round trip of some 120 µs.
        on_unload: what to do, once.
        interval: seconds between two questions.

    """

    def __init__(self, is_ready: Callable[[], bool], on_unload: Callable[[], object], *, interval: float = 0.5) -> None:
        self._is_ready = is_ready
        self._on_unload = on_unload
        self._interval = interval
        self._next = 0.0
        self._given = False

    def is_due(self) -> bool:
        """Whether it is time to ask again."""
        return not self._given and time.monotonic() >= self._next

    def is_given(self) -> bool:
        """Ask Triton. Only while a call is live: once the model is being finalized, the question aborts the server."""
        self._next = time.monotonic() + self._interval
        try:
            self._given = not self._is_ready()
        except Exception:  # noqa: BLE001 - Triton answers so while the server itself is starting or stopping
            return False
        return self._given

    def act(self) -> None:
        """Do what is to be done at an unload."""
        self._on_unload()


class Watch:
    """Asks Triton in turn whether the caller of each live call has left, and now and then whether the model goes.

    Every call is asked once per ``interval``, but all together no more than ``max_rate`` times a second, so with many
    live calls the interval grows instead of the load (a question costs about 130 µs of CPU in stub and server). Callers
    seldom leave alone: once one has, the rest are asked without a pause, until a round finds nobody gone.

    Args:
        loop: where the callbacks run.
        interval: seconds between two questions about one call.
        max_rate: questions per second over all calls.
        unload: looked at while calls are live; ``None`` looks for no unload.

    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, interval: float, max_rate: int, unload: UnloadSign | None = None
    ) -> None:
        self._loop = loop
        self._interval = interval
        self._pause = 1 / max_rate
        self._unload = unload
        self._calls: dict[Call, Callable[[], object]] = {}
        self._wake = threading.Event()
        self._closed = False
        self._hurry = False
        self._thread = threading.Thread(target=self._run, name="call-watch", daemon=True)
        self._thread.start()

    def add(self, call: Call, on_cancel: Callable[[], object]) -> None:
        """Watch a call; ``on_cancel`` runs on the event loop at most once. Event-loop thread only."""
        self._calls[call] = on_cancel
        self._wake.set()

    def discard(self, call: Call) -> None:
        """Watch the call no more. Event-loop thread only."""
        self._calls.pop(call, None)

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
            self._look_for_unload(call)
            if _has_left(call) and (on_cancel := self._calls.pop(call, None)) is not None:
                self._hurry = hurry = True
                self._loop.call_soon_threadsafe(on_cancel)
            if not hurry:
                time.sleep(max(0.0, self._pause - (time.monotonic() - asked)))
        if not self._hurry:
            time.sleep(max(0.001, self._interval - (time.monotonic() - began)))

    def _look_for_unload(self, call: Call) -> None:
        if self._unload is not None and self._unload.is_due() and call.while_live(self._unload.is_given):
            self._loop.call_soon_threadsafe(self._unload.act)


def _has_left(call: Call) -> bool:
    try:
        return call.is_cancelled()
    except Exception:
        log.exception("is_cancelled failed for request %r", call.id)
        return False
