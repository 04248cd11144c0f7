"""The benchmark's whole command against a real tritonserver with the simulated engine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import REPOSITORY, ROOT, START_LIMIT_S
from triton_lifecycle.launcher.server import TritonServer

COMMAND = [sys.executable, "-m", "load.benchmark_request_lifecycle", "--model", "simulated", "--output-len", "8"]
LIMIT_S = 240.0


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    print(done.stdout, done.stderr)
    return done


def cells(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "result.json").read_text())["cells"]


def lines(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in (folder / "cells").glob("*.jsonl"))


def test_interrupted_and_resumed(tmp_path: Path):
    """Ctrl-C ends the server, keeps what was found and makes the report; --resume measures what is missing."""
    folder = tmp_path / "run"
    load = ["--scenario", "normal", "--num-requests", "150", "--capacity", "50", "--out", str(folder)]
    with (tmp_path / "told").open("wb") as told, subprocess.Popen([*COMMAND, *load], cwd=ROOT, stderr=told) as process:
        until = time.monotonic() + LIMIT_S
        while lines(folder) < 12:
            assert process.poll() is None, (tmp_path / "told").read_text()
            assert time.monotonic() < until, (tmp_path / "told").read_text()
            time.sleep(0.05)
        below = psutil.Process(process.pid).children(recursive=True)
        assert "tritonserver" in [child.name() for child in below]
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 130
    assert "--resume" in (tmp_path / "told").read_text()
    _, alive = psutil.wait_procs(below, timeout=60)
    assert alive == []
    before = cells(folder)[0]["figures"]
    assert (before["whole"], before["complete"] > 5, before["asked"] < 150) == (False, True, True)
    assert "interrupted" in (folder / "report.html").read_text()

    done = bench("--resume", str(folder))
    assert done.returncode == 0
    after = cells(folder)[0]["figures"]
    assert (after["whole"], after["asked"], after["complete"]) == (True, 150, 150)
    assert after["throughput"]["value"] == pytest.approx(8 * after["goodput"]["value"])
    assert "normal, 30 s" in done.stdout
    assert (folder / "result.csv").read_text().count("\n") == 2


@pytest.fixture
def simulated() -> Iterator[TritonServer]:
    """Run a server that the benchmark did not start."""
    with TritonServer(REPOSITORY, models=["simulated"]) as server:
        yield server.wait_ready(START_LIMIT_S)
        time.sleep(1.5)


def test_running_servers_by_every_protocol(simulated: TritonServer, tmp_path: Path):
    """Named servers get the same load over gRPC, HTTP and the official contract; a broken rule ends with 3."""
    http = f"http://{simulated.http_url}"
    named = f"ours=grpc://{simulated.grpc_url},ours-http={http},triton={http}"
    load = ["--target", named, "--concurrency", "4,8", "--num-requests", "24", "--timeout", "20"]
    first = bench(*load, "--out", str(tmp_path / "first"))
    assert first.returncode == 0
    figures = {
        (item["cell"]["target"], item["cell"]["concurrency"]): item["figures"] for item in cells(tmp_path / "first")
    }
    assert len(figures) == 6
    assert all((found["complete"], found["whole"]) == (24, True) for found in figures.values())

    baseline = str(tmp_path / "first" / "result.json")
    rules = ["--baseline", baseline, "--fail-if", "failed>0", "--fail-if", "goodput<1000"]
    again = bench("--resume", str(tmp_path / "first"), "--compare", str(tmp_path / "first"), *rules)
    assert again.returncode == 3
    assert again.stdout.count("passed  failed>0") == again.stdout.count("FAILED  goodput<1000") == 6
    assert simulated.running
