"""Metrics on a real Triton (simulated engine), read by a real Prometheus: the page, the dashboards, the alerts.

The rules are those that are shipped, with every minute made a second. Models are loaded side by side, each for the
causes of some alerts, so that all of them fire and clear within a minute.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests import services
from tests.e2e.conftest import REPOSITORY
from tests.waiting import eventually
from triton_lifecycle.errors import LifecycleError
from triton_lifecycle.launcher.server import TritonServer
from triton_lifecycle.metrics.catalogue import FAMILIES
from triton_lifecycle_client import AsyncClient, RetryPolicy

DEPLOY = REPOSITORY.parent / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
LIMIT_S = 120.0
"""For anything that is waited for; it comes far sooner."""
REDIS = "redis://127.0.0.1:1/0"
"""Nobody listens there."""

LEAKER = '''
import os

held = []

def leaker(event):
    """Leak descriptors, mend it, or fail, as the caller's id says."""
    if event.caller_id == "leak":
        held.extend(os.open("/dev/null", os.O_RDONLY) for _ in range(64))
    elif event.caller_id == "mend":
        while held:
            os.close(held.pop())
    elif event.caller_id == "fail":
        raise RuntimeError("as it was told to")
'''
MOODS = {f"mood {level}": 4.0**level for level in range(1, 6)}
"""What a prompt says, and how many times slower the engine is for it: each far beyond all that was seen before."""
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "faulty": (
        {
            "startup_s": 5.0,
            "faults": [
                {"do": "stall", "for_s": 9.0, "on": {"prompt_contains": "stone"}},
                {"do": "die", "on": {"prompt_contains": "fire"}},
            ],
        },
        {"timeout_handling": {"enable_intelligent_timeout": False}},
    ),
    "learning": ({"base_ms": 2.0, "mean_output_tokens": None}, {}),
    "moody": (
        {
            "base_ms": 1.0,
            "mean_output_tokens": None,
            "faults": [
                {"do": "slow", "factor": factor, "for_s": 0.005 * factor, "on": {"prompt_contains": mood}}
                for mood, factor in MOODS.items()
            ],
        },
        {},
    ),
    "narrow": (
        {"max_num_seqs": 1, "faults": [{"do": "raise", "on": {"prompt_contains": "door"}}]},
        {"admission": {"max_waiting_requests": 4}, "error_handling": {"max_recovery_attempts": 0}},
    ),
    "leaky": (
        {"base_ms": 2.0},
        {
            "event_driven": {"handlers": [{"use": "leaker:leaker", "events": ["Received"]}], "event_queue_size": 8},
            "monitoring": {"leak_check_interval": 0.5},
            "distributed": {"enabled": True, "event_bus_backend": "redis", "redis_url": REDIS},
        },
    ),
}
"""Name → settings of the engine, and of the backend."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository of the models above."""
    folder = tmp_path_factory.mktemp("metered")
    source = REPOSITORY / "simulated"
    engine = json.loads((source / "1" / "model.json").read_text())
    for name, (changes, settings) in MODELS.items():
        model = folder / name
        shutil.copytree(source, model, ignore=shutil.ignore_patterns("__pycache__"))
        (model / "1" / "model.json").write_text(json.dumps(engine | changes))
        (model / "request_lifecycle.yaml").write_text(yaml.safe_dump({"request_lifecycle": settings}))
    with (folder / "narrow" / "config.pbtxt").open("a") as config:
        config.write('parameters { key: "REPORT_CUSTOM_METRICS" value { string_value: "true" } }\n')
    (folder / "leaky" / "1" / "leaker.py").write_text(LEAKER)
    return folder


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Return the one server of this module."""
    running = TritonServer(repository, log_path=tmp_path_factory.mktemp("server") / "triton.log")
    running.start().wait_ready(90)
    yield running
    running.kill()


@pytest.fixture(scope="module")
def began() -> float:
    """Return when all of this began, in Unix seconds."""
    return time.time()


@pytest.fixture(scope="module")
def prometheus(began: float, server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a Prometheus that watches the server by the shipped rules, sixty times as fast."""
    rules = tmp_path_factory.mktemp("rules") / "rules.yml"
    rules.write_text(sixty_times_as_fast(RULES.read_text(encoding="utf-8")))
    assert server.ports is not None
    with services.prometheus(rules, [f"127.0.0.1:{server.ports.metrics}"]) as service:
        yield service.url


def sixty_times_as_fast(rules: str) -> str:
    """Make each minute of a rule a second (at least three in a window, for it must hold two scrapes)."""

    def scaled(match: re.Match[str]) -> str:
        seconds = int(match["count"]) * {"m": 1, "h": 60}[match["unit"]]
        return f"{match['before']}{max(3, seconds) if match['before'] == '[' else seconds}s"

    return re.sub(r"(?P<before>\[|for: )(?P<count>\d+)(?P<unit>[mh])\b", scaled, rules)


async def query(prometheus: str, expression: str) -> list[dict[str, Any]]:
    """Return an instant query's result."""
    async with httpx.AsyncClient(base_url=prometheus, timeout=10) as web:
        answer = (await web.get("/api/v1/query", params={"query": expression})).json()
    assert answer["status"] == "success", (expression, answer)
    return list(answer["data"]["result"])


FIRING = 'ALERTS{alertstate="firing"}'


async def alerts(prometheus: str, expression: str) -> set[str]:
    """Return the names of the alerts that a query finds."""
    return {found["metric"]["alertname"] for found in await query(prometheus, expression)}


async def fires(prometheus: str, *names: str) -> None:
    """Wait until each has fired since this was asked, if only for one evaluation between two looks."""
    began = time.monotonic()

    async def fired() -> bool:
        since = int(time.monotonic() - began) + 1
        return set(names) <= await alerts(prometheus, f"max_over_time({FIRING}[{since}s])")

    await eventually(fired, LIMIT_S)


async def clears(prometheus: str, *names: str) -> None:
    """Wait until none of these fires any more."""

    async def cleared() -> bool:
        return not await alerts(prometheus, FIRING) & set(names)

    await eventually(cleared, LIMIT_S)


@asynccontextmanager
async def connected(server: TritonServer, model: str) -> AsyncIterator[AsyncClient]:
    """Return a client that sends nothing twice."""
    async with AsyncClient(server.grpc_url, model=model, retry=RetryPolicy(attempts=1)) as client:
        yield client


@asynccontextmanager
async def meanwhile(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Have something done for the length of the block, if it lasts so long."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def ask(
    client: AsyncClient, text: str = "tell me", count: int = 1, tokens: int = 4, pause: float = 0.0, **options: Any
) -> None:
    """Send requests one after the other, however they end."""
    for _ in range(count):
        with suppress(LifecycleError):
            await client.generate(text, max_tokens=tokens, ignore_eos=True, **options)
        if pause:
            await asyncio.sleep(pause)


def test_every_alert_fires_and_clears(server: TritonServer, prometheus: str):
    """Each alert's cause is brought about, the alert fires, the cause goes, and the alert clears."""

    async def faulty() -> None:
        async with connected(server, "faulty") as client:
            async with meanwhile(ask(client, "a stone", 10, tokens=20)):
                await fires(prometheus, "LifecycleEngineStalled")
            await clears(prometheus, "LifecycleEngineStalled")
            async with meanwhile(ask(client, "a fire", 10)):
                await fires(prometheus, "LifecycleEngineDown", "LifecycleEngineRestartLoop")
            await clears(prometheus, "LifecycleEngineDown", "LifecycleEngineRestartLoop")

    async def learning() -> None:
        async with connected(server, "learning") as client:
            await ask(client, count=60, tokens=8)

    async def moody() -> None:
        async with connected(server, "moody") as client:
            # Just enough for predictions to be made: the next are the first that count.
            await ask(client, count=30)
            for mood in MOODS:
                await ask(client, mood)
            # So few that they cannot make up for it while the rule waits.
            async with meanwhile(ask(client, count=100, pause=4.0)):
                await fires(prometheus, "LifecyclePredictionOff")
            async with meanwhile(ask(client, count=100_000, pause=0.02)):
                await clears(prometheus, "LifecyclePredictionOff")

    async def narrow() -> None:
        async with connected(server, "narrow") as client:
            async with meanwhile(*(ask(client, tokens=3000) for _ in range(5))):
                await fires(prometheus, "LifecycleQueueNearLimit")
            await ask(client, count=3)
            await ask(client, timeout=0.05, tokens=2000)
            await clears(prometheus, "LifecycleQueueNearLimit")
            async with meanwhile(ask(client, "a door", 4000, pause=0.1)):
                await fires(prometheus, "LifecycleErrorBudgetFastBurn", "LifecycleErrorBudgetSlowBurn")
            async with meanwhile(ask(client, "a tree", 4000, pause=0.1)):
                await clears(prometheus, "LifecycleErrorBudgetFastBurn", "LifecycleErrorBudgetSlowBurn")

    async def leaky() -> None:
        async with connected(server, "leaky") as client:
            async with meanwhile(ask(client, count=4000, pause=0.05)):
                await fires(prometheus, "LifecycleEventsLost")
            await ask(client, request_id="leak")
            await fires(prometheus, "LifecycleLeak")
            await ask(client, request_id="mend")
            await clears(prometheus, "LifecycleLeak", "LifecycleEventsLost")
            # Not too often in a row, or the bus removes the handler.
            good, bad = ask(client, count=4000, pause=0.02), ask(client, count=4000, pause=0.1, request_id="fail")
            async with meanwhile(good, bad):
                await fires(prometheus, "LifecycleHandlerFailing")
            await clears(prometheus, "LifecycleHandlerFailing")

    async def all_of_them() -> None:
        async with asyncio.TaskGroup() as group:
            for cause in (faulty, learning, moody, narrow, leaky):
                group.create_task(cause())

    asyncio.run(all_of_them())


def test_prometheus_accepts_the_page_and_the_docs_know_it(server: TritonServer):
    """promtool has nothing to say about our metrics; every one on the page is in the catalogue, with its labels."""
    page = httpx.get(server.metrics_url, timeout=10).text
    program = shutil.which("promtool")
    assert program is not None, "promtool is not installed; run `make system` as root"
    answer = subprocess.run(
        [program, "check", "metrics"], input=page, capture_output=True, text=True, timeout=30, check=False
    )
    said = [line for line in (answer.stdout + answer.stderr).splitlines() if not line.startswith("nv_")]
    # Triton's own names and vLLM's colon are not ours to choose.
    assert [line for line in said if not (line.startswith("vllm:") and "contain ':'" in line)] == []
    assert answer.returncode in {0, 3}, "3 is what it says to names that it does not like"
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    ours = {name: kind for name, kind in kinds.items() if not name.startswith("nv_")}
    assert ours == {name: FAMILIES[name].kind for name in ours}
    narrow = 'model="narrow"'
    lines = page.splitlines()
    for name, family in FAMILIES.items():
        if name.startswith("lifecycle_store"):
            # There only with a shared store.
            continue
        first = next((line for line in lines if re.match(rf"{name}(_count)?{{", line)), "")
        assert set(re.findall(r'(\w+)="', first)) == set(family.all_labels), (name, first)
    stages = sum(
        float(v) for v in re.findall(rf"^lifecycle_stage_time_seconds_total{{{narrow}.*}} (\S+)$", page, re.MULTILINE)
    )
    [whole] = re.findall(rf"^lifecycle_request_time_seconds_total{{{narrow}.*}} (\S+)$", page, re.MULTILINE)
    assert stages == pytest.approx(float(whole), rel=0.01)


QUERIES = [
    pytest.param(target["expr"], id=f"{path.stem}: {panel['title']} {number}")
    for path in sorted((DEPLOY / "grafana").glob("*.json"))
    for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]
    for number, target in enumerate(panel.get("targets", ()))
]


@pytest.mark.parametrize("expression", QUERIES)
def test_every_query_of_the_dashboards_returns_data(prometheus: str, began: float, expression: str):
    """What Grafana would ask, of the Prometheus that saw all of the above, over all that time."""
    for variable, value in {"$model": ".*", "$__rate_interval": "1m", "$instance": ".*"}.items():
        expression = expression.replace(variable, value)
    now = time.time()
    asked = {"query": expression, "start": began, "end": now, "step": 1}
    answer = httpx.get(f"{prometheus}/api/v1/query_range", params=asked, timeout=20).json()
    assert answer["status"] == "success", (expression, answer)
    values = [float(value) for series in answer["data"]["result"] for _, value in series["values"]]
    assert [value for value in values if value == value], f"no data: {expression}"  # noqa: PLR0124 - NaN is none


def test_a_server_that_is_gone_is_noticed(server: TritonServer, prometheus: str):
    """The server ends, and the alert fires; it comes back on its port, and the alert clears."""
    time.sleep(1.5)
    server.stop()
    asyncio.run(fires(prometheus, "LifecycleServerDown"))
    again = server.again()
    again.models = ["narrow"]
    try:
        again.start().wait_ready(90)
        asyncio.run(clears(prometheus, "LifecycleServerDown"))
    finally:
        again.kill()
