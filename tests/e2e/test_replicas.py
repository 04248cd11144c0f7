"""Three real tritonservers on the simulated engine with a real Envoy before them: spread, death, drain, end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from load import replicas
from tritonclient.utils import InferenceServerException

from tests.e2e.asking import RefusedError, ask, joined
from triton_lifecycle.errors import UnknownRequest
from triton_lifecycle.launcher.envoy import Front, Policy
from triton_lifecycle.launcher.ports import free_ports
from triton_lifecycle.launcher.replicas import Fleet, make_fleet
from triton_lifecycle.launcher.server import TritonServer
from triton_lifecycle_client import Client, LifecycleError

ROOT = Path(__file__).parents[2]
MODEL = "simulated"
CALLERS = 8
LIMIT_S = 60.0


@dataclass
class Load:
    """What callers that ask one after the other have seen."""

    answers: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return len(self.answers) + len(self.errors)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Return three ready replicas; they must end in order, with Envoy, and leave nothing."""
    http, grpc, admin = free_ports("127.0.0.1", 3)
    made = make_fleet(
        ROOT / "model_repository",
        3,
        models=[MODEL],
        front=Front(http=http, grpc=grpc, admin=admin),
        policy=Policy(model=MODEL),
        state=tmp_path_factory.mktemp("state"),
    )
    try:
        made.start()
        made.wait_ready(120)
        yield made
        processes = [process for server in made.servers for process in server.processes()]
        processes.append(psutil.Process(made.balancer.pid))
        assert made.stop() == 0, [server.log()[-3000:] for server in made.servers]
        assert [process for process in processes if process.is_running()] == []
        left = {
            name for name in os.listdir("/dev/shm") for server in made.servers if name.startswith(server.shm_prefix)
        }
        assert left == set()
        assert list((made.balancer.state / "envoy").iterdir()) == []
    finally:
        made.kill()


def under_load(callers: list[Callable[[Load], None]], loads: list[Load], meanwhile: Callable[[], None]) -> None:
    """Let callers ask again and again while something happens to the servers in this thread."""
    over = threading.Event()

    def keep_asking(call: Callable[[Load], None], load: Load) -> None:
        while not over.is_set():
            call(load)

    threads = [threading.Thread(target=keep_asking, args=pair) for pair in zip(callers, loads, strict=True)]
    for thread in threads:
        thread.start()
    try:
        meanwhile()
    finally:
        over.set()
        for thread in threads:
            thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads)


def ours(client: Client, *, tokens: int, stream: bool) -> Callable[[Load], None]:
    """Return a caller with our client: an answer in one piece, or a stream."""

    def call(load: Load) -> None:
        try:
            if stream:
                load.answers.append("".join(chunk.text for chunk in client.stream("a", **OPTIONS, max_tokens=tokens)))
            else:
                load.answers.append(client.generate("a", **OPTIONS, max_tokens=tokens).text)
        except LifecycleError as error:
            load.errors.append(repr(error))

    return call


def plain(fleet: Fleet, *, tokens: int) -> Callable[[Load], None]:
    """Return a caller with nothing but tritonclient."""
    front = SimpleNamespace(grpc_url=f"127.0.0.1:{fleet.balancer.front.grpc}")
    sampling = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0}

    def call(load: Load) -> None:
        try:
            found = ask(front, "grpc-stream", model=MODEL, text_input="a", sampling_parameters=sampling)
            load.answers.append(joined(found))
        except (RefusedError, InferenceServerException) as error:
            # The second: the stream was open on the dead one, and the request not yet sent.
            load.errors.append(str(error))

    return call


OPTIONS = {"temperature": 0.0, "ignore_eos": True, "timeout": LIMIT_S}


def clients(fleet: Fleet) -> tuple[Client, Client]:
    front = fleet.balancer.front
    return Client(f"grpc://127.0.0.1:{front.grpc}", model=MODEL), Client(f"http://127.0.0.1:{front.http}", model=MODEL)


def look_after(fleet: Fleet, until: Callable[[], bool]) -> None:
    """Supervise until something is so."""
    deadline = time.monotonic() + LIMIT_S
    while not until():
        assert fleet.wait(0.1) is None, fleet.end_story()
        assert time.monotonic() < deadline, "it did not come to this in time"


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_load_is_spread_evenly(fleet: Fleet, protocol: str) -> None:
    """Each of three replicas gets a third of the requests, within ten percent."""
    before = fleet.balancer.counts()[protocol]
    grpc, http = clients(fleet)
    with grpc, http:
        loads = [Load() for _ in range(CALLERS)]
        call = ours(grpc if protocol == "grpc" else http, tokens=2, stream=False)
        total = lambda: sum(load.total for load in loads)  # noqa: E731
        under_load([call] * CALLERS, loads, lambda: look_after(fleet, lambda: total() >= 180))
    got = [after - then for after, then in zip(fleet.balancer.counts()[protocol], before, strict=True)]
    assert [error for load in loads for error in load.errors] == []
    assert sum(got) >= 180
    assert all(abs(count - sum(got) / 3) <= 0.1 * sum(got) / 3 for count in got), got


