"""One server per file, with the models that its cases need: the real one where the engine matters, else simulated.

Where a case says minutes or thousands, a shorter form runs unless ``LIFECYCLE_FULL=1`` is set.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.e2e.conftest import REPOSITORY, StartServer, start_server, until_idle, weights
from triton_lifecycle.launcher.server import TritonServer
from triton_lifecycle_client import AsyncClient

FULL = os.environ.get("LIFECYCLE_FULL") == "1"
LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.0}

__all__ = ["repository", "server", "start_server", "weights"]  # the fixtures

_OFFICIAL = {"timeout_handling": {"enabled": False}}
_SLOW = {"base_ms": 30.0, "per_sequence_us": 0.0}
_ONE = {"max_num_seqs": 1, "base_ms": 5.0, "per_sequence_us": 0.0}
_SIMULATED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "simulated": ({}, _OFFICIAL),
    "quick": ({"base_ms": 0.5, "per_sequence_us": 10.0}, _OFFICIAL),
    "queue_of_4": (_ONE, _OFFICIAL | {"admission": {"max_waiting_requests": 4}}),
    "queue_of_2": (_ONE, _OFFICIAL | {"admission": {"max_waiting_requests": 2}}),
    "few_tokens": (_ONE, _OFFICIAL | {"admission": {"max_prompt_tokens": 1000}}),
    "few_live": (_ONE, _OFFICIAL | {"admission": {"max_live_requests": 6}}),
    "one_second": (_ONE | _SLOW, {"timeout_handling": {"first_token_timeout": 1.0}}),
    "metered": ({}, _OFFICIAL),
    "short_drain": (_SLOW, _OFFICIAL | {"shutdown": {"drain_timeout": 1.0}}),
}
"""Name → settings of the engine, and of the backend."""
_REAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "real": ({}, {"timeout_handling": {"stall_timeout": 2.0, "default_timeout": 120.0}}),
    "plain": ({}, _OFFICIAL),
    "real_one": ({"max_num_seqs": 1}, _OFFICIAL),
    "nowhere": ({"model": "/no/such/model"}, _OFFICIAL),
}


def times(short: int, full: int) -> int:
    """Return how often to do what a case repeats."""
    return full if FULL else short


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Path:
    """Return a model repository with every model that the cases name."""
    folder = tmp_path_factory.mktemp("cases")
    for base, models in (("simulated", _SIMULATED), ("smollm2", _REAL)):
        source = REPOSITORY / base
        engine = json.loads((source / "1" / "model.json").read_text())
        if base == "smollm2":
            engine["model"] = str(weights)
        for name, (changes, settings) in models.items():
            version = folder / name / "1"
            version.mkdir(parents=True)
            text = (source / "config.pbtxt").read_text()
            if name == "metered":
                text += 'parameters { key: "REPORT_CUSTOM_METRICS" value { string_value: "true" } }\n'
            (version.parent / "config.pbtxt").write_text(text)
            (version / "model.py").write_text((source / "1" / "model.py").read_text())
            (version / "model.json").write_text(json.dumps(engine | changes))
            (version.parent / "request_lifecycle.yaml").write_text(yaml.safe_dump({"request_lifecycle": settings}))
    return folder


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, start_server: StartServer) -> Iterator[TritonServer]:
    """Return the file's server with its ``MODELS``; no process may be lost, and it must end in order."""
    running = start_server(*request.module.MODELS)
    before = {process.pid for process in psutil.Process(running.pid).children(recursive=True)}
    yield running
    after = {process.pid for process in psutil.Process(running.pid).children(recursive=True)}
    # SIGTERM within a second of a closed HTTP stream finds Triton 2.51 still holding the request; see compatibility.md.
    time.sleep(1.5)
    assert running.stop() == 0, running.log()[-4000:]
    assert running.leftovers == []
    assert before <= after, "no process was lost"


def body(**changes: Any) -> dict[str, Any]:
    """Return the JSON of a generate request; unknown keys travel as parameters."""
    sampling = {name: changes.pop(name) for name in ("max_tokens", "ignore_eos", "temperature", "n") if name in changes}
    return {"text_input": "tell me", "sampling_parameters": json.dumps(sampling), **changes}


def resident(server: TritonServer) -> int:
    """Return the bytes of memory of the server and its stubs, without vLLM's processes."""
    family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    return sum(process.memory_info().rss for process in family if not process.name().startswith("VLLM"))


def crashed_by_itself(server: TritonServer) -> bool:
    """Return whether tritonserver crashed in its gRPC front end: 2.51 does so now and then, see compatibility.md."""
    log = server.log()
    return (
        server.wait(60) is not None
        and "Signal (11) received" in log
        and "libtriton_python" not in log.split("Signal")[1]
    )


def prove_idle(server: TritonServer, model: str) -> None:
    """Nothing is running, waiting or live, the numbers add up, and a short request is answered."""

    async def scenario() -> None:
        async with AsyncClient(server.grpc_url, model=model) as client:
            await until_idle(client)
            assert (await client.generate("hello", max_tokens=4, ignore_eos=True)).output_tokens == 4

    asyncio.run(scenario())
