"""A run of the real server, recorded: it replays to the same decisions, simulated and against a server."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.e2e.conftest import REPOSITORY, START_LIMIT_S
from tests.waiting import eventually
from triton_lifecycle.errors import LifecycleError, UnknownRequest
from triton_lifecycle.events import encode
from triton_lifecycle.launcher.server import TritonServer
from triton_lifecycle.recording import Recording, read, stories
from triton_lifecycle.simulation.run import Plan, simulate
from triton_lifecycle_client import NO_RETRY, AsyncClient
from triton_lifecycle_client.cli import app

SETTINGS = """
request_lifecycle:
  timeout_handling: { default_timeout: 20.0, first_token_timeout: 4.0, stall_timeout: 3.0 }
  admission: { max_live_requests: 6 }
  event_driven: { recorder: { path: EVENTS, tokens: true } }
"""
PAUSE_S = 2.0
"""Between two bursts: asked again by a slower machine they do not run into each other."""
LONG = {"max_tokens": 300, "ignore_eos": True, "temperature": 0.0}
ENDLESS = LONG | {"max_tokens": 900}


@pytest.fixture(scope="module")
def recorded(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TritonServer, Path]]:
    """Return a running server of the real model and the file into which it records."""
    folder = tmp_path_factory.mktemp("recorded")
    model = folder / "repository" / "recorded"
    shutil.copytree(REPOSITORY / "smollm2" / "1", model / "1", ignore=shutil.ignore_patterns("weights", "__pycache__"))
    shutil.copy(REPOSITORY / "smollm2" / "config.pbtxt", model)
    engine = json.loads((REPOSITORY / "smollm2" / "1" / "model.json").read_text())
    (model / "1" / "model.json").write_text(json.dumps(engine | {"model": str(weights), "max_num_seqs": 4}))
    events = folder / "events.jsonl"
    (model / "request_lifecycle.yaml").write_text(SETTINGS.replace("EVENTS", json.dumps(str(events))))
    server = TritonServer(model.parent, models=["recorded"], log_path=folder / "triton.log")
    server.start()
    try:
        server.wait_ready(START_LIMIT_S)
        asyncio.run(_traffic(server))
        yield server, events
        time.sleep(1.5)
        assert server.stop() == 0, server.log()[-4000:]
    finally:
        server.kill()


async def _traffic(server: TritonServer) -> None:
    """Ask for every end there is, over both protocols."""
    for protocol, url in (("grpc", server.grpc_url), ("http", server.http_url)):
        async with AsyncClient(url, model="recorded", protocol=protocol, retry=NO_RETRY, timeout=60) as client:
            await client.generate("Hello", max_tokens=2)
            await asyncio.sleep(PAUSE_S)
            await asyncio.gather(
                _ends(client.generate("The capital of France is", max_tokens=12, temperature=0.0)),
                _ends(client.generate("Once upon a time", max_tokens=8, n=2, temperature=0.8)),
                _leaves(client, after=5),
                _cancels(client, f"{protocol}-cancelled"),
                _ends(client.generate("Tell me a story", timeout=0.4, **LONG)),
            )
            await asyncio.sleep(PAUSE_S)
            await asyncio.gather(
                _ends(client.generate("", max_tokens=4)),
                _ends(client.generate("Hi", sampling={"max_tokenz": 4})),
                _ends(client.generate("word " * 5000, max_tokens=4)),
            )
            await asyncio.sleep(PAUSE_S)
            # Three more than may be live, so exactly three are refused. The others have far more to write than their
            # limits allow: asked again, none makes room for a tenth although the caller's machine falters for a while.
            await asyncio.gather(
                *(
                    _ends(client.generate(f"Count to {number}", timeout=3 + number * 0.2, **ENDLESS))
                    for number in range(9)
                )
            )
            await asyncio.sleep(PAUSE_S)


async def _ends(work) -> None:
    with suppress(LifecycleError):
        await work


async def _leaves(client: AsyncClient, after: int) -> None:
    async with client.stream("A long tale:", **LONG) as stream:
        count = 0
        async for _ in stream:
            count += 1
            if count == after:
                break


async def _cancels(client: AsyncClient, request_id: str) -> None:
    task = asyncio.create_task(_ends(client.generate("Another tale:", request_id=request_id, **LONG)))
    await asyncio.sleep(0.5)
    await eventually(lambda: client.cancel(request_id), despite=(UnknownRequest,))
    await task


def settled(events: Path) -> Recording:
    """Return the recording once every request of it has ended and nothing comes any more."""
    until, before = time.monotonic() + 60, -1
    while True:
        recording = read(events)
        still = recording.events == before and all(story.ending for story in recording.stories)
        if still or time.monotonic() > until:
            return recording
        before = recording.events
        time.sleep(0.5)


def test_a_real_run_replays_to_the_same_decisions_twice(recorded: tuple[TritonServer, Path]):
    """Every end but a fault is in the recording; both simulated runs are alike, and decide as the server did."""
    recording = settled(recorded[1])
    ends = Counter((story.status, story.slug) for story in recording.stories)
    for end in (
        ("completed", None),
        ("cancelled", "caller_left"),
        ("cancelled", "cancelled"),
        ("timed_out", "total_timeout"),
        ("rejected", "invalid_input"),
        ("rejected", "prompt_too_long"),
        ("rejected", "queue_full"),
    ):
        assert ends[end], (end, ends)
    runs = [simulate(recording.stories, Plan(seed=7)) for _ in range(2)]
    assert [encode(event) for event in runs[0]] == [encode(event) for event in runs[1]]
    whole = {story.id: story.decision for story in recording.stories if story.received}
    assert {story.id: story.decision for story in stories(runs[0])} == whole


def test_a_real_run_is_asked_again_of_a_real_server(recorded: tuple[TritonServer, Path], tmp_path: Path):
    """What hangs on the request and its caller ends as before; as many are refused for a full server as had been."""
    server, events = recorded
    settled(events)
    copy = tmp_path / "events.jsonl"
    shutil.copy(events, copy)
    answer = CliRunner().invoke(app, ["replay", str(copy), "--url", server.grpc_url, "--json"])
    assert answer.exit_code in {0, 4}, answer.output
    report = json.loads(answer.stdout)
    assert report["requests"] == len([story for story in read(copy).stories if story.received])
    surely = ("invalid_input", "prompt_too_long", "caller_left", "cancelled)")
    assert [d for d in report["differences"] if any(slug in d["recorded"] for slug in surely)] == []
    refused = [run["ends"].get("rejected queue_full") for run in (report["recorded"], report["replayed"])]
    assert refused == [6, 6], report
    # The others may run into their limits a little sooner or later than they did.
    assert len(report["differences"]) <= report["requests"] / 4, report["differences"]
