"""The server of a soak, and a whole run on it."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import uvloop

from load.benchmark.servers import copy_model, model_folder
from load.overhead.measure import BenchFailed
from load.soak.drive import Soak
from load.soak.report import MODELS, Engine, Report, Setup
from triton_lifecycle.launcher import LauncherError
from triton_lifecycle.launcher.server import TritonServer

READY_S: Final = 300.0
CLOSING_S: Final = 1.5
"""Triton 2.51 ends with an error while a connection that was closed a moment ago still counts as open."""
KEPT: Final = 500
"""Ended requests that the server remembers, so that this memory is full long before the warm-up ends."""
SIMULATED: Final[dict[str, Any]] = {"base_ms": 20.0, "per_sequence_us": 50.0, "max_num_seqs": 16}
"""Of the simulated engine: about 770 tokens/s, of which half cost a fifth of a core."""


@contextmanager
def served(setup: Setup, say: Callable[[str], None]) -> Iterator[TritonServer]:
    """Run the server for the length of the block; afterwards nothing of it is left."""
    source = model_folder(MODELS[Engine(setup.engine)])
    folder = Path(tempfile.mkdtemp(prefix="lifecycle-soak-"))
    try:
        document = {"context_management": {"max_finished": KEPT}}
        copy_model(source, folder / source.name, {"request_lifecycle": document}, say)
        if setup.engine == Engine.simulated.value:
            path = folder / source.name / "1" / "model.json"
            path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | SIMULATED), encoding="utf-8")
        say(f"starting tritonserver with {source.name}")
        with TritonServer(folder, models=[source.name]) as server:
            yield server.wait_ready(READY_S, say)
            time.sleep(CLOSING_S)
            say("stopping tritonserver")
        if server.exit_code or server.leftovers:
            raise BenchFailed(f"tritonserver ended with code {server.exit_code}; left over: {server.leftovers}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(setup: Setup, say: Callable[[str], None]) -> Report:
    """Start the server, put the load on, stop it, and return the report: what was found so far if something broke."""
    soak: Soak | None = None
    try:
        with served(setup, say) as server:
            soak = Soak(server, setup, say)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(soak.run())
    except (BenchFailed, LauncherError) as error:
        if soak is None:
            raise
        soak.report.problems.append(str(error))
    return soak.report
