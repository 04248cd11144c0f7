"""What a context costs, however many are kept: ``python -m load.contexts``.

Each step opens a request, gives it its layers as the stages do, and closes it into a store that is full, so that one of
those kept has to go; then asks for kept ones at random, and lets some expire. No Triton, no engine, no bus.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

from rich.console import Console
from rich.table import Table

from triton_lifecycle.bus import NoBus
from triton_lifecycle.context import Contexts, Input, Wants
from triton_lifecycle.engine import Chunk, Delta
from triton_lifecycle.events import Finished
from triton_lifecycle.store import LAYERS
from triton_lifecycle.store.memory import MemoryStore
from triton_lifecycle.store.records import SUMMARY, Records, read_summary

SIZES = (100, 1_000, 10_000, 100_000, 1_000_000)
ROUNDS = 7
TIMES = 5_000
PARAMETERS = {"max_tokens": 64, "temperature": 0.7, "top_p": 0.9}
LAST = Chunk((Delta(0, "made", tuple(range(64)), "length", -12.5),), finished=True, cached_tokens=16, created_tokens=16)


class Subject:
    """A full store with the contexts before it, on a clock of its own."""

    def __init__(self, size: int, *, layered: bool) -> None:
        self._now = 0.0
        self._publisher = NoBus()
        ttls = dict.fromkeys(LAYERS, 3600.0) if layered else {SUMMARY: 3600.0}
        self.store = MemoryStore(ttls, max_requests=size, clock=self._clock)
        self._contexts = Contexts(ended=self.store, records=Records("node", layered=layered), clock=self._clock)
        self._number = 0
        self.ids: list[str] = []

    def serve(self) -> None:
        """Open a request, fill its layers, close it."""
        self._number += 1
        ctx = self._contexts.open(SimpleNamespace(id=f"caller-{self._number}"), "model", self._publisher)
        ctx.input = Input(f"prompt {self._number}", PARAMETERS, Wants(), exclude_prompt=True)
        ctx.execution.prompt_tokens = 3
        for milestone in ("admitted", "scheduled", "first_token", "finished"):
            ctx.mark(milestone)
        ctx.absorb(LAST)
        self._contexts.close(ctx, Finished, finish_reason="length", output_tokens=64)
        self.ids.append(ctx.id)

    def ask(self) -> None:
        """Read the status of a kept request."""
        found = self._contexts.ended.get(random.choice(self.ids))  # noqa: S311 - no secret
        read_summary("", found)

    def expire(self) -> None:
        """Let one request's time be over: it is the next in line, so one step forgets it."""
        self.store.expire(1)

    def age(self) -> None:
        """Let an hour pass."""
        self._now += 3601.0

    def _clock(self) -> float:
        return self._now


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=max(SIZES), help="the largest number of kept requests to try")
    most = parser.parse_args().most
    table = Table(title=f"µs of CPU per operation, median of {ROUNDS} rounds of {TIMES} (least…most)")
    table.add_column("kept", justify="right")
    for name in ("open + close, five layers", "open + close, summary", "status of a kept one", "expire", "bytes each"):
        table.add_column(name, justify="right")
    for size in [size for size in SIZES if size <= most]:
        table.add_row(f"{size:,}", *_row(size))
    Console().print(table)


def _row(size: int) -> list[str]:
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    subject = Subject(size, layered=True)
    for _ in range(size + TIMES):
        subject.serve()
    # Resident memory of a process grows only: it tells something where a size is well beyond the last one.
    each = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / size
    cells = [_timed(subject.serve)]
    subject.ids = subject.ids[-size:]
    asked = _timed(subject.ask)
    subject.age()
    expired = _timed(subject.expire, rounds=min(ROUNDS, size // TIMES)) if size >= TIMES else "-"
    del subject
    gc.collect()
    plain = Subject(size, layered=False)
    for _ in range(size + TIMES):
        plain.serve()
    cells.append(_timed(plain.serve))
    return [*cells, asked, expired, f"{each:,.0f}" if size >= 100_000 else "-"]


def _timed(operation: Callable[[], None], rounds: int = ROUNDS) -> str:
    found = []
    for _ in range(rounds):
        began = time.process_time()
        for _ in range(TIMES):
            operation()
        found.append((time.process_time() - began) / TIMES * 1e6)
    return f"{statistics.median(found):.1f} ({min(found):.1f}…{max(found):.1f})"


if __name__ == "__main__":
    main()
