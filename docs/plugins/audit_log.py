"""A handler: who asked and how it ended, a line each, without a word of what was asked."""

import asyncio
import json
import logging
from logging.handlers import RotatingFileHandler

from triton_lifecycle.events import Event, Received


class AuditLog:
    """Writes a line for each request's beginning and end, in ten files at most.

    A handler whose ``__call__`` is a coroutine has a queue and a time limit of its own. Writing to a disk may block, so
    that is done in a thread.
    """

    def __init__(self, path: str, max_bytes: int = 10_000_000) -> None:
        self._log = logging.Logger("audit")
        self._log.addHandler(RotatingFileHandler(path, maxBytes=max_bytes, backupCount=9, encoding="utf-8"))

    async def __call__(self, event: Event) -> None:
        """Write the event's line."""
        line = {"event": type(event).__name__, "request": event.request_id}
        if isinstance(event, Received):
            line |= {"caller": event.caller_id, "unix": event.wall}
        else:
            line |= {"slug": getattr(event, "slug", None), "tokens": getattr(event, "output_tokens", 0)}
        await asyncio.to_thread(self._log.info, json.dumps(line))
