"""L1…L8: loading, unloading, and living long."""

from __future__ import annotations

import asyncio
import json
import re
import time
from contextlib import aclosing
from pathlib import Path

import httpx
import psutil
import pytest

from tests.cases.conftest import LONG, body, prove_idle, resident, times
from tests.e2e.conftest import StartServer
from tests.waiting import TRIES, until
from triton_lifecycle import errors
from triton_lifecycle.launcher.server import TritonServer
from triton_lifecycle_client import NO_RETRY, AsyncClient
from triton_lifecycle_client.types import Protocol

MODELS = ("plain", "simulated")
SLOW_S = 3.0
"""What a busy machine may add."""


def repository_call(server: TritonServer, model: str, verb: str) -> None:
    """Have Triton load or unload a model."""
    answer = httpx.post(f"http://{server.http_url}/v2/repository/models/{model}/{verb}", json={}, timeout=120)
    assert answer.status_code == 200, answer.text


def stubs(server: TritonServer) -> list[psutil.Process]:
    """Return the processes that models run in."""
    children = psutil.Process(server.pid).children()
    return [child for child in children if "stub" in " ".join(child.cmdline())]


def test_l1_unload_after_streams_of_all_ends(server: TritonServer):
    """One stream finished, one was cancelled, one failed: unloaded within 30 s, and the stub is gone."""
    repository_call(server, "quick", "load")
    [before] = [stub for stub in stubs(server) if any("quick" in part for part in stub.cmdline())]

    async def scenario() -> None:
        async with AsyncClient(server.http_url, model="quick", protocol="http") as client:
            async for _ in client.stream("tell me", max_tokens=20):
                pass
            stream = client.stream("tell me", **LONG)
            async with aclosing(stream):
                await anext(stream)
            with pytest.raises(errors.TotalTimeout):
                async for _ in client.stream("tell me", timeout=0.1, **LONG):
                    pass

    asyncio.run(scenario())
    began = time.monotonic()
    repository_call(server, "quick", "unload")
    psutil.wait_procs([before], timeout=30 - (time.monotonic() - began))
    assert not before.is_running()


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_an_unload_by_order_ends_within_the_drain(server: TritonServer, protocol: Protocol):
    """A stream of twelve seconds ends with what it has and ``draining`` after the drain's one, and the stub is gone."""
    repository_call(server, "short_drain", "load")
    [stub] = [stub for stub in stubs(server) if any("short_drain" in part for part in stub.cmdline())]
    url = server.grpc_url if protocol == "grpc" else server.http_url

    async def scenario() -> float:
        async with AsyncClient(url, model="short_drain", protocol=protocol, retry=NO_RETRY) as client:
            stream = client.stream("tell me", **LONG)
            async with aclosing(stream):
                await anext(stream)
                order = asyncio.create_task(client.unload())
                with pytest.raises(errors.Draining, match="outlasted its limit of 1 s"):
                    async for _ in stream:
                        pass
            return await order

    assert 1.0 <= asyncio.run(scenario()) < 2.0 + SLOW_S
    psutil.wait_procs([stub], timeout=10)
    assert not stub.is_running()


def test_a_drain_by_order_is_taken_back(server: TritonServer):
    """While it drains a model refuses and is not ready, and its stream goes on; after ``resume`` it serves."""

    async def scenario() -> None:
        async with AsyncClient(server.grpc_url, model="simulated", retry=NO_RETRY) as client:
            stream = client.stream("tell me", **LONG)
            async with aclosing(stream):
                await anext(stream)
                assert (await client.drain()).live == 1
                for refused in (client.generate("tell me"), client.check_ready()):
                    with pytest.raises(errors.Draining):
                        await refused
                assert not (await client.resume()).draining
                await client.check_ready()
                assert (await client.generate("tell me", max_tokens=2, ignore_eos=True)).output_tokens == 2

    asyncio.run(scenario())
    prove_idle(server, "simulated")


def _value(server: TritonServer, name: str) -> float:
    page = httpx.get(server.metrics_url, timeout=10).text
    found = re.findall(rf'^{re.escape(name)}{{model="metered",version="1"}} ([0-9.e+]+)$', page, re.MULTILINE)
    assert len(found) == 1, page[-2000:]
    return float(found[0])


def test_l2_reload_under_metrics(server: TritonServer, repository: Path):
    """An answer, a reload, an answer and a look at the metrics in turn: no crash, and each answer is counted."""
    name = "vllm:generation_tokens_total"
    repository_call(server, "metered", "load")
    url = f"http://{server.http_url}/v2/models/metered/generate"
    for number in range(1, times(10, 20) + 1):
        assert httpx.post(url, json=body(max_tokens=4, ignore_eos=True), timeout=10).status_code == 200
        # Triton loads a model again only when its files have changed.
        with (repository / "metered" / "1" / "model.json").open("a") as settings:
            settings.write("\n")
        repository_call(server, "metered", "load")
        assert httpx.post(url, json=body(max_tokens=4, ignore_eos=True), timeout=10).status_code == 200
        # The page is written once a second, and by an instance that is replaced when it ends.
        until(lambda number=number: _value(server, name) == 8 * number)
    repository_call(server, "metered", "unload")


def test_l6_memory_is_flat_over_streams(server: TritonServer):
    """Ten rounds of two thousand streamed tokens: nothing grows."""

    async def streams() -> None:
        async with AsyncClient(server.http_url, model="simulated", protocol="http") as client:

            async def one() -> None:
                async for _ in client.stream("tell me", max_tokens=200, ignore_eos=True):
                    pass

            await asyncio.gather(*[one() for _ in range(10)])

    sizes = []
    for _ in range(times(10, 100)):
        asyncio.run(streams())
        sizes.append(resident(server))
    assert sizes[-1] - sizes[2] < 32 * 2**20


def test_l7_readiness_under_load(server: TritonServer):
    """With 64 streams and ten long prompts on the real engine, p99 of asking for readiness is below a second."""

    async def scenario(turn: int) -> list[float]:
        took = []
        async with (
            AsyncClient(server.grpc_url, model="plain", timeout=120) as client,
            httpx.AsyncClient(base_url=f"http://{server.http_url}") as web,
        ):
            asked = [client.generate("tell me", max_tokens=60, ignore_eos=True) for _ in range(64)]
            asked += [client.generate(f"{turn} {number} " + "word " * 300, max_tokens=4) for number in range(10)]
            work = asyncio.gather(*asked)
            while not work.done():
                began = time.monotonic()
                answer = await web.get("/v2/models/plain/ready", timeout=10)
                assert answer.status_code == 200
                took.append(time.monotonic() - began)
                await asyncio.sleep(0.1)
            await work
        return took

    for turn in range(TRIES):  # again, should the machine falter just then
        took = sorted(asyncio.run(scenario(turn)))
        assert len(took) > 10
        if took[int(0.99 * len(took))] < 1.0:
            break
    assert took[int(0.99 * len(took))] < 1.0
    prove_idle(server, "plain")


def test_l8_a_model_that_is_nowhere(start_server: StartServer, server: TritonServer):
    """The load fails within 60 s with an error that names the path; no process of it is left."""
    before = {process.pid for process in server.processes()}
    began = time.monotonic()
    answer = httpx.post(f"http://{server.http_url}/v2/repository/models/nowhere/load", json={}, timeout=120)
    assert time.monotonic() - began < 60
    assert answer.status_code == 400
    assert "/no/such/model" in json.loads(answer.text)["error"]
    until(lambda: {process.pid for process in server.processes()} <= before)
