"""Two real servers share a real Redis: each tells what became of the other's requests, also when that one is gone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.services import redis_server
from tests.waiting import until
from triton_lifecycle import errors
from triton_lifecycle.launcher.server import TritonServer
from triton_lifecycle_client import Client
from triton_lifecycle_client.types import Status

SIMULATED = Path(__file__).parents[2] / "model_repository" / "simulated"


def make_repository(folder: Path, url: str, node: str) -> Path:
    """Return a repository with the simulated model as one replica of two."""
    shutil.copytree(SIMULATED, folder / "simulated", ignore=shutil.ignore_patterns("__pycache__"))
    settings = {
        "timeout_handling": {"enabled": False},
        "context_management": {"storage_backend": "redis"},
        "distributed": {"enabled": True, "node_name": node, "redis_url": url, "context_sync_interval": 0.2},
    }
    # So slow that a long answer goes on for minutes, whatever a test waits for meanwhile.
    engine = folder / "simulated" / "1" / "model.json"
    engine.write_text(json.dumps(json.loads(engine.read_text()) | {"base_ms": 50.0}))
    text = yaml.safe_dump({"request_lifecycle": settings})
    (folder / "simulated" / "request_lifecycle.yaml").write_text(text, encoding="utf-8")
    return folder


def lifecycle(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "triton_lifecycle_client", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def becomes(client: Client, name: str, status: str) -> Status:
    """Wait until a server says so of a request; before, it may not know it or have no store."""

    def told() -> Status | None:
        found = client.status(name)
        return found if found.status == status else None

    return until(told, despite=(errors.UnknownRequest, errors.StoreError))


def test_either_server_tells_of_the_others_requests(tmp_path):
    """Ended and live ones, by our id and the caller's; `lost` after kill -9; an honest error without the store."""
    servers: list[TritonServer] = []
    try:
        with redis_server("--appendonly", "yes") as redis:
            for node in ("left", "right"):
                folder = make_repository(tmp_path / node, redis.url, node)
                server = TritonServer(folder, models=("simulated",), log_path=tmp_path / f"{node}.log")
                servers.append(server)
                server.start()
            left, right = (server.wait_ready(120) for server in servers)
            with (
                Client(left.grpc_url, model="simulated", protocol="grpc") as at_left,
                Client(right.http_url, model="simulated", protocol="http") as at_right,
            ):
                answer = at_left.generate("hello", max_tokens=8, request_id="mine")
                told = becomes(at_right, "mine", "finished")
                assert (told.status, told.node, told.output_tokens) == ("finished", "left", 8)
                assert at_right.status(told.id) == told
                assert answer.request_id == told.caller_id
                stream = at_left.stream("long", max_tokens=3800, ignore_eos=True, request_id="long")
                next(stream)
                until(lambda: becomes(at_right, "long", "live").output_tokens)
                shown = lifecycle("status", "long", "--url", right.grpc_url, "--model", "simulated", "--json")
                live = json.loads(shown.stdout)
                assert (live.get("status"), live.get("node")) == ("live", "left"), shown
                assert live["output_tokens"] > 0
                drawn = lifecycle("timeline", "long", "--url", right.grpc_url, "--model", "simulated", "--json")
                (line,) = json.loads(drawn.stdout)["requests"]
                assert (line["caller_id"], line["status"], line["phases"][-1]["phase"]) == ("long", "live", "decode")
                other = at_left.stream("other", max_tokens=3800, ignore_eos=True, request_id="other")
                next(other)
                becomes(at_right, "other", "live")
                assert at_right.cancel("other") is True
                with pytest.raises(errors.Cancelled, match="through another replica"):
                    list(other)
                assert at_right.cancel("other") is False
                redis.kill()
                with pytest.raises(errors.StoreError, match=r"redis at 127.0.0.1 does not answer"):
                    at_right.status("mine")
                assert at_left.status("mine").status == "finished"
                redis.start()
                assert becomes(at_right, "mine", "finished") == told
                os.kill(left.pid, signal.SIGKILL)
                becomes(at_right, "long", "lost")
            drawn = lifecycle("timeline", "long", "--url", right.grpc_url, "--model", "simulated")
            assert "the replica 'left' that served it is gone" in drawn.stderr, drawn
            assert right.stop() == 0, right.log()[-4000:]
    finally:
        for server in servers:
            server.kill()
