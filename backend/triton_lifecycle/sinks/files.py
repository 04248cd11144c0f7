"""A file of lines that is written for ever within a bounded space: full ones are numbered, compressed, and dropped."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import logging
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Final

from triton_lifecycle.errors import ConfigError

log = logging.getLogger(__name__)

WRITERS: Final = 100
"""Processes that may write beside each other, each to a file of its own."""
_TAIL: Final = 64 * 1024
_QUICK: Final = 1
"""gzip's level: events shrink about tenfold at the quickest already."""


class RotatingFile:
    """Appends whole lines. Every method but the constructor belongs to one thread.

    ``events.jsonl`` is being written; full ones are ``events.1.jsonl.gz``, ``events.2.jsonl.gz`` …, the highest number
    the newest. A process that finds the file in use by another one takes ``events-2.jsonl``, and so on.

    Args:
        path: the file.
        max_bytes: size at which a file is full; a longer line has a file to itself.
        max_files: files kept, the one that is written among them.
        compress: whether full files are compressed.

    Raises:
        ConfigError: it cannot be written.

    """

    def __init__(self, path: Path, *, max_bytes: int, max_files: int, compress: bool) -> None:
        self.max_bytes = max_bytes
        self._max_files = max_files
        self._compress = compress
        self._packer: threading.Thread | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.path, self._lock = _free(path)
            self._number = max((number for number, _ in self._full()), default=0)
            self._descriptor = self._open()
        except OSError as error:
            raise ConfigError(f"event_driven.recorder.path: {path} cannot be written: {error.strerror}") from None

    @property
    def room(self) -> int:
        """Bytes that the file still takes."""
        return self.max_bytes - self._size

    def has_room(self, size: int) -> bool:
        """Whether so many bytes may be added to the file."""
        return not self._size or self._size + size <= self.max_bytes

    def append(self, data: bytes) -> None:
        """Write all of it, or none of it and raise ``OSError``."""
        written = 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise
        self._size += written

    def rotate(self) -> None:
        """Begin a new file; raises ``OSError`` when that cannot be done."""
        if self._packer is not None:
            self._packer.join()
        self._number += 1
        full = self.path.with_name(f"{self.path.stem}.{self._number}{self.path.suffix}")
        self.path.rename(full)
        os.close(self._descriptor)
        self._descriptor = self._open()
        self._prune()
        if self._compress:
            self._packer = threading.Thread(target=_pack, args=(full,), name="recorder-gzip", daemon=True)
            self._packer.start()

    def close(self) -> None:
        """Let go of the file; what is being compressed gets some seconds."""
        os.close(self._descriptor)
        os.close(self._lock)
        if self._packer is not None:
            self._packer.join(timeout=5)

    def _open(self) -> int:
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o640)
        self._size = _mended(descriptor)
        return descriptor

    def _full(self) -> list[tuple[int, Path]]:
        """Return the full files and their numbers, oldest first."""
        pattern = re.compile(rf"{re.escape(self.path.stem)}\.(\d+){re.escape(self.path.suffix)}(\.gz(\.part)?)?")
        found = ((pattern.fullmatch(path.name), path) for path in self.path.parent.iterdir())
        return sorted((int(match[1]), path) for match, path in found if match)

    def _prune(self) -> None:
        keep = self._number - (self._max_files - 1)
        for number, path in self._full():
            if number <= keep:
                path.unlink(missing_ok=True)


def _free(path: Path) -> tuple[Path, int]:
    """Return the first of the names that nobody writes to, and the lock that keeps it so."""
    for number in range(1, WRITERS + 1):
        candidate = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        lock = os.open(candidate.with_name(f"{candidate.name}.lock"), os.O_RDWR | os.O_CREAT, 0o640)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        if number > 1:
            log.warning("%s is written by another process; events go to %s", path.name, candidate.name)
        return candidate, lock
    raise ConfigError(f"event_driven.recorder.path: {path} and {WRITERS - 1} names beside it are in use")


def _mended(descriptor: int) -> int:
    """Cut off a line that a crash left unfinished; return the file's size."""
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, _TAIL, max(0, size - _TAIL))
    if tail and not tail.endswith(b"\n"):
        size -= len(tail) - (tail.rfind(b"\n") + 1)
        os.ftruncate(descriptor, size)
    return size


def _pack(path: Path) -> None:
    """Compress a full file beside it, and then remove it."""
    part = path.with_name(f"{path.name}.gz.part")
    try:
        with path.open("rb") as plain, gzip.open(part, "wb", _QUICK) as packed:
            shutil.copyfileobj(plain, packed, 256 * 1024)
        part.rename(path.with_name(f"{path.name}.gz"))
        path.unlink(missing_ok=True)
    except OSError as error:
        log.error("the recorder could not compress %s: %s", path.name, error.strerror)  # noqa: TRY400
        part.unlink(missing_ok=True)
