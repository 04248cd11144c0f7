"""The server's own ends: in order, by force, and what must not be left behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
import time

import httpx
import psutil
import pytest

from tests.e2e.conftest import StartServer, left_over
from tests.waiting import until
from triton_lifecycle import errors
from triton_lifecycle.launcher.server import TritonServer
from triton_lifecycle_client import Client

LONG = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.0}


def _processes(server: TritonServer) -> tuple[psutil.Process, list[psutil.Process]]:
    """Return the stub and everything below it."""
    for child in psutil.Process(server.pid).children():
        below = child.children(recursive=True)
        if "stub" in " ".join(child.cmdline()):
            return child, below
    raise AssertionError("no stub runs")


def _all_gone(processes: list[psutil.Process], within: float) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(processes, timeout=within)
    return [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def _sockets() -> set[str]:
    """Return what vLLM's sockets, and their folders, are called among the temporary files."""
    names = os.listdir(tempfile.gettempdir())
    return {name for name in names if name.startswith("tlc-") or re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-.*", name)}


@pytest.mark.parametrize("first", ["stub", "tritonserver"])
def test_kill_9_leaves_nothing(start_server: StartServer, first):
    """kill -9 of the stub, then of tritonserver (or tritonserver alone): within 10 s no child and no shared memory."""
    before, sockets = set(os.listdir("/dev/shm")), _sockets()
    server = start_server("smollm2")
    assert _sockets() - sockets
    stub, below = _processes(server)
    engine = [process for process in below if process.name().startswith("VLLM")]
    assert engine, [process.name() for process in below]
    assert set(os.listdir("/dev/shm")) - before
    if first == "stub":
        # The guardian stays for as long as tritonserver holds the shared memory that it shared with the stub.
        others = [process for process in below if not any("guardian" in part for part in process.cmdline())]
        assert len(others) == len(below) - 1
        stub.kill()
        assert _all_gone(others, 60) == [], "the engine's processes follow the stub"
    os.kill(server.pid, signal.SIGKILL)
    assert _all_gone([stub, *below], 60) == []
    until(lambda: not left_over(before))
    assert _sockets() - sockets == set()
    server.wait(60)


def test_sigterm_lets_a_stream_finish(start_server: StartServer):
    """SIGTERM during a stream of five seconds and more: it completes, new requests are refused, exit code 0."""
    sockets = _sockets()
    server = start_server("smollm2", exit_timeout_s=120)
    with (
        Client(server.grpc_url, model="smollm2") as client,
        client.stream("Tell me a story", max_tokens=400, ignore_eos=True) as stream,
    ):
        next(stream)
        began = time.monotonic()
        server.terminate()
        refused = None
        while refused is None and time.monotonic() - began < 30:
            try:
                answer = httpx.post(
                    f"http://{server.http_url}/v2/models/smollm2/generate",
                    json={"text_input": "x", "parameters": {"max_tokens": 1}},
                    timeout=60,
                )
                refused = answer.status_code if answer.status_code != 200 else None
            except httpx.TransportError:
                refused = 503
        list(stream)
        lasted = time.monotonic() - began
        assert stream.completion.output_tokens == 400
    assert lasted > 2, "the stream was still running when SIGTERM came"
    assert refused in {400, 503}
    assert server.wait(150) == 0, server.log()[-4000:]
    assert "Segfault" not in server.log()
    assert server.leftovers == []
    assert _sockets() - sockets == set()


def test_the_folder_serves_the_official_backends_models(start_server: StartServer):
    """`backend: "vllm"` and a model.json alone, served from a backend folder that holds ours."""
    server = start_server("drop_in")
    config = httpx.get(f"http://{server.http_url}/v2/models/drop_in/config", timeout=60).json()
    assert config["backend"] == "vllm"
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert {tensor["name"] for tensor in config["input"]} >= {"text_input", "stream", "sampling_parameters", "image"}
    with Client(server.grpc_url, model="drop_in") as client:
        assert "Paris" in client.generate("The capital of France is", max_tokens=4, temperature=0.0).text
        with pytest.raises(errors.InvalidInput, match="max_tokens"):
            client.generate("x", sampling={"max_tokenz": 1})
    assert server.stop() == 0
    assert server.leftovers == []


def test_a_wrong_model_json_is_named(start_server: StartServer, repository):
    """An unknown key fails the load with the key and the nearest known one; nothing is left over."""
    folder = repository / "broken"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text('backend: "vllm"\n')
    (folder / "1" / "model.json").write_text('{"model": "m", "max_model_length": 5}')
    with pytest.raises(Exception, match=r"max_model_length.*max_model_len"):
        start_server("broken")


def test_reloads_with_metrics_on(start_server: StartServer, repository):
    """Answers and reloads in turn: no crash, and the page goes on counting where the instance before had stopped."""
    folder = repository / "metered"
    shutil.copytree(repository / "simulated", folder, ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "config.pbtxt").open("a") as settings:
        settings.write('parameters { key: "REPORT_CUSTOM_METRICS" value { string_value: "true" } }\n')
    server = start_server("metered")
    instances = {_processes(server)[0].pid}
    for number in range(1, 6):
        _two_tokens(server)
        # Triton loads a model again only when its files have changed.
        with (folder / "1" / "model.json").open("a") as settings:
            settings.write("\n")
        loaded = httpx.post(f"http://{server.http_url}/v2/repository/models/metered/load", json={}, timeout=60)
        assert loaded.status_code == 200, loaded.text
        _two_tokens(server)
        until(lambda number=number: _tokens_on_the_page(server) == 4 * number)
        instances |= {child.pid for child in psutil.Process(server.pid).children() if "stub" in child.cmdline()[0]}
    assert len(instances) >= 6, "each load made an instance"
    assert server.running
    assert server.stop() == 0, server.log()[-4000:]
    assert server.leftovers == []


def _two_tokens(server: TritonServer) -> None:
    with Client(server.grpc_url, model="metered") as client:
        assert client.generate("tell me", max_tokens=2, ignore_eos=True).output_tokens == 2


def _tokens_on_the_page(server: TritonServer) -> float:
    page = httpx.get(server.metrics_url, timeout=60).text
    [value] = re.findall(r'^vllm:generation_tokens_total{model="metered",version="1"} (\S+)$', page, re.MULTILINE)
    return float(value)
