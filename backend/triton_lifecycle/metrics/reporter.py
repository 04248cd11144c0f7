"""Once a second: reads the figures, takes what has changed, and has a thread write it to Triton's page."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from triton_lifecycle.metrics.page import Page
from triton_lifecycle.threads import show_name

log = logging.getLogger(__name__)

EVERY_S: Final = 1.0
CLOSE_S: Final = 2.0
"""What the last write may take."""


class Reporter:
    """Writes one page.

    A turn begins only when the one before is written, so a server that takes its time is asked less often, and nothing
    piles up.

    Args:
        page: the page.
        read: called before each turn, on the event loop, and told whether everything is wanted; puts onto the page what
            is read rather than told.
        every: seconds between two turns.

    """

    def __init__(self, page: Page, read: Callable[[bool], None] = lambda _: None, *, every: float = EVERY_S) -> None:
        self._page = page
        self._read = read
        self._every = every
        self._writer = ThreadPoolExecutor(1, "metrics", show_name, ("metrics",))
        self._task: asyncio.Task[None] | None = None
        self._failed = False

    def start(self) -> None:
        """Report from now on."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="metrics")

    async def aclose(self) -> None:
        """Write what is left, within :data:`CLOSE_S`, and end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.report(whole=True)
        except TimeoutError:
            log.warning("Triton's metrics page was too slow for the last figures")
        self._writer.shutdown(wait=False, cancel_futures=True)

    async def report(self, *, whole: bool = False) -> None:
        """Bring the page up to date; ``whole``: also what is read only now and then."""
        try:
            self._read(whole)
        except Exception:
            if not self._failed:
                self._failed = True
                log.exception("a figure for Triton's metrics cannot be read")
        if batch := self._page.collect():
            await asyncio.get_running_loop().run_in_executor(self._writer, self._page.write, batch)

    async def _run(self) -> None:
        while True:
            await self.report()
            await asyncio.sleep(self._every)
