"""The three ports of a server: chosen free, or checked before anything is started."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields

import psutil

from triton_lifecycle.launcher import LauncherError

SEARCH = range(20_000, 32_000)
"""Below Linux's ephemeral range, so that no outgoing connection takes the port between the check and its use."""


class PortTaken(LauncherError):
    """A wanted port is in use; the message names it and, where visible, who holds it."""


@dataclass(frozen=True)
class Ports:
    """Where a server listens; the defaults are Triton's own."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002

    @classmethod
    def free(cls, host: str = "127.0.0.1") -> Ports:
        """Return three ports that are free on ``host`` now."""
        return cls(*free_ports(host, len(fields(cls))))

    def check(self, host: str) -> None:
        """Raise unless all three are different and free on ``host``."""
        check_ports({name: (host, port) for name, port in asdict(self).items()})


def check_ports(wanted: Mapping[str, tuple[str, int]]) -> None:
    """Raise unless all ports are different and free.

    Args:
        wanted: what each is for, as messages name it, with its address and its number.

    Raises:
        PortTaken: one is in use.
        LauncherError: one is none, or is given twice.

    """
    numbers = [port for _, port in wanted.values()]
    for name, (host, port) in wanted.items():
        if not 0 < port < 65536:
            raise LauncherError(f"the {name} port is {port}; it must lie between 1 and 65535")
        if numbers.count(port) > 1:
            raise LauncherError(f"port {port} is given twice; {', '.join(wanted)} each need their own")
        if not is_free(host, port):
            raise PortTaken(
                f"port {port} ({name}) on {host} is in use by {user_of(port)}. "
                "End that process, choose another port, or leave the ports out to have free ones chosen."
            )


def free_ports(host: str, count: int, *, besides: Collection[int] = ()) -> list[int]:
    """Return so many different ports, none of ``besides``, that are free on ``host`` now."""
    found: list[int] = []
    for port in random.SystemRandom().sample(SEARCH, len(SEARCH)):
        if len(found) == count:
            break
        if port not in besides and is_free(host, port):
            found.append(port)
    if len(found) < count:
        raise LauncherError(f"there are not {count} free ports between {SEARCH.start} and {SEARCH.stop} on {host}")
    return found


def is_free(host: str, port: int) -> bool:
    """Tell whether a server could listen on the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: connections still closing (TIME_WAIT) do not count, a listener does.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except PermissionError as error:
            raise LauncherError(f"port {port} needs privileges this user has not; choose one above 1023") from error
        except socket.gaierror as error:
            raise LauncherError(f"{host!r} is no address of this machine: {error.strerror}") from error
        except OSError as error:
            if error.errno == 99:  # EADDRNOTAVAIL
                raise LauncherError(f"{host!r} is no address of this machine") from error
            return False
    return True


def holder(port: int) -> psutil.Process | None:
    """Return the process that listens on the port, if this user may see it."""
    try:
        for connection in psutil.net_connections(kind="tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if listens and connection.pid:
                return psutil.Process(connection.pid)
    except psutil.Error:
        pass
    return None


def user_of(port: int) -> str:
    """Say in words who holds the port."""
    process = holder(port)
    if process is None:
        return "a process this user cannot see"
    try:
        return f"{process.name()} (pid {process.pid})"
    except psutil.Error:
        return f"pid {process.pid}"
