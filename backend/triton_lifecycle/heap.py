"""Python's cyclic garbage collector, kept away from requests.

A full collection looks at every object there is, and holds the event loop meanwhile: some 0.1 s with a thousand live
requests, more with vLLM's modules in the same process. What is there once the model is loaded stays for good, so it is
left out. What a request makes is freed by its reference counts (``tests/unit/test_heap.py``; a failure may leave its
traceback to the collector), so young collections may be rarer than Python has them, too.
"""

from __future__ import annotations

import gc
from typing import Final

THRESHOLDS: Final = (10_000, 10, 10)
"""Net allocations that begin a young collection (Python: 700); young ones for each middle one; middle ones for each
full one."""


def settle() -> None:
    """Leave all that there is now out of every later collection; takes as long as one full collection."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


def resettle() -> None:
    """Do it again where it was done: what was replaced since can be freed. The engine's restart calls it."""
    if gc.get_freeze_count():
        settle()
