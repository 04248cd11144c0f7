"""One coroutine owns one request: it opens the context, runs the stages, closes it once, and sends one FINAL.

Everything a request holds (permit, deadline, its place in the cancel watch, its work in the engine) is given back when
the block is left, *before* the last response goes out: a caller that has its answer finds the server free of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from triton_lifecycle import events
from triton_lifecycle.bus import Publisher
from triton_lifecycle.context import Context, Contexts
from triton_lifecycle.engine import Chunk
from triton_lifecycle.errors import (
    CallerLeft,
    Cancelled,
    DeadlineExceeded,
    Draining,
    LifecycleError,
    Overloaded,
    RequestError,
)
from triton_lifecycle.logs import about
from triton_lifecycle.stages import Route
from triton_lifecycle.stages.postprocess import partial
from triton_lifecycle.triton import Call
from triton_lifecycle.watch import Watch

log = logging.getLogger(__name__)


class Pipeline:
    """Runs requests through the stages.

    Args:
        route: the stages.
        contexts: where live requests are held.
        publisher: where events go.
        watch: notices callers that left; ``None`` when somebody else calls :meth:`Context.interrupt`.
        model: the model's name, for events and summaries.
        capture: whether an exception that nobody expected stays within :meth:`run`; else it is raised once the request
            has ended.

    """

    def __init__(
        self,
        route: Route,
        contexts: Contexts,
        publisher: Publisher,
        watch: Watch | None,
        model: str,
        *,
        capture: bool = True,
    ) -> None:
        self._route = route
        self._contexts = contexts
        self._publisher = publisher
        self._watch = watch
        self._model = model
        self._capture = capture

    async def run(self, call: Call) -> None:
        """Serve one request from its arrival to its last response. Never raises for a request's own trouble.

        Without ``capture`` it raises what was raised in a stage without being an error of this project.
        """
        ctx = self._contexts.open(call, self._model, self._publisher)
        ctx.task = asyncio.current_task()
        # Refused in the same step in which it came: so no more are ever held than may be.
        error = self._contexts.refusal() or await self._attempt(ctx)
        # No await from here on: nothing can come between the ending, its event and the last response.
        ctx.seal()
        ctx.task = None
        ctx.mark("finished")
        self._close(ctx, error)
        _conclude(ctx, error)
        if not self._capture and isinstance(error, _Unexpected) and isinstance(error.cause, Exception):
            raise error.cause

    async def _attempt(self, ctx: Context) -> LifecycleError | None:
        try:
            with ctx.held as held:
                if self._watch is not None:
                    self._watch.add(ctx.call, lambda: ctx.interrupt(CallerLeft("the caller left")))
                    held.callback(self._watch.discard, ctx.call)
                await self._stages(ctx)
        except asyncio.CancelledError as error:
            if ctx.interruption is None and not _is_cancelled(ctx.task):
                return _bug(ctx, error)
            return ctx.interruption or Draining("the server stopped before the request was finished")
        except LifecycleError as error:
            return ctx.interruption or error
        except BaseException as error:  # noqa: BLE001 - also what a plug-in should not raise must not cost an ending
            return ctx.interruption or _bug(ctx, error)
        return ctx.interruption

    async def _stages(self, ctx: Context) -> None:
        for name, stage in self._route.before:
            with ctx.stage(name):
                await stage(ctx)
        with ctx.stage("execute"):
            await self._route.execute(ctx, self._deliverer(ctx))

    def _deliverer(self, ctx: Context) -> Callable[[Chunk], Any]:
        after = self._route.after

        async def deliver(chunk: Chunk) -> None:
            item: Any = chunk
            for name, stage in after:
                ctx.execution.stage = name
                item = await stage(ctx, item)
                if item is None:
                    break
            ctx.execution.stage = "execute"

        return deliver

    def _close(self, ctx: Context, error: LifecycleError | None) -> None:
        if error is not None:
            _tell(ctx, error)
        tokens = ctx.output.tokens
        if error is None:
            reasons = ",".join(str(sequence.finish_reason) for sequence in ctx.output.sequences)
            self._contexts.close(ctx, events.Finished, finish_reason=reasons, output_tokens=tokens)
        elif isinstance(error, Cancelled):
            known = ctx.interrupted_at
            after = 0.0 if known is None else ctx.execution.times["finished"] - known
            self._contexts.close(ctx, events.Cancelled, slug=error.slug, output_tokens=tokens, after=after)
        elif isinstance(error, DeadlineExceeded):
            self._contexts.close(ctx, events.TimedOut, slug=error.slug, message=error.message, output_tokens=tokens)
        elif isinstance(error, RequestError) or (isinstance(error, Overloaded) and not ctx.execution.attempts):
            self._contexts.close(ctx, events.Rejected, slug=error.slug, message=error.message)
        else:
            self._contexts.close(ctx, events.Failed, slug=error.slug, message=error.message, output_tokens=tokens)


def _tell(ctx: Context, error: LifecycleError) -> None:
    """Log how a request ended, by its slug alone: a message may quote what the caller sent."""
    level = logging.DEBUG
    if isinstance(error, DeadlineExceeded):
        level = logging.INFO
    elif not isinstance(error, Cancelled | RequestError | Overloaded):
        level = logging.WARNING
    if log.isEnabledFor(level):
        log.log(level, "request %s ended with %s", ctx.id, error.slug, extra=about(ctx, error.slug))


def _is_cancelled(task: asyncio.Task[Any] | None) -> bool:
    return task is not None and task.cancelling() > 0


class _Unexpected(LifecycleError):
    """Travels as its base; keeps what happened."""

    def __init__(self, message: str, cause: BaseException) -> None:
        super().__init__(message)
        self.cause = cause


def _bug(ctx: Context, error: BaseException) -> LifecycleError:
    log.error("request %s failed in stage %s", ctx.id, ctx.execution.stage, exc_info=error, extra=about(ctx))
    return _Unexpected(
        f"stage {ctx.execution.stage!r} failed with {type(error).__name__}; "
        f"the server's log has the details under request {ctx.id}",
        error,
    )


def _conclude(ctx: Context, error: LifecycleError | None) -> None:
    """Send the one FINAL."""
    if isinstance(error, CallerLeft):
        sent = ctx.call.end()
    elif isinstance(error, DeadlineExceeded) and (rest := _partial(ctx)) is not None:
        sent = ctx.call.send(rest, final=True)
    elif error is not None:
        sent = ctx.call.fail(error)
    elif ctx.last_response is not None:
        sent = ctx.call.send(ctx.last_response, final=True)
    else:
        sent = ctx.call.end()
    sent.add_done_callback(lambda done: _report_lost(ctx, done))


def _partial(ctx: Context) -> dict[str, list[Any]] | None:
    """Return what there is, if the caller asked for that rather than for an error."""
    return partial(ctx) if ctx.metadata.partial and not ctx.metadata.stream else None


def _report_lost(ctx: Context, sent: asyncio.Future[None]) -> None:
    if not sent.cancelled() and (raised := sent.exception()) is not None:
        log.error("request %s: its last response could not be sent: %s", ctx.id, raised, extra=about(ctx))
