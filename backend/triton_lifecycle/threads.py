"""Threads carry their names outside Python too: ``top -H``, ``perf`` and ``load.overhead`` tell them apart."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

LONGEST: Final = 15
"""Characters of a thread's name that Linux keeps."""


def named(name: str, run: Callable[[], object]) -> Callable[[], None]:
    """Return what a thread runs, under a name."""

    def running() -> None:
        show_name(name)
        run()

    return running


def show_name(name: str) -> None:
    """Tell the system what the calling thread is for; it must not be the main thread, whose name is the process's."""
    # Where there is no such file a thread just stays without a name.
    with contextlib.suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name[:LONGEST], encoding="utf-8")
