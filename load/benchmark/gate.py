"""Rules that a run must not break: ``goodput<0.95`` fails when goodput is below 95 % of the baseline's.

Rates and times are judged as ratios to the same cell of the baseline. Shares and counts (``failed``, ``fairness``,
``wasted_received``, …) are judged as they are, since a ratio to 0 says nothing.
"""

from __future__ import annotations

import operator
import re
from typing import TYPE_CHECKING, Final

import msgspec

from load.benchmark.result import row
from triton_lifecycle.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from load.benchmark.result import Document

RELATIVE: Final = (
    "goodput", "throughput",
    "first_p50", "first_p90", "first_p99",
    "between_p50", "between_p90", "between_p99",
    "total_p50", "total_p90", "total_p99",
)  # fmt: skip
ABSOLUTE: Final = ("failed", "fairness", "wasted_received", "wasted_made", "refusals", "retries", "lag_p99")
_OPERATORS: Final[dict[str, Callable[[float, float], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_RULE: Final = re.compile(r"(?P<metric>\w+)\s*(?P<sign><=|>=|<|>)\s*(?P<bound>\d+(?:\.\d+)?)(?P<percent>\s*%)?")


class Rule(msgspec.Struct, frozen=True):
    """One rule.

    Attributes:
        text: as it was given.
        metric: which figure.
        sign: with which the figure and the bound are compared; where that is true, the rule is broken.

    """

    text: str
    metric: str
    sign: str
    bound: float

    @property
    def relative(self) -> bool:
        """Whether the figure is a ratio to the baseline."""
        return self.metric in RELATIVE


class Judgement(msgspec.Struct, frozen=True):
    """A rule on one cell."""

    rule: str
    cell: str
    value: float
    broken: bool


def parse(text: str) -> Rule:
    """Read a rule; raises ``InvalidInput`` naming what it may be."""
    match = _RULE.fullmatch(text.strip())
    if match is None:
        raise InvalidInput(f'--fail-if {text!r}: expected METRIC<NUMBER or METRIC>NUMBER, such as "goodput<0.95"')
    metric = match["metric"]
    if metric not in RELATIVE + ABSOLUTE:
        raise InvalidInput(f"--fail-if {text!r}: unknown figure {metric!r}; known: {', '.join(RELATIVE + ABSOLUTE)}")
    return Rule(text, metric, match["sign"], float(match["bound"]) / (100 if match["percent"] else 1))


def check(rules: Sequence[Rule], baseline: bool) -> None:  # noqa: FBT001
    """Raise ``InvalidInput`` when a rule needs a baseline and there is none."""
    for rule in rules:
        if rule.relative and not baseline:
            raise InvalidInput(f"--fail-if {rule.text!r} is judged against a baseline; name one with --baseline FILE")


def judge(rules: Sequence[Rule], document: Document, baseline: Document | None) -> list[Judgement]:
    """Return what each rule says of each cell.

    Raises:
        InvalidInput: a rule could be judged on no cell at all, so that it could never fail.

    """
    known = {} if baseline is None else {item.cell: row(item.cell, item.figures) for item in baseline.cells}
    found: list[Judgement] = []
    for rule in rules:
        judged = []
        for item in document.cells:
            value = row(item.cell, item.figures).get(rule.metric)
            if rule.relative:
                reference = known.get(item.cell, {}).get(rule.metric)
                value = value / reference if value is not None and reference else None
            if value is not None:
                broken = _OPERATORS[rule.sign](value, rule.bound)
                judged.append(Judgement(rule.text, f"{item.cell.target}: {item.cell.load}", value, broken))
        if not judged:
            raise InvalidInput(
                f"--fail-if {rule.text!r}: no cell of this run can be judged by it; has the baseline the same?"
            )
        found += judged
    return found
