"""C1…C8: callers that leave."""

from __future__ import annotations

import asyncio
import itertools
import queue
import random
import time
from contextlib import aclosing, suppress

import grpc
import httpx
import pytest
import tritonclient.grpc as sync_grpc
import tritonclient.grpc.aio as aio_grpc
from tritonclient.utils import InferenceServerException

from tests.cases.conftest import LONG, body, crashed_by_itself, prove_idle, resident, times
from tests.e2e.conftest import StartServer, until_idle
from tests.e2e.test_text import tensors
from tests.waiting import TRIES, until
from triton_lifecycle.errors import Cancelled, UnknownRequest
from triton_lifecycle.launcher.server import TritonServer
from triton_lifecycle_client import AsyncClient, Client
from triton_lifecycle_client.errors import ServerUnreachable

MODELS = ("real_one", "simulated", "quick")


def leave(url: str, model: str, seconds: float, **values) -> None:
    """Send a unary request and close the connection after so many seconds."""
    with suppress(httpx.TimeoutException):
        httpx.post(f"http://{url}/v2/models/{model}/generate", json=body(**values), timeout=seconds)


def test_c1_a_unary_caller_that_is_gone(server: TritonServer):
    """Triton reports nothing: the deadline on the server ends it, or a control request at once; then others run."""
    leave(server.http_url, "real_one", 0.5, **LONG, timeout_ms=3000, id="gone")
    with Client(server.http_url, model="real_one", protocol="http") as client:
        # It gets the one slot when the limit has ended what nobody waits for, not when that is whole.
        assert client.generate("hello", max_tokens=4, ignore_eos=True).output_tokens == 4
        assert client.status("gone").status == "timed_out"
        assert client.status("gone").output_tokens < 400
        leave(server.http_url, "real_one", 0.5, **LONG, timeout_ms=60_000, id="told")
        until(lambda: client.cancel("told"), despite=(UnknownRequest,))
        assert client.generate("hello", max_tokens=4, ignore_eos=True).output_tokens == 4
        assert client.status("told").status == "cancelled"
        assert client.status("told").output_tokens < 400
    prove_idle(server, "real_one")


def test_c2_a_hundred_unary_callers_give_up(server: TritonServer):
    """With limits of 10 to 300 ms: server and stub survive, and all that they asked for comes to its end."""

    async def scenario() -> None:
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=100)) as web:

            async def one(number: int) -> None:
                with suppress(httpx.TimeoutException):
                    await web.post(
                        f"http://{server.http_url}/v2/models/simulated/generate",
                        json=body(max_tokens=40, ignore_eos=True),
                        timeout=0.01 + 0.29 * number / 99,
                    )

            await asyncio.gather(*map(one, range(100)))

    asyncio.run(scenario())
    prove_idle(server, "simulated")


def test_c3_late_and_double_cancels(start_server: StartServer):
    """Streams of four tokens whose callers allow 1 to 50 ms: each request that arrived has one ordinary end."""
    seconds = times(6, 180)

    async def scenario(server: TritonServer) -> tuple[dict[str, int], dict[str, int]]:
        async with (
            AsyncClient(server.grpc_url, model="quick") as client,
            aio_grpc.InferenceServerClient(server.grpc_url) as triton,
        ):
            before = (await client.state()).counts
            until = time.monotonic() + seconds

            async def caller(chance: random.Random) -> None:
                async def ask():
                    yield {"model_name": "quick", "inputs": tensors(aio_grpc.InferInput, "tell me")}

                while time.monotonic() < until:
                    next(sent)
                    with suppress(InferenceServerException, grpc.RpcError, asyncio.CancelledError):
                        answers = triton.stream_infer(ask(), stream_timeout=chance.uniform(0.001, 0.05))
                        async for _ in answers:
                            pass

            await asyncio.gather(*[caller(random.Random(number)) for number in range(8)])
            await until_idle(client)
            return before, (await client.state()).counts

    for left in reversed(range(TRIES)):
        # A server of its own, which is killed: Triton 2.51 may lose track of such a request, or crash; see
        # compatibility.md. What it crashed on says nothing of ours.
        server, sent = start_server("quick"), itertools.count()
        try:
            before, after = asyncio.run(scenario(server))
        except ServerUnreachable:
            if not (left and crashed_by_itself(server)):
                raise
        else:
            break
        finally:
            server.kill()
    gained = {name: after[name] - before[name] for name in after}
    assert 100 < gained["received"] <= next(sent)
    assert gained["received"] == gained["completed"] + gained["cancelled"] + gained["timed_out"]
    assert gained["completed"] > 0
    assert gained["cancelled"] > 0


