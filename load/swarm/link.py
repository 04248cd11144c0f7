"""Locust's side of its driver: start the process, hand it orders, wake whoever waits for an outcome."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import gevent
import msgspec
from gevent.event import AsyncResult, Event
from gevent.lock import Semaphore

from load.swarm.protocol import Beat, Drop, FromDriver, Hello, Order, Outcome
from triton_lifecycle.launcher import project_root

if TYPE_CHECKING:
    from collections.abc import Callable

FAREWELL_S: Final = 10.0
CHUNK: Final = 1 << 18

_decode: Final = msgspec.json.Decoder(FromDriver).decode
_encode: Final = msgspec.json.Encoder().encode


class DriverEnded(Exception):
    """The driver process is gone; nothing can be measured any more."""


class Link:
    """A driver process, for the greenlets of this process.

    Args:
        hello: where requests go.
        beat: told once a second how the driver is.
        ended: told when the driver ends without being asked to.

    """

    def __init__(self, hello: Hello, beat: Callable[[Beat], None], ended: Callable[[], None]) -> None:
        self._ids = itertools.count()
        self._waiting: dict[int, Callable[[Outcome | None], None]] = {}
        self._beat = beat
        self._ended = ended
        self._closed = False
        self._over = False
        self._lock = Semaphore()
        self._ready = Event()
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "load.swarm.driver", str(theirs.fileno())],
                cwd=project_root(),
                env=_environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        self._send(hello)
        self._reader = gevent.spawn(self._read)

    @property
    def live(self) -> int:
        """How many requests are under way."""
        return len(self._waiting)

    @property
    def over(self) -> bool:
        """Whether the driver has ended: it answers nothing any more."""
        return self._over

    def wait_ready(self, limit_s: float) -> bool:
        """Wait until the driver takes orders without delay, or has ended; return whether it takes them."""
        self._ready.wait(limit_s)
        return self._ready.is_set() and not self._over

    def next_id(self) -> int:
        """Return a name for an order."""
        return next(self._ids)

    def order(self, order: Order, done: Callable[[Outcome | None], None]) -> None:
        """Begin a request; ``done`` is called with its outcome, or with ``None`` if the driver ended."""
        if self._over:
            done(None)
            return
        self._waiting[order.id] = done
        self._send(order)

    def ask(self, order: Order) -> Outcome:
        """Make a request and wait for its outcome; a greenlet that is killed meanwhile leaves the request.

        Raises:
            DriverEnded: there is no driver any more.

        """
        result: Any = AsyncResult()
        self.order(order, result.set)
        try:
            outcome: Outcome | None = result.get()
        except BaseException:
            self.drop(order.id)
            raise
        if outcome is None:
            raise DriverEnded("the process that makes the requests has ended")
        return outcome

    def drop(self, order_id: int) -> None:
        """Leave a request; its outcome is not told."""
        if self._waiting.pop(order_id, None) is not None:
            self._send(Drop(order_id))

    def drop_all(self) -> int:
        """Leave every request; return how many there were."""
        left = list(self._waiting)
        for order_id in left:
            self.drop(order_id)
        return len(left)

    def close(self) -> None:
        """End the driver: it leaves what is under way and goes."""
        self._closed = True
        self._shut(socket.SHUT_WR)
        try:
            self._process.wait(FAREWELL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(FAREWELL_S)
        self._reader.join(FAREWELL_S)
        self._socket.close()

    def _shut(self, how: int) -> None:
        with suppress(OSError):  # the driver went first
            self._socket.shutdown(how)

    def _send(self, message: Hello | Order | Drop) -> None:
        with self._lock, suppress(OSError):  # the reader sees an end too, and tells everybody
            self._socket.sendall(_encode(message) + b"\n")

    def _read(self) -> None:
        rest = b""
        try:
            while data := self._receive():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._take(_decode(line))
        finally:
            # From here on an order is answered at once; whoever waits, for readiness too, is told.
            self._over = True
            self._ready.set()
            waiting, self._waiting = self._waiting, {}
            for done in waiting.values():
                done(None)
            if not self._closed:
                self._ended()

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(CHUNK)
        except OSError:
            return b""

    def _take(self, message: Outcome | Beat) -> None:
        if isinstance(message, Beat):
            self._ready.set()
            if message.lags:
                self._beat(message)
        elif (done := self._waiting.pop(message.id, None)) is not None:
            done(message)


def _environment() -> dict[str, str]:
    """Return what the driver needs to find this project, wherever Locust was started."""
    paths = [str(project_root()), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
