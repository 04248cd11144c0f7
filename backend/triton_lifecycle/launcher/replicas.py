"""Several tritonservers behind one Envoy, as one thing that starts, serves and ends."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from triton_lifecycle import config
from triton_lifecycle.launcher import LauncherError, Progress, silent
from triton_lifecycle.launcher.balancer import Balancer
from triton_lifecycle.launcher.envoy import Front, Policy, Replica
from triton_lifecycle.launcher.ports import Ports, free_ports
from triton_lifecycle.launcher.restarts import MOST_RESTARTS, Restarts
from triton_lifecycle.launcher.server import TritonServer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from triton_lifecycle.config import Distributed

LOOK_S: Final = 0.2
NODE_NAME: Final = "LIFECYCLE__DISTRIBUTED__NODE_NAME"


@dataclass
class _Member:
    """One replica, over all its restarts."""

    server: TritonServer
    name: str
    restarts: Restarts
    ready: bool = False
    given_up: bool = False
    started_at: float = 0.0


class Fleet:
    """Replicas and the load balancer before them, for :class:`~triton_lifecycle.launcher.foreground.Foreground`.

    A replica that dies, or whose model's process dies, is started again on its ports while the others serve; so is
    Envoy. One that dies too often stays down; with the last of them the whole ends.

    Args:
        servers: not started yet, each with ports of its own.
        balancer: before them, not started yet.
        say: receives what happens to the replicas.
        restarts: how often within ten minutes each may be started again.
        ready_timeout_s: how long a replica that is started again may take to load its models.

    """

    def __init__(
        self,
        servers: Sequence[TritonServer],
        balancer: Balancer,
        *,
        say: Progress = silent,
        restarts: int = MOST_RESTARTS,
        ready_timeout_s: float = 600.0,
    ) -> None:
        self.members = [
            _Member(server, f"replica {number}", Restarts(restarts)) for number, server in enumerate(servers, start=1)
        ]
        self.balancer = balancer
        self._say = say
        self._restarts = restarts
        self._ready_timeout_s = ready_timeout_s
        self._balancer_restarts = Restarts(restarts)
        self._fault: str | None = None
        self.leftovers: list[str] = []
        """What had to be removed by force after an end."""
        self.swept: list[str] = []
        """What servers that were killed earlier had left."""

    @property
    def servers(self) -> list[TritonServer]:
        """The replicas as they are now."""
        return [member.server for member in self.members]

    @property
    def exit_timeout_s(self) -> float:
        """How long running requests get at the end."""
        return max(server.exit_timeout_s for server in self.servers)

    @property
    def log_path(self) -> Path:
        """The first replica's log; the others lie beside it."""
        return self.members[0].server.log_path

    @property
    def stub_died(self) -> bool:
        """Whether a death is left to whoever keeps this; there is none, as replicas are started again here."""
        return False

    def again(self) -> Fleet:
        """Return a new one with the same settings, not yet started."""
        return Fleet(
            [server.again() for server in self.servers],
            self.balancer.again(),
            say=self._say,
            restarts=self._restarts,
            ready_timeout_s=self._ready_timeout_s,
        )

    def start(self) -> None:
        """Start all and return at once.

        Raises:
            LauncherError: one cannot be started; none is left then.

        """
        # All ports first: models take long to load, and a fleet without its front would have loaded them in vain.
        self.balancer.check_ports()
        for server in self.servers:
            if server.ports is not None:
                server.ports.check(server.host)
        try:
            for member in self.members:
                self._start(member)
            self.balancer.start()
        except BaseException:
            self.kill()
            raise

    def wait_ready(self, timeout: float = 300.0, on_progress: Progress = silent) -> None:
        """Wait until each replica is ready and Envoy knows it.

        Raises:
            LauncherError: one ended or did not get ready in time.

        """
        until = time.monotonic() + timeout
        for member in self.members:
            left = max(0.1, until - time.monotonic())
            member.server.wait_ready(left, lambda line, name=member.name: on_progress(f"{name}: {line}"))  # type: ignore[misc]
            member.ready = True
        self.balancer.wait_ready(max(5.0, until - time.monotonic()))

    def wait(self, timeout: float = LOOK_S) -> int | None:
        """Look after all for about ``timeout`` seconds; return an exit code once nothing can serve any more."""
        for member in self.members:
            if not member.given_up:
                self._look_after(member)
        if not self.balancer.running:
            self._restart_balancer()
        if all(member.given_up for member in self.members):
            self._fault = "every replica has died too often"
        if self._fault is not None:
            return 1
        time.sleep(timeout)
        return None

    def stop(self) -> int:
        """End all in order: no new connections, running requests go on, then Envoy; return the worst exit code."""
        self.balancer.close()
        running = [member.server for member in self.members if member.server.running]
        for server in running:
            server.terminate()
        codes = [server.stop() for server in running]
        self.balancer.stop()
        self._collect()
        return next((code for code in codes if code != 0), 0)

    def kill(self) -> None:
        """End everything at once."""
        self.abort()
        self.balancer.kill()
        for server in self.servers:
            server.kill()
        self._collect()

    def abort(self) -> None:
        """Kill everything and return at once. Safe in a signal handler."""
        for member in self.members:
            member.server.abort()
        self.balancer.abort()

    def exit_timed_out(self) -> bool:
        """Tell whether a replica ended before its work did, since its exit timeout had passed."""
        return any(server.exit_timed_out() for server in self.servers)

    def end_story(self) -> str:
        """Say why this ended by itself."""
        return self._fault or "the replicas were ended"

    def _start(self, member: _Member) -> None:
        member.ready = False
        member.started_at = time.monotonic()
        member.server.start()

    def _look_after(self, member: _Member) -> None:
        server, now = member.server, time.monotonic()
        if server.wait(0) is not None:
            fault = server.end_story()
        elif server.stub_died:
            fault = f"a model's process has died; the server's log: {server.log_path}"
        elif member.ready:
            return
        elif server.is_ready():
            member.ready = True
            self._say(f"{member.name} is ready")
            return
        elif now - member.started_at > self._ready_timeout_s:
            fault = f"it was not ready after {self._ready_timeout_s:.0f} s; its log: {server.log_path}"
        else:
            return
        # Whoever waits for an answer of the dead is told by the closed connection.
        server.kill()
        self._collect()
        if not member.restarts.one_more(now):
            member.given_up = True
            self._say(f"{member.name} has died too often and stays down: {fault}")
            return
        self._say(f"{member.name} is started again ({member.restarts}): {fault}")
        member.server = server.again()
        try:
            self._start(member)
        except LauncherError as error:
            member.given_up = True
            self._say(f"{member.name} cannot be started again: {error}")

    def _restart_balancer(self) -> None:
        story = self.balancer.end_story()
        self.balancer.kill()
        if not self._balancer_restarts.one_more(time.monotonic()):
            self._fault = story
            return
        self._say(f"the load balancer is started again ({self._balancer_restarts}): {story}")
        self.balancer = self.balancer.again()
        try:
            self.balancer.start()
        except LauncherError as error:
            self._fault = str(error)

    def _collect(self) -> None:
        for server in self.servers:
            self.leftovers += server.leftovers
            self.swept += server.swept
            server.leftovers, server.swept = [], []


