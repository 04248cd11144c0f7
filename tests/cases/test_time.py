"""T1…T4: limits of time."""

from __future__ import annotations

import asyncio
import json
import queue
import signal
import time

import grpc
import httpx
import pytest
import tritonclient.grpc as sync_grpc
from load.recovery import engine
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.cases.conftest import LONG, body, prove_idle
from tests.e2e.test_text import tensors
from tests.waiting import TRIES, eventually, in_time, soon
from triton_lifecycle import errors
from triton_lifecycle.launcher.server import TritonServer
from triton_lifecycle_client import AsyncClient

MODELS = ("real", "one_second", "simulated")


def test_t1_a_waiting_request_ends_by_its_own_timer(server: TritonServer):
    """R1 runs for ten seconds; R2 waits behind it, and ends at its first-token limit of one second; R1 is unharmed."""

    async def scenario() -> None:
        async with AsyncClient(server.grpc_url, model="one_second") as client:
            first = asyncio.create_task(client.generate("tell me", **LONG))

            async def runs() -> bool:
                return (await client.state()).engine["running"] == 1

            async def refused() -> None:
                began = time.monotonic()
                with pytest.raises(errors.FirstTokenTimeout, match=r"first-token limit of 1 s"):
                    await client.generate("tell me", max_tokens=4)
                assert time.monotonic() - began >= 1.0

            await eventually(runs)
            await soon(refused, 1.5)
            assert (await first).output_tokens == 400

    asyncio.run(scenario())


def test_t2_the_timeout_parameter_in_microseconds(server: TritonServer):
    """``timeout`` = 300000 on a long stream: an error at 0.3 s that names the limit, and tokens before it."""
    url = f"http://{server.http_url}/v2/models/real/generate_stream"

    def ask() -> list[dict[str, str]]:
        began = time.monotonic()
        with httpx.stream("POST", url, json=body(**LONG, stream=True, timeout=300_000), timeout=60) as answer:
            events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
        assert time.monotonic() - began >= 0.3
        assert events[-1]["error"].startswith("total_timeout: the total limit of 0.3 s")
        return events

    for _ in range(TRIES):  # a machine that falters may have no token within so short a limit
        events = in_time(ask, 0.8)
        if len(events) > 1:
            break
    assert len(events) > 1
    assert "".join(event["text_output"] for event in events[:-1])


def test_t3_an_engine_that_stands_still(server: TritonServer):
    """SIGSTOP of the engine under 20 streams: each ends by its stall limit of 2 s; after SIGCONT the next is served."""

    async def one(client: AsyncClient, begun: asyncio.Semaphore) -> float:
        """Return when the stream ended."""
        stream = client.stream("tell me", **LONG)
        await anext(stream)
        begun.release()
        with pytest.raises(errors.StallTimeout, match=r"stall limit of 2 s"):
            async for _ in stream:
                pass
        return time.monotonic()

    async def scenario() -> None:
        begun = asyncio.Semaphore(0)
        async with AsyncClient(server.grpc_url, model="real") as client:
            streams = [asyncio.create_task(one(client, begun)) for _ in range(20)]
            for _ in streams:
                await asyncio.wait_for(begun.acquire(), 30)
            process = engine(server)
            process.send_signal(signal.SIGSTOP)
            stopped = time.monotonic()
            try:
                ended = await asyncio.wait_for(asyncio.gather(*streams), 30)
            finally:
                process.send_signal(signal.SIGCONT)
            assert all(1.8 <= at - stopped < 3.0 for at in ended), [at - stopped for at in ended]

    asyncio.run(scenario())
    prove_idle(server, "real")


def test_t4_an_error_carries_its_requests_id(server: TritonServer):
    """Of five requests on one stream, r3 has a deadline of 1 ms: the error is r3's, and the others are served."""
    asked: queue.Queue = queue.Queue()
    with grpc.insecure_channel(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for number in range(1, 6):
            asked.put(_message(f"r{number}", 1 if number == 3 else 60_000))
        asked.put(None)
        failed, served = [], set()
        for answer in stub.ModelStreamInfer(iter(asked.get, None), timeout=30):
            if answer.error_message:
                failed.append((answer.infer_response.id, answer.error_message))
            else:
                served.add(answer.infer_response.id)
    [(name, message)] = failed
    assert name == "r3"
    assert message.startswith("total_timeout: ")
    assert served >= {"r1", "r2", "r4", "r5"}


def _message(request_id: str, timeout_ms: int) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name="simulated", id=request_id)
    for tensor in tensors(sync_grpc.InferInput, "tell me", max_tokens=20):
        request.inputs.append(tensor._get_tensor())
        request.raw_input_contents.append(tensor._get_content())
    request.parameters["timeout_ms"].int64_param = timeout_ms
    return request
