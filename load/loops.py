"""The event loop that load tools run on: of the kind that serves, so that tool and server are alike."""

from __future__ import annotations

import asyncio


def new_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's, which comes with vLLM; asyncio's own where there is none."""
    try:
        import uvloop  # noqa: PLC0415
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
