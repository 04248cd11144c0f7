"""The demonstration: one answer over each protocol from a real server, and where the time went."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.table import Table

from triton_lifecycle.launcher.leftovers import SHM
from triton_lifecycle.launcher.server import TritonServer

from .sync import Client
from .terminal import err, out, write

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from triton_lifecycle.launcher import Progress

    from .types import Protocol, Status

POINTS = ("received", "admitted", "scheduled", "first_token", "finished")
_SETTLE_S = 2.0


def run(repository: Path, model: str, prompt: str, max_tokens: int, *, say: Progress) -> bool:
    """Show it all; returns whether every part of it went as it should."""
    server = TritonServer(repository, models=[model])
    statuses: dict[str, Status] = {}
    server.start()
    try:
        with err.status(f"starting tritonserver with {model} …"):
            server.wait_ready(on_progress=say)
        for protocol, url in (("grpc", server.grpc_url), ("http", server.http_url)):
            out.print(f"\n[bold]{protocol.upper()}[/] {url}")
            statuses[protocol] = _ask(url, protocol, model, prompt, max_tokens)  # type: ignore[arg-type]
        out.print()
        show_timing(statuses)
    finally:
        with err.status("stopping the server …"):
            clean = _stop(server)
    return clean and all(status.status == "finished" for status in statuses.values())


def show_timing(statuses: Mapping[str, Status]) -> None:
    """Print when each point of a request's life was reached, one column for each request."""
    out.print(
        "[italic]where the time went (ms since received)[/]"
    )  # a table's own title is broken at the table's width
    out.print(_timing_table(statuses))


def _timing_table(statuses: Mapping[str, Status]) -> Table:
    table = Table()
    table.add_column("reached")
    for name in statuses:
        table.add_column(name, justify="right")
    names = [*POINTS, *sorted({point for status in statuses.values() for point in status.times_ms} - set(POINTS))]
    for point in names:
        cells = [status.times_ms.get(point) for status in statuses.values()]
        table.add_row(point.replace("_", " "), *("-" if at is None else f"{at:.1f}" for at in cells))
    table.add_section()
    for label, values in {
        "prompt tokens (from cache)": [_tokens(status) for status in statuses.values()],
        "output tokens": [str(status.output_tokens) for status in statuses.values()],
        "ended by": [status.finish_reason or status.slug or "-" for status in statuses.values()],
    }.items():
        table.add_row(label, *values)
    if any(status.node for status in statuses.values()):
        table.add_row("served by", *(status.node or "-" for status in statuses.values()))
    return table


def _tokens(status: Status) -> str:
    if status.prompt_tokens is None:
        return "-"
    return str(status.prompt_tokens) + (f" ({status.cached_tokens})" if status.cached_tokens else "")


def _ask(url: str, protocol: Protocol, model: str, prompt: str, max_tokens: int) -> Status:
    with Client(url, model=model, protocol=protocol, timeout=120) as client:
        write(prompt)
        stream = client.stream(prompt, max_tokens=max_tokens, temperature=0.0)
        for chunk in stream:
            write(chunk.text)
        write("\n")
        # The last response leaves the server just before it closes its books on the request.
        until = time.monotonic() + _SETTLE_S
        while (status := client.status(stream.request_id)).status == "live" and time.monotonic() < until:
            time.sleep(0.02)
        return status


def _stop(server: TritonServer) -> bool:
    """Stop the server and tell what is left of it; returns whether nothing is."""
    code = server.stop()
    regions = sorted(path.name for path in SHM.glob(f"{server.shm_prefix}*"))
    processes = [f"{process.name()} (pid {process.pid})" for process in server.processes()]
    for line in server.leftovers:
        out.print(f"[yellow]had to clean up:[/] {line}")
    if code == 0 and not regions and not processes and not server.leftovers:
        out.print("[bold green]stopped[/] with exit code 0; no process and no shared memory of it is left")
        return True
    out.print(f"[bold red]stopped[/] with exit code {code}; left: {', '.join(processes + regions) or 'nothing'}")
    return False
