"""The parent's side of a load process: start it, ask it, and be sure that nothing of it is left."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
import uuid
from typing import TYPE_CHECKING

import msgspec

from load.overhead.measure import Answer, BenchFailed, Order, Sample
from triton_lifecycle.launcher import project_root
from triton_lifecycle.launcher.installation import child_environment, find_installation
from triton_lifecycle.launcher.leftovers import MARK, Footprint

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    import psutil

FAREWELL_S = 15.0
ORDER_MARGIN_S = 10.0


class Child:
    """A load process in a process group of its own; leaving the block ends it and all that it started.

    Args:
        arguments: the kind of load and where it goes, see :func:`load.overhead.child.make_source`.
        log: file for what it prints.

    """

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self._log = log
        self._rest = b""
        mark = uuid.uuid4().hex
        # What tritonserver gets, so that vLLM runs under the same conditions here and there.
        env = child_environment(find_installation(), mark={MARK: mark}, given={})
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "load.overhead.child", *arguments],
                cwd=project_root(),
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                process_group=0,
            )
        self._footprint = Footprint(mark, f"bench_{mark[:12]}_", self.process.pid, time.time())

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until it takes orders."""
        self._read(timeout_s)
        self._footprint.observe()

    def send(self, order: Order) -> None:
        """Give it an order; :meth:`receive` must follow."""
        if self.process.stdin is None:
            raise BenchFailed("the load process has no stdin")
        try:
            self.process.stdin.write(msgspec.json.encode(order) + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise BenchFailed(self._end_story()) from None

    def receive(self, order: Order) -> Sample:
        """Return what it measured."""
        sample = self._read(order.limit_s + ORDER_MARGIN_S).sample
        if sample is None:
            raise BenchFailed("the load process answered without a sample")
        return sample

    def ask(self, order: Order) -> Sample:
        """Give it an order and return what it measured."""
        self.send(order)
        return self.receive(order)

    def processes(self) -> list[psutil.Process]:
        """Return the process and all that it started."""
        return self._footprint.processes()

    def stop(self) -> None:
        """End it in order, and by force what does not end."""
        try:
            self._footprint.observe()
            if self.process.stdin is not None:
                self.process.stdin.close()
            self.process.wait(FAREWELL_S)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            pass
        finally:  # a second Ctrl-C too must leave nothing behind
            self.process.kill()
            self._footprint.sweep()
            self.process.wait(5)
            if self.process.stdout is not None:
                self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _read(self, timeout_s: float) -> Answer:
        if self.process.stdout is None:
            raise BenchFailed("the load process has no stdout")
        pipe = self.process.stdout.fileno()
        end = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left = end - time.monotonic()
            if left <= 0:
                raise BenchFailed(f"the load process gave no answer within {timeout_s:.0f} s; its log: {self._log}")
            if select.select([pipe], [], [], min(left, 1.0))[0]:
                data = os.read(pipe, 1 << 20)
                if not data:
                    raise BenchFailed(self._end_story())
                self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        answer = msgspec.json.decode(line, type=Answer)
        if answer.error is not None:
            raise BenchFailed(f"{answer.error}\n(the load process's log: {self._log})")
        return answer

    def _end_story(self) -> str:
        tail = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-5:]
        return "the load process ended unasked:\n" + "\n".join(f"  {line}" for line in tail) + f"\nIts log: {self._log}"
