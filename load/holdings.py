"""What a server holds: memory, descriptors, threads and shared memory of its processes, and its own accounts."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final
from urllib.request import ProxyHandler, Request, build_opener

import msgspec
import psutil

from load.overhead.measure import BenchFailed
from load.overhead.processes import ServingProcesses
from triton_lifecycle.engine.guardian import SHM, shared_memory_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from triton_lifecycle.launcher.server import TritonServer

ANSWER_S: Final = 30.0
MIB: Final = 2**20


class Holding(msgspec.Struct, frozen=True):
    """One look at a server.

    Attributes:
        at: seconds on the monotonic clock.
        stub_mib: resident memory of the model's process, which holds this backend.
        triton_mib: of tritonserver itself.
        engine_mib: of vLLM's processes; 0 with the simulated engine, which lives in the stub.
        descriptors: open files of all of them.
        threads: of all of them.
        shm_files: files under /dev/shm that they use.
        shm_mib: what these take.
        live: requests that have not ended.
        kept: ended requests that are still known.
        lag_p99_ms: of the backend's event loop, over the last minute; ``None`` before its first second.
        lag_max_ms: likewise.
        held: the leak accounting, by account.

    """

    at: float
    stub_mib: float
    triton_mib: float
    engine_mib: float
    descriptors: int
    threads: int
    shm_files: int
    shm_mib: float
    live: int
    kept: int
    lag_p99_ms: float | None
    lag_max_ms: float | None
    held: dict[str, float]


class Holdings:
    """Looks at one server. A look takes some 10 ms; it blocks, so not on an event loop.

    Args:
        server: runs.
        model: whose process and accounts are looked at.

    """

    def __init__(self, server: TritonServer, model: str) -> None:
        self._server = server
        self._model = model
        self._triton = psutil.Process(server.pid)
        self._stubs = [stub for stub in ServingProcesses(server.pid).stubs if _serves(stub, model)]
        if not self._stubs:
            raise BenchFailed(f"tritonserver (pid {server.pid}) runs no process for the model {model}")

    def look(self) -> Holding:
        """Return what is held now.

        Raises:
            BenchFailed: the server does not answer, or a process of it is gone.

        """
        state = self.state()
        stubs = {stub.pid for stub in self._stubs}
        engine = [each for stub in self._stubs for each in _below(stub) if each.pid not in stubs]
        all_of_it = [self._triton, *self._stubs, *engine]
        blocks = [SHM / name for name in shared_memory_of([process.pid for process in all_of_it])]
        try:
            memory = [_resident(processes) for processes in (self._stubs, [self._triton])]
        except psutil.Error as error:
            raise BenchFailed(f"a process of the server is gone: {error}") from None
        return Holding(
            at=time.monotonic(),
            stub_mib=memory[0],
            triton_mib=memory[1],
            engine_mib=_resident(_vllm(engine)),
            descriptors=sum(map(_descriptors, all_of_it)),
            threads=sum(map(_threads, all_of_it)),
            shm_files=len(blocks),
            shm_mib=sum(_bytes(block) for block in blocks) / MIB,
            live=state["live"],
            kept=state["kept"],
            lag_p99_ms=state["loop"]["lag_p99_ms"],
            lag_max_ms=state["loop"]["lag_max_ms"],
            held=state["accounts"]["held"],
        )

    def memory(self) -> float:
        """Return the resident memory of the model's processes alone, in MiB; takes well under a millisecond."""
        try:
            return _resident(self._stubs)
        except psutil.Error as error:
            raise BenchFailed(f"a process of the server is gone: {error}") from None

    def state(self) -> dict[str, Any]:
        """Return the answer to the control request ``state``, raw.

        Raises:
            BenchFailed: there is none within half a minute.

        """
        body = {"text_input": "", "parameters": {"control": "state"}}
        # One connection each: Triton 2.51 cannot end in order while an idle one is open.
        request = Request(
            f"http://{self._server.http_url}/v2/models/{self._model}/generate",
            json.dumps(body).encode(),
            {"Connection": "close"},
        )
        try:
            with build_opener(ProxyHandler({})).open(request, timeout=ANSWER_S) as reply:
                found: dict[str, Any] = json.loads(json.loads(reply.read())["text_output"])
        except (OSError, ValueError, KeyError) as error:
            raise BenchFailed(f"the server does not say what it holds: {error}") from None
        return found


def _serves(stub: psutil.Process, model: str) -> bool:
    return any(f"/{model}/" in part for part in stub.cmdline()[1:2])


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _vllm(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Leave out the guardian and helpers."""
    found = []
    for process in processes:
        with suppress(psutil.Error):
            if process.name().startswith("VLLM"):
                found.append(process)
    return found


def _resident(processes: Iterable[psutil.Process]) -> float:
    return float(sum(process.memory_info().rss for process in processes)) / MIB


def _descriptors(process: psutil.Process) -> int:
    try:
        return int(process.num_fds())
    except psutil.Error:
        return 0


def _threads(process: psutil.Process) -> int:
    try:
        return int(process.num_threads())
    except psutil.Error:
        return 0


def _bytes(path: Any) -> int:  # noqa: ANN401 - a Path
    try:
        return int(path.stat().st_blocks) * 512
    except OSError:
        return 0
