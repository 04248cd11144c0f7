"""One real tritonserver with the real vLLM serves most tests; tests that end a server start their own.

Only one real engine lives at a time: vLLM binds its worker to the same core in each, and two would crawl.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from triton_lifecycle.launcher.server import TritonServer
from triton_lifecycle.launcher.weights import prepare_weights
from triton_lifecycle_client import AsyncClient, Client

ROOT = Path(__file__).parents[2]
REPOSITORY = ROOT / "model_repository"
START_LIMIT_S = 300.0

StartServer = Callable[..., TritonServer]


@pytest.fixture(scope="session")
def weights() -> Path:
    """Return the folder of the real model, converted if it was not yet."""
    return prepare_weights(REPOSITORY / "smollm2" / "1" / "weights")


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Path:
    """Return a model repository with the shipped models and the variants that the tests need.

    ``smollm2`` and ``simulated`` are the shipped folders themselves. ``one_slot`` is the real model with room for one
    running sequence and a large prompt budget, so that queueing and prefilling can be met at will. ``drop_in`` is what
    a user of the official backend has: ``backend: "vllm"`` and a ``model.json``, nothing of ours.
    """
    folder = tmp_path_factory.mktemp("repository")
    for name in ("smollm2", "simulated"):
        (folder / name).symlink_to(REPOSITORY / name)
    engine = json.loads((REPOSITORY / "smollm2" / "1" / "model.json").read_text())
    model = folder / "one_slot" / "1"
    shutil.copytree(REPOSITORY / "smollm2" / "1", model, ignore=shutil.ignore_patterns("weights", "__pycache__"))
    shutil.copy(REPOSITORY / "smollm2" / "config.pbtxt", model.parent)
    (model / "model.json").write_text(json.dumps(engine | {"model": str(weights), "max_num_seqs": 1}))
    model = folder / "drop_in" / "1"
    model.mkdir(parents=True)
    (model.parent / "config.pbtxt").write_text('backend: "vllm"\ninstance_group [{ count: 1 kind: KIND_MODEL }]\n')
    (model / "model.json").write_text(
        json.dumps({"model": str(weights), "dtype": "bfloat16", "max_model_len": 512, "enforce_eager": True})
    )
    return folder


@pytest.fixture(scope="session")
def start_server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Return a function that starts a server and waits until it is ready; what still runs at the end is ended."""
    started: list[TritonServer] = []

    def start(*models: str, **options: object) -> TritonServer:
        log = tmp_path_factory.mktemp("server") / "triton.log"
        server = TritonServer(repository, models=models, log_path=log, **options)
        started.append(server)
        server.start()
        return server.wait_ready(START_LIMIT_S)

    yield start
    for server in started:
        server.kill()


@pytest.fixture(scope="module")
def server_environment() -> dict[str, str]:
    """Return further variables of the environment of a module's shared server; a module may say others."""
    return {}


@pytest.fixture(scope="module")
def server(start_server: StartServer, server_environment: dict[str, str]) -> Iterator[TritonServer]:
    """Return a module's shared server with the real model; it must end in order and leave nothing."""
    running = start_server("smollm2", "simulated", env=server_environment)
    yield running
    # SIGTERM within a second of a closed HTTP stream finds Triton 2.51 still holding the request; see compatibility.md.
    time.sleep(1.5)
    assert running.stop() == 0, running.log()[-4000:]
    assert running.leftovers == []
    assert [name for name in os.listdir("/dev/shm") if name.startswith(running.shm_prefix)] == []


@pytest.fixture(params=["grpc", "http"])
def client(request: pytest.FixtureRequest, server: TritonServer) -> Iterator[Client]:
    """Return a client of the real model, once over gRPC and once over HTTP."""
    url = server.grpc_url if request.param == "grpc" else server.http_url
    with Client(url, model="smollm2", protocol=request.param) as made:
        yield made


def left_over(before: set[str]) -> set[str]:
    """Return what is in /dev/shm since, and no living process has mapped: others may run servers beside this one."""
    found = set(os.listdir("/dev/shm")) - before
    if found:
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with suppress(OSError):
                text = maps.read_text(errors="replace")
                found = {name for name in found if f"/dev/shm/{name}" not in text}
    return found


async def until_idle(client: AsyncClient) -> None:
    """Wait for the server to hold nothing, and prove that it does."""
    deadline = time.monotonic() + 60
    while True:
        state = await client.state()
        held = (state.live, state.engine["requests"], state.engine["running"], state.engine["waiting"])
        if not any(held) or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.05)
    assert held == (0, 0, 0, 0), state
    assert state.counts["received"] == sum(count for name, count in state.counts.items() if name != "received")
