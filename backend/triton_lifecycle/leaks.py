"""Leak accounting: what is held now, and whether it all came back once nothing is going on.

Every kind of thing that a request may hold is an *account*: a name and a function that reads how much is held. Those of
requests must read 0 while no request is live. Those of the process (descriptors, threads, tasks, shared memory) must
come back to what they were at the first idle moment, apart from an allowance for what is made once and kept.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from triton_lifecycle.engine.guardian import SHM, shared_memory_of
from triton_lifecycle.triton import LANE

log = logging.getLogger(__name__)

Read = Callable[[], float]
SETTLE_S: Final = 2.0
"""No request for so long counts as idle; what is given back late has its time."""
POOL: Final = "lifecycle-pool"
"""How the threads are named that the event loop gives short blocking work to."""


class Account(msgspec.Struct, frozen=True):
    """One kind of thing that can leak."""

    name: str
    read: Read
    """Cheap, and safe on the event loop."""
    allowance: float | None = None
    """How far it may stay above its first idle value; ``None``: it must be 0 when idle."""


class Leak(msgspec.Struct, frozen=True):
    """An account that did not come back."""

    held: float
    expected: float
    """At most."""


class Accounts:
    """All accounts, and what the self-check found.

    Whoever holds something on behalf of requests registers it: ``accounts.add("sink.redis", lambda: sink.backlog)``.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._baseline: dict[str, float] = {}
        self.checks = 0
        """Self-checks made."""
        self.reports = 0
        """Self-checks whose findings differed from those before: so often it was logged."""
        self.leaks: dict[str, Leak] = {}
        """As of the last self-check."""

    def add(self, name: str, read: Read, *, allowance: float | None = None) -> None:
        """Register an account.

        Args:
            name: unique.
            read: returns how much is held now.
            allowance: see :class:`Account`.

        Raises:
            ValueError: the name is taken.

        """
        if name in self._accounts:
            raise ValueError(f"the account {name!r} exists already")
        self._accounts[name] = Account(name, read, allowance)

    def remove(self, name: str) -> None:
        """Forget an account; an unknown one is fine."""
        self._accounts.pop(name, None)
        self._baseline.pop(name, None)
        self.leaks.pop(name, None)

    def read(self) -> dict[str, float]:
        """Return how much is held now, by account; one that cannot be read is left out."""
        held = {}
        for account in list(self._accounts.values()):
            try:
                held[account.name] = account.read()
            except Exception:
                log.exception("account %s cannot be read", account.name)
        return held

    def compare(self) -> dict[str, Leak]:
        """Return what is above what must hold while nothing is live; the first call sets the baseline."""
        found: dict[str, Leak] = {}
        for name, held in self.read().items():
            allowance = self._accounts[name].allowance
            expected = 0.0
            if allowance is not None:
                expected = self._baseline.setdefault(name, held) + allowance
            if held > expected:
                found[name] = Leak(held, expected)
        return found

    def check(self) -> dict[str, Leak]:
        """Compare, and tell once about each change of what did not come back. Call it only while nothing is live."""
        found = self.compare()
        self.checks += 1
        if found.keys() != self.leaks.keys():
            self.reports += 1
            if found:
                said = ", ".join(f"{name} is {leak.held:g} (at most {leak.expected:g})" for name, leak in found.items())
                log.warning("no request is live, but not everything came back: %s", said)
            else:
                log.info("what had not come back has come back")
        self.leaks = found
        return found

    def state(self) -> dict[str, Any]:
        """Return what is held, and the outcome of the self-checks, for the control request ``state``."""
        leaks = {name: msgspec.structs.asdict(leak) for name, leak in self.leaks.items()}
        return {"held": self.read(), "checks": self.checks, "reports": self.reports, "leaks": leaks}


class SelfCheck:
    """Checks the accounts again and again while nothing is live.

    Args:
        accounts: what is checked.
        received: counts the requests that came so far.
        live: counts those that have not ended.
        interval: seconds between two checks.
        prepare: done before each check, off the loop if it takes long.
        settle: seconds without a request that count as idle, :data:`SETTLE_S` or the interval if that is shorter.

    """

    def __init__(
        self,
        accounts: Accounts,
        *,
        received: Callable[[], int],
        live: Callable[[], int],
        interval: float,
        prepare: Callable[[], Awaitable[None]] | None = None,
        settle: float | None = None,
    ) -> None:
        self._accounts = accounts
        self._received = received
        self._live = live
        self._interval = interval
        self._prepare = prepare
        self._settle = min(SETTLE_S, interval) if settle is None else settle

    async def run(self) -> None:
        """Go on until cancelled."""
        # The first moment, before any request, is the baseline.
        await self._check_if_idle()
        while True:
            await asyncio.sleep(self._interval)
            await self._check_if_idle()

    async def _check_if_idle(self) -> None:
        try:
            if not await self._stays_idle():
                return
            # What is found may only be late, such as a queue that is being emptied: it gets as much time again.
            if not self._accounts.compare() or await self._stays_idle():
                self._accounts.check()
        except Exception:
            log.exception("the self-check failed")

    async def _stays_idle(self) -> bool:
        before = self._received()
        if self._live():
            return False
        await asyncio.sleep(self._settle)
        if self._prepare is not None:
            await self._prepare()
        return not self._live() and self._received() == before


class SharedMemory:
    """The shared memory of this process and those below it, under /dev/shm.

    A block is known by name from when it was first seen in use, so that one that nobody uses any more, but that was
    never removed, still counts.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()

    def look(self) -> None:
        """Find what is in use now; takes some milliseconds."""
        pids = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
        self._names |= shared_memory_of(pids)
        self._names = {name for name in self._names if (SHM / name).exists()}

    def held(self) -> float:
        """Return the bytes that the known blocks take."""
        return float(sum(_bytes(SHM / name) for name in self._names))


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def open_descriptors() -> float:
    """Return how many file descriptors this process has open."""
    return float(len(os.listdir("/proc/self/fd")))  # noqa: PTH208 - a Path for each would be waste


def threads() -> float:
    """Return how many Python threads run, those of bounded pools apart: a pool keeps what it once needed."""
    return float(sum(not thread.name.startswith((POOL, LANE)) for thread in threading.enumerate()))


ALLOWANCES: Final = {"descriptors": 32.0, "threads": 16.0, "tasks": 8.0, "shm_bytes": 64.0 * 2**20}
"""What may be made once and kept: pools of threads, connections, the grammar trial's pipes, Triton's pool of shared
memory, which grows with the largest load and does not shrink. A leak grows past each of them."""


def add_process_accounts(accounts: Accounts, loop: asyncio.AbstractEventLoop) -> SharedMemory:
    """Register what the process as a whole holds; returns what must look for new shared memory now and then."""
    memory = SharedMemory()
    reads: dict[str, Read] = {
        "descriptors": open_descriptors,
        "threads": threads,
        "tasks": lambda: float(len(asyncio.all_tasks(loop))),
        "shm_bytes": memory.held,
    }
    for name, read in reads.items():
        accounts.add(name, read, allowance=ALLOWANCES[name])
    return memory
