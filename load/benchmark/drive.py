"""Sends a cell's requests: when they are due, or one after the other by so many callers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from load.benchmark import asking
from load.benchmark.options import CLOSED
from load.benchmark.statistics import Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from load.benchmark.asking import Target
    from load.benchmark.plan import Cell, Planned
    from load.benchmark.records import Record

_WATCH_S: Final = 0.05


class Load:
    """One cell's load on one target.

    Args:
        target: whom.
        cell: how.
        tenants: number of callers among whom requests are dealt out.
        on_record: told of each request as it ends.

    """

    def __init__(self, target: Target, cell: Cell, tenants: int, on_record: Callable[[Record], None]) -> None:
        self._target = target
        self._cell = cell
        self._tenants = tenants
        self._on_record = on_record
        self._begin = 0.0
        self.gaps = Histogram()
        self.lag = Histogram()

    async def run(self, planned: Iterable[Planned]) -> None:
        """Send all and return when the last has ended; each has its caller's deadline, so that is bounded."""
        self._begin = asking.now()
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._watch())
            if self._cell.scenario == CLOSED:
                await self._closed(iter(planned))
            else:
                await self._open(planned)
            watch.cancel()

    async def _open(self, planned: Iterable[Planned]) -> None:
        async with asyncio.TaskGroup() as group:
            for item in planned:
                late = asking.now() - self._begin - item.at
                if late < 0:
                    await asyncio.sleep(-late)
                    late = asking.now() - self._begin - item.at
                self.lag.add(late)
                group.create_task(self._ask(item))

    async def _closed(self, planned: Iterator[Planned]) -> None:
        async def caller() -> None:
            for item in planned:
                await self._ask(item)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._cell.concurrency):
                group.create_task(caller())

    async def _ask(self, item: Planned) -> None:
        tenant = item.ask.number % self._tenants
        record, gaps = await asking.ask(self._target, item, self._begin, self._cell.timeout, tenant)
        for gap in gaps:
            self.gaps.add(gap)
        self._on_record(record)

    async def _watch(self) -> None:
        """Measure how late the event loop itself is."""
        while True:
            due = asking.now() + _WATCH_S
            await asyncio.sleep(_WATCH_S)
            self.lag.add(asking.now() - due)
