"""``python -m load.soak``."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console

from load.overhead.measure import BenchFailed
from load.soak.report import Engine, Setup, show, verdicts
from load.soak.serve import run
from load.swarm.settings import front_ends
from triton_lifecycle.launcher import LauncherError

SLOPE: Final = 1.0


def main(
    *,
    minutes: Annotated[float, typer.Option(min=0.2, help="How long load is put on, warm-up included.")] = 60.0,
    warm_up: Annotated[
        float | None, typer.Option(help="Minutes that do not count; a fifth of all, at most 10, if not given.")
    ] = None,
    engine: Annotated[Engine, typer.Option(help="What computes; `real` is vLLM with SmolLM2.")] = Engine.simulated,
    load: Annotated[float, typer.Option(min=0.01, max=1.0, help="Share of what the server can carry.")] = 0.5,
    chaos: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of callers that cancel, time out, read slowly, send rubbish.")
    ] = 0.2,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 5.0,
    over: Annotated[
        str, typer.Option(help="Front ends with weights; `generate_stream` is one more.")
    ] = "grpc:4,generate:1",
    slope: Annotated[float, typer.Option(help="MiB per hour that memory may grow after the warm-up.")] = SLOPE,
    seed: Annotated[int, typer.Option(help="Of who comes when and asks what.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here too.", dir_okay=False)] = None,
) -> None:
    """Put a steady load of good and bad callers on a real server and see whether anything grows or fails.

    It needs no running server. Ctrl-C ends it in order, with a report of what was seen so far. Exit codes: 0 every
    bound is met, 1 one is missed or the run was too short to decide it, 2 wrong usage.
    """
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder {json_file.absolute().parent} does not exist", param_hint="--json")
    try:
        weights = front_ends(over)
    except ValueError:
        raise typer.BadParameter("front ends with weights, such as grpc:4,generate:1", param_hint="--over") from None
    warm = min(10.0, minutes / 5) if warm_up is None else warm_up
    if not 0 <= warm < minutes:
        raise typer.BadParameter(f"must be less than the {minutes:g} minutes of the run", param_hint="--warm-up")
    progress = Console(stderr=True, highlight=False, soft_wrap=True)
    setup = Setup(minutes, warm, engine.value, load, chaos, every, weights, seed)
    try:
        report = run(setup, lambda line: progress.print(f"{time.strftime('%H:%M:%S')} {line}", markup=False))
    except (BenchFailed, LauncherError) as error:
        progress.print(f"soak: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
    show(report, slope, Console(width=None if sys.stdout.isatty() else 200, highlight=False))
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    raise typer.Exit(0 if set(verdicts(report, slope).values()) == {"met"} else 1)


if __name__ == "__main__":
    typer.run(main)
