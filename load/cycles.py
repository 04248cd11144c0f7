"""Load and unload a model under load, again and again: does any caller lose an answer, is anything left behind?

``python -m load.cycles --cycles 200`` on the simulated engine, ``--real --cycles 10`` on vLLM. In turn the model is
reloaded (its file has changed: Triton puts a new instance in the place of the old one) and unloaded (as ``lifecycle
unload`` does it: drained first) and loaded again, while callers ask without a pause. Each answer must be whole, or end
with an error that says why. The old stub's end is timed from the order to unload on and held against the drain's
limit, which the longest answers outlast. A reload has no such limit: the new instance serves, and the old one's end
(timed from then on) is that of its longest answer.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import httpx
import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from load.benchmark.servers import copy_model, model_folder
from load.overhead.processes import ServingProcesses
from load.rounds import spread
from triton_lifecycle.errors import Draining
from triton_lifecycle.launcher import silent
from triton_lifecycle.launcher.server import TritonServer
from triton_lifecycle_client import AsyncClient, LifecycleError, RetryPolicy
from triton_lifecycle_client.errors import ModelNotFound, ServerUnreachable

CALLERS: Final = 8
DRAIN_S: Final = 2.0
BOUND_S: Final = 1.0
"""Seconds beyond the drain's limit within which a stub must be gone."""
LENGTHS: Final = (1, 8, 40, 150, 600)
EXPLAINED: Final = (Draining, ModelNotFound)
"""What a caller may be told while the model goes: come back, or it is not there."""
LOAD_LIMIT_S: Final = 120.0
READY_S: Final = 300.0


class Outcome(msgspec.Struct):
    """What became of one run."""

    cycles: int = 0
    answers: int = 0
    refused: Counter[str] = msgspec.field(default_factory=Counter)
    lost: int = 0
    late: int = 0
    """Stubs that outlived the drain's limit by more than :data:`BOUND_S`."""
    unload_s: list[float] = []
    """Seconds from the order to unload to the stub's end."""
    reload_s: list[float] = []
    """Seconds from the new instance's being there to the old stub's end."""
    orphans: list[str] = []
    problems: list[str] = []

    @property
    def good(self) -> bool:
        """Whether no answer was lost, nothing outlived its time, and nothing is left."""
        return self.answers > 0 and not (self.lost or self.late or self.orphans)


def prepare(repository: Path, *, real: bool) -> str:
    """Put the model into an empty repository; return its name."""
    name = "smollm2" if real else "simulated"
    lifecycle = {"request_lifecycle": {"shutdown": {"drain_timeout": DRAIN_S}}}
    copy_model(model_folder(name), repository / name, lifecycle, silent)
    return name


async def run(server: TritonServer, repository: Path, model: str, cycles: int, tell: Callable[[str], None]) -> Outcome:
    """Cycle the model under :data:`CALLERS` callers."""
    outcome, over = Outcome(), asyncio.Event()
    # Without retries: each refusal is seen and counted.
    async with AsyncClient(server.grpc_url, model=model, timeout=60, retry=RetryPolicy(attempts=1)) as client:
        callers = [asyncio.create_task(_call(client, number, outcome, over)) for number in range(CALLERS)]
        try:
            for number in range(1, cycles + 1):
                before = outcome.answers
                async with asyncio.timeout(LOAD_LIMIT_S):
                    while outcome.answers < before + CALLERS:  # noqa: ASYNC110 - a load tool's poll
                        await asyncio.sleep(0.02)
                await _cycle(server, client, repository, number, outcome)
                outcome.cycles = number
                what, gone = ("reload", outcome.reload_s) if number % 2 else ("unload", outcome.unload_s)
                tell(
                    f"cycle {number}/{cycles}, {what}: old stub gone after {gone[-1]:.1f} s; {outcome.answers} answers"
                )
        finally:
            over.set()
            await asyncio.wait(callers, timeout=90)
            for task in callers:
                task.cancel()
    return outcome


