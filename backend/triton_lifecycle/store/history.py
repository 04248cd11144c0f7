"""The contexts of one server with all that keeps them, built from the configuration."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any, Final

from triton_lifecycle.config import Config
from triton_lifecycle.context import Contexts
from triton_lifecycle.store import layer_ttls, open_store
from triton_lifecycle.store.archive import Archive
from triton_lifecycle.store.memory import MemoryStore
from triton_lifecycle.store.mirror import Mirror
from triton_lifecycle.store.records import SUMMARY, Records

CLEANED_AT_ONCE: Final = 500
"""Requests forgotten before others have their turn on the loop."""
STOP_LIMIT_S: Final = 2.0
"""What the last writing may take when the server stops."""


class History:
    """Builds :attr:`contexts`, and :attr:`archive` which answers what became of the ended ones.

    Args:
        config: the configuration.

    Raises:
        ConfigError: the store's client library is missing, or its address cannot be read.

    """

    def __init__(self, config: Config) -> None:
        section = config.context_management
        node = config.distributed.node_name or f"{socket.gethostname()}-{os.getpid()}"
        ttls = layer_ttls(config) if section.enable_layered_storage else {SUMMARY: section.expired_context_timeout}
        memory = MemoryStore(ttls, max_requests=section.max_finished if section.enabled else 0)
        self.contexts = Contexts(
            max_live=section.max_contexts,
            ended=memory,
            records=Records(
                node,
                layered=section.enable_layered_storage,
                keep_prompts=section.keep_prompts,
                keep_outputs=section.keep_outputs,
            ),
        )
        store = open_store(config)
        self._mirror = (
            None
            if store is None
            else Mirror(
                store,
                self.contexts,
                node=node,
                longest=max(ttls.values()),
                shortest=min(ttls.values()),
                interval=config.distributed.context_sync_interval,
                share_live=config.distributed.enabled,
            )
        )
        self.archive = Archive(memory, store, self._mirror, node)
        self._cleanup_interval = section.context_cleanup_interval
        self._cleaner: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to write and to clean up. Needs a running loop."""
        self._cleaner = asyncio.get_running_loop().create_task(self._clean(), name="context-cleaner")
        if self._mirror is not None:
            self._mirror.start()

    async def aclose(self) -> None:
        """Stop, after what waits has been written."""
        if self._cleaner is not None:
            self._cleaner.cancel()
            await asyncio.wait([self._cleaner])
        if self._mirror is not None:
            await self._mirror.aclose(STOP_LIMIT_S)

    def state(self) -> dict[str, Any]:
        """Return how the store does; only its kind when it is this process's memory."""
        return {"name": "memory"} if self._mirror is None else self._mirror.state()

    async def _clean(self) -> None:
        while True:
            await asyncio.sleep(self._cleanup_interval)
            while self.contexts.ended.expire(CLEANED_AT_ONCE):  # noqa: ASYNC110 - a step, not a poll
                await asyncio.sleep(0)