def make_fleet(
    repository: Path,
    count: int,
    *,
    front: Front,
    models: Sequence[str] | None = None,
    policy: Policy | None = None,
    metrics_ports: Sequence[int] | None = None,
    exit_timeout_s: float = 30.0,
    restarts: int = MOST_RESTARTS,
    env: Mapping[str, str] | None = None,
    say: Progress = silent,
    state: Path | None = None,
) -> Fleet:
    """Return replicas of one model repository with free ports on the loopback, and Envoy before them.

    Args:
        repository: which all of them load.
        count: how many.
        front: where Envoy listens.
        models: the models to load; ``None`` loads all.
        policy: how requests are spread.
        metrics_ports: one for each replica; free ones when left out.
        exit_timeout_s: how long running requests get at the end.
        restarts: see :class:`Fleet`.
        env: further environment variables of each.
        say: see :class:`Fleet`.
        state: see :class:`~triton_lifecycle.launcher.server.TritonServer`.

    """
    host = "127.0.0.1"
    free = free_ports(host, 3 * count, besides=(front.http, front.grpc, front.admin, *(metrics_ports or ())))
    ports = [
        Ports(free[3 * at], free[3 * at + 1], metrics_ports[at] if metrics_ports else free[3 * at + 2])
        for at in range(count)
    ]
    servers = [
        TritonServer(
            repository,
            models=models,
            ports=own,
            host=host,
            exit_timeout_s=exit_timeout_s,
            env={**_name(number, models), **(env or {})},
            state=state,
        )
        for number, own in enumerate(ports, start=1)
    ]
    replicas = [Replica(host, own.http, own.grpc) for own in ports]
    return Fleet(servers, Balancer(replicas, front, policy, state=state), say=say, restarts=restarts)


def _name(number: int, models: Sequence[str] | None) -> dict[str, str]:
    # Several models of one server would share the name, which each must have for itself: they make up their own.
    return {NODE_NAME: f"{socket.gethostname()}-{number}"} if models is not None and len(models) == 1 else {}


def settings_of(repository: Path, models: Sequence[str] | None) -> Distributed:
    """Return the section ``distributed`` of the models' configurations: the first that is switched on, else the first.

    Raises:
        ConfigError: a configuration is wrong.

    """
    names = models if models is not None else sorted(path.name for path in repository.iterdir() if path.is_dir())
    found = [config.load(repository / name / config.FILE_NAME).distributed for name in names]
    return next((section for section in found if section.enabled), found[0] if found else config.Distributed())
