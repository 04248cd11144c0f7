"""Measures every cell that is not whole yet: a server at a time, and on it a cell at a time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec

from load.benchmark import capacity, plan, servers
from load.benchmark.drive import Load
from load.benchmark.options import CLOSED, TargetSpec
from load.benchmark.records import COMPLETE, CellEnd, Folder, Record, Run
from load.benchmark.targets import open_target

if TYPE_CHECKING:
    from load.benchmark.asking import Target
    from load.benchmark.plan import Cell
    from load.benchmark.progress import Told
    from load.benchmark.servers import Served

WARM_UP: Final = 4
SETTLE_S: Final = 1.0


class Runner:
    """One run.

    Args:
        folder: where its results are and go.
        run: what is known of it; the capacity is added.
        told: is told how far it is.

    """

    def __init__(self, folder: Folder, run: Run, told: Told) -> None:
        self._folder = folder
        self._run = run
        self._told = told

    def measure(self) -> None:
        """Measure; what was found so far is in the folder at any time.

        Raises:
            LauncherError: a server does not start.
            LifecycleError: it does not answer.

        """
        options = self._run.options
        todo = [(spec, [cell for cell in cells if not self._whole(cell)]) for spec, cells in plan.cells(options)]
        self._told.begin(sum(len(cells) for _, cells in todo), options.num_requests)
        for spec, cells in todo:
            if cells:
                with servers.serving(spec, options, self._told.say) as served:
                    asyncio.run(self._on(spec, served, cells))

    def _whole(self, cell: Cell) -> bool:
        measured = self._folder.measured(cell)
        return measured is not None and measured.end is not None

    async def _on(self, spec: TargetSpec, served: Served, cells: list[Cell]) -> None:
        target = open_target(spec.kind, served.url, self._run.options.model, served.metrics_url)
        try:
            await target.wait_ready(servers.READY_S)
            await self._warm_up(target, cells[0])
            if self._run.capacity is None and any(cell.scenario != CLOSED for cell in cells):
                await self._measure_capacity(spec, target)
            for cell in cells:
                await self._cell(target, cell)
        finally:
            await target.close()

    async def _warm_up(self, target: Target, cell: Cell) -> None:
        options = msgspec.structs.replace(self._run.options, num_requests=WARM_UP, seed=self._run.options.seed + 7)
        warm = plan.Cell(cell.target, CLOSED, WARM_UP, 120.0)
        await Load(target, warm, options.tenants, lambda _: None).run(plan.requests(options, warm, 1.0))

    async def _measure_capacity(self, spec: TargetSpec, target: Target) -> None:
        options = self._run.options
        self._told.say(f"measuring the capacity on {spec.kind}, {options.capacity_seconds:g} s and a little more")
        self._run.capacity = await capacity.measure(target, options)
        self._run.capacity_of = spec.kind
        self._folder.write_run(self._run)
        self._told.say(f"1x is {self._run.capacity:.2f} requests/s")
        await asyncio.sleep(SETTLE_S)

    async def _cell(self, target: Target, cell: Cell) -> None:
        options = self._run.options
        before = await asyncio.to_thread(servers.generated, target.metrics_url)
        self._told.cell(f"{cell.target}: {cell.load}", options.num_requests)
        with self._folder.writer(cell) as writer:

            def on_record(record: Record) -> None:
                writer.add(record)
                self._told.record(complete=record.outcome == COMPLETE, refusals=record.refusals)

            load = Load(target, cell, options.tenants, on_record)
            await load.run(plan.requests(options, cell, self._run.capacity or 1.0))
            await asyncio.sleep(SETTLE_S)
            after = await asyncio.to_thread(servers.generated, target.metrics_url)
            made = None if before is None or after is None else after - before
            writer.finish(CellEnd(gaps=dict(load.gaps.counts), made=made, lag_p99=load.lag.quantile(0.99) or 0.0))
        self._told.cell_done()
