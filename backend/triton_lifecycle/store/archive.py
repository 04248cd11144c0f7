"""The archive: what is known of a request that is not live here, from this process's memory and the shared store."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import msgspec

from triton_lifecycle.errors import StoreError
from triton_lifecycle.store import Store
from triton_lifecycle.store.memory import MemoryStore
from triton_lifecycle.store.mirror import Mirror
from triton_lifecycle.store.orders import order_cancel
from triton_lifecycle.store.records import Summary, read_summary

ANSWER_LIMIT_S: Final = 3.0
"""What an answer may take, however many questions the store is asked for it."""

CANCEL_LIMIT_S: Final = 15.0
"""The longest that a cancel through another replica may take."""
CONFIRMED_S: Final = 3.0
"""Beyond two syncs of the other replica: for its request to end and for the store to hear of it."""
LOOK_S: Final = 0.1


class Archive:
    """Answers from memory where it can, and asks the store where it must.

    Args:
        memory: what this process keeps.
        store: shared with other replicas; ``None`` when there is none.
        mirror: writes to that store, and knows whether it is up.
        node: this replica's name.

    """

    def __init__(
        self, memory: MemoryStore, store: Store | None = None, mirror: Mirror | None = None, node: str = ""
    ) -> None:
        self._memory = memory
        self._store = store
        self._mirror = mirror
        self._node = node

    async def find(self, key: str) -> Summary | None:
        """Return what is known of a request by our id, or else by the caller's latest use of its own.

        Raises:
            StoreError: it is not known here, and the store cannot be asked.

        """
        here = await self._memory.read(key)
        if here:
            return read_summary(key, here)
        named = await self._memory.resolve(key)
        local = None if named is None else read_summary(named, await self._memory.read(named))
        if self._store is None:
            return local
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                shared = await self._shared(self._store, key)
        except (StoreError, TimeoutError) as error:
            if local is not None:
                return local
            why = error.message if isinstance(error, StoreError) else f"{self._store.name} is too slow"
            raise StoreError(
                f"{why}: the request is not known in this process, and whether the store knows it cannot be told now"
            ) from None
        return max((found for found in (local, shared) if found), key=lambda found: found.received_at, default=None)

    async def cancel(self, found: Summary) -> Summary:
        """Have the replica that serves a live request cancel it, and return how it ended.

        Raises:
            StoreError: the store cannot be asked, or that replica has not confirmed it in time.

        """
        if self._store is None or self._mirror is None:
            raise StoreError(f"request {found.id} is served by {found.node!r}, with which no store is shared")
        limit = min(CANCEL_LIMIT_S, CONFIRMED_S + 2 * self._mirror.interval)
        told: Summary | None = found
        try:
            async with asyncio.timeout(limit):
                await order_cancel(self._store, found.id, found.node)
                while told is not None and told.status == "live":
                    await asyncio.sleep(LOOK_S)
                    told = await self.find(found.id)
        except TimeoutError:
            raise StoreError(
                f"the replica {found.node!r} has not confirmed within {limit:.1f} s that request {found.id} is "
                "cancelled; ask for its status"
            ) from None
        return found if told is None else told

    async def _shared(self, store: Store, key: str) -> Summary | None:
        if self._mirror is not None and not self._mirror.up:
            raise StoreError(f"{store.name} does not answer")
        layers: Mapping[str, bytes] = await store.read(key)
        if not layers:
            named = await store.resolve(key)
            if named is None:
                return None
            key, layers = named, await self._memory.read(named) or await store.read(named)
        found = read_summary(key, layers)
        if found is None or found.status != "live":
            return found
        return found if await self._is_served(store, found) else msgspec.structs.replace(found, status="lost")

    async def _is_served(self, store: Store, found: Summary) -> bool:
        """Whether the replica that a live request was seen on is the same process, and lives."""
        if found.node == self._node:
            return False
        since = await store.mark(f"alive:{found.node}")
        return since is not None and float(since) <= found.received_at
