"""Runs one tritonserver from start to a clean end, whatever ends it."""

from __future__ import annotations

import atexit
import contextlib
import http.client
import os
import shutil
import signal
import subprocess
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from triton_lifecycle.engine.guardian import DEATHS
from triton_lifecycle.launcher import LauncherError, Progress, leftovers, serverlog, silent
from triton_lifecycle.launcher.installation import (
    SERVED_AS,
    assemble_backends,
    backend_source,
    child_environment,
    find_installation,
    state_folder,
)
from triton_lifecycle.launcher.leftovers import Footprint
from triton_lifecycle.launcher.ports import Ports

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

POLL_S = 0.05
LOOK_S = 0.5
PROGRESS_S = 15.0
LOGS_KEPT = 20
MARGIN_S = 15.0
"""Beyond its exit timeout, Triton needs some seconds to unload the models."""


class StartFailed(LauncherError):
    """The server did not come up; the message holds what its log says about it."""


class TritonServer:
    """A tritonserver as a child process.

    It runs in a process group of its own, so a terminal's Ctrl-C reaches it (and vLLM's processes below it) only
    through this object. Not in a session of its own: Linux may schedule each session as one unit (autogroup), and then
    who asks the server can stand still for seconds beside an engine that computes on the CPU (decision 0033). When it
    ends, for whatever reason, a watcher ends what it left running and removes its shared memory.

    Args:
        model_repository: Triton's model repository.
        models: the models to load; ``None`` loads all.
        ports: where to listen; ``None`` takes free ports.
        host: address to listen on.
        exit_timeout_s: how long running requests may go on after SIGTERM.
        extra_args: further arguments for tritonserver; they come last and so win.
        env: further environment variables.
        log_path: file for the server's output; by default one under ``.lifecycle/logs``.
        source: the folder that holds our ``model.py``; by default the one of this package.
        served_as: backend names that lead to it; ``()`` leaves the plain Python backend alone.
        state: folder for layouts, logs and records; by default ``.lifecycle`` in the project.

    """

    def __init__(
        self,
        model_repository: Path | str,
        *,
        models: Sequence[str] | None = None,
        ports: Ports | None = None,
        host: str = "127.0.0.1",
        exit_timeout_s: float = 30.0,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        source: Path | None = None,
        served_as: Sequence[str] = SERVED_AS,
        state: Path | None = None,
    ) -> None:
        self.model_repository = Path(model_repository).absolute()
        self.models = None if models is None else list(models)
        self.ports = ports
        self.host = host
        self.exit_timeout_s = exit_timeout_s
        self.extra_args = list(extra_args)
        self.env = dict(env or {})
        self.source = source or backend_source()
        self.served_as = tuple(served_as)
        self.state = state or state_folder()
        self.id = uuid.uuid4().hex
        self._given_log = log_path
        self._logs = self.state / "logs"
        self.log_path = log_path or self._logs / f"server-{time.strftime('%m%d-%H%M%S')}-{self.id[:6]}.log"
        self.leftovers: list[str] = []
        """What had to be removed by force after the server's end."""
        self.swept: list[str] = []
        """What was removed at the start, left by servers that were killed together with their launchers."""
        self._process: subprocess.Popen[bytes] | None = None
        self._footprint: Footprint | None = None
        self._ended = threading.Event()
        self._stop_asked = threading.Event()

    @property
    def pid(self) -> int:
        """The tritonserver's process id."""
        return self._started().pid

    @property
    def http_url(self) -> str:
        """``host:port``, as ``tritonclient.http`` wants it."""
        return f"{self._reachable}:{self._ports.http}"

    @property
    def grpc_url(self) -> str:
        """``host:port``, as ``tritonclient.grpc`` wants it."""
        return f"{self._reachable}:{self._ports.grpc}"

    @property
    def metrics_url(self) -> str:
        """The address of Triton's metrics, with scheme and path."""
        return f"http://{self._reachable}:{self._ports.metrics}/metrics"

    @property
    def exit_code(self) -> int | None:
        """The tritonserver's exit code once it and all it left are gone; negative for a signal; ``None`` before."""
        return self._process.returncode if self._process is not None and self._ended.is_set() else None

    @property
    def running(self) -> bool:
        """Whether tritonserver was started and has not ended."""
        return self._process is not None and not self._ended.is_set() and self._process.poll() is None

    def again(self) -> TritonServer:
        """Return a new server with this one's settings and ports, not yet started. The log begins anew."""
        return TritonServer(
            self.model_repository,
            models=self.models,
            ports=self.ports,
            host=self.host,
            exit_timeout_s=self.exit_timeout_s,
            extra_args=self.extra_args,
            env=self.env,
            log_path=self._given_log,
            source=self.source,
            served_as=self.served_as,
            state=self.state,
        )

    @property
    def stub_died(self) -> bool:
        """Whether a model's process has died unasked: tritonserver would let its callers wait for ever."""
        return self.running and self._deaths.exists()

    @property
    def _deaths(self) -> Path:
        return self.state / "servers" / f"{self.id}.deaths"

    def processes(self) -> list[psutil.Process]:
        """Return the living processes of this server: tritonserver, stubs, and what runs below them."""
        return self._footprint.processes() if self._footprint else []

    def start(self) -> TritonServer:
        """Start tritonserver and return at once; :meth:`wait_ready` waits for the models.

        Raises:
            LauncherError: repository, model, port or installation is not as it must be; nothing was started.

        """
        if self._process is not None:
            raise LauncherError("this server was started before; make a new TritonServer for another start")
        self._check_repository()
        self._check_log()
        installation = find_installation()
        ports = self.ports = self.ports or Ports.free(self.host)
        ports.check(self.host)
        self.swept += leftovers.sweep_dead(self.state / "servers")
        backends = assemble_backends(installation, self.state, self.source, self.served_as)
        mark = {leftovers.MARK: self.id, DEATHS: str(self._deaths)}
        environment = child_environment(installation, mark=mark, given=self.env, source=self.source)
        command = [*dies_with_us(), str(installation.binary), *self._arguments(ports, backends)]
        self._prune_logs()
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, process_group=0
            )
        try:
            self._supervise(self._process.pid)
        except BaseException:  # even Ctrl-C must not leave a server that nobody watches
            self._process.kill()
            raise
        return self

    @property
    def shm_prefix(self) -> str:
        """How the names of this server's shared memory regions begin: its own, so that servers cannot meet there."""
        return f"tlc_{self.id[:12]}_"

    def wait_ready(self, timeout: float = 300.0, on_progress: Progress = silent) -> TritonServer:
        """Wait until all models are ready.

        Args:
            timeout: seconds; a server that is not ready by then is killed.
            on_progress: receives a line for each phase of the start, and now and then that the last goes on.

        Raises:
            StartFailed: the server ended or did not get ready in time.

        """
        process = self._started()
        begin = time.monotonic()
        told: list[str] = []
        told_at, next_look = 0.0, 0.0
        while not self.is_ready():
            elapsed = time.monotonic() - begin
            if process.poll() is not None:
                self._ended.wait(30)
                if self._stop_asked.is_set():
                    raise StartFailed("the server was stopped while it was starting")
                raise StartFailed(
                    f"tritonserver ended with code {process.returncode} while it was starting:\n"
                    f"{_indented(serverlog.explain(self.log()))}\nIts whole log: {self.log_path}"
                )
            if elapsed > timeout:
                text = self.log()
                self.kill()
                raise StartFailed(
                    f"tritonserver was not ready after {timeout:.0f} s"
                    f" (last seen {serverlog.phase(text) or 'starting'}) and was ended:\n"
                    f"{_indented(serverlog.explain(text))}\nIts whole log: {self.log_path}"
                )
            if elapsed >= next_look:
                next_look = elapsed + LOOK_S
                phase = serverlog.phase(self.log()) or "starting tritonserver"
                # Models, and the processes below them, write at the same time: a phase seen again is nothing new.
                new = phase not in told
                if new:
                    told.append(phase)
                if new or elapsed >= told_at + PROGRESS_S:
                    told_at = elapsed
                    on_progress(f"{elapsed:3.0f} s  {'' if new else 'still '}{told[-1]}")
            time.sleep(POLL_S)
        if not told:
            on_progress(f"{time.monotonic() - begin:3.0f} s  ready")
        if self._footprint is not None:
            self._footprint.observe()
        return self

    def stop(self, grace_s: float | None = None) -> int:
        """End the server in order and return its exit code.

        tritonserver alone gets SIGTERM: it lets running requests finish, then unloads the models, which ends vLLM. A
        second Ctrl-C during the wait ends it at once.

        Args:
            grace_s: seconds after which it is killed; by default its exit timeout and a margin.

        """
        self._started()
        if self._footprint is not None and self.running:
            self._footprint.observe()
        self.terminate()
        grace = self.exit_timeout_s + MARGIN_S if grace_s is None else grace_s
        try:
            if not self._wait_exit(grace):
                self.leftovers.append(f"tritonserver did not end within {grace:.0f} s of SIGTERM and was killed")
                self.kill()
        except KeyboardInterrupt:
            self.kill()
            raise
        self._ended.wait(30)
        return self._started().returncode

    def terminate(self) -> None:
        """Send SIGTERM to tritonserver, once; does not wait."""
        if not self._stop_asked.is_set():
            self._stop_asked.set()
            with contextlib.suppress(ProcessLookupError):
                self._started().terminate()

    def kill(self) -> None:
        """End the server and everything below it at once."""
        if self._process is None or self._ended.is_set():
            return
        if self._footprint is not None:
            self._footprint.observe()
        self.abort()
        self._ended.wait(30)

    def abort(self) -> None:
        """Kill tritonserver and return at once; the watcher does the rest. Safe in a signal handler."""
        self._stop_asked.set()
        if self._process is not None and not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait until the server and all it left are gone; returns the exit code, ``None`` after the timeout."""
        return self._started().returncode if self._ended.wait(timeout) else None

    def log(self) -> str:
        """Return what the server has written (the end of it, if it is long)."""
        return serverlog.read(self.log_path)

    def __enter__(self) -> TritonServer:
        return self if self._process is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _supervise(self, pid: int) -> None:
        self._footprint = Footprint(self.id, self.shm_prefix, pid, _created(pid))
        record = self.state / "servers" / f"{self.id}.json"
        leftovers.write_record(record, self._footprint, log=str(self.log_path))
        atexit.register(self.kill)
        threading.Thread(target=self._watch, args=(record,), name=f"tritonserver-{pid}", daemon=True).start()

    def _watch(self, record: Path) -> None:
        # The only place that waits for the process without limit, and the only one that cleans up after it.
        self._started().wait()
        try:
            if self._footprint is not None:
                self.leftovers += self._footprint.sweep()
            record.unlink(missing_ok=True)
            self._deaths.unlink(missing_ok=True)
        finally:
            atexit.unregister(self.kill)
            self._ended.set()

    def _wait_exit(self, timeout: float) -> bool:
        end = time.monotonic() + timeout
        while not self._ended.wait(0.1):
            if self._started().poll() is None and time.monotonic() > end:
                return False
        return True

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise LauncherError("the server has not been started")
        return self._process

    @property
    def _ports(self) -> Ports:
        if self.ports is None:
            raise LauncherError("the server has no ports before it is started")
        return self.ports

    @property
    def _reachable(self) -> str:
        return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)  # noqa: S104

    def is_ready(self) -> bool:
        """Ask the server, within two seconds, whether all its models are ready."""
        # Straight to the server: urllib would honour a proxy from the environment even for this machine.
        connection = http.client.HTTPConnection(self._reachable.strip("[]"), self._ports.http, timeout=2)
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _check_repository(self) -> None:
        if not self.model_repository.is_dir():
            raise LauncherError(f"the model repository {self.model_repository} does not exist or is no folder")
        have = sorted(p.name for p in self.model_repository.iterdir() if p.is_dir() and not p.name.startswith("."))
        if not have:
            raise LauncherError(
                f"the model repository {self.model_repository} holds no model; it needs a folder for each, "
                "with config.pbtxt and a version folder such as 1/ inside"
            )
        for model in self.models or ():
            if model not in have:
                raise LauncherError(
                    f"there is no model {model!r} in {self.model_repository}; it has: {', '.join(have)}"
                )

    def _check_log(self) -> None:
        # The logs folder is ours to make; one that somebody named may be mistyped, and a server is often run as root.
        folder = self.log_path.parent
        if folder != self._logs and not folder.is_dir():
            raise LauncherError(f"the folder {folder} for the log {self.log_path.name} does not exist; make it first")
        if self.log_path.is_dir():
            raise LauncherError(f"the log {self.log_path} is a folder; name a file in it")
        if folder.is_dir() and not os.access(self.log_path if self.log_path.exists() else folder, os.W_OK):
            raise LauncherError(f"the log {self.log_path} cannot be written by this user; choose another place")

    def _arguments(self, ports: Ports, backends: Path) -> list[str]:
        arguments = [
            f"--model-repository={self.model_repository}",
            f"--backend-directory={backends}",
            f"--backend-config=python,shm-region-prefix-name={self.shm_prefix}",
            f"--http-address={self.host}",
            f"--http-port={ports.http}",
            f"--grpc-address={self.host}",
            f"--grpc-port={ports.grpc}",
            f"--metrics-address={self.host}",
            f"--metrics-port={ports.metrics}",
            f"--exit-timeout-secs={max(1, round(self.exit_timeout_s))}",
        ]
        if self.models is not None:
            arguments += ["--model-control-mode=explicit", *(f"--load-model={model}" for model in self.models)]
        return arguments + self.extra_args

    def _prune_logs(self) -> None:
        if self.log_path.parent == self._logs:
            self._logs.mkdir(parents=True, exist_ok=True)
            # Many replicas, or one that says little, may be older than so many others: their logs are still written.
            kept = leftovers.logs_in_use(self.state / "servers")
            logs = [path for path in self._logs.glob("server-*.log") if path.resolve() not in kept]
            for path in sorted(logs, key=_written_at)[:-LOGS_KEPT]:
                path.unlink(missing_ok=True)

    def exit_timed_out(self) -> bool:
        """Tell whether the server ended before its work did, since its exit timeout had passed."""
        return serverlog.exit_timed_out(self.log())

    def end_story(self) -> str:
        """Say how the server ended and what its log holds about it."""
        code = self._started().returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended by itself with code {code}"
        return f"tritonserver {how}:\n{_indented(serverlog.explain(self.log()))}\nIts whole log: {self.log_path}"


def dies_with_us() -> list[str]:
    """Return what stands before a command so that its process ends with this one; nothing where that cannot be."""
    # Should this process be killed (-9), the kernel sends tritonserver SIGTERM. The kernel means the thread that
    # starts it, so only the main thread may ask for it. `setpriv` becomes tritonserver: same process, no child between.
    if threading.current_thread() is threading.main_thread() and (setpriv := shutil.which("setpriv")):
        return [setpriv, "--pdeathsig", "TERM", "--"]
    return []


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another launcher was quicker
        return 0.0


def _created(pid: int) -> float:
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return time.time()


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
