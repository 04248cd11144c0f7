"""What events cost under load: ``python -m load.events_cost``.

The whole pipeline and the simulated engine run in this process in real time, with as many requests as the engine takes
at once. Rounds alternate in one process: events off, events on, and off again, which shows what the machine's own noise
makes of equal things. On means the bus, the recorder writing every event but those of each token to a file, and all
metrics, ours and the official ones; their page is a stand-in on which a call takes as long as on Triton's. Compared are
the tokens each second and the time to the first token. ``python -m load.metrics_cost`` is the same through a real
Triton, where the machine's noise hides a millisecond.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from load.in_process import CALLERS, WARM_UP_S, engine, measure, on_servers_loop
from load.rounds import COLUMNS, Round, cells, later, lost, take_turns, verdict
from triton_lifecycle import metrics, sinks
from triton_lifecycle.admission import Admission
from triton_lifecycle.beat import Beat
from triton_lifecycle.bus import Bus, NoBus
from triton_lifecycle.config import OFFICIAL, Config, EventDriven, Recorder
from triton_lifecycle.engine.supervisor import Supervisor
from triton_lifecycle.leaks import Accounts
from triton_lifecycle.pipeline import Pipeline
from triton_lifecycle.stages import Services, build_route
from triton_lifecycle.store.history import History

AIM_LOST = 0.01
AIM_FIRST_TOKEN_S = 0.001
CALL_CPU_S = 9e-6
"""Of a call to Triton's page: CPU time in the stub, by decision 0028; then it waits for the server."""
CALL_WAIT_S = 10e-6
STAGES = ("receive", "preprocess", "schedule", "execute")


class _Page:
    """Stands where Triton's metric families and metrics are: what is written costs time and goes nowhere."""

    COUNTER, GAUGE, HISTOGRAM = range(3)

    def __init__(self, **_: object) -> None:
        self.MetricFamily = type(self)
        self.Metric = type(self)

    def _write(self, _: float) -> None:
        until = time.perf_counter() + CALL_CPU_S
        while time.perf_counter() < until:
            pass
        time.sleep(CALL_WAIT_S)

    increment = set = observe = _write


class EventsRound(Round):
    """One round, and the lines that the recorder wrote."""

    lines: int


def _report(parts: metrics.Parts, bus: Bus) -> metrics.Reporter:
    """Write all metrics once a second from now on."""
    page = metrics.Page(_Page(), "model", "1", "model")
    ours, official = metrics.RequestMetrics(page, "model", STAGES), metrics.OfficialMetrics(page, 4096)
    follow = metrics.Follow([ours.ended, official.ended])
    bus.subscribe(follow.take, follow.TYPES, name="metrics")
    reporter = metrics.Reporter(page, metrics.ServerMetrics(page, parts).read)
    reporter.start()
    return reporter


async def run_round(seconds: float, folder: Path | None) -> EventsRound:
    """Serve for some seconds; with events, recorder and metrics when there is a folder for the file."""
    recorder = EventDriven(recorder=Recorder(path="events.jsonl"))
    config = OFFICIAL if folder is None else Config(timeout_handling=OFFICIAL.timeout_handling, event_driven=recorder)
    simulated, history = engine(), History(config)
    supervisor = Supervisor(simulated, config.error_handling, clock=time.monotonic)
    await supervisor.start()
    admission = Admission(config.admission, most=10_000)
    opened = [] if folder is None else sinks.open_sinks(config, folder)
    bus: Bus | NoBus = NoBus()
    reporter = None
    if folder is not None:
        bus = Bus()
        for sink in opened:
            bus.subscribe(sink.take, sink.types, name=sink.name)
        parts = metrics.Parts(
            engine=simulated,
            supervisor=supervisor,
            admission=admission,
            contexts=history.contexts,
            bus=bus,
            sinks=opened,
            history=history,
            accounts=Accounts(),
            predictor=None,
            beat=Beat(asyncio.get_running_loop()),
        )
        reporter = _report(parts, bus)
    route = build_route(Services(config, simulated, supervisor, admission))
    found = await measure(Pipeline(route, history.contexts, bus, None, "model"), history.contexts, seconds)
    await bus.aclose()
    if reporter is not None:
        await reporter.aclose()
    lines = await _close(opened)
    await supervisor.stop()
    await simulated.stop()
    return EventsRound(found.tokens_per_s, found.first_p50, found.first_p99, found.cpu_per_token, lines)


async def _close(opened: list[sinks.Sink]) -> int:
    """Close the sinks; return the lines that they wrote, all of them."""
    lines = 0
    for sink in opened:
        await sink.aclose()
        if sink.counts()["lost"]:
            raise RuntimeError(f"{sink.name} lost events: {sink.counts()}")
        lines += sink.counts()["sent"]
    return lines


def main(rounds: int = 40, seconds: float = 2.0) -> None:
    """Measure and print."""
    console = Console()
    with tempfile.TemporaryDirectory() as name:
        found = take_turns(
            ("off", "on", "off again"),
            rounds,
            lambda which: on_servers_loop(run_round(seconds, Path(name) if which == "on" else None)),
        )
    table = Table(title=f"Bus, recorder and metrics off and on, {rounds} rounds of {seconds:g} s, {CALLERS} streams")
    for column in ("events", *COLUMNS, "lines/s"):
        table.add_column(column, justify="left" if column == "events" else "right")
    for which, measured in found.items():
        lines = statistics.median(each.lines for each in measured) / (seconds + WARM_UP_S)
        table.add_row(which, *cells(measured), f"{lines:.0f}")
    console.print(table)
    off, on, again = found.values()
    console.print(
        f"throughput lost: {lost(off, on):.2%} (off against off again: {lost(off, again):.2%}); aim ≤ {AIM_LOST:.0%}: "
        f"{verdict(lost(off, on), lost(off, again), AIM_LOST)}"
    )
    console.print(
        f"first token p99, quiet rounds: {later(off, on) * 1e3:+.2f} ms (off against off again: "
        f"{later(off, again) * 1e3:+.2f} ms); aim ≤ {AIM_FIRST_TOKEN_S * 1e3:g} ms: "
        f"{verdict(later(off, on), later(off, again), AIM_FIRST_TOKEN_S)}"
    )


if __name__ == "__main__":
    typer.run(main)
