"""Recordings for tests: requests of every end through the real pipeline and the simulated engine, in virtual time."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tests.fakes import pb_utils
from tests.fakes.harness import Harness
from triton_lifecycle.config import Admission, Config, ErrorHandling, TimeoutHandling
from triton_lifecycle.context import Context
from triton_lifecycle.engine.simulated import Fault, SimulatedEngine, SimulatedSettings, When
from triton_lifecycle.errors import CallerLeft, Cancelled
from triton_lifecycle.events import DeadlineMoved, Event, Progress, Received, encode
from triton_lifecycle.simulation.virtual_time import run

CONFIG = Config(
    timeout_handling=TimeoutHandling(
        default_timeout=6.0,
        first_token_timeout=2.5,
        stall_timeout=0.9,
        max_timeout=60.0,
        enable_intelligent_timeout=False,
    ),
    admission=Admission(max_live_requests=12),
    error_handling=ErrorHandling(recovery_delay=0.1),
)

WALL = 1_796_000_000.0
"""What the calendar shows at the virtual clock's zero: both move at one speed there, as on a real machine."""


def write(path: Path, events: list[Event]) -> Path:
    """Write events as a recorder does."""
    path.write_bytes(b"".join(encode(event) + b"\n" for event in events))
    return path


def without_tokens(events: list[Event]) -> list[Event]:
    """Return what a recorder writes when it is not told to record tokens."""
    return [event for event in events if not isinstance(event, (Progress, DeadlineMoved))]


def busy_run(seed: int = 1, requests: int = 150, *, config: Config = CONFIG, rate: float = 12.0) -> list[Event]:
    """Return the events of a busy server: completed, cancelled, timed out, failed, refused for load and for input."""
    events = run(_busy, seed, requests, config, rate)
    return [replace(e, wall=WALL + e.at) if isinstance(e, Received) else e for e in events]


async def _busy(seed: int, requests: int, config: Config, rate: float) -> list[Event]:
    chance = random.Random(seed)
    faults = (
        Fault(do="raise", on=When(prompt_contains="bad luck", token=3)),
        Fault(do="raise", on=When(nth_request=30, token=2), times=1),
        Fault(do="stall", on=When(nth_request=40, token=2), for_s=1.2),
    )
    engine = SimulatedEngine(
        SimulatedSettings(
            seed=seed, max_num_seqs=6, base_ms=30.0, token_sigma=0.3, mean_output_tokens=60, faults=faults
        )
    )
    harness = Harness(config, engine, send_delay=0.002)
    await engine.start()
    tasks = []
    for number in range(requests):
        await asyncio.sleep(chance.expovariate(rate))
        tasks.append(asyncio.create_task(_one(harness, chance, number)))
    await asyncio.gather(*tasks)
    await engine.stop()
    return harness.events


async def _one(harness: Harness, chance: random.Random, number: int) -> None:
    parameters: dict[str, Any] = {"request_priority": chance.choice([0, 0, 1]), "tenant": chance.choice(["", "a", "b"])}
    sampling: dict[str, Any] = {"max_tokens": chance.choice([1, 8, 40, 80]), "ignore_eos": chance.random() < 0.3}
    text = "one two three " * chance.randint(1, 60)
    kind = chance.random()
    if kind < 0.05:
        sampling["max_tokenz"] = 4
    elif kind < 0.08:
        text = "\0"
    elif kind < 0.1:
        text = "word " * 3000
    elif kind < 0.14:
        text = "bad luck " + text
    elif kind < 0.25:
        parameters["timeout_ms"] = chance.choice([50, 400, 900])
    elif kind < 0.3:
        sampling["n"] = 3
    import json

    request = pb_utils.InferenceRequest(
        {"text_input": text, "stream": chance.random() < 0.7, "sampling_parameters": json.dumps(sampling)},
        parameters,
        request_id=f"r{number}",
    )
    task = asyncio.create_task(harness.serve(request))
    if 0.6 < kind < 0.75:
        await asyncio.sleep(chance.choice([0.0, 0.05, 0.5, 1.5]))
        found = harness.contexts.find(f"r{number}")
        if isinstance(found, Context):
            found.interrupt(CallerLeft("gone") if kind < 0.7 else Cancelled("asked"))
    await task


def repeated(events: list[Event], at_least: int) -> list[Event]:
    """Return the same run again and again, each time with other ids and later, until there are as many events."""
    span = max(event.at for event in events) - min(event.at for event in events) + 1.0
    found = list(events)
    number = 0
    while len(found) < at_least:
        number += 1
        for event in events:
            moved: dict[str, Any] = {
                "request_id": f"{event.request_id[:24]}{number:08x}",
                "at": event.at + number * span,
            }
            if isinstance(event, DeadlineMoved):
                moved["due"] = event.due + number * span
            elif isinstance(event, Received):
                moved |= {"caller_id": f"{event.caller_id}.{number}", "wall": event.wall + number * span}
            found.append(replace(event, **moved))
    return found
