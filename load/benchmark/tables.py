"""What was found, in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from load.benchmark import compare, published, words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from load.benchmark.compare import Difference
    from load.benchmark.gate import Judgement
    from load.benchmark.result import Result


def show(result: Result, others: Sequence[Result], judgements: Sequence[Judgement], console: Console) -> None:
    """Print all tables that have something in them."""
    if lines := published.table(result):
        console.print(_failures(lines))
    if result.cells:
        console.print(_figures(result))
    for title, found in (
        ("Targets against the first one", compare.targets(result)),
        ("Runs against the first one", compare.runs([result, *others])),
    ):
        if found:
            console.print(_differences(title, found))
    for item in judgements:
        style = "red" if item.broken else "green"
        line = f"{'FAILED' if item.broken else 'passed'}  {item.rule}: {item.value:.4g}  [{item.cell}]"
        console.print(line, style=style, markup=False, highlight=False)


def _failures(lines: Sequence[published.Line]) -> Table:
    table = Table(title="Requests that fail: published for others, and measured here", box=box.SIMPLE)
    names = list(dict.fromkeys(entry.target for line in lines for entry in line.entries))
    for heading in ("load", *published.PUBLISHED, *(f"{name} (measured)" for name in names), "aim"):
        table.add_column(heading)
    for line in lines:
        entries = {entry.target: entry for entry in line.entries}
        cells = [f"{line.scenario}, {line.timeout:g} s", *map(words.percent, line.published.values())]
        for name in names:
            entry = entries.get(name)
            verdict = f"\n{entry.verdict}" if entry is not None and entry.verdict else ""
            cells.append(f"{words.share(entry.failed)}\nof {entry.asked}{verdict}" if entry is not None else "-")
        table.add_row(*cells, f"≤ {words.percent(line.aim)}")
    return table


def _figures(result: Result) -> Table:
    table = Table(title="Each cell; times in ms, p50 / p99", box=box.SIMPLE)
    for heading in ("target", "load", "asked", "failed", "goodput/s", "tokens/s", "first token", "between", "total"):
        table.add_column(heading, justify="left" if heading in {"target", "load"} else "right")
    for heading in ("refused", "retries", "wasted", "fairness"):
        table.add_column(heading, justify="right")
    for found in result.cells:
        value = found.figures
        wasted = value.wasted_received if value.wasted_made is None else value.wasted_made
        table.add_row(
            found.cell.target,
            found.cell.load
            + ("" if value.whole else " (interrupted)")
            + (" (tool was late)" if value.tool_was_late else ""),
            str(value.asked),
            words.percent(value.failed.value),
            f"{value.goodput.value:.2f}",
            f"{value.throughput.value:,.0f}",
            *(words.times(each) for each in (value.first, value.between, value.total)),
            str(value.refusals),
            str(value.retries),
            words.percent(wasted),
            f"{value.fairness:.3f}",
        )
    return table


def _differences(title: str, found: Sequence[Difference]) -> Table:
    table = Table(title=f"{title}, with intervals of 95 %", box=box.SIMPLE)
    for heading in ("load", "who", "figure", "change", "verdict"):
        table.add_column(heading)
    for item in found:
        table.add_row(
            item.load, f"{item.other} / {item.one}", item.metric, words.change(item.change, item.metric), item.verdict
        )
    return table
