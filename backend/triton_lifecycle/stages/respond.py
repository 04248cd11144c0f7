"""Stage 6: send; the last response waits until everything the request held has been given back."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from triton_lifecycle.context import Context
from triton_lifecycle.stages.postprocess import Response

AHEAD: Final = 64
"""Responses of one request that may wait to be sent where none are merged."""


async def respond(ctx: Context, response: Response) -> None:
    """Send a response and wait until it is on its way.

    While this waits, the engine's collector merges what comes in: a slow sender gets fewer, larger responses. The
    final response is only put down here; the pipeline sends it after the request has been closed.
    """
    if response.final:
        ctx.last_response = response.outputs
    else:
        await ctx.call.send(response.outputs, final=False)


async def respond_each(ctx: Context, response: Response) -> None:
    """Send a response without waiting for it, so that each engine step is a response of its own.

    Only when :data:`AHEAD` of them wait does this wait too, and the engine merges after all: nothing grows without end.
    """
    if ctx.unsent is None:
        ctx.unsent = deque()
    if not response.final:
        sent = ctx.call.send(response.outputs, final=False)
        sent.add_done_callback(_looked_at)
        ctx.unsent.append(sent)
    while ctx.unsent and (response.final or len(ctx.unsent) > AHEAD or ctx.unsent[0].done()):
        await ctx.unsent.popleft()
    if response.final:
        ctx.last_response = response.outputs


def _looked_at(sent: asyncio.Future[None]) -> None:
    """Take note of an error also where nobody waits any more, because the request was interrupted."""
    if not sent.cancelled():
        sent.exception()
