"""Results on disk: one folder for a run, one file of JSON lines for each cell.

A cell's file is whole when its last line is its end; a run goes on with the cells that are not. A request's arrival
depends on those before it, so a cell that was interrupted is measured anew as a whole; what it found stays until then.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import msgspec

from load.benchmark.options import Options
from load.benchmark.plan import Cell
from triton_lifecycle.errors import InvalidInput

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

COMPLETE: Final = "complete"
FAILED: Final = "failed"
RUN_FILE: Final = "run.json"
CELLS: Final = "cells"
VERSION: Final = 1


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one request; times are seconds from its cell's beginning.

    Attributes:
        due: when it was to be sent.
        outcome: ``complete`` or ``failed``.
        slug: why it failed.
        attempts: how often it was sent.
        refusals: attempts that the server refused for overload.
        tokens: received.

    """

    number: int
    tenant: int
    due: float
    sent: float
    first: float | None
    end: float
    outcome: str
    slug: str | None
    attempts: int
    refusals: int
    tokens: int


class CellEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The last line of a cell that was measured to its end.

    Attributes:
        gaps: seconds between chunks: how often by bucket, see :class:`~load.benchmark.statistics.Histogram`.
        made: tokens that the server says it made meanwhile; ``None`` where it does not say.
        lag_p99: how late this tool itself was: seconds between when a request was due and when it was sent, or of its
            event loop, whichever is worse.

    """

    gaps: dict[int, int]
    made: int | None
    lag_p99: float


class Measured(msgspec.Struct, frozen=True):
    """A cell and all that was found in it; ``end`` is absent when it was interrupted."""

    cell: Cell
    records: list[Record]
    end: CellEnd | None


class Run(msgspec.Struct, kw_only=True):
    """What is known of a run before and beside its cells.

    Attributes:
        environment: what the figures depend on.
        capacity: requests/s that are 1x; ``None`` until measured, or where only closed loops are.
        capacity_of: the target it was measured on, or ``given``.

    """

    version: int = VERSION
    options: Options
    environment: dict[str, Any] = {}
    command: str = ""
    capacity: float | None = None
    capacity_of: str = ""


class Folder:
    """A run's folder.

    Args:
        path: where; made when it is not there.

    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def begun(self) -> bool:
        """Whether there is a run in it."""
        return (self.path / RUN_FILE).is_file()

    def write_run(self, run: Run) -> None:
        """Write what is known of the run; a reader sees the old or the new, never half."""
        (self.path / CELLS).mkdir(parents=True, exist_ok=True)
        self.write(RUN_FILE, msgspec.json.format(msgspec.json.encode(run), indent=2) + b"\n")

    def write(self, name: str, data: bytes) -> Path:
        """Write a file as a whole and return its path."""
        path, partial = self.path / name, self.path / f".{name}.partial"
        partial.write_bytes(data)
        os.replace(partial, path)  # noqa: PTH105 - said so that it may replace
        return path

    def run(self) -> Run:
        """Read what is known of the run.

        Raises:
            InvalidInput: there is none, or it is not readable.

        """
        try:
            run = msgspec.json.decode((self.path / RUN_FILE).read_bytes(), type=Run)
        except (OSError, msgspec.MsgspecError) as error:
            raise InvalidInput(f"{self.path}: no run of this benchmark to read ({error})") from None
        if run.version != VERSION:
            raise InvalidInput(f"{self.path}: written by another version of this benchmark; measure anew")
        return run

    def writer(self, cell: Cell) -> CellWriter:
        """Return a writer of one cell's file."""
        return CellWriter(self._file(cell), cell)

    def measured(self, cell: Cell) -> Measured | None:
        """Return what is there of a cell; a line that was cut off is left out."""
        try:
            lines = self._file(cell).read_bytes().splitlines()
        except FileNotFoundError:
            return None
        records, end = [], None
        for line in lines[1:]:
            with suppress(msgspec.MsgspecError):
                found = _LINE.decode(line)
                if found.end is not None:
                    end = found.end
                elif found.record is not None:
                    records.append(found.record)
        return Measured(cell, sorted(records, key=lambda record: record.number), end)

    def _file(self, cell: Cell) -> Path:
        return self.path / CELLS / f"{cell.id}.jsonl"


class _Line(msgspec.Struct, omit_defaults=True):
    cell: Cell | None = None
    record: Record | None = None
    end: CellEnd | None = None


_LINE: Final = msgspec.json.Decoder(_Line)


class CellWriter:
    """Writes a cell's file as its requests end; a line is on its way to the disk when the call returns."""

    def __init__(self, path: Path, cell: Cell) -> None:
        self._path = path
        self._cell = cell
        self._file: IO[bytes] | None = None

    def add(self, record: Record) -> None:
        """Write one request's fate."""
        self._write(_Line(record=record))

    def finish(self, end: CellEnd) -> None:
        """Write that the cell is whole."""
        self._write(_Line(end=end))

    def _write(self, line: _Line) -> None:
        if self._file is None:
            raise RuntimeError("the file is not open")
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("wb")
        self._write(_Line(cell=self._cell))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
