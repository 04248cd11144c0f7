"""The waterfall for a terminal: one bar for each request, split by phase, on a common scale of time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from rich.table import Table
from rich.text import Text

from triton_lifecycle.story import PHASES, Story
from triton_lifecycle_client.terminal import out, printable

from .view import View, totals

if TYPE_CHECKING:
    from rich.console import Console

COLORS: Final = {
    "receive": "bright_black",
    "preprocess": "magenta",
    "queue": "yellow",
    "prefill": "blue",
    "decode": "green",
    "respond": "cyan",
}
MARKS: Final = {"receive": "r", "preprocess": "p", "queue": ".", "prefill": "=", "decode": "#", "respond": "s"}
"""For a terminal without colours, or a file."""
STYLES: Final = {
    "completed": "green",
    "failed": "bold red",
    "cancelled": "bright_black",
    "timed_out": "yellow",
    "rejected": "magenta",
    "live": "cyan",
}
NAME_WIDTH: Final = 16
UNKNOWN_WIDTH: Final = 120


def show(view: View, rows: int, console: Console = out) -> None:
    """Print the waterfall of the first ``rows`` requests, and the totals of all."""
    if not view.stories:
        console.print("no request of the recording is like this")
        return
    stories = view.stories[:rows]
    width = console.width if console.is_terminal else UNKNOWN_WIDTH
    bar = max(20, min(width, 200) - NAME_WIDTH - 46)
    console.print(_head(view), soft_wrap=True)
    console.print(_waterfall(stories, bar, colored=console.is_terminal))
    if len(view.stories) > rows:
        console.print(f"… and {len(view.stories) - rows} more; --rows, --slowest, --status or --html show them")
    console.print(_legend(colored=console.is_terminal), soft_wrap=True)
    console.print(_totals(view))


def _head(view: View) -> Text:
    wall = view.wall
    since = "" if wall is None else time.strftime(", from %Y-%m-%d %H:%M:%S", time.localtime(wall))
    plural = "" if len(view.stories) == 1 else "s"
    return Text(
        f"{printable(view.source)}: {len(view.stories)} request{plural} in {seconds(view.end - view.begin)}{since}",
        style="bold",
    )


def _waterfall(stories: list[Story], width: int, *, colored: bool) -> Table:
    begin = min(story.begin for story in stories)
    span = max(max(story.end for story in stories) - begin, 1e-9)
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("request", width=NAME_WIDTH, no_wrap=True)
    table.add_column("at", justify="right", no_wrap=True)
    table.add_column(f"0 … {seconds(span)}", width=width, no_wrap=True)
    table.add_column("took", justify="right", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("end", no_wrap=True)
    for story in stories:
        table.add_row(
            Text(printable(story.caller_id or story.id)[:NAME_WIDTH]),
            seconds(story.begin - begin),
            _bar(story, begin, width / span, width, colored=colored),
            seconds(story.duration),
            str(story.output_tokens),
            Text(printable(story.slug or story.status), style=STYLES[story.status]),
        )
    return table


def _bar(story: Story, begin: float, scale: float, width: int, *, colored: bool) -> Text:
    """Draw one request: each cell shows the phase that took most of it, so that a short request is seen too."""
    first = min(width - 1, int((story.begin - begin) * scale))
    last = max(first, min(width - 1, int((story.end - begin) * scale)))
    taken: list[dict[str, float]] = [{} for _ in range(first, last + 1)]
    for segment in story.segments():
        left, right = (segment.begin - begin) * scale, (segment.end - begin) * scale
        for cell in range(max(first, int(left)), min(last, int(right)) + 1):
            part = max(0.0, min(right, cell + 1) - max(left, cell))
            shares = taken[cell - first]
            shares[segment.phase] = shares.get(segment.phase, 0.0) + part
    text = Text(" " * first)
    for shares in taken:
        phase = max(shares, key=lambda name: (shares[name], PHASES.index(name)), default="respond")
        text.append("█" if colored else MARKS[phase], style=COLORS[phase])
    return text


def _legend(*, colored: bool) -> Text:
    text = Text()
    for phase in PHASES:
        text.append(("█ " if colored else f"{MARKS[phase]} "), style=COLORS[phase])
        text.append(f"{phase}   ")
    return text


def _totals(view: View) -> Table:
    found = totals(view.stories)
    table = Table("", "count", "p50", "p90", "p99", "max", box=None, padding=(0, 2), pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for status, count in found["ends"].items():
        table.add_row(Text(status, style=STYLES[status]), str(count))
    table.add_section()
    rows = {"first token": found["first_token_s"], "whole request": found["total_s"], **found["phases_s"]}
    for label, values in rows.items():
        if values:
            table.add_row(label, "", *(seconds(value) for value in values.values()))
    table.add_row("output tokens", str(found["output_tokens"]))
    return table


def seconds(value: float) -> str:
    """Return a duration in the unit that suits it."""
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"
