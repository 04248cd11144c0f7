"""A real browser for tests: the system's Chromium, driven by playwright, with a fresh profile each time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from triton_lifecycle.launcher import system

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run the browser for the length of the block. No event loop can be run in this thread meanwhile.

    Raises:
        AssertionError: there is none; the message says how to get it.

    """
    program = system.browser()
    assert program is not None, f"no browser is installed ({', '.join(system.PROGRAMS)}); run `make system` as root"
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=FLAGS, timeout=60_000)
        try:
            yield browser
        finally:
            browser.close()
