"""The recorder: one event a line, as ``events.encode`` writes it, in files of bounded size and number.

A thread encodes and writes; the event loop only appends to a bounded queue. Where events are missing, a line
``{"event":"Lost","at":…,"count":n}`` stands in their place.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from pathlib import Path
from typing import Final

import msgspec

from triton_lifecycle.config import Recorder as RecorderSettings
from triton_lifecycle.events import Event, Lost, encode
from triton_lifecycle.sinks import FLUSH_S
from triton_lifecycle.sinks.files import RotatingFile
from triton_lifecycle.threads import named

log = logging.getLogger(__name__)

NAME: Final = "recorder"
EVERY_S: Final = 0.2
"""How long a line waits at most before it is in the file."""
SOON: Final = 1000
"""Events that do not wait for that."""
CHUNK: Final = 200
"""Lines that are written at one go; encoding them holds Python's lock, and so the event loop, for some 0.1 ms."""


class _Line(msgspec.Struct, frozen=True):
    data: bytes
    tells: int
    """How many lost events this line tells of; 0 for an event."""


class Recorder:
    """A sink that writes lines of JSON.

    Args:
        settings: ``event_driven.recorder``.
        directory: against which a relative path is looked up.
        types: which events.
        size: events that may wait for the thread; more are lost and counted.

    Raises:
        ConfigError: the file cannot be written.

    """

    name = "recorder"

    def __init__(
        self, settings: RecorderSettings, directory: Path, types: tuple[type[Event], ...], *, size: int
    ) -> None:
        self.types = types
        self._file = RotatingFile(
            directory / settings.path,
            max_bytes=settings.max_bytes,
            max_files=settings.max_files,
            compress=settings.compress,
        )
        self._size = size
        self._queue: deque[Event | Lost] = deque()
        # Each figure is written by one thread alone: these by the event loop …
        self._taken = self._dropped = self._gap = 0
        # … and these by the writer.
        self._written = self._failed = self._untold = 0
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=named(NAME, self._run), name=NAME, daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        """The file that is being written."""
        return self._file.path

    def take(self, event: Event) -> None:
        """Let the event wait for the writer, or count it as lost when too many wait."""
        self._taken += 1
        waiting = len(self._queue)
        if waiting >= self._size:
            self._dropped += 1
            self._gap += 1
            return
        if self._gap:
            self._queue.append(Lost(at=time.monotonic(), count=self._gap))
            self._gap = 0
        self._queue.append(event)
        if waiting >= SOON and not self._wake.is_set():
            self._wake.set()

    def counts(self) -> dict[str, int]:
        """Return what became of the events: taken = sent + lost + backlog."""
        lost = self._dropped + self._failed
        return {
            "taken": self._taken,
            "sent": self._written,
            "lost": lost,
            "backlog": self._taken - self._written - lost,
        }

    async def aclose(self) -> None:
        """Write what waits, within :data:`~triton_lifecycle.sinks.FLUSH_S`."""
        self._closing = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join, FLUSH_S)
        counts = self.counts()
        if counts["lost"] or counts["backlog"]:
            log.warning("the recorder lost %d of %d events", counts["lost"] + counts["backlog"], counts["taken"])

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(EVERY_S)
            self._wake.clear()
            self._drain()
        if self._gap:
            self._queue.append(Lost(at=time.monotonic(), count=self._gap))
            self._gap = 0
        self._drain()
        self._file.close()

    def _drain(self) -> None:
        while self._queue:
            lines = []
            if self._untold:
                lines.append(_Line(encode(Lost(at=time.monotonic(), count=self._untold)) + b"\n", self._untold))
                self._untold = 0
            while self._queue and len(lines) < CHUNK:
                entry = self._queue.popleft()
                tells = entry.count if isinstance(entry, Lost) else 0
                lines.append(_Line(encode(entry) + b"\n", tells))
            self._write(lines)

    def _write(self, lines: list[_Line]) -> None:
        """Write the lines, beginning a new file wherever one is full."""
        part: list[_Line] = []
        room = self._file.room
        for line in lines:
            if len(line.data) > room:
                self._append(part)
                part, room = [], self._file.max_bytes
            part.append(line)
            room -= len(line.data)
        self._append(part)

    def _append(self, part: list[_Line]) -> None:
        if not part:
            return
        data = b"".join(line.data for line in part)
        events = sum(not line.tells for line in part)
        try:
            if not self._file.has_room(len(data)):
                self._file.rotate()
            self._file.append(data)
        except OSError as error:
            if not self._failed:
                log.error("the recorder cannot write %s: %s", self._file.path, error.strerror)  # noqa: TRY400
            self._failed += events
            self._untold += events + sum(line.tells for line in part)
        else:
            self._written += events
