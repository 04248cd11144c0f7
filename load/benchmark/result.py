"""A run as a whole: read from its folder, and as JSON and CSV for programs."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any, Final

import msgspec

from load.benchmark import figures, plan
from load.benchmark.figures import Figures
from load.benchmark.plan import Cell
from load.benchmark.records import Folder, Measured, Run
from load.benchmark.statistics import Interval
from triton_lifecycle.errors import InvalidInput

RESULT_FILE: Final = "result.json"
TABLE_FILE: Final = "result.csv"
PAGE_FILE: Final = "report.html"


class Found(msgspec.Struct, frozen=True):
    """A cell's records and what they come to."""

    measured: Measured
    figures: Figures

    @property
    def cell(self) -> Cell:
        """Which cell."""
        return self.measured.cell


class Result(msgspec.Struct, frozen=True):
    """A run and its cells, in their order; a cell in which nothing had ended is not among them."""

    name: str
    run: Run
    cells: list[Found]


class Summary(msgspec.Struct, frozen=True):
    """One cell in the JSON file."""

    cell: Cell
    figures: Figures


class Document(msgspec.Struct, frozen=True):
    """The JSON file; a later run's ``--baseline``."""

    run: Run
    cells: list[Summary]


def read(path: Path) -> Result:
    """Read a run's folder; raises ``InvalidInput`` when it holds none."""
    folder = Folder(path)
    run = folder.run()
    found = [
        Found(measured, figures.of(measured))
        for _, cells in plan.cells(run.options)
        for cell in cells
        if (measured := folder.measured(cell)) is not None and measured.records
    ]
    return Result(path.name or str(path), run, found)


def document(result: Result) -> Document:
    """Return what the JSON file holds of a run."""
    return Document(result.run, [Summary(found.cell, found.figures) for found in result.cells])


def as_json(document: Document) -> bytes:
    """Return all figures."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def read_json(path: Path) -> Document:
    """Read what :func:`as_json` wrote; raises ``InvalidInput``."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Document)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidInput(f"--baseline {path}: no {RESULT_FILE} of this benchmark ({error})") from None


def row(cell: Cell, found: Figures) -> dict[str, Any]:
    """Return a cell as one flat row; an interval becomes three columns."""
    flat: dict[str, Any] = msgspec.to_builtins(cell)
    for name in found.__struct_fields__:
        value = getattr(found, name)
        if isinstance(value, Interval):
            flat |= {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}
        elif name in {"first", "between", "total"}:
            flat |= {f"{name}_{share}": value.get(share) for share in ("p50", "p90", "p99")}
        elif name == "slugs":
            flat[name] = " ".join(f"{slug}={count}" for slug, count in value.items())
        elif name != "slices":
            flat[name] = value
    return flat


def as_csv(result: Result) -> bytes:
    """Return a row for each cell."""
    rows = [row(found.cell, found.figures) for found in result.cells]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else ["target"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