def test_c5_the_same_id_again(server: TritonServer):
    """Start, cancel by id, and send again at once: each answer belongs to its own request, none is lost."""

    async def scenario() -> None:
        async with AsyncClient(server.grpc_url, model="quick") as client:
            for _ in range(times(50, 200)):
                stream = client.stream("tell me", request_id="same", **LONG)
                async with aclosing(stream):
                    await anext(stream)
                    assert await client.cancel("same")
                    again = asyncio.create_task(client.generate("tell me", request_id="same", max_tokens=4))
                    with pytest.raises(Cancelled):
                        async for _ in stream:
                            pass
                assert (await again).output_tokens <= 4
                assert (await client.status("same")).status == "finished"
            await until_idle(client)

    asyncio.run(scenario())


async def _rate(client: AsyncClient) -> float:
    """Return tokens a second of 32 answers at once."""
    began = time.monotonic()
    answers = await asyncio.gather(*[client.generate("tell me", max_tokens=200, ignore_eos=True) for _ in range(32)])
    return sum(answer.output_tokens for answer in answers) / (time.monotonic() - began)


def test_c6_a_thousand_leave_at_the_first_token(server: TritonServer):
    """Afterwards the server makes at least 90 % of the tokens a second that it made before."""

    async def one(client: AsyncClient) -> None:
        stream = client.stream("tell me", **LONG)
        async with aclosing(stream):
            await anext(stream)

    async def scenario() -> None:
        async with AsyncClient(server.http_url, model="simulated", protocol="http") as client:
            before = max([await _rate(client) for _ in range(2)])
            for _ in range(times(10, 50)):
                await asyncio.gather(*[one(client) for _ in range(20)])
            await until_idle(client)
            after = max([await _rate(client) for _ in range(3)])
            assert after >= 0.9 * before

    asyncio.run(scenario())


def test_c7_three_sequences_end_with_their_caller(server: TritonServer):
    """n = 3, and the caller leaves: all three end at once, and the memory stays flat."""

    async def one(client: AsyncClient) -> None:
        stream = client.stream("tell me", sampling={"n": 3}, max_tokens=400, ignore_eos=True)
        async with aclosing(stream):
            await anext(stream)

    async def scenario(rounds: int) -> None:
        async with AsyncClient(server.grpc_url, model="simulated") as client:
            for _ in range(rounds):
                await asyncio.gather(*[one(client) for _ in range(10)])
            await until_idle(client)

    asyncio.run(scenario(5))
    memory = resident(server)
    asyncio.run(scenario(times(15, 20)))
    assert resident(server) - memory < 32 * 2**20


def test_c8_stop_stream_with_cancel(server: TritonServer):
    """tritonclient's ``stop_stream(cancel_requests=True)`` returns within a second, and the work has ended."""
    answers: queue.Queue = queue.Queue()
    took: list[float] = []
    while not took or (took[-1] >= 1 and len(took) < TRIES):  # again, should the machine have faltered just then
        with sync_grpc.InferenceServerClient(server.grpc_url) as triton:
            triton.start_stream(callback=lambda result, error: answers.put((result, error)))
            triton.async_stream_infer("simulated", tensors(sync_grpc.InferInput, "tell me", **LONG))
            assert answers.get(timeout=60)[1] is None
            began = time.monotonic()
            triton.stop_stream(cancel_requests=True)
            took.append(time.monotonic() - began)
    assert took[-1] < 1, took
    prove_idle(server, "simulated")
