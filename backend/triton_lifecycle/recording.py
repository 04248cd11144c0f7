"""Reading what a recorder wrote: files of events become one :class:`Story` for each request.

A source is a file, a folder or a glob; plain and gzip files are read alike. A recording may have been cut anywhere:
lines that cannot be read are counted, and a request may lack its beginning or its end.
"""

from __future__ import annotations

import glob
import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final, Union

import msgspec

from triton_lifecycle.errors import InvalidInput
from triton_lifecycle.events import TYPES, Event, Lost, Received
from triton_lifecycle.story import Story

MAX_LINE: Final = 2**20
"""Bytes; a longer line is no event."""
MAX_EVENTS: Final = 5_000_000
"""Events that are held at once; a recording is read up to here and says so."""
SAME_CLOCK_S: Final = 30.0
"""Clocks that differ by more than this, as the calendar tells, are different ones."""

_NUMBERED: Final = re.compile(r"^(?P<name>.+)\.(?P<number>\d{1,15})$")
_SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".ndjson")


class Recording(msgspec.Struct):
    """What the files tell."""

    stories: list[Story]
    """By arrival."""
    files: list[str]
    events: int
    lost: int
    """Events that the recorder says it dropped."""
    unreadable: int
    """Lines that are no event: a last line cut short, or something else's."""
    cut: bool
    """Whether reading stopped at :data:`MAX_EVENTS`."""

    @property
    def begin(self) -> float:
        """Clock time of the first event."""
        return min((story.begin for story in self.stories), default=0.0)

    @property
    def end(self) -> float:
        """Clock time of the last event."""
        return max((story.end for story in self.stories), default=0.0)


_decoder: Final = msgspec.json.Decoder(Union[(*TYPES, Lost)])


def find(source: str | Path) -> list[Path]:
    """Return the files that a source names, each recorder's oldest first.

    A file that is still written has its older parts beside it, with a number before the suffix; they belong to it.

    Raises:
        InvalidInput: there are none.

    """
    path = Path(source)
    if path.is_dir():
        found = [file for file in path.iterdir() if file.name.endswith(_SUFFIXES)]
    elif path.exists():
        found = [path, *_older(path)]
    else:
        found = [Path(name) for name in glob.glob(str(source), recursive=True) if Path(name).is_file()]  # noqa: PTH207
    if not found:
        raise InvalidInput(f"{source}: no such file, and no recording in such a folder (…{', …'.join(_SUFFIXES)})")
    return sorted(set(found), key=_order)


def read(source: str | Path, *, max_events: int = MAX_EVENTS) -> Recording:
    """Read a whole recording.

    Raises:
        InvalidInput: there is no such source, it cannot be read, or there is no event in it.

    """
    files = find(source)
    reader = _Reader(max_events)
    for path in files:
        try:
            reader.file(path)
        except OSError as error:
            raise InvalidInput(f"{path}: cannot be read: {error.strerror or error}") from None
        if reader.cut:
            break
    if not reader.events:
        raise InvalidInput(f"{source}: holds no event; is it what a recorder wrote (event_driven.recorder)?")
    stories = [Story.of(events) for events in reader.requests.values()]
    stories.sort(key=lambda story: (story.begin, story.id))
    return Recording(
        stories=stories,
        files=[str(path) for path in files],
        events=reader.events,
        lost=reader.lost,
        unreadable=reader.unreadable,
        cut=reader.cut,
    )


def stories(events: list[Event]) -> list[Story]:
    """Return the stories of events that are in memory, by arrival."""
    requests: dict[str, list[Event]] = {}
    for event in events:
        requests.setdefault(event.request_id, []).append(event)
    found = [Story.of(own) for own in requests.values()]
    return sorted(found, key=lambda story: (story.begin, story.id))


class _Reader:
    """Sorts events by request, on one clock.

    Machines count from different beginnings. The first recorder's clock is kept as it is; what was written under
    another one, or after a restart of the machine, is moved by as much as the calendars say: a request always as a
    whole.
    """

    def __init__(self, max_events: int) -> None:
        self.requests: dict[str, list[Event]] = {}
        self.events = 0
        self.lost = 0
        self.unreadable = 0
        self.cut = False
        self._max_events = max_events
        self._recorder: tuple[str, str] | None = None
        self._first_offset: float | None = None
        self._offset: float | None = None
        self._received_at = 0.0
        self._shifts: dict[str, float] = {}

    def file(self, path: Path) -> None:
        """Read one file; a recorder's files come one after another."""
        if self._recorder != _order(path)[:2]:
            self._recorder, self._offset = _order(path)[:2], None
        for item in self._items(path):
            if isinstance(item, Received):
                self._look_at_clock(item)
            shift = self._shifts.get(item.request_id, 0.0)
            self.requests.setdefault(item.request_id, []).append(_moved(item, shift) if shift else item)
            self.events += 1
            if self.events >= self._max_events:
                self.cut = True
                return

    def _look_at_clock(self, event: Received) -> None:
        offset = event.wall - event.at
        if self._first_offset is None:
            self._first_offset = offset
        restarted = event.at < self._received_at - SAME_CLOCK_S
        if self._offset is None or restarted:
            self._offset = offset
        self._received_at = event.at
        shift = self._offset - self._first_offset
        if abs(shift) > SAME_CLOCK_S:
            self._shifts[event.request_id] = shift

    def _items(self, path: Path) -> Iterator[Event]:
        with _open(path) as file:
            for line in self._lines(file):
                try:
                    item: Event | Lost = _decoder.decode(line)
                except msgspec.MsgspecError:
                    self.unreadable += 1
                    continue
                if isinstance(item, Lost):
                    self.lost += max(0, item.count)
                else:
                    yield item

    def _lines(self, file: IO[bytes]) -> Iterator[bytes]:
        try:
            while line := file.readline(MAX_LINE):
                if len(line) == MAX_LINE and not line.endswith(b"\n"):
                    self.unreadable += 1
                    while (rest := file.readline(MAX_LINE)) and not rest.endswith(b"\n"):
                        pass
                elif line.strip():
                    yield line
        except (EOFError, zlib.error, gzip.BadGzipFile):
            # The end of a compressed file is missing: what came before it counts.
            self.unreadable += 1


def _moved(event: Event, shift: float) -> Event:
    moved = {"at": event.at + shift}
    if (due := getattr(event, "due", None)) is not None:
        moved["due"] = due + shift
    return msgspec.structs.replace(event, **moved)


def _open(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if packed else path.open("rb")  # type: ignore[return-value]


_CURRENT: Final = 2**63


def _older(path: Path) -> list[Path]:
    """Return the full files of the recorder that writes ``path``; none when that is itself one of them."""
    folder, name, number = _order(path)
    beside = (file for file in path.parent.iterdir() if file.name.endswith(_SUFFIXES) and file != path)
    return [file for file in beside if number == _CURRENT and _order(file)[:2] == (folder, name)]


def _order(path: Path) -> tuple[str, str, int]:
    """Sort a recorder's files: ``events.1.jsonl.gz``, ``events.2.jsonl.gz`` …, and last ``events.jsonl``."""
    suffix = max((suffix for suffix in _SUFFIXES if path.name.endswith(suffix)), key=len, default="")
    stem = path.name.removesuffix(suffix)
    match = _NUMBERED.match(stem)
    return (str(path.parent), match["name"], int(match["number"])) if match else (str(path.parent), stem, _CURRENT)
