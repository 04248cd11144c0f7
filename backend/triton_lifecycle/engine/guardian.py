"""The guardian: a small process that outlives the stub, so that nothing else does.

Whatever kills Triton's Python stub (a crash, ``kill -9``, the out-of-memory killer) leaves vLLM's engine processes
alive, holding gigabytes. The stub therefore starts this file in a process group of its own and holds the other end of
its standard input. When that pipe closes, the stub has ended: every process below it that still lives is ended too, and
the shared memory that they and the stub used is removed. When tritonserver itself dies, a stub that does not follow is
ended first.

An engine's processes are known by descent, looked at a few times a second, and by a mark in their environment: vLLM's
process titles overwrite what ``/proc`` shows of the environment, so the mark alone finds only the youngest.

Standard library only, since it runs as ``python -I guardian.py`` and must cost little.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Final

MARK: Final = "TRITON_LIFECYCLE_ENGINE"
"""Environment variable that the stub sets before it starts an engine; every descendant inherits it."""

DEATHS: Final = "TRITON_LIFECYCLE_DEATHS"
"""Environment variable with a file to which a guardian adds a line when its stub has died unasked."""

SHM: Final = Path("/dev/shm")  # noqa: S108 - not a temporary file: where POSIX shared memory lives
STUB_GRACE_S: Final = 3.0
ORDERLY_GRACE_S: Final = 1.0
KILL_GRACE_S: Final = 2.0
TRACKER_GRACE_S: Final = 2.0
POLL_S: Final = 0.25


class Family:
    """The processes below a stub, remembered so that they are known when the stub no longer is.

    Args:
        stub: its process id.
        mark: the value of :data:`MARK` in the environment of its engine's processes.

    """

    def __init__(self, stub: int, mark: str) -> None:
        self._stub = stub
        self._needle = f"{MARK}={mark}".encode()
        self._seen: dict[int, str] = {}
        self.memory: set[str] = set()
        """Names under /dev/shm that its members used when last looked at closely."""

    def look(self) -> None:
        """Remember every process that is below the stub now."""
        waiting = [self._stub]
        while waiting:
            for pid in _children(waiting.pop()):
                if pid != os.getpid():
                    self._seen.setdefault(pid, _started(pid))
                    waiting.append(pid)

    def look_closely(self) -> None:
        """Look everywhere, also for those whose parent has died, and at the shared memory in use."""
        self.look()
        for pid in _all_processes():
            with contextlib.suppress(OSError):
                if self._needle in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    self._seen.setdefault(pid, _started(pid))
        for pid in self.alive():
            self._seen.update({child: _started(child) for child in _children(pid)})
        self.memory |= shared_memory_of(self.alive())

    def alive(self) -> list[int]:
        """Return the members that live; a process that only inherited a number is none."""
        others = {os.getpid(), self._stub}
        return [pid for pid, at in self._seen.items() if pid not in others and _alive(pid) and _started(pid) == at]


def shared_memory_of(pids: list[int]) -> set[str]:
    """Return the names under /dev/shm that the given processes have mapped or open.

    A named semaphore is mapped under a name that it had only while it was made: its number in the file system finds
    the name it has.
    """
    names: dict[int, str] = {}
    with contextlib.suppress(OSError), os.scandir(SHM) as entries:
        names = {entry.inode(): entry.name for entry in entries}
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
                *_, inode, path = line.split(maxsplit=5) if line.count("/") else ("0", "")
                if path.startswith("/dev/shm/"):  # noqa: S108
                    name = path.removeprefix("/dev/shm/").removesuffix(" (deleted)")  # noqa: S108
                    found.add(names.get(int(inode), name))
    return found


def end_processes(pids: list[int], *, grace: float = 0.0) -> None:
    """Ask the processes to end, and kill those that have not within ``grace`` seconds."""
    if grace > 0 and pids:
        _signal(pids, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and any(_alive(pid) for pid in pids):
            time.sleep(0.05)
    _signal([pid for pid in pids if _alive(pid)], signal.SIGKILL)
    deadline = time.monotonic() + KILL_GRACE_S
    while time.monotonic() < deadline and any(_alive(pid) for pid in pids):
        time.sleep(0.02)


def end_engine(pids: list[int], *, grace: float) -> None:
    """End an engine's processes, Python's resource trackers last.

    A tracker ends by itself once its users are gone, and only then removes their named semaphores, which nobody else
    knows: killed with the rest, it would leave them under /dev/shm for ever.
    """
    trackers = [pid for pid in pids if is_tracker(pid)]
    end_processes([pid for pid in pids if pid not in trackers], grace=grace)
    deadline = time.monotonic() + TRACKER_GRACE_S
    for pid in trackers:
        _await_end(pid, deadline - time.monotonic())
    end_processes([pid for pid in trackers if _alive(pid)])


def remove_shared_memory(names: set[str]) -> None:
    """Unlink names under /dev/shm; those already gone are fine."""
    for name in names:
        with contextlib.suppress(OSError):
            (SHM / name).unlink()


def socket_folder(mark: str) -> Path:
    """Return the folder for an engine's sockets; vLLM leaves them wherever they are, so they get one of their own."""
    return Path(tempfile.gettempdir()) / f"tlc-{mark}"


