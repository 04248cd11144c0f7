"""The mirror: writes what happens to requests into the store, beside them and never in their way.

Ended requests wait, pinned, in this process's memory until the store has them; live ones are compared with what was
written last, every ``distributed.context_sync_interval``. So nothing is queued twice, and all that a store that is down
costs is memory within a bound. When it is back it gets what it missed, and everything if it has lost its data.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from triton_lifecycle.errors import StoreError
from triton_lifecycle.store import Entry, Store
from triton_lifecycle.store.orders import Orders
from triton_lifecycle.store.records import versions

if TYPE_CHECKING:
    from triton_lifecycle.context import Context, Contexts

log = logging.getLogger(__name__)

SOON_S: Final = 0.02
"""After an end, for others to be written with it."""
BATCH: Final = 20
"""Requests written at once: about a millisecond of the loop's time."""
BATCH_BYTES: Final = 256 * 1024
YIELD_EVERY: Final = 100
"""Live requests looked at before others have their turn on the loop."""
LONGEST_PAUSE_S: Final = 5.0
"""Between two tries of a store that is down; the first is a tenth of a second."""
ALIVE_INTERVALS: Final = 5
"""Sync intervals without a sign of life after which others take a replica's live requests for lost."""
LEAST_ALIVE_S: Final = 10.0


class _Written(msgspec.Struct):
    """What the store has of a live request."""

    versions: dict[str, Hashable]
    at: float


