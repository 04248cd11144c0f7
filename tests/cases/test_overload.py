"""O1…O5: more than the server can do at once. And M1: the numbers add up."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time

import aiohttp

from tests.cases.conftest import LONG, body, prove_idle, resident, times
from tests.e2e.conftest import until_idle
from tests.e2e.test_generate import GENERATE_ERROR_STATUS as REFUSED
from tests.waiting import TRIES
from triton_lifecycle.errors import from_wire
from triton_lifecycle.launcher.server import TritonServer
from triton_lifecycle_client import AsyncClient

MODELS = ("simulated", "quick", "queue_of_4", "queue_of_2", "few_tokens", "few_live")


class Answer:
    """What came of one unary request."""

    def __init__(self, status: int, document: dict, seconds: float) -> None:
        self.status = status
        self.seconds = seconds
        self.error = from_wire(document["error"]) if "error" in document else None


async def _ask(web: aiohttp.ClientSession, server: TritonServer, model: str, **values) -> Answer:
    began = time.monotonic()
    async with web.post(f"http://{server.http_url}/v2/models/{model}/generate", json=body(**values)) as answer:
        return Answer(answer.status, json.loads(await answer.read()), time.monotonic() - began)


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(120))


def test_o1_a_hundred_at_once(server: TritonServer):
    """One slot and four places to wait: five are served, 95 refused within 200 ms, each with its own hint."""

    async def scenario() -> list[Answer]:
        async with _session() as web:
            # The connections are made first: what is measured is the refusal.
            await asyncio.gather(*[_ask(web, server, "quick", max_tokens=1) for _ in range(100)])
            return await asyncio.gather(*[_ask(web, server, "queue_of_4", **LONG) for _ in range(100)])

    answers = asyncio.run(scenario())
    served = [answer for answer in answers if answer.status == 200]
    refused = [answer for answer in answers if answer.status == REFUSED]
    assert (len(served), len(refused)) == (5, 95)
    assert all(answer.error.slug == "queue_full" for answer in refused)
    assert all("admission.max_waiting_requests is 4" in answer.error.message for answer in refused)
    assert all(answer.error.retry_after >= 0.1 for answer in refused)
    assert max(answer.seconds for answer in refused) < 0.2, sorted(answer.seconds for answer in refused)[-5:]
    prove_idle(server, "queue_of_4")


def test_o2_a_burst_is_counted_exactly(server: TritonServer):
    """One slot and two places: of five within 20 ms exactly three are accepted, every time."""

    async def scenario() -> None:
        async with (
            _session() as web,
            AsyncClient(server.grpc_url, model="queue_of_2") as client,
        ):
            for _ in range(20):
                answers = await asyncio.gather(
                    *[_ask(web, server, "queue_of_2", max_tokens=60, ignore_eos=True) for _ in range(5)]
                )
                assert sorted(answer.status for answer in answers) == [200, 200, 200, REFUSED, REFUSED]
                await until_idle(client)

    asyncio.run(scenario())


def test_o3_prompt_tokens_are_counted_and_n_with_them(server: TritonServer):
    """Of three prompts of 400 tokens the third passes the limit of 1000; a request for four answers counts as four."""
    prompt = "time " * 400

    async def scenario() -> None:
        async with _session() as web, AsyncClient(server.grpc_url, model="few_tokens") as client:
            # Now the server knows how many bytes a token has.
            await client.generate(prompt, max_tokens=1)
            long = {"text_input": prompt, **LONG}
            running = [asyncio.create_task(_ask(web, server, "few_tokens", **long)) for _ in range(2)]
            await asyncio.sleep(0.3)
            assert (await client.state()).live == 2
            third = await _ask(web, server, "few_tokens", **long)
            assert (third.status, third.error.slug) == (REFUSED, "token_budget")
            assert re.search(r"prompt has about \d+, and admission.max_prompt_tokens is 1000", third.error.message)
            assert third.error.retry_after > 0
            assert [answer.status for answer in await asyncio.gather(*running)] == [200, 200]
            four = await _ask(web, server, "few_tokens", **long | {"temperature": 1.0}, n=4)
            assert "n = 4 counts as 4" in four.error.message
            assert four.error.retry_after is None, "it would never fit"
            answers = await asyncio.gather(
                *[_ask(web, server, "few_live", max_tokens=100, ignore_eos=True, n=4) for _ in range(2)]
            )
            assert sorted(answer.status for answer in answers) == [200, REFUSED], "eight, where six may be live"

    asyncio.run(scenario())


def test_o4_twenty_thousand_small_requests(server: TritonServer):
    """Twenty at a time: none fails, and the last tenth takes no longer than the first."""
    number = times(3000, 20_000)

    async def scenario(number: int) -> list[float]:
        took: list[float] = []
        left = iter(range(number))
        async with _session() as web:

            async def caller() -> None:
                for _ in left:
                    answer = await _ask(web, server, "quick", max_tokens=1)
                    assert answer.status == 200
                    took.append(answer.seconds)

            await asyncio.gather(*[caller() for _ in range(20)])
        return took

    def p99(tenth: list[float]) -> float:
        return sorted(tenth)[int(0.99 * len(tenth))]

    took = asyncio.run(scenario(number))
    assert len(took) == number
    # Below 20 ms it is the machine's own scheduling that is measured.
    first, last = max(p99(took[: number // 10]), 0.02), p99(took[-number // 10 :])
    for _ in range(TRIES):  # what has grown stays so; a machine that faltered does not
        if last <= 1.5 * first:
            break
        last = p99(asyncio.run(scenario(number // 10)))
    assert last <= 1.5 * first


def test_o5_a_caller_that_reads_nothing(server: TritonServer):
    """Its stream stands; ten others take as long as without it, and the server's memory stays bounded."""

    async def others() -> float:
        async with AsyncClient(server.grpc_url, model="simulated") as client:
            began = time.monotonic()
            await asyncio.gather(*[client.generate("tell me", max_tokens=200, ignore_eos=True) for _ in range(10)])
            return time.monotonic() - began

    alone = max(asyncio.run(others()) for _ in range(2))
    memory = resident(server)
    host, port = server.http_url.split(":")
    text = json.dumps(body(max_tokens=3000, ignore_eos=True, n=8, stream=True)).encode()
    with socket.create_connection((host, int(port))) as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = f"POST /v2/models/simulated/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n"
        silent.sendall(head.encode() + text)
        time.sleep(0.5)
        beside = min(asyncio.run(others()) for _ in range(3))
        assert beside < 1.5 * alone
        assert resident(server) - memory < 64 * 2**20
    prove_idle(server, "simulated")


