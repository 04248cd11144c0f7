"""CPU time of the server's processes, from /proc."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil

from load.overhead.measure import BenchFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

STUB = "triton_python_backend_stub"
TRITONS = "Triton's own"


class Serving(msgspec.Struct, frozen=True):
    """CPU seconds (user and system, all threads) of the processes that serve; the engine's own are not among them."""

    tritonserver: float
    stub: float
    threads: dict[str, float] = {}
    """Of the stub's threads, by name; those that Triton itself starts there are :data:`TRITONS`."""

    @property
    def both(self) -> float:
        """Their sum."""
        return self.tritonserver + self.stub

    def __sub__(self, earlier: Serving) -> Serving:
        """Return what was used since."""
        threads = {name: used - earlier.threads.get(name, 0.0) for name, used in self.threads.items()}
        return Serving(self.tritonserver - earlier.tritonserver, self.stub - earlier.stub, threads)


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
        threads: defaultdict[str, float] = defaultdict(float)
        for stub in self.stubs:
            for name, used in _threads(stub):
                threads[name] += used
        return Serving(tritonserver=_cpu(self._server), stub=sum(map(_cpu, self.stubs)), threads=dict(threads))


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


def _threads(process: psutil.Process) -> Iterator[tuple[str, float]]:
    """Yield the name and the CPU seconds of each thread that is alive."""
    with contextlib.suppress(psutil.Error, OSError):
        for thread in process.threads():
            name = Path(f"/proc/{process.pid}/task/{thread.id}/comm").read_text(encoding="utf-8").strip()
            yield TRITONS if STUB.startswith(name) else name, thread.user_time + thread.system_time


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