class Mirror:
    """Keeps a store in step with the contexts of this process.

    Args:
        store: where to write.
        contexts: the live requests and the ended ones.
        node: this replica's name.
        longest: seconds that the longest-lived layer is kept; live requests are written anew before half of the
            shortest time is over.
        shortest: seconds that the shortest-lived layer is kept.
        interval: seconds between two writings of live requests.
        share_live: whether to write live requests at all.
        clock: monotonic seconds.

    """

    def __init__(
        self,
        store: Store,
        contexts: Contexts,
        *,
        node: str,
        longest: float,
        shortest: float,
        interval: float = 1.0,
        share_live: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._contexts = contexts
        self._node = node
        self._longest = longest
        self._shortest = shortest
        self.interval = interval
        """Seconds between two writings of live requests, and two looks for orders of other replicas."""
        self._orders = Orders(store, contexts, node)
        self._share_live = share_live
        self._clock = clock
        self._mark = uuid.uuid4().hex
        self._marked = False
        self._since = str(time.time())
        self._live: dict[str, _Written] = {}
        self._sync_at = clock()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.up = True
        """Whether the last operation went well."""
        self.written = 0
        """Ended requests that the store took."""
        self.failures = 0
        """Operations that failed."""

    def start(self) -> None:
        """Begin to write."""
        self._contexts.on_end = self._wake.set
        self._task = asyncio.get_running_loop().create_task(self._run(), name="context-mirror")

    async def aclose(self, limit: float) -> None:
        """Write what waits, within ``limit`` seconds; what is left then is counted as lost."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            self._contexts.on_end = None
            await self._write_last(limit)
        await self._store.aclose()

    def state(self) -> dict[str, Any]:
        """Return how the store does, for the state of the server."""
        return {
            "name": self._store.name,
            "up": self.up,
            "written": self.written,
            "waiting": self._contexts.ended.waiting,
            "lost": self._contexts.ended.lost,
            "failures": self.failures,
            "orders": self._orders.carried_out,
        }

    async def _run(self) -> None:
        pause = 0.0
        while True:
            try:
                await self._pass()
            except StoreError as error:
                self._failed(error)
                pause = min(LONGEST_PAUSE_S, max(0.1, pause * 2))
                await asyncio.sleep(pause)
                continue
            except Exception:
                # A fault of ours must not end the mirror for good; it shows in the log and the count.
                log.exception("writing contexts to %s failed", self._store.name)
                self.failures += 1
                await asyncio.sleep(LONGEST_PAUSE_S)
                continue
            pause = 0.0
            self._went_well()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._sync_at - self._clock())):
                    await self._wake.wait()
                    await asyncio.sleep(SOON_S)

    async def _pass(self) -> None:
        if not self._marked:
            await self._look_for_losses()
        self._wake.clear()
        await self._write_ended()
        if self._clock() >= self._sync_at:
            await self._sign()
            if self._share_live:
                await self._write_live()
                await self._orders.look()
            self._sync_at = self._clock() + self.interval

    async def _look_for_losses(self) -> None:
        """After a failure: a store without our mark has lost its data, and gets everything again."""
        if self.failures and await self._store.mark(f"data:{self._node}") != self._mark:
            self._contexts.ended.pin_all()
            self._live.clear()
        await self._sign()
        self._marked = True

    async def _sign(self) -> None:
        await self._store.set_marks({f"data:{self._node}": self._mark}, 2 * self._longest)
        if self._share_live:
            alive = max(LEAST_ALIVE_S, ALIVE_INTERVALS * self.interval)
            await self._store.set_marks({f"alive:{self._node}": self._since}, alive)

    async def _write_ended(self) -> None:
        ended = self._contexts.ended
        while batch := ended.pinned(BATCH, BATCH_BYTES):
            await self._store.write([self._aged(entry) for entry in batch])
            ended.unpin(batch)
            self.written += len(batch)
            for entry in batch:
                self._live.pop(entry.id, None)

    async def _write_live(self) -> None:
        batch: list[Entry] = []
        took: dict[str, _Written] = {}
        for number, ctx in enumerate(self._contexts.live()):
            if number % YIELD_EVERY == 0:
                await asyncio.sleep(0)
            if ctx.sealed:
                continue
            now = self._clock()
            known = self._live.get(ctx.id)
            if known is not None and now - known.at > self._shortest / 2:
                known = None
            new = versions(ctx)
            names = new if known is None else {name: v for name, v in new.items() if v != known.versions[name]}
            if not names:
                continue
            if known is not None:
                names["metadata"] = new["metadata"]
            entry = self._contexts.records.live(ctx, names)
            batch.append(entry if known is None and self._is_latest(ctx) else _unclaimed(entry))
            took[ctx.id] = _Written(new, now if known is None else known.at)
            if len(batch) == BATCH:
                await self._write_some(batch, took)
        await self._write_some(batch, took)
        # Those that ended are forgotten when they were written so, or cannot be any more.
        for request_id in self._live.keys() - {ctx.id for ctx in self._contexts.live()}:
            if not self._contexts.ended.waits(request_id):
                del self._live[request_id]

    async def _write_some(self, batch: list[Entry], took: dict[str, _Written]) -> None:
        if batch:
            await self._store.write(batch)
            self._live |= took
            batch.clear()
            took.clear()

    async def _write_last(self, limit: float) -> None:
        if self.up:
            with contextlib.suppress(StoreError, TimeoutError):
                async with asyncio.timeout(limit):
                    await self._write_ended()
        left = self._contexts.ended.waiting
        if left:
            self._contexts.ended.lost += left
            log.error("%s: %d ended requests were not written before the stop", self._store.name, left)

    def _aged(self, entry: Entry) -> Entry:
        """Return the entry with its age, and with its claim on the caller's id only if that is new and its own."""
        aged = msgspec.structs.replace(entry, age=self._clock() - entry.at)
        claims = entry.id not in self._live and self._contexts.ended.claimant(entry.caller_id) == entry.id
        return aged if claims else _unclaimed(aged)

    def _is_latest(self, ctx: Context) -> bool:
        return self._contexts.ended.claimant(ctx.metadata.caller_id) == ctx.id

    def _failed(self, error: StoreError) -> None:
        self.failures += 1
        self._marked = False
        if self.up:
            self.up = False
            log.warning("%s; finished requests are kept in memory until it is back", error.message)

    def _went_well(self) -> None:
        if not self.up:
            self.up = True
            log.info("%s is back; it has what was missed", self._store.name)


def _unclaimed(entry: Entry) -> Entry:
    return msgspec.structs.replace(entry, caller_id="")
