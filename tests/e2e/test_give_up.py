"""Five hundred callers who give up: what the real engine still does for them, and how soon the next one is served."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import msgspec

from tests.e2e.conftest import until_idle
from triton_lifecycle.errors import LifecycleError
from triton_lifecycle.launcher.server import TritonServer
from triton_lifecycle_client import NO_RETRY, AsyncClient

CALLERS = 500
PATIENCE_S = 5.0
ASKED = {"max_tokens": 16, "ignore_eos": True, "temperature": 0.0}
NEXT_S = 1.0
NOTICED_S = 0.15
"""From leaving to the abort in the engine, as in test_cancel.py."""
TRIES = 3
"""A machine that falters spoils one; a fault spoils them all."""


class Caller(msgspec.Struct):
    """One caller and what it saw."""

    name: str
    streams: bool
    tokens: int = 0
    left_at: float | None = None
    """Unix seconds; ``None`` when it was answered."""
    error: LifecycleError | None = None


class Outcome(msgspec.Struct):
    """What became of all of them."""

    left: int
    wasted: int
    """Tokens made for streams that were left and that their callers never saw."""
    begun_after: float
    """The longest time after its caller had left in which the engine began with a request."""
    next_after: float
    """Seconds that a new caller waits for a whole answer."""
    too_late: list[str]
    """How unary requests ended that their callers' limit met."""
    latest_s: float
    """When the last of them ended."""


async def _ask(client: AsyncClient, caller: Caller) -> None:
    prompt = f"{caller.name}: tell me a story about"
    try:
        if not caller.streams:
            # Nobody tells the server that a unary caller has left: it says beforehand how long it waits.
            await client.generate(prompt, request_id=caller.name, timeout=PATIENCE_S, **ASKED)
            return
        stream = client.stream(prompt, request_id=caller.name, **ASKED)
        async with asyncio.timeout(PATIENCE_S), aclosing(stream):
            async for chunk in stream:
                caller.tokens += sum(chunk.token_counts)
    except TimeoutError:
        caller.left_at = time.time()
    except LifecycleError as error:
        caller.error = error


async def _give_up(server: TritonServer, number: int) -> Outcome:
    callers = [Caller(f"caller-{number}-{each}", streams=each % 2 == 0) for each in range(CALLERS)]
    async with AsyncClient(server.grpc_url, model="smollm2", retry=NO_RETRY) as client:
        await asyncio.gather(*(_ask(client, caller) for caller in callers))
        began = time.monotonic()
        assert (await client.generate("And now?", max_tokens=4, ignore_eos=True)).output_tokens == 4
        next_after = time.monotonic() - began
        await until_idle(client)
        ends = {caller.name: await client.status(caller.name) for caller in callers}
    outcome = Outcome(0, 0, 0.0, next_after, [], 0.0)
    for caller in callers:
        end = ends[caller.name]
        if caller.left_at is not None:
            assert end.status in {"cancelled", "finished"}, end
            outcome.left += 1
            outcome.wasted += end.output_tokens - caller.tokens
            begun = end.received_at + end.times_ms.get("scheduled", 0.0) / 1e3
            outcome.begun_after = max(outcome.begun_after, begun - caller.left_at)
        elif caller.error is not None:
            outcome.too_late.append(caller.error.slug)
            outcome.latest_s = max(outcome.latest_s, end.times_ms["finished"] / 1e3)
    return outcome


def test_five_hundred_callers_give_up(server: TritonServer):
    """At most a token each is made for those who left, nothing begins for them, and the next caller waits no second."""
    for number in range(TRIES):
        outcome = asyncio.run(_give_up(server, number))
        print(outcome)
        assert outcome.left > CALLERS / 10, "the engine is too quick for this test: ask it for more"
        assert outcome.wasted <= outcome.left
        assert set(outcome.too_late) <= {"total_timeout"}
        assert outcome.latest_s < PATIENCE_S + 1.0
        if outcome.begun_after <= NOTICED_S and outcome.next_after <= NEXT_S:
            return
    raise AssertionError(outcome)
