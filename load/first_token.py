"""Where the time to the first token goes, one request at a time: ``python -m load.first_token``.

A real tritonserver, by default with the simulated engine, whose step takes exactly 20 ms. Every request's own times are
asked of the server (``status``); what lies before and after them is Triton's and the client's part. An empty call, the
health question of the same protocol, shows how much of that no backend can change.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import Annotated, Final, Literal

import typer
from rich.console import Console
from rich.table import Table
from tritonclient.grpc import InferenceServerClient

from load.models import copy_with
from load.overhead.measure import percentile
from triton_lifecycle.launcher import project_root
from triton_lifecycle.launcher.server import TritonServer
from triton_lifecycle.launcher.weights import prepare_weights
from triton_lifecycle_client import AsyncClient

READY_S: Final = 300.0
STEP_MS: Final = 20.0
PAUSE_S: Final = 0.005
"""Between two requests, so that none meets the last one's end."""
PARTS: Final = {
    "empty call": "a health question, for comparison; no part of the sum",
    "to the backend": "client, network, Triton, its stub",
    "receive … schedule": "validation, tokens, limits, admission",
    "queue": "until the engine begins with it",
    "prefill": "the engine's first step",
    "to the client": "detokenizing, the send lane, Triton, network, client",
    "first token": "what the caller sees",
}


Protocol = Literal["grpc", "http"]


class Engine(Enum):
    """Which model is asked."""

    simulated = "simulated"
    real = "smollm2"


def repository(engine: Engine, target: Path) -> Path:
    """Return the model repository to serve."""
    shipped = project_root() / "model_repository"
    if engine is Engine.real:
        prepare_weights(shipped / engine.value / "1" / "weights")
        return shipped
    model = target / engine.value
    settings = {"base_ms": STEP_MS, "per_sequence_us": 0.0, "prefill_tokens_per_s": 1e9, "mean_output_tokens": None}
    copy_with(shipped / engine.value, model, settings)
    return target


async def measure(url: str, protocol: Protocol, model: str, requests: int) -> dict[str, list[float]]:
    """Return each part's milliseconds, request by request."""
    found: dict[str, list[float]] = defaultdict(list)
    empty = _empty(url, protocol)
    async with AsyncClient(url, model=model, protocol=protocol) as client:
        for number in range(-5, requests):
            began = time.time()
            empty()
            called = time.time() - began
            await asyncio.sleep(PAUSE_S)
            name = f"{protocol}-{number}"
            began = time.time()
            stream = client.stream(f"Story {number}:", max_tokens=2, ignore_eos=True, temperature=0.0, request_id=name)
            first = None
            async for _ in stream:
                first = first or time.time()
            status = await client.status(name)
            if number < 0 or first is None:
                continue
            times, received = status.times_ms, (status.received_at - began) * 1e3
            found["empty call"].append(called * 1e3)
            found["to the backend"].append(received)
            found["receive … schedule"].append(times["admitted"])
            found["queue"].append(times["scheduled"] - times["admitted"])
            found["prefill"].append(times["first_token"] - times["scheduled"])
            found["to the client"].append((first - began) * 1e3 - received - times["first_token"])
            found["first token"].append((first - began) * 1e3)
            await asyncio.sleep(PAUSE_S)
    return found


def _empty(url: str, protocol: str) -> Callable[[], object]:
    """Return a question that no model sees, over a connection of its own that stays open. It blocks."""
    if protocol == "grpc":
        live: Callable[[], object] = InferenceServerClient(url).is_server_live
        return live
    connection = http.client.HTTPConnection(url, timeout=READY_S)

    def ask() -> None:
        connection.request("GET", "/v2/health/live")
        connection.getresponse().read()

    return ask


def show(found: dict[str, dict[str, list[float]]], engine: Engine, requests: int) -> None:
    """Print the table."""
    table = Table(title=f"Time to the first token, ms, {engine.name} engine, {requests} requests, one at a time")
    for column in ("", "", *(f"{protocol} {what}" for protocol in found for what in ("p50", "p90"))):
        table.add_column(column, justify="right" if column else "left")
    for part, meaning in PARTS.items():
        if part in {"to the backend", "first token"}:
            table.add_section()
        cells = [f"{percentile(times[part], q):.2f}" for times in found.values() for q in (50, 90)]
        table.add_row(part, meaning, *cells)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def main(
    engine: Annotated[str, typer.Option(help="simulated or real.")] = "simulated",
    requests: Annotated[int, typer.Option(min=10, help="Requests over each protocol.")] = 100,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the medians here too.", dir_okay=False)
    ] = None,
) -> None:
    """Measure and print where the time to the first token goes."""
    if engine not in Engine.__members__:
        raise typer.BadParameter(f"expected simulated or real, found {engine!r}", param_hint="--engine")
    chosen = Engine[engine]
    say = Console(stderr=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lifecycle-first-token-")))
        say.print(f"starting tritonserver with the {engine} engine")
        server = TritonServer(repository(chosen, folder), models=[chosen.value], log_path=folder / "triton.log")
        stack.enter_context(server).wait_ready(READY_S)
        found: dict[str, dict[str, list[float]]] = {}
        urls: dict[Protocol, str] = {"grpc": server.grpc_url, "http": server.http_url}
        for protocol, url in urls.items():
            say.print(f"{requests} requests over {protocol}")
            found[protocol] = asyncio.run(measure(url, protocol, chosen.value, requests))
        time.sleep(1.5)
    show(found, chosen, requests)
    if json_file is not None:
        medians = {
            name: {part: statistics.median(times) for part, times in parts.items()} for name, parts in found.items()
        }
        json_file.write_text(json.dumps({"engine": engine, "requests": requests, "p50_ms": medians}), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
