"""How far a run is: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from rich.console import Console
    from rich.progress import TaskID


class Told:
    """Is told how far the run is and shows it; a context manager, since the bars must leave the terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._cells: TaskID | None = None
        self._cell: TaskID | None = None
        self._name = ""
        self._complete = self._failed = self._refusals = 0

    def begin(self, cells: int, requests: int) -> None:
        """Tell how much there is to do."""
        self.say(f"{cells} cells of {requests} requests each to measure")
        self._cells = self._progress.add_task("cells", total=cells, note="")

    def cell(self, name: str, requests: int) -> None:
        """Tell that a cell begins."""
        self._name = name
        self._complete = self._failed = self._refusals = 0
        self._cell = self._progress.add_task(name, total=requests, note="")
        if not self._console.is_terminal:
            self.say(f"{name}: begins")

    def record(self, *, complete: bool, refusals: int) -> None:
        """Tell of one request's end."""
        self._complete += complete
        self._failed += not complete
        self._refusals += refusals
        if self._cell is not None:
            self._progress.update(self._cell, advance=1, note=self._note)

    def cell_done(self) -> None:
        """Tell that the cell is whole."""
        if self._cells is not None and self._cell is not None:
            self._progress.remove_task(self._cell)
            self._progress.advance(self._cells)
        self.say(f"{self._name}: {self._note}")

    @property
    def _note(self) -> str:
        return f"{self._complete} complete, {self._failed} failed, {self._refusals} refusals"

    def say(self, text: str) -> None:
        """Show a line."""
        self._console.print(f"[{time.monotonic() - self._began:4.0f} s] {text}", markup=False, highlight=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
