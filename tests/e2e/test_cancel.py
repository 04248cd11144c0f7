"""A caller that leaves frees the engine at once: over gRPC and HTTP, while queued, prefilling and running."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import aclosing

import pytest

from tests.e2e.conftest import StartServer, until_idle
from tests.waiting import eventually
from triton_lifecycle import errors
from triton_lifecycle.launcher.server import TritonServer
from triton_lifecycle_client import AsyncClient

LONG = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.0}
CANCELS_EACH = 34
"""Over two protocols and three states: 204 cancels."""
MOST_TRIES = 8
"""For one cancel. A try in which the request ended first, or the machine itself stood still, measures nothing."""
MACHINE_STALL_S = 0.05


@pytest.fixture(scope="module")
def one_slot(start_server: StartServer):
    """A server whose real engine runs one sequence at a time."""
    server = start_server("one_slot")
    yield server
    # SIGTERM within a second of a closed HTTP stream finds Triton 2.51 still holding the request; see compatibility.md.
    time.sleep(1.5)
    assert server.stop() == 0
    assert server.leftovers == []


class Pulse:
    """A thread that only asks for the processor: how late it gets it is the machine's doing."""

    PERIOD_S = 0.005

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._late: list[float] = []
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(self.PERIOD_S):
            now = time.monotonic()
            self._late.append(now - last - self.PERIOD_S)
            last = now

    def take(self) -> list[float]:
        """Return by how much it was late each time since it was last asked, in seconds."""
        late, self._late = self._late, []
        return late


async def _wait_status(client: AsyncClient, request_id: str, wanted: str) -> str:
    """Wait until a request has the status or has ended with another; ``live`` means that it was admitted."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        status = await client.status(request_id)
        if status.status != "live" or (wanted == "live" and "admitted" in status.times_ms):
            return status.status
        await asyncio.sleep(0.01)
    raise AssertionError(f"{request_id} did not become {wanted}: {status}")


async def _leave(client: AsyncClient, pulse: Pulse, prompt: str, request_id: str, *, after_chunks: int) -> float:
    """Start a stream, leave it, and return the milliseconds from leaving to the abort in the engine.

    On a machine that stands still in every try its own share is taken off.
    """
    measured: list[float] = []
    for number in range(MOST_TRIES):
        delay = await _leave_once(client, pulse, f"{number} {prompt}", f"{request_id}-{number}", after_chunks)
        if delay is not None:
            late = pulse.take()
            if max(late, default=0.0) < MACHINE_STALL_S:
                return delay
            measured.append(max(0.0, delay - sum(late) * 1e3))
    assert measured, f"{request_id}: in {MOST_TRIES} tries the request always ended first"
    return min(measured)


async def _leave_once(
    client: AsyncClient, pulse: Pulse, prompt: str, request_id: str, after_chunks: int
) -> float | None:
    stream = client.stream(prompt, request_id=request_id, **LONG)
    if after_chunks:
        async with aclosing(stream):
            for _ in range(after_chunks):
                await anext(stream)
            pulse.take()
            left_at = time.time()
    else:
        waiting = asyncio.create_task(anext(stream))
        while True:
            try:
                if await _wait_status(client, request_id, "live") != "live":
                    waiting.cancel()
                    await asyncio.gather(waiting, return_exceptions=True)
                    await stream.aclose()
                    return None
                break
            except errors.UnknownRequest:
                await asyncio.sleep(0.005)
        pulse.take()
        left_at = time.time()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await stream.aclose()
    if await _wait_status(client, request_id, "cancelled") != "cancelled":
        return None
    status = await client.status(request_id)
    return (status.received_at + status.times_ms["finished"] / 1e3 - left_at) * 1e3


async def _measure(server: TritonServer, protocol: str) -> dict[str, list[float]]:
    url = server.grpc_url if protocol == "grpc" else server.http_url
    delays: dict[str, list[float]] = {"running": [], "prefilling": [], "queued": []}
    async with AsyncClient(url, model="one_slot", protocol=protocol) as client:
        with Pulse() as pulse:
            await _cancels(client, pulse, protocol, delays)
        await until_idle(client)
        state = await client.state()
        assert state.counts["received"] == sum(v for k, v in state.counts.items() if k != "received")
    return delays


async def _cancels(client: AsyncClient, pulse: Pulse, protocol: str, delays: dict[str, list[float]]) -> None:
    for number in range(CANCELS_EACH):
        delays["running"].append(await _leave(client, pulse, "Tell me", f"{protocol}-run-{number}", after_chunks=2))
        # Half a second of prefill on a CPU; each prompt differs from its first word on, so no cache shortens it.
        prompt = f"{number} {protocol} " + "word " * 150
        delays["prefilling"].append(await _leave(client, pulse, prompt, f"{protocol}-pre-{number}", after_chunks=0))
    blocker = client.stream("Count", **LONG)
    async with aclosing(blocker):
        await anext(blocker)
        for number in range(CANCELS_EACH):
            delays["queued"].append(await _leave(client, pulse, "Wait", f"{protocol}-wait-{number}", after_chunks=0))
            if number % 8 == 7:
                await anext(blocker)


def test_cancel_reaches_the_engine_within_150_ms(one_slot: TritonServer, record_property):
    """p99 over 204 cancels, each state and protocol; afterwards no live context and no engine request."""
    every = []
    for protocol in ("grpc", "http"):
        for state, delays in asyncio.run(_measure(one_slot, protocol)).items():
            delays.sort()
            record_property(f"{protocol}-{state}", f"p50 {delays[len(delays) // 2]:.0f} ms, max {delays[-1]:.0f} ms")
            print(f"{protocol:5} {state:11} p50 {delays[len(delays) // 2]:6.1f} ms  max {delays[-1]:6.1f} ms")
            every += delays
    every.sort()
    p99 = every[int(len(every) * 0.99)]
    print(f"all {len(every)} cancels: p99 {p99:.1f} ms")
    assert len(every) >= 200
    assert p99 <= 150


def test_a_queued_request_that_is_cancelled_never_runs(one_slot: TritonServer):
    """R1 runs, R2 and R3 wait; R2 is cancelled by id: it was never scheduled, and R3 is served next."""

    async def scenario() -> None:
        async with AsyncClient(one_slot.grpc_url, model="one_slot") as client:
            first = client.stream("Count", request_id="r1", **LONG)
            await anext(first)
            second = asyncio.create_task(client.generate("Wait", request_id="r2", max_tokens=4))
            third = asyncio.create_task(client.generate("Wait", request_id="r3", max_tokens=4))
            for waits in ("r2", "r3"):
                assert (
                    await eventually(
                        lambda name=waits: _wait_status(client, name, "live"), despite=(errors.UnknownRequest,)
                    )
                    == "live"
                )
            assert await client.cancel("r2")
            with pytest.raises(errors.Cancelled, match="control request"):
                await second
            await first.aclose()
            assert (await third).output_tokens == 4
            assert "scheduled" not in (await client.status("r2")).times_ms
            assert not await client.cancel("r2"), "a second cancel comes too late and is harmless"
            await until_idle(client)

    asyncio.run(scenario())
