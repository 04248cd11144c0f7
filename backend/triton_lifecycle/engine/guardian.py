"""The guardian: a small process that outlives the stub, so that nothing else does.

Whatever kills Triton's Python stub (a crash, ``kill -9``, the out-of-memory killer) leaves vLLM's engine processes
alive, holding gigabytes. The stub therefore starts this file as a process of its own session and holds the other end of
its standard input. When that pipe closes without the word ``bye``, the stub is dead: every process that carries this
engine's mark in its environment is ended and the shared memory that they and the stub used is removed. When
tritonserver itself dies, a stub that does not follow is ended first.

Standard library only, since it runs as ``python -I guardian.py`` and must cost little.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Final

MARK: Final = "TRITON_LIFECYCLE_ENGINE"
"""Environment variable that the stub sets before it starts an engine; every descendant inherits it."""

SHM: Final = Path("/dev/shm")  # noqa: S108 - not a temporary file: where POSIX shared memory lives
STUB_GRACE_S: Final = 3.0
POLL_S: Final = 0.5


def marked_processes(mark: str) -> list[int]:
    """Return the living processes whose environment carries ``mark``, the caller's own excluded."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def shared_memory_of(pids: list[int]) -> set[str]:
    """Return the names under /dev/shm that the given processes have mapped or open."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
                path = line.split(maxsplit=5)[-1]
                if path.startswith("/dev/shm/"):  # noqa: S108
                    found.add(path.removeprefix("/dev/shm/").removesuffix(" (deleted)"))  # noqa: S108
    return found


def end_processes(pids: list[int], *, grace: float = 0.0) -> None:
    """Ask the processes to end, and kill those that have not within ``grace`` seconds."""
    if grace > 0:
        _signal(pids, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and any(_alive(pid) for pid in pids):
            time.sleep(0.05)
    _signal(pids, signal.SIGKILL)


def remove_shared_memory(names: set[str]) -> None:
    """Unlink names under /dev/shm; those already gone are fine."""
    for name in names:
        with contextlib.suppress(OSError):
            (SHM / name).unlink()


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
            arguments, stdin=subprocess.PIPE, start_new_session=True, env=environment, close_fds=True
        )

    def tell_shared_memory(self) -> None:
        """Report what the stub has mapped by now; it can no longer be asked once it is dead."""
        self._say(f"shm {' '.join(sorted(shared_memory_of([os.getpid()])))}")

    def dismiss(self) -> None:
        """Say that the stub ends in order, and wait until the guardian has left (at most 5 s)."""
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
    """Wait for the end of the stub or the server, then clean up. Returns when nothing is left to guard."""
    names: set[str] = set()
    rest = b""
    while True:
        readable, _, _ = select.select([pipe], [], [], POLL_S)
        if readable:
            data = os.read(pipe.fileno(), 65536)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                word, _, value = line.decode(errors="replace").partition(" ")
                if word == "bye":
                    return
                if word == "shm":
                    names.update(value.split())
            if not data:
                break
        if not _alive(server):
            _await_end(stub, STUB_GRACE_S)
            end_processes([stub])
            break
    pids = marked_processes(mark)
    mine = shared_memory_of(pids)
    end_processes(pids)
    remove_shared_memory(mine - names)
    # What the stub had mapped is tritonserver's too, while that lives.
    while _alive(server):
        time.sleep(POLL_S)
    remove_shared_memory(names)


def _await_end(pid: int, limit: float) -> None:
    deadline = time.monotonic() + limit
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)


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
