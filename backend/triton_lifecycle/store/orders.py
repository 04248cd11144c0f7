"""Cancels from one replica to another, as marks in the shared store.

Whoever cancels puts down the order first and then rings the other's bell, a mark of one name for each replica. That one
looks at its bell at each sync, and only when it has rung at the order of each of its live requests: without cancels
this costs one question, and none is lost when several ring at once.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Final

from triton_lifecycle.errors import Cancelled

if TYPE_CHECKING:
    from triton_lifecycle.context import Contexts
    from triton_lifecycle.store import Store

KEPT_S: Final = 120.0
"""How long an order stands; a replica that has not looked by then counts as gone."""


async def order_cancel(store: Store, request_id: str, node: str) -> None:
    """Tell a replica to cancel one of its requests.

    Raises:
        StoreError: the store is down.

    """
    await store.set_marks({f"cancel:{request_id}": "1"}, KEPT_S)
    await store.set_marks({f"bell:{node}": uuid.uuid4().hex}, KEPT_S)


class Orders:
    """Carries out what other replicas have ordered.

    Args:
        store: shared with them.
        contexts: the live requests.
        node: this replica's name.

    """

    def __init__(self, store: Store, contexts: Contexts, node: str) -> None:
        self._store = store
        self._contexts = contexts
        self._node = node
        self._rung: str | None = None
        self.carried_out = 0
        """Requests that were cancelled so."""

    async def look(self) -> None:
        """Cancel what is to be cancelled.

        Raises:
            StoreError: the store is down; the next look finds the same orders.

        """
        rung = await self._store.mark(f"bell:{self._node}")
        if rung is None or rung == self._rung:
            return
        for ctx in list(self._contexts.live()):
            if await self._store.mark(f"cancel:{ctx.id}") is not None:
                self.carried_out += ctx.interrupt(Cancelled("Request was cancelled through another replica"))
            await asyncio.sleep(0)
        self._rung = rung
