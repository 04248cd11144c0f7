"""What each option of ``performance_optimization`` gives or costs: ``python -m load.options``.

A real tritonserver serves the simulated engine once with every choice; the load is that of the benchmark's simulated
part (64 gRPC streams, 50,000 tokens/s offered), and then a single stream at 200 tokens/s. Variants take turns in
rounds, since machines drift. Every stream's text is compared with the unary answer.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from load.overhead import parts
from load.overhead.children import Child
from load.overhead.figures import Work
from load.overhead.measure import Order, Prompt
from load.rounds import spread
from triton_lifecycle.launcher import project_root
from triton_lifecycle.launcher.installation import state_folder
from triton_lifecycle.launcher.server import TritonServer

MODEL: Final = "simulated"
READY_S: Final = 120.0
VARIANTS: Final[dict[str, dict[str, object]]] = {
    "as shipped": {},
    "enable_async_processing: false": {"enable_async_processing": False},
    "enable_batch_optimization: false": {"enable_batch_optimization": False},
    "enable_resource_pooling: false": {"enable_resource_pooling": False},
    "resource_pool_size: 2": {"resource_pool_size": 2},
    "resource_pool_size: 4": {"resource_pool_size": 4},
    "resource_pool_size: 16": {"resource_pool_size": 16},
}


class Found:
    """What one variant came to, over all rounds."""

    def __init__(self) -> None:
        self.many: list[Work] = []
        self.first_ms: list[float] = []


def measure(options: dict[str, object], waves: int, found: Found, say: Console) -> None:
    """Start a server with these options, load it, and add to what was found."""
    with ExitStack() as stack:
        repository = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lifecycle-options-")))
        parts.simulated_repository(project_root() / "model_repository" / MODEL, repository)
        document = {"request_lifecycle": {"performance_optimization": options}}
        (repository / MODEL / "request_lifecycle.yaml").write_text(json.dumps(document), encoding="utf-8")
        server = TritonServer(repository, models=[MODEL])
        stack.enter_context(server).wait_ready(READY_S, lambda _: None)
        logs = state_folder() / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        unary = stack.enter_context(Child(("http", server.http_url, MODEL), logs / "options-http.log"))
        client = stack.enter_context(Child(("grpc", server.grpc_url, MODEL), logs / "options-grpc.log"))
        for child in (unary, client):
            child.wait_ready(READY_S)
        plan = parts.Plan(rounds=1, levels=(1,), simulated_waves=waves)
        rig = parts.SimulatedRig(
            unary, [client], server=server, plan=plan, say=lambda line: say.print(f"  {line}", markup=False)
        )
        rig.measure(found.many)
        single = client.ask(Order([Prompt(f"One stream, number {n}") for n in range(20)], 1, 50, 60.0))
        found.first_ms.append(statistics.median(single.first) * 1e3)


def main(
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all variants.")] = 3,
    waves: Annotated[int, typer.Option(min=1, help="Answers per stream.")] = 2,
    only: Annotated[str, typer.Option(help="Measure only variants whose name holds this.")] = "",
) -> None:
    """Measure every variant in turn and print the table."""
    say = Console(stderr=True, highlight=False)
    found = {name: Found() for name in VARIANTS if only in name}
    for number in range(1, rounds + 1):
        for name, result in found.items():
            say.print(f"round {number}/{rounds}, {name}", markup=False)
            measure(VARIANTS[name], waves, result, say)
    table = Table(title=f"performance_optimization, {rounds} rounds (median, lowest…highest)")
    for heading in ("variant", "tokens/s", "tokens/response", "CPU µs/token", "1 stream: first ms"):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for name, result in found.items():
        table.add_row(
            name,
            spread([work.sample.rate for work in result.many], 0),
            spread([work.sample.tokens / work.sample.responses for work in result.many], 1),
            spread([work.used.both / work.sample.tokens * 1e6 for work in result.many], 1),
            spread(result.first_ms, 2),
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