def test_m1_every_request_is_counted_once(server: TritonServer):
    """A hundred requests of mixed ends: received = completed + failed + cancelled + timed out + rejected."""

    async def scenario() -> dict[str, int]:
        async with _session() as web, AsyncClient(server.grpc_url, model="queue_of_4") as client:
            before = (await client.state()).counts

            async def cancelled(number: int) -> Answer:
                asked = asyncio.create_task(_ask(web, server, "queue_of_4", **LONG, id=f"m1-{number}"))
                await asyncio.sleep(0.1)
                assert await client.cancel(f"m1-{number}")
                return await asked

            answers = [
                *await asyncio.gather(*[_ask(web, server, "queue_of_4", max_tokens=4) for _ in range(30)]),
                *await asyncio.gather(*[_ask(web, server, "queue_of_4", max_tokens=-4) for _ in range(30)]),
                *[await _ask(web, server, "queue_of_4", **LONG, timeout_ms=100) for _ in range(10)],
                *[await _ask(web, server, "queue_of_4", max_tokens=4) for _ in range(20)],
                *[await cancelled(number) for number in range(10)],
            ]
            assert len(answers) == 100
            await until_idle(client)
            after = (await client.state()).counts
            return {name: after[name] - before[name] for name in after}

    gained = asyncio.run(scenario())
    assert gained["received"] == 100
    assert gained["completed"] + gained["rejected"] == 80
    assert (gained["timed_out"], gained["cancelled"], gained["failed"]) == (10, 10, 0)
