"""The parts of the Locust load that need no Locust: settings, verdict, chaos, driver."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from load.swarm import deeds
from load.swarm.driver import serve
from load.swarm.health import Health, faults, refusal
from load.swarm.protocol import CHAOS, Beat, Drop, FromDriver, Hello, Order
from load.swarm.settings import Settings

from triton_lifecycle import errors
from triton_lifecycle.errors import InvalidInput

RECORDING = Path(__file__).parents[1] / "fixtures" / "real_run.jsonl.gz"
GOOD = {
    "grpc_url": "127.0.0.1:8001", "http_url": "127.0.0.1:8000", "model": "smollm2", "over": "grpc:3,generate",
    "request_timeout": 60.0, "attempts": 1, "seed": 7, "prompt_tokens": "64", "answer_tokens": "uniform:8-64",
    "prefix_tokens": 0, "recording": "", "arrival_rate": 0.0, "arrivals": "poisson", "speed": 1.0, "shape": "steady",
    "think": 0.0, "chaos": 0.0, "drain": 30.0, "max_lag_ms": 50.0, "max_in_flight": 100, "report": "", "run_time": 60,
    "num_users": 40, "spawn_rate": 4,
}  # fmt: skip
WELL = Health(lag_ms=2, greenlet_ms=5, late_ms=3, cpu=40, dropped=0, samples=500)


def settings(**changed: object) -> Settings:
    return Settings.read(Namespace(**GOOD | changed))


def test_a_tool_that_kept_up_may_report():
    """Small lags and a half-idle core are no fault."""
    assert faults(WELL, 50.0) == []


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({"lag_ms": 51}, "event loop woke 51 ms late"),
        ({"greenlet_ms": 80}, "greenlets woke 80 ms late"),
        ({"late_ms": 60}, "sent 60 ms late"),
        ({"cpu": 97}, "97 % of a core"),
        ({"dropped": 3}, "3 arrivals were never sent"),
        ({"samples": 4}, "looked at only 4 times"),
        ({"deaths": 1}, "1 of the processes"),
    ],
)
def test_each_way_of_being_the_bottleneck_is_named(what, said):
    """One figure out of bounds refuses the run and says which, and what to do."""
    found = faults(msgspec.structs.replace(WELL, **what), 50.0)
    assert len(found) == 1
    assert said in found[0]
    assert "Add workers" in refusal(found)


def test_settings_name_every_problem_at_once():
    """Each wrong option has its line with the value and the rule."""
    wrong = {"over": "smtp", "answer_tokens": "0", "shape": "spike:1,2", "chaos": 1.5, "attempts": 0, "drain": -1,
             "arrivals": "recorded"}  # fmt: skip
    with pytest.raises(InvalidInput) as caught:
        settings(**wrong)
    for name in ("over", "answer-tokens", "shape", "chaos", "attempts", "drain", "arrivals"):
        assert f"--{name}" in caught.value.message
    with pytest.raises(InvalidInput, match="needs --run-time"):
        settings(shape="bursts", run_time=None)


def test_users_follow_the_shape():
    """A closed loop has as many users as the level says, one at least, and the last level stays."""
    steps = settings(shape="steps:0.25,0.5,1")
    assert [steps.users_at(at) for at in (0, 19, 21, 41, 59, 90)] == [10, 10, 20, 40, 40, 40]
    assert settings(shape="spike:3").users_at(30) == 120
    assert settings(shape="steps:0,1").users_at(0) == 1
    assert settings(run_time=None).users_at(10_000) == 40


def test_an_open_loop_has_its_rate_and_its_front_ends():
    """Arrivals come at the rate asked for; front ends by their weights, the same for the same seed."""
    run = settings(arrival_rate=20.0)
    assert run.open_loop
    times = list(run.times())
    assert 1050 < len(times) < 1350
    assert times == list(settings(arrival_rate=20.0).times())
    over = Counter(run.over_of(number) for number in range(2000))
    assert set(over) == {"grpc", "generate"}
    assert 0.7 < over["grpc"] / 2000 < 0.8


def test_a_recording_gives_lengths_limits_and_moments():
    """Recorded arrivals need no rate; they end with the run."""
    run = settings(recording=str(RECORDING), arrivals="recorded", run_time=3, speed=2.0)
    assert run.open_loop
    times = list(run.times())
    assert times[0] == 0
    assert max(times) < 3
    assert run.mix.ask(0).timeout == 60.0


@pytest.mark.parametrize("deed", CHAOS)
def test_chaos_that_ends_as_it_must_keeps_its_slug(deed):
    """What a deed must end as is told as it is; an engine's failure never is what it must end as."""
    for slug in deeds.EXPECTED[deed]:
        error = None if slug is None else errors.BY_SLUG[slug]("x")
        assert deeds.judge(deed, error)[0] == slug
    slug, message = deeds.judge(deed, errors.GenerationFailed("broke"))
    assert slug == "unexpected_generation_failed"
    assert "broke" in message


