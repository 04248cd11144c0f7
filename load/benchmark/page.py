"""One HTML page that needs nothing else: no script, nothing fetched; every text is escaped by the template."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import jinja2
from markupsafe import Markup

from load.benchmark import charts, compare, published, words
from load.benchmark.charts import COLORS, Point, Series
from load.benchmark.options import CLOSED, SCENARIOS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from load.benchmark.figures import Figures
    from load.benchmark.gate import Judgement
    from load.benchmark.result import Found, Result

TEMPLATE: Final = "page.html.jinja"


def render(result: Result, others: Sequence[Result], judgements: Sequence[Judgement]) -> str:
    """Return the page."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string((files(__package__) / TEMPLATE).read_text(encoding="utf-8"))
    names = list(dict.fromkeys(found.cell.target for found in result.cells))
    return template.render(
        result=result,
        words=words,
        colors={name: index % COLORS for index, name in enumerate(names)},
        makers=list(published.PUBLISHED),
        lines=published.table(result),
        differences=compare.targets(result),
        changes=compare.runs([result, *others]),
        judgements=judgements,
        plots=plots(result, names),
    )


def plots(result: Result, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the plots that this run has the cells for, each as title, names of its lines, and SVG."""
    found = [
        *_against(result, names, "concurrency", [item for item in result.cells if item.cell.scenario == CLOSED]),
    ]
    for scenario in (*SCENARIOS, CLOSED):
        cells = [item for item in result.cells if item.cell.scenario == scenario]
        if len({item.cell.timeout for item in cells}) > 1:
            for callers in sorted({item.cell.concurrency for item in cells}):
                same = [item for item in cells if item.cell.concurrency == callers]
                label = f"{scenario}, {callers} callers" if callers else scenario
                found += _against(result, names, "timeout", same, label)
    return found + [plot for item in result.cells for plot in [_over_time(item)]]


_CURVES: Final[tuple[tuple[str, str, Callable[[Figures], Point]], ...]] = (
    ("goodput", "complete answers/s", lambda f: Point(0, f.goodput.value, f.goodput.low, f.goodput.high)),
    ("failed requests", "%", lambda f: Point(0, f.failed.value * 100, f.failed.low * 100, f.failed.high * 100)),
    ("throughput", "tokens/s", lambda f: Point(0, f.throughput.value, f.throughput.low, f.throughput.high)),
    ("first token, p50", "s", lambda f: Point(0, f.first.get("p50", 0.0))),
    ("first token, p99", "s", lambda f: Point(0, f.first.get("p99", 0.0))),
    ("between chunks, p50", "s", lambda f: Point(0, f.between.get("p50", 0.0))),
)


def _against(
    result: Result, names: Sequence[str], what: str, cells: Sequence[Found], label: str = ""
) -> list[dict[str, Any]]:
    """Plot each figure against the number of callers or their time limit, a line for each target."""
    timeouts = result.run.options.timeout
    found = []
    for title, unit, value in _CURVES if cells else ():
        series = []
        for index, name in enumerate(names):
            for number, limit in enumerate(timeouts if what == "concurrency" else (None,)):
                points = [
                    Point(float(getattr(item.cell, what)), point.y, point.low, point.high)
                    for item in cells
                    if item.cell.target == name and limit in {None, item.cell.timeout}
                    for point in [value(item.figures)]
                ]
                suffix = f", {limit:g} s" if limit is not None and len(timeouts) > 1 else ""
                if points:
                    series.append(Series(name + suffix, points, index, dashed=number > 0))
        axis = "callers at once" if what == "concurrency" else "the caller's time limit, s"
        full = f"{title} against {what}" + (f" ({label})" if label else "")
        svg = charts.line(series, title=full, x=axis, y=unit, log_x=True)
        found.append({"title": full, "series": series, "svg": Markup(svg)})  # noqa: S704 - an element tree, written out
    return found


def _over_time(item: Found) -> dict[str, Any]:
    slices = item.figures.slices
    lines = [
        Series("arrived/s", [Point(part.at, part.arrived) for part in slices], 3, dashed=True, marks=False),
        Series("complete/s", [Point(part.at, part.complete) for part in slices], 0, marks=False),
        Series("failed/s", [Point(part.at, part.failed) for part in slices], 1, marks=False),
        Series("live", [Point(part.at, part.live) for part in slices], 2, marks=False),
    ]
    title = f"{item.cell.target}: {item.cell.load}, over time"
    svg = charts.line(lines, title=title, x="s", y="requests/s, and live requests")
    return {"title": title, "series": lines, "svg": Markup(svg)}  # noqa: S704 - an element tree, written out
