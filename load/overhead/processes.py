"""CPU time of the server's processes, from /proc."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
import psutil

from load.overhead.measure import BenchFailed

if TYPE_CHECKING:
    from collections.abc import Iterable

STUB = "triton_python_backend_stub"


class Serving(msgspec.Struct, frozen=True):
    """CPU seconds (user and system, all threads) of the processes that serve; the engine's own are not among them."""

    tritonserver: float
    stub: float

    @property
    def both(self) -> float:
        """Their sum."""
        return self.tritonserver + self.stub

    def __sub__(self, earlier: Serving) -> Serving:
        """Return what was used since."""
        return Serving(self.tritonserver - earlier.tritonserver, self.stub - earlier.stub)


class ServingProcesses:
    """One tritonserver and the stubs of its models.

    Args:
        pid: tritonserver's process id.

    """

    def __init__(self, pid: int) -> None:
        self._server = psutil.Process(pid)
        # vLLM's processes are children of a stub; only tritonserver's own children are stubs.
        self.stubs = [child for child in self._server.children() if _is_stub(child)]
        if not self.stubs:
            raise BenchFailed(f"tritonserver (pid {pid}) runs no Python backend stub")

    def used(self) -> Serving:
        """Return the CPU time used so far."""
        return Serving(tritonserver=_cpu(self._server), stub=sum(map(_cpu, self.stubs)))


def settle(processes: Iterable[psutil.Process], *, share: float = 0.05, limit_s: float = 5.0) -> float:
    """Wait until the processes sleep, at most ``limit_s``.

    Args:
        processes: which.
        share: of one core, all together; below it they count as asleep.
        limit_s: seconds after which they are taken as they are.

    Returns:
        Their last share of one core.

    """
    watched = list(processes)
    end = time.monotonic() + limit_s
    while True:
        began, before = time.monotonic(), sum(map(_cpu, watched))
        time.sleep(0.25)
        now = time.monotonic()
        found = (sum(map(_cpu, watched)) - before) / (now - began)
        if found < share or now > end:
            return max(found, 0.0)


def _is_stub(process: psutil.Process) -> bool:
    try:
        return STUB in " ".join(process.cmdline()[:1])
    except psutil.Error:
        return False


def _cpu(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