async def _call(client: AsyncClient, number: int, outcome: Outcome, over: asyncio.Event) -> None:
    chance = random.Random(number)  # noqa: S311 - lengths of a load
    while not over.is_set():
        wanted, got = chance.choice(LENGTHS), 0
        try:
            async with client.stream("river " * 4, max_tokens=wanted, ignore_eos=True, temperature=0.0) as stream:
                async for chunk in stream:
                    got += sum(chunk.token_counts)
        except EXPLAINED as error:
            outcome.refused[error.slug] += 1
            await asyncio.sleep(0.05)
        except LifecycleError as error:
            if isinstance(error, ServerUnreachable) or not _says_unavailable(error):
                outcome.lost += 1
                outcome.problems.append(f"after {got} of {wanted} tokens: {error.wire()}")
            outcome.refused[error.slug] += 1
            await asyncio.sleep(0.05)
        else:
            outcome.answers += 1
            if got != wanted:
                outcome.lost += 1
                outcome.problems.append(f"an answer of {wanted} tokens ended after {got} as if it were whole")


def _says_unavailable(error: LifecycleError) -> bool:
    """Whether this is Triton's own word for a model that is being loaded or unloaded."""
    return any(
        words in error.message for words in ("is not ready", "unknown model", "not found", "no available versions")
    )


async def _cycle(server: TritonServer, client: AsyncClient, repository: Path, number: int, outcome: Outcome) -> None:
    old, model = stubs(server), client.model
    async with httpx.AsyncClient(base_url=f"http://{server.http_url}", timeout=LOAD_LIMIT_S) as http:
        began = time.monotonic()
        if number % 2:
            # Triton takes a change of config.pbtxt over in place; one of the version's files makes a new instance.
            with (repository / model / "1" / "model.json").open("a", encoding="utf-8") as file:
                file.write("\n")
            (await http.post(f"/v2/repository/models/{model}/load", json={})).raise_for_status()
            # The old instance goes once the new one is there: its drain begins by then.
            began = time.monotonic()
        else:
            await client.unload()
        while any(map(_lives, old)) and time.monotonic() - began < LOAD_LIMIT_S:  # noqa: ASYNC110 - a load tool's poll
            await asyncio.sleep(0.02)
        took = time.monotonic() - began
        if number % 2:
            outcome.reload_s.append(took)
        else:
            outcome.unload_s.append(took)
            outcome.late += took > DRAIN_S + BOUND_S
        outcome.orphans += [
            f"cycle {number}: {' '.join(process.cmdline())[:120]}" for process in old if _lives(process)
        ]
        if not number % 2:
            (await http.post(f"/v2/repository/models/{model}/load", json={})).raise_for_status()


def stubs(server: TritonServer) -> list[psutil.Process]:
    """Return the processes that models run in, and all below them."""
    return [each for stub in ServingProcesses(server.pid).stubs for each in (stub, *stub.children(recursive=True))]


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--real", action="store_true", help="vLLM in the place of the simulated engine")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="lifecycle-cycles-") as folder:
        model = prepare(Path(folder), real=options.real)
        with TritonServer(Path(folder), models=(model,)) as server:
            server.wait_ready(READY_S)
            tell = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
            outcome = asyncio.run(run(server, Path(folder), model, options.cycles, tell))
    if options.json:
        print(msgspec.json.encode(outcome).decode())
    else:
        _print(outcome)
    return 0 if outcome.good else 1


def _print(outcome: Outcome) -> None:
    table = Table("what", "found")
    for name, value in (
        ("cycles", outcome.cycles),
        ("whole answers", outcome.answers),
        ("refused, or outlasted the drain", dict(outcome.refused)),
        ("lost answers", outcome.lost),
        (
            f"unloaded after, s (drain {DRAIN_S:g} s): median (least…longest)",
            spread(outcome.unload_s, 1) if outcome.unload_s else "-",
        ),
        (
            "old stub's end behind a reload, s: median (least…longest)",
            spread(outcome.reload_s, 1) if outcome.reload_s else "-",
        ),
        (f"later than the drain by over {BOUND_S:g} s", outcome.late),
        ("orphans", len(outcome.orphans)),
    ):
        table.add_row(name, str(value))
    console = Console()
    console.print(table)
    for problem in (outcome.problems + outcome.orphans)[:10]:
        console.print(f"  {problem}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
