"""What tracing costs under load: ``python -m load.tracing_cost``.

The whole pipeline and the simulated engine run in this process in real time, with as many requests as the engine takes
at once. Rounds alternate: tracing off, tracing of every request to a real OTLP receiver in a process of its own, and
off again, which shows what the machine's own noise makes of equal things. The bus is on in all of them. Compared are
the tokens each second, the CPU for each token, and the time to the first token.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc  # type: ignore[import-untyped]
import typer
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service
from rich.console import Console
from rich.table import Table

from load.in_process import CALLERS, engine, measure, on_servers_loop
from load.rounds import COLUMNS, Round, cells, lost, take_turns, verdict
from triton_lifecycle.admission import Admission
from triton_lifecycle.bus import Bus
from triton_lifecycle.config import OFFICIAL, Config, Monitoring
from triton_lifecycle.config.urls import OtlpUrl
from triton_lifecycle.context import Contexts
from triton_lifecycle.engine.supervisor import Supervisor
from triton_lifecycle.pipeline import Pipeline
from triton_lifecycle.stages import Services, build_route
from triton_lifecycle.tracing import Tracing

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

AIM_LOST = 0.03


class TracingRound(Round):
    """One round, and what became of its spans."""

    spans: int
    lost: int


class Receiver(service.TraceServiceServicer):
    """Takes what comes."""

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802, ANN401, ARG002 - the protocol's
        """Take a batch."""
        return messages.ExportTraceServiceResponse()


def receive(way_back: Connection) -> None:
    """Run the receiver until the other end hangs up."""
    os.nice(5)  # a collector is elsewhere: what it costs is not ours
    server = grpc.server(ThreadPoolExecutor(1))
    service.add_TraceServiceServicer_to_server(Receiver(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    way_back.send(port)
    way_back.poll(None)
    server.stop(0).wait()


async def run_round(seconds: float, collector: str | None) -> TracingRound:
    """Serve for some seconds; every request traced when there is a collector."""
    config = OFFICIAL
    tracing: Tracing | None = None
    bus, simulated, contexts = Bus(), engine(), Contexts()
    if collector is not None:
        monitoring = Monitoring(tracing_enabled=True, tracing_endpoint=OtlpUrl(collector), tracing_sample_ratio=1.0)
        config = Config(timeout_handling=OFFICIAL.timeout_handling, monitoring=monitoring)
        tracing = Tracing(config)
        bus.subscribe(tracing.take, Tracing.TYPES, name="tracing")
    supervisor = Supervisor(simulated, config.error_handling, clock=time.monotonic)
    await supervisor.start()
    admission = Admission(config.admission, most=10_000)
    route = build_route(Services(config, simulated, supervisor, admission, tracing=tracing))
    found = await measure(Pipeline(route, contexts, bus, None, "model"), contexts, seconds)
    await bus.aclose()
    counts = {"spans": 0, "lost": 0}
    if tracing is not None:
        await tracing.aclose()
        counts = tracing.counts()
    await supervisor.stop()
    await simulated.stop()
    base = (found.tokens_per_s, found.first_p50, found.first_p99, found.cpu_per_token)
    return TracingRound(*base, counts["spans"], counts["lost"])


def main(rounds: int = 12, seconds: float = 3.0) -> None:
    """Measure and print."""
    start = multiprocessing.get_context("spawn")
    here, there = start.Pipe()
    receiver = start.Process(target=receive, args=(there,), daemon=True)
    receiver.start()
    collector = f"http://127.0.0.1:{here.recv()}"
    found = take_turns(
        ("off", "on", "off again"),
        rounds,
        lambda which: on_servers_loop(run_round(seconds, collector if which == "on" else None)),
    )
    here.send(None)
    receiver.join(10)
    _print(found, f"{rounds} rounds of {seconds:g} s, {CALLERS} streams")


def _print(found: dict[str, list[TracingRound]], how: str) -> None:
    console = Console()
    table = Table(title=f"Tracing off and on (every request, OTLP over gRPC), {how}")
    for column in ("tracing", *COLUMNS, "spans a round", "lost"):
        table.add_column(column, justify="left" if column == "tracing" else "right")
    for which, measured in found.items():
        spans = statistics.median(each.spans for each in measured)
        table.add_row(which, *cells(measured), f"{spans:.0f}", str(sum(each.lost for each in measured)))
    console.print(table)
    off, on, again = found.values()
    console.print(
        f"throughput lost: {lost(off, on):.2%} (off against off again: {lost(off, again):.2%}); aim ≤ {AIM_LOST:.0%}: "
        f"{verdict(lost(off, on), lost(off, again), AIM_LOST)}"
    )


if __name__ == "__main__":
    typer.run(main)