def test_rubbish_that_is_served_is_unexpected():
    """A whole answer to rubbish is a failure; a failed request in earnest is told by its own slug."""
    assert deeds.judge("sends_rubbish", None)[0] == "unexpected_answer"
    assert deeds.judge("times_out", None)[0] == "unexpected_answer"
    assert deeds.judge("ask", errors.QueueFull("full"))[0] == "queue_full"
    assert deeds.judge("ask", None) == (None, "")


def test_the_driver_answers_each_order_once_and_ends_with_its_owner():
    """Unreachable servers are told by slug, a dropped order is never answered, lag is told; closing ends it."""

    async def talk() -> list[object]:
        ours, theirs = socket.socketpair()
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # bound, not listening: nothing else answers there
            url = f"127.0.0.1:{taken.getsockname()[1]}"
            serving = asyncio.create_task(serve(theirs))
            reader, writer = await asyncio.open_connection(sock=ours)
            lines = [Hello("", url, "m", 5.0)]
            lines += [Order(number, number, "generate", "Hello", 4) for number in range(3)]
            lines += [Order(7, 7, "generate", "Hello", 4, due=asyncio.get_running_loop().time() + 1000), Drop(7)]
            writer.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
            said: list[object] = []
            async with asyncio.timeout(30):
                while len([one for one in said if isinstance(one, Beat)]) < 2 or len(said) < 5:
                    said.append(msgspec.json.decode(await reader.readline(), type=FromDriver))
                writer.close()
                await serving
            return said

    said = asyncio.run(talk())
    outcomes = [one for one in said if not isinstance(one, Beat)]
    assert sorted(one.id for one in outcomes) == [0, 1, 2]
    assert {one.slug for one in outcomes} == {"server_unreachable"}
    assert any(one.lags for one in said if isinstance(one, Beat))


DEAD_DRIVER = """
from gevent import monkey
monkey.patch_all()
import json
import gevent
from load.swarm.link import DriverEnded, Link
from load.swarm.protocol import Hello, Order

def ask(number):
    try:
        link.ask(Order(number, number, "generate", "Hello", 4, due=1e12))
    except DriverEnded:
        return "told"

told, deaths = [], []
for die_ready in (True, False):
    link = Link(Hello("", "127.0.0.1:1", "m", 5.0), lambda beat: None, lambda: deaths.append(1))
    if die_ready:
        told.append(link.wait_ready(60))
        under_way = gevent.spawn(ask, 1)
        while not link.live:
            gevent.sleep(0.01)
    link._process.kill()
    if die_ready:
        told.append(under_way.get(timeout=60))
    told.append(link.wait_ready(60))
    told.append(gevent.spawn(ask, 2).get(timeout=60))
    link.close()
print(json.dumps([told, len(deaths)]))
"""


def test_whoever_waits_for_a_driver_that_died_is_told():
    """A request under way, one asked later and the wait for readiness all end; the death is told once for each."""
    ran = subprocess.run(
        [sys.executable, "-c", DEAD_DRIVER],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == [[True, "told", False, "told", False, "told"], 2]
