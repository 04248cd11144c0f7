"""Stage 6: send; the last response waits until everything the request held has been given back."""

from __future__ import annotations

from triton_lifecycle.context import Context
from triton_lifecycle.stages.postprocess import Response


async def respond(ctx: Context, response: Response) -> None:
    """Send a response and wait until it is on its way.

    While this waits, the engine's collector merges what comes in: a slow sender gets fewer, larger responses. The
    final response is only put down here; the pipeline sends it after the request has been closed.
    """
    if response.final:
        ctx.last_response = response.outputs
    else:
        await ctx.call.send(response.outputs, final=False)