class Guardian:
    """The stub's end of the guardian.

    Args:
        mark: the value of :data:`MARK` that this engine's processes carry.
        python: the interpreter that runs the guardian.

    """

    def __init__(self, mark: str, python: str) -> None:
        environment = {key: value for key, value in os.environ.items() if key != MARK}
        arguments = [python, "-I", __file__, mark, "--stub", str(os.getpid()), "--server", str(os.getppid())]
        self._process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, process_group=0, env=environment, close_fds=True
        )

    def tell_shared_memory(self) -> None:
        """Report what the stub has mapped by now; it can no longer be asked once it is dead."""
        self._say(f"shm {' '.join(sorted(shared_memory_of([os.getpid()])))}")

    def expect_end(self) -> None:
        """Have the engine's processes and their memory looked at closely, since they are about to be stopped."""
        self._say("ending")

    def dismiss(self) -> None:
        """Say that the engine was stopped; what is left of it is ended before this returns (at most 5 s)."""
        self._say("bye")
        pipe = self._process.stdin
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _say(self, line: str) -> None:
        pipe = self._process.stdin
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.write(f"{line}\n".encode())
                pipe.flush()


def watch(mark: str, stub: int, server: int, pipe: IO[bytes]) -> None:
    """Wait for the end of the engine, the stub or the server, then clean up. Returns when nothing is left to guard."""
    family = Family(stub, mark)
    used_by_stub: set[str] = set()
    orderly = False
    rest = b""
    while not orderly:
        readable, _, _ = select.select([pipe], [], [], POLL_S)
        family.look()
        if readable:
            data = os.read(pipe.fileno(), 65536)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                word, _, value = line.decode(errors="replace").partition(" ")
                orderly = orderly or word == "bye"
                if word == "ending":
                    family.look_closely()
                if word == "shm":
                    used_by_stub.update(value.split())
            if not data:
                break
        if not _alive(server):
            _await_end(stub, STUB_GRACE_S)
            end_processes([stub])
            break
    if not orderly and _alive(server):
        _report_death(stub)
    family.look_closely()
    end_engine(family.alive(), grace=ORDERLY_GRACE_S if orderly else 0.0)
    shutil.rmtree(socket_folder(mark), ignore_errors=True)
    used = family.memory | used_by_stub
    remove_shared_memory(used - shared_memory_of([server]))
    # What Triton itself shares with the stub is in use while tritonserver lives.
    while not orderly and _alive(server):
        time.sleep(POLL_S)
    remove_shared_memory(set() if orderly else used)


def _report_death(stub: int) -> None:
    if path := os.environ.get(DEATHS):
        with contextlib.suppress(OSError), Path(path).open("a", encoding="ascii") as deaths:
            deaths.write(f"{stub}\n")


def _all_processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (thread / "children").read_text(encoding="ascii").split())
    return found


def _started(pid: int) -> str:
    """Return when the process started, in clock ticks; with the number it names a process for good."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    return ""


def _await_end(pid: int, limit: float) -> None:
    deadline = time.monotonic() + limit
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)


def is_tracker(pid: int) -> bool:
    """Whether a process is Python's resource tracker."""
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in {"Z", "X"}


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def main() -> None:
    """Run the guardian."""
    parser = argparse.ArgumentParser(description="Ends an engine's processes when the stub that started them dies.")
    parser.add_argument("mark")
    parser.add_argument("--stub", type=int, required=True)
    parser.add_argument("--server", type=int, required=True)
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch(options.mark, options.stub, options.server, sys.stdin.buffer)


if __name__ == "__main__":
    main()
