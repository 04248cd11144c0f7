"""Knows which processes and shared memory belong to one server, and removes what outlives it.

The stub, EngineCore and Worker are children of tritonserver's children; when one in the chain is killed the rest is
handed to init and its parentage says nothing any more. So a process counts as the server's if it carries the server's
mark in its environment, or is in its process group, or was seen as a descendant while the tree was whole. (The mark
alone would not do: vLLM sets process titles, which may overwrite what the kernel shows as a process's environment.)
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import psutil

MARK = "TRITON_LIFECYCLE_SERVER"
SHM = Path("/dev/shm")  # noqa: S108 - the kernel's name for POSIX shared memory
PATIENCE_S = 5.0
TRACKER_S = 3.0
_ENGINE_REGIONS = ("psm_", "sem.", "torch_", "mp-", "vllm")
"""How Python's and torch's shared memory is named; other mapped files may be a client's and are never touched."""


@dataclass
class Footprint:
    """What one server occupies.

    Args:
        mark: the value of the mark in the environment of its processes.
        prefix: how the names of its shared memory regions begin.
        pid: tritonserver's process id, which is its process group's id too.
        created: tritonserver's start time as psutil gives it, in Unix seconds.

    """

    mark: str
    prefix: str
    pid: int
    created: float
    _seen: set[psutil.Process] = field(default_factory=set)
    _regions: set[Path] = field(default_factory=set)

    def server_lives(self) -> bool:
        """Tell whether tritonserver itself runs."""
        return process_lives(self.pid, self.created)

    def processes(self) -> list[psutil.Process]:
        """Return the server's living processes, tritonserver included."""
        found = {process for process in self._seen if _alive(process)}
        for process in psutil.process_iter():
            if process.pid != os.getpid() and process not in found and self._owns(process):
                found.add(process)
        return sorted(found, key=lambda process: process.pid)

    def observe(self) -> list[psutil.Process]:
        """Remember the present processes and the shared memory they have mapped."""
        processes = self.processes()
        self._seen.update(processes)
        for process in processes:
            # tritonserver maps what clients registered with it; that is not ours to remove.
            if process.pid != self.pid:
                self._regions.update(_mapped(process.pid))
        return processes

    def sweep(self, *, patience_s: float | None = None) -> list[str]:
        """End every process and remove every region that is left once tritonserver is gone.

        Args:
            patience_s: how long processes that are already ending may take; by default ``PATIENCE_S``.

        Returns:
            A line for each thing that had to be removed by force; empty after a clean stop.

        """
        told: list[str] = []
        processes = self.observe()
        _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S if patience_s is None else patience_s)
        # A resource tracker ends by itself after its users, and removes their shared memory when it does.
        trackers = [process for process in alive if _is_tracker(process)]
        told += _kill([process for process in alive if process not in trackers])
        _, alive = psutil.wait_procs(trackers, timeout=TRACKER_S)
        told += _kill(alive)
        told += _kill(self.processes())  # one born meanwhile
        for region in sorted(self._regions | set(SHM.glob(f"{self.prefix}*"))):
            with contextlib.suppress(FileNotFoundError):
                region.unlink()
                told.append(f"removed shared memory {region.name}")
        return told

    def _owns(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_ZOMBIE or process.create_time() < self.created - 1:
                return False
            if os.getpgid(process.pid) == self.pid:
                return not self._number_reused()
            return process.environ().get(MARK) == self.mark
        return False

    def _number_reused(self) -> bool:
        # The kernel gives a number out again only when no process of its group is left.
        try:
            return abs(psutil.Process(self.pid).create_time() - self.created) >= 1.0
        except psutil.Error:
            return False


def write_record(path: Path, footprint: Footprint, **more: str) -> None:
    """Write down a running server, so that a later start can clean up after it should its launcher be killed."""
    facts = {"mark": footprint.mark, "prefix": footprint.prefix, "pid": footprint.pid, "created": footprint.created}
    launcher = {
        "launcher_pid": os.getpid(),
        "launcher_created": psutil.Process().create_time(),
        "booted": psutil.boot_time(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(facts | launcher | more), encoding="utf-8")
    partial.replace(path)


def dead_servers(folder: Path) -> list[tuple[Path, Footprint]]:
    """Return the recorded servers of which neither tritonserver nor the launcher lives."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            if abs(facts["booted"] - psutil.boot_time()) > 60:  # all of it went with the machine's last run
                path.unlink(missing_ok=True)
                continue
            footprint = Footprint(facts["mark"], facts["prefix"], facts["pid"], facts["created"])
            if not footprint.server_lives() and not process_lives(facts["launcher_pid"], facts["launcher_created"]):
                found.append((path, footprint))
        except (OSError, ValueError, KeyError, TypeError):
            path.unlink(missing_ok=True)
    return found


def sweep_dead(folder: Path) -> list[str]:
    """Clean up after every dead server recorded in ``folder``; returns a line per thing removed."""
    told: list[str] = []
    for path, footprint in dead_servers(folder):
        told += footprint.sweep(patience_s=0.2)
        path.unlink(missing_ok=True)
    return told


def logs_in_use(folder: Path) -> set[Path]:
    """Return the logs of the recorded servers, dead ones that nobody has cleaned up after included."""
    found = set()
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found.add(Path(json.loads(path.read_text(encoding="utf-8"))["log"]).resolve())
    return found


def process_lives(pid: int, created: float) -> bool:
    """Tell whether this very process runs, not merely one with its number."""
    try:
        process = psutil.Process(pid)
        return _alive(process) and abs(process.create_time() - created) < 1.0
    except psutil.Error:
        return False


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _mapped(pid: int) -> set[Path]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if f" {SHM}/" in line}
    return {p for p in paths if p.name.startswith(_ENGINE_REGIONS) and not p.name.endswith("(deleted)")}


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def _kill(processes: list[psutil.Process]) -> list[str]:
    told = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            name = process.name()
            process.kill()
            told.append(f"ended {name} (pid {process.pid})")
    psutil.wait_procs(processes, timeout=5)
    return told
