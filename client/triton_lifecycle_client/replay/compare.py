"""Two runs of the same requests, side by side: what was decided, how much was made, how long it took."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
from rich.table import Table
from rich.text import Text

from triton_lifecycle_client.quantiles import quantiles
from triton_lifecycle_client.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from triton_lifecycle.story import Decision, Story

MAX_SHOWN = 20
"""Differences that a table shows; JSON has them all."""


class Outcome(msgspec.Struct, frozen=True):
    """How one request went in one run.

    Attributes:
        tokens: made for it; ``None`` when its caller cannot know.
        first_token_s: seconds from its arrival, ``None`` without a token.
        total_s: seconds from its arrival to its end.

    """

    status: str
    slug: str | None
    tokens: int | None
    first_token_s: float | None
    total_s: float
    decision: Decision | None = None
    """What the server decided, where that is known in full."""

    @classmethod
    def of(cls, story: Story) -> Outcome:
        """Take the outcome from a recording."""
        return cls(
            story.status, story.slug, story.output_tokens, story.time_to_first_token, story.duration, story.decision
        )


class Difference(msgspec.Struct, frozen=True):
    """A request that was decided otherwise."""

    id: str
    caller_id: str
    recorded: str
    replayed: str


class Report(msgspec.Struct, frozen=True):
    """A comparison."""

    requests: int
    differences: list[Difference]
    left_out: dict[str, int]
    """Recorded requests that were not replayed, by the reason."""
    recorded: dict[str, Any]
    replayed: dict[str, Any]

    @property
    def agree(self) -> bool:
        """Whether every request that was replayed was decided alike, and there was one."""
        return bool(self.requests) and not self.differences


def compare(
    recorded: Iterable[Story], replayed: Mapping[str, Outcome], left_out: Mapping[str, int], *, exact: bool
) -> Report:
    """Compare the recorded requests with their outcomes in another run.

    Args:
        recorded: the recording.
        replayed: outcomes by the recorded request's id; what is not among them was left out.
        left_out: how many were, by the reason.
        exact: compare finish reasons, token counts, permits and retries too, which only a simulation can repeat.

    """
    both = [(story, replayed[story.id]) for story in recorded if story.id in replayed]
    differences = []
    for story, outcome in both:
        before, after = _words(Outcome.of(story), exact=exact), _words(outcome, exact=exact)
        if before != after:
            differences.append(Difference(story.id, story.caller_id, before, after))
    return Report(
        requests=len(both),
        differences=differences,
        left_out={reason: count for reason, count in left_out.items() if count},
        recorded=summary(Outcome.of(story) for story, _ in both),
        replayed=summary(outcome for _, outcome in both),
    )


def summary(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Return counts and quantiles of one run."""
    given = list(outcomes)
    ends = Counter(outcome.status + (f" {outcome.slug}" if outcome.slug else "") for outcome in given)
    return {
        "ends": dict(sorted(ends.items())),
        "output_tokens": sum(outcome.tokens or 0 for outcome in given),
        "first_token_s": quantiles(o.first_token_s for o in given if o.first_token_s is not None),
        "total_s": quantiles(outcome.total_s for outcome in given),
    }


def tables(report: Report) -> list[Table]:
    """Return what a terminal shows: the two runs side by side, and the first requests that differ."""
    table = Table("", title=None)
    table.add_column("recorded", justify="right")
    table.add_column("replayed", justify="right")
    ends = sorted({*report.recorded["ends"], *report.replayed["ends"]})
    for end in ends:
        before, after = (str(run["ends"].get(end, 0)) for run in (report.recorded, report.replayed))
        table.add_row(Text(printable(end)), before, after, style="" if before == after else "yellow")
    table.add_section()
    table.add_row("output tokens", *(str(run["output_tokens"]) for run in (report.recorded, report.replayed)))
    for name, label in (("first_token_s", "first token"), ("total_s", "whole request")):
        for share in report.recorded[name] | report.replayed[name]:
            cells = (run[name].get(share) for run in (report.recorded, report.replayed))
            table.add_row(f"{label} {share}", *("-" if value is None else f"{value * 1e3:.0f} ms" for value in cells))
    if not report.differences:
        return [table]
    differing = Table("request", "recorded", "replayed")
    for difference in report.differences[:MAX_SHOWN]:
        name = difference.caller_id or difference.id
        differing.add_row(*(Text(printable(text)) for text in (name[:40], difference.recorded, difference.replayed)))
    return [table, differing]


def _words(outcome: Outcome, *, exact: bool) -> str:
    words = outcome.status + (f" ({outcome.slug})" if outcome.slug else "")
    decision = outcome.decision
    if not exact or decision is None:
        return words
    words += f", {decision.output_tokens} tokens"
    if decision.finish_reason:
        words += f", {decision.finish_reason}"
    if decision.retries:
        words += f", {decision.retries} retries"
    return words if decision.admitted else f"{words}, not admitted"
