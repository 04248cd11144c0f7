"""Locust against a real tritonserver with the simulated engine: headless, distributed, from its web page."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from load.mixes import arrivals, shape

from tests.e2e.conftest import REPOSITORY, ROOT, START_LIMIT_S
from tests.waiting import until
from triton_lifecycle.launcher.ports import Ports
from triton_lifecycle.launcher.server import TritonServer
from triton_lifecycle_client import Client
from triton_lifecycle_client.types import ServerState

LOCUSTFILE = ROOT / "load" / "locustfile.py"
LIMIT_S = 240.0
PATIENT = "5000"
"""Milliseconds that the tool may be late here: what is tested is not the speed of the machine that tests."""
FRONT_ENDS = ("grpc", "generate_stream", "generate")
DEEDS = ("cancels", "reads_slowly", "times_out", "sends_rubbish")


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    log = tmp_path_factory.mktemp("locust") / "triton.log"
    server = TritonServer(REPOSITORY, models=["simulated"], log_path=log)
    server.start()
    try:
        server.wait_ready(START_LIMIT_S)
        yield server
        time.sleep(1.5)
        assert server.stop() == 0, server.log()[-4000:]
        assert server.leftovers == []
    finally:
        server.kill()


class Locust:
    """Starts Locust processes against a server; what still runs at the end is ended."""

    def __init__(self, server: TritonServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        where = ("--grpc-url", self.server.grpc_url, "--http-url", self.server.http_url, "--model", "simulated")
        log = self.folder / f"locust-{len(self._started)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), *where, *arguments],
                cwd=self.folder,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._started.append(process)
        return process

    def run(self, *arguments: str) -> int:
        """Run a whole load; return how it exits."""
        process = self.start("--headless", "--only-summary", "--csv", "run", "--report", "run.json", *arguments)
        return process.wait(LIMIT_S)

    @property
    def log(self) -> str:
        """What all processes said."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("locust-*.log")))

    @property
    def report(self) -> dict:
        return json.loads((self.folder / "run.json").read_text())

    def rows(self, name: str) -> list[dict[str, str]]:
        with (self.folder / f"run_{name}.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.wait(60)


@pytest.fixture
def locust(simulated: TritonServer, tmp_path: Path) -> Iterator[Locust]:
    made = Locust(simulated, tmp_path)
    yield made
    made.end()


def assert_nothing_left(server: TritonServer) -> None:
    """Wait until the server holds nothing, and see that every request ended once."""
    with Client(server.grpc_url, model="simulated") as client:

        def idle() -> ServerState | None:
            state = client.state()
            return None if state.live or state.engine["running"] or state.engine["waiting"] else state

        state = until(idle)
    assert state.counts["received"] == sum(count for name, count in state.counts.items() if name != "received")


def test_every_user_and_chaos_in_a_closed_loop(locust: Locust):
    """Every front end has its four series; only chaos fails, by slug, as it must; nothing is left on the server."""
    for seconds in ("5s", "30s"):  # a machine that falters needs longer to have met each kind of chaos
        code = locust.run("-u", "14", "-r", "14", "-t", seconds, "--chaos", "0.4", "--answer-tokens", "uniform:8-40",
                          "--max-lag-ms", PATIENT)  # fmt: skip
        assert code == 0, locust.log
        series = locust.report["series"]
        if all(series.get(f"chaos {deed}", {"count": 0})["count"] > 2 for deed in DEEDS):
            break
    for over in FRONT_ENDS:
        assert series[f"{over} end to end"]["count"] > 0
        assert series[f"{over} first token"]["count"] == series[f"{over} end to end"]["count"]
        assert series[f"{over} tokens/s of an answer (no ms)"]["p50"] > 0
    for over in FRONT_ENDS[:2]:
        assert series[f"{over} between tokens"]["count"] > series[f"{over} end to end"]["count"]
    assert "generate between tokens" not in series
    whole = sum(series[f"{over} end to end"]["count"] for over in FRONT_ENDS)
    assert locust.report["requests"] == whole, "Aggregated counts whole requests and nothing else"
    assert 8 <= locust.report["tokens"] / whole <= 40
    failed = locust.report["failures"]
    assert set(failed) <= {f"chaos {deed}" for deed in DEEDS}
    assert set(failed["chaos sends_rubbish"]) == {"invalid_input"}
    assert set(failed["chaos times_out"]) <= {"total_timeout", "first_token_timeout"}
    assert set(failed["chaos cancels"]) <= {"cancelled", "caller_left"}
    assert series["chaos reads_slowly"]["failures"] == 0
    assert series["tool loop lag"]["count"] > 50
    names = {(row["Type"], row["Name"]) for row in locust.rows("stats")}
    assert {("grpc", "first token"), ("generate_stream", "between tokens"), ("", "Aggregated")} <= names
    assert {row["Error"] for row in locust.rows("failures")} >= {"invalid_input", "total_timeout"}
    assert_nothing_left(locust.server)


def test_master_and_workers_share_one_plan(locust: Locust):
    """Two workers send exactly the requests that one plan holds, each once; their figures arrive at the master."""
    free = Ports.free()
    workers = [locust.start("--worker", "--master-port", str(free.http)) for _ in range(2)]
    code = locust.run("--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", str(free.http),
                      "--expect-workers", "2", "--expect-workers-max-wait", "60", "-t", "4s", "--seed", "5",
                      "--arrival-rate", "25", "--shape", "bursts:3", "--chaos", "0.2", "--max-lag-ms", PATIENT,
                      "--answer-tokens", "lognormal:12,0.5")  # fmt: skip
    assert code == 0, locust.log
    assert [worker.wait(LIMIT_S) for worker in workers] == [0, 0]
    made = sum(row["count"] for name, row in locust.report["series"].items() if "end to end" in name or "chaos" in name)
    assert made == len(list(arrivals(shape("bursts:3", 4.0), 25.0, 5)))
    assert locust.report["series"]["tool late arrivals"]["count"] == made
    assert set(locust.report["failures"]) <= {f"chaos {deed}" for deed in DEEDS}
    assert_nothing_left(locust.server)


def test_a_tool_that_was_the_bottleneck_reports_nothing(locust: Locust):
    """Arrivals that could not be sent make the run say nothing but why; the exit code is its own."""
    code = locust.run("-t", "3s", "--arrival-rate", "60", "--max-in-flight", "1", "--max-lag-ms", PATIENT)
    assert code == 3, locust.log
    assert "REFUSED" in locust.log
    assert "arrivals were never sent" in locust.log
    assert set(locust.report) == {"refused", "tool"}
    assert [row["Name"] for row in locust.rows("stats") if int(row["Request Count"])] == []
    assert_nothing_left(locust.server)


def test_what_cannot_be_done_is_refused_before_it_starts(locust: Locust):
    """Every wrong option is named at once, with what it wants; nothing is sent."""
    code = locust.run("--answer-tokens", "many", "--over", "smtp", "--shape", "bursts:9", "-t", "5s")
    assert code == 1
    for part in ("--answer-tokens: length 'many'", "--over 'smtp'", "--shape: shape 'bursts:9'"):
        assert part in locust.log


def test_the_web_page_starts_and_stops_a_run(locust: Locust):
    """The page offers our options, starts a run with them, shows the series, and stopping leaves nothing."""
    port = Ports.free().http
    process = locust.start("--web-host", "127.0.0.1", "--web-port", str(port), "--max-lag-ms", PATIENT)

    def get(path: str, form: dict[str, str] | None = None) -> str:
        data = None if form is None else urllib.parse.urlencode(form).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", data, timeout=60) as answer:
            return answer.read().decode()

    page = until(lambda: get("/"), LIMIT_S, despite=(OSError,))
    assert "answer_tokens" in page, locust.log
    assert json.loads(get("/swarm", {"user_count": "4", "spawn_rate": "4", "answer_tokens": "16", "chaos": "0"}))[
        "success"
    ]
    wanted = {"end to end", "first token", "between tokens", "loop lag"}
    until(lambda: wanted <= {row["name"] for row in json.loads(get("/stats/requests"))["stats"]}, LIMIT_S)
    get("/stop", {})
    assert_nothing_left(locust.server)
    process.send_signal(signal.SIGTERM)
    process.wait(LIMIT_S)
    assert "Traceback" not in locust.log, locust.log
