"""The real engine dies under streams, and its callers see a pause."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time

import psutil
import pytest
from load import recovery

from tests.e2e.conftest import REPOSITORY, StartServer, left_over
from tests.waiting import eventually, until
from triton_lifecycle.launcher.ports import Ports
from triton_lifecycle.launcher.server import TritonServer
from triton_lifecycle_client import AsyncClient, Client, LifecycleError, RetryPolicy


@pytest.fixture(scope="module")
def server(start_server: StartServer):
    """A server of its own, since its engine is killed."""
    running = start_server("smollm2")
    yield running
    assert running.stop() == 0, running.log()[-4000:]
    assert running.leftovers == []


def test_kill_9_of_the_engine_under_32_streams(server: TritonServer):
    """No stream fails, each answer is the undisturbed one token for token, and nothing of the dead engine is left."""
    memory = set(os.listdir("/dev/shm"))
    dead = recovery.engine_processes(server)
    prompts = asyncio.run(recovery.clear_prompts(server, 32))
    outcome = asyncio.run(recovery.run(server, prompts, 1, print))
    assert outcome.problems == []
    assert (outcome.kills, outcome.failed, outcome.different) == (1, 0, 0)
    assert outcome.answers >= 32
    assert outcome.paused >= 32, "the death met every stream"
    assert [process for process in dead if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []
    assert len(os.listdir("/dev/shm")) <= len(memory)


def test_an_idle_engines_death_is_known_within_a_second(server: TritonServer):
    """The state says so at once, the engine comes back by itself, and a request sent meanwhile is answered then."""

    async def scenario():
        async with AsyncClient(server.grpc_url, model="smollm2", timeout=120) as client:

            async def gone():
                return (await client.state()).engine["status"] != "ready"

            async def death_and_return():
                recovery.engine(server).kill()
                killed = time.monotonic()
                await eventually(gone)
                took = time.monotonic() - killed
                answer = await client.generate("The capital of France is", max_tokens=4, temperature=0.0)
                assert "Paris" in answer.text
                assert (await client.state()).engine["status"] == "ready"
                return took

            took = [await death_and_return()]
            if took[0] >= 1.0:  # once more, should the machine have faltered just then
                took.append(await death_and_return())
            assert min(took) < 1.0, took

    asyncio.run(scenario())


def test_kill_9_of_the_stub_under_serve(tmp_path):
    """Callers over gRPC and HTTP have an error within 5 s, the model is served again, and nothing is left."""
    before = set(os.listdir("/dev/shm"))
    command = [sys.executable, "-m", "triton_lifecycle_client", "serve", "--model", "simulated"]
    ports = Ports.free()
    # So slow that the answers go on until the stub is killed, however long it takes to ask for them.
    shutil.copytree(REPOSITORY / "simulated", tmp_path / "repository" / "simulated")
    engine = tmp_path / "repository" / "simulated" / "1" / "model.json"
    engine.write_text(json.dumps(json.loads(engine.read_text()) | {"base_ms": 50.0}))
    command += ["--model-repository", str(tmp_path / "repository"), "--metrics-port", str(ports.metrics)]
    command += ["--http-port", str(ports.http), "--grpc-port", str(ports.grpc)]
    with (tmp_path / "serve.log").open("w") as log:
        serve = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        urls = {"grpc": f"127.0.0.1:{ports.grpc}", "http": f"127.0.0.1:{ports.http}"}
        last = []
        for _ in range(3):  # more than once only where the machine faltered just then
            _await_answers(urls)
            below = psutil.Process(serve.pid).children(recursive=True)
            [stub] = [process for process in below if "stub" in " ".join(process.cmdline()) and _is_model(process)]
            took = asyncio.run(_kill_under_streams(urls, stub))
            assert len(took) == 12
            last.append(max(took))
            _await_answers(urls)
            assert _gone(below) == []
            if last[-1] < 5.0:
                break
        assert min(last) < 5.0, last
    finally:
        serve.terminate()
        assert serve.wait(60) == 0, (tmp_path / "serve.log").read_text()
    until(lambda: not left_over(before))


def _is_model(process: psutil.Process) -> bool:
    return "triton_python_backend_stub" in process.name() or process.name().startswith("triton_python")


def _gone(processes: list[psutil.Process]) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(processes, timeout=60)
    return [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def _await_answers(urls: dict[str, str]) -> None:
    """Wait until the model answers over both protocols; Triton opens one after the other."""
    deadline = time.monotonic() + 120
    for protocol, url in urls.items():
        answered = 0
        while answered != 2:
            try:
                with Client(url, model="simulated", protocol=protocol, timeout=10) as client:
                    answered = client.generate("hello", max_tokens=2).output_tokens
            except LifecycleError:
                assert time.monotonic() < deadline
                time.sleep(0.2)


async def _read(client: AsyncClient) -> None:
    async for _ in client.stream("tell me", max_tokens=2000, ignore_eos=True):
        pass


async def _kill_under_streams(urls: dict[str, str], stub: psutil.Process) -> list[float]:
    """Return for each of twelve callers the seconds from the kill to its error."""
    killed = 0.0
    retry = RetryPolicy(attempts=1)

    async def caller(protocol: str, *, stream: bool) -> float:
        async with AsyncClient(urls[protocol], model="simulated", protocol=protocol, timeout=60, retry=retry) as client:
            with pytest.raises(LifecycleError) as caught:
                await (_read(client) if stream else client.generate("tell me", max_tokens=2000, ignore_eos=True))
            assert killed, f"an error before the kill: {caught.value}"
            return time.monotonic() - killed

    kinds = [(protocol, stream) for protocol in urls for stream in (True, False)] * 3
    callers = [asyncio.create_task(caller(protocol, stream=stream)) for protocol, stream in kinds]
    async with AsyncClient(urls["grpc"], model="simulated", protocol="grpc") as client:

        async def all_run() -> bool:
            state = await client.state()
            return state.live == state.engine["running"] == len(callers)

        await eventually(all_run)
    killed = time.monotonic()
    stub.kill()
    return await asyncio.gather(*callers)