def test_a_replica_is_killed_under_load(fleet: Fleet) -> None:
    """Our client loses nothing, streams go on elsewhere; tritonclient loses what ran there; the dead one comes back."""
    grpc, http = clients(fleet)
    with grpc, http:
        whole = {tokens: grpc.generate("a", **OPTIONS, max_tokens=tokens).text for tokens in (4, 60)}
        callers = [ours(client, tokens=60, stream=True) for client in (grpc, grpc, http, http)]
        callers += [ours(client, tokens=60, stream=False) for client in (grpc, http)]
        callers += [plain(fleet, tokens=4) for _ in range(CALLERS)]
        loads = [Load() for _ in callers]
        killed = fleet.servers[0]
        before: dict[str, list[int]] = {}

        def meanwhile() -> None:
            look_after(fleet, lambda: all(load.total >= 3 for load in loads))
            os.kill(killed.pid, signal.SIGKILL)
            look_after(fleet, lambda: fleet.servers[0] is not killed and fleet.members[0].ready)
            look_after(fleet, lambda: fleet.balancer.ready() == 3)
            before.update(fleet.balancer.counts())
            # Back in rotation: it gets requests again, over both protocols.
            look_after(
                fleet, lambda: all(fleet.balancer.counts()[kind][0] > before[kind][0] + 3 for kind in ("grpc", "http"))
            )

        under_load(callers, loads, meanwhile)
    mine, others = loads[:-CALLERS], loads[-CALLERS:]
    print(f"ours: {sum(load.total for load in mine)}, failed {sum(len(load.errors) for load in mine)}")
    print(f"tritonclient: {sum(load.total for load in others)}, failed {sum(len(load.errors) for load in others)}")
    assert [error for load in mine for error in load.errors] == []
    assert {answer for load in mine for answer in load.answers} == {whole[60]}, "nothing is lost, nothing comes twice"
    assert {answer for load in others for answer in load.answers} == {whole[4]}
    assert all(len(load.errors) <= 1 for load in others), "only what ran on the dead one"


def test_a_stream_goes_on_from_its_tokens_on_another_replica(fleet: Fleet) -> None:
    """Its replica dies in the middle: the next one reads what was made as a prompt, and the answer is the same."""
    tokens, heard = 800, 50
    grpc, http = clients(fleet)
    with grpc, http:
        whole = grpc.generate("a", **OPTIONS, max_tokens=tokens)
        stream = grpc.stream("a", **OPTIONS, max_tokens=tokens, request_id="broken")
        made = 0
        while made < heard:
            made += next(stream).output_tokens
        killed = next(server for server in fleet.servers if asked_directly(server, lambda client: client.state().live))
        os.kill(killed.pid, signal.SIGKILL)
        for _ in stream:
            pass
        answer = stream.completion
        others = [server for server in fleet.servers if server is not killed]
        [told] = [
            found for server in others if (found := asked_directly(server, lambda client: client.status("broken")))
        ]
        look_after(fleet, lambda: killed not in fleet.servers and fleet.balancer.ready() == 3)
    assert (answer.text, answer.output_tokens) == (whole.text, tokens)
    assert answer.attempts > 1
    assert whole.prompt_tokens is not None
    assert answer.prompt_tokens == whole.prompt_tokens
    assert told.prompt_tokens >= whole.prompt_tokens + heard
    assert told.output_tokens <= tokens - heard


def asked_directly(server: TritonServer, question: Callable[[Client], Any]) -> Any:
    """Return what one replica answers; ``None`` where it does not know the request."""
    with Client(server.grpc_url, model=MODEL) as client, contextlib.suppress(UnknownRequest):
        return question(client)


def test_a_replica_is_killed_under_locusts_users(fleet: Fleet, tmp_path: Path) -> None:
    """Our client's users lose nothing, tritonclient's at most what ran there; the load was even."""
    outcome = replicas.run(fleet, tmp_path, 15.0, 12, print)
    assert outcome.ours.failed == 0, outcome
    assert outcome.ours.requests > 60
    assert outcome.plain.failed <= 4, "one for each user"
    assert outcome.plain.requests > 30
    for got in outcome.before.values():
        mean = sum(got) / len(got)
        # Each of Envoy's threads goes round by itself, and a short run is a few rounds.
        assert all(abs(count - mean) <= max(0.1 * mean, 4) for count in got), outcome.before


def test_a_replica_that_drains_gets_no_new_work(fleet: Fleet) -> None:
    """SIGTERM to one of them: what runs there is finished, what comes goes elsewhere, nothing fails."""
    grpc, http = clients(fleet)
    with grpc, http:
        callers = [ours(client, tokens=100, stream=stream) for client in (grpc, http) for stream in (True, False)]
        callers += [plain(fleet, tokens=20) for _ in range(4)]
        loads = [Load() for _ in callers]
        drained = fleet.servers[1]

        def meanwhile() -> None:
            look_after(fleet, lambda: all(load.total >= 2 for load in loads))
            os.kill(drained.pid, signal.SIGTERM)
            look_after(fleet, lambda: drained.wait(0) is not None)
            assert fleet.members[1].server is drained or drained.exit_code == 0
            look_after(fleet, lambda: fleet.servers[1] is not drained and fleet.members[1].ready)

        under_load(callers, loads, meanwhile)
    assert [error for load in loads for error in load.errors] == []
    assert drained.exit_code == 0, drained.log()[-3000:]
