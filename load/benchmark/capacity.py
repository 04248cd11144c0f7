"""What the machine can serve: requests/s while more callers than it can run at once keep asking.

It is measured once, on the run's first target, and is what 1x means for all of them: each gets the same load.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import msgspec

from load.benchmark import plan
from load.benchmark.drive import Load
from load.benchmark.options import CLOSED, Options
from load.benchmark.plan import Cell, Planned
from load.benchmark.records import COMPLETE, Record
from triton_lifecycle.errors import LifecycleError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from load.benchmark.asking import Target

WARM_UP: Final = 0.25
"""Of the time, not counted: until the server is full."""
_LIMIT_S: Final = 120.0


class NothingServed(LifecycleError):
    """The target completed nothing, so there is no capacity to speak of."""

    slug = "nothing_served"


async def measure(target: Target, options: Options) -> float:
    """Return requests/s.

    Raises:
        NothingServed: none was completed.

    """
    seconds = options.capacity_seconds
    records: list[Record] = []
    load = Load(target, Cell("", CLOSED, options.capacity_concurrency, _LIMIT_S), options.tenants, records.append)
    await load.run(_until(options, time.monotonic() + seconds))
    found = served(records, seconds * WARM_UP, seconds)
    if found <= 0:
        slugs = ", ".join(sorted({record.slug or "" for record in records}))
        raise NothingServed(f"no request was completed while the capacity was measured ({slugs})")
    return found


def served(records: Sequence[Record], begin: float, end: float) -> float:
    """Return answers/s between two moments; one that lies across a border counts by the part that is within.

    Answers of one length come in waves, all at once; counting whole ones would make the figure a matter of luck.
    """
    work = 0.0
    for record in records:
        if record.outcome == COMPLETE:
            within = min(record.end, end) - max(record.sent, begin)
            work += max(0.0, within) / max(1e-9, record.end - record.sent)
    return work / (end - begin)


def _until(options: Options, moment: float) -> Iterator[Planned]:
    # Other words than those of the cells, that no prefix cache decides.
    other = msgspec.structs.replace(options, seed=options.seed + 1_000_003)
    for ask in plan.mix(other, CLOSED):
        if time.monotonic() >= moment:
            return
        yield Planned(0.0, ask)
