"""Traces: one span for each request and one for each of its stages, in the trace that the caller began.

A request's ids are chosen on arrival, so that vLLM's span can stand below its own. Everything else waits for its end:
a subscriber of the bus keeps the events, builds the spans from the events' own times, and hands them to OpenTelemetry's
batch processor, whose thread sends them. No span ever holds a prompt or an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from triton_lifecycle.config import Config
from triton_lifecycle.errors import ConfigError
from triton_lifecycle.events import ENDINGS, TYPES, DeadlineMoved, Event, Progress, Received, Traced
from triton_lifecycle.tracing.w3c import Parent, TraceContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger(__name__)

MAX_EVENTS: Final = 128
"""Events kept of one request; its ending always is."""
CLOSE_S: Final = 3.0
"""What sending the last spans may take at the end; the rest is lost and counted."""
GIVE_UP_S: Final = 1.0


class Tracing:
    """Follows requests and exports their spans. Event-loop thread only.

    Args:
        config: the configuration.
        exporter: takes the spans; by default the one that the configuration asks for.

    Raises:
        ConfigError: OpenTelemetry is not installed, or the environment asks of it what there is not.

    """

    TYPES: tuple[type[Event], ...] = tuple(event_type for event_type in TYPES if event_type is not Progress)

    def __init__(self, config: Config, exporter: SpanExporter | None = None) -> None:
        try:
            from triton_lifecycle.tracing import sdk  # noqa: PLC0415 - loads OpenTelemetry
        except ImportError as error:
            raise ConfigError(
                f"monitoring.tracing_enabled: needs OpenTelemetry, which is not installed ({error}); "
                "pip install 'triton-lifecycle[tracing]'"
            ) from error
        self._sdk = sdk.Sdk(config, exporter)
        self._open: dict[str, _Open] = {}
        self.requests = 0
        """Whose spans were made."""
        self.left_out = 0
        """Not sampled."""

    def begin(self, request_id: str, parent: Parent | None) -> TraceContext:
        """Choose where a request's own span stands, and whether there will be one."""
        return self._sdk.begin(request_id, parent)

    def take(self, event: Event) -> None:
        """Keep what is needed of an event; at the ending build the spans."""
        kind = type(event)
        if kind is Received:
            self._open[event.request_id] = _Open(event)
            return
        found = self._open.get(event.request_id)
        if found is None:
            return
        if kind is DeadlineMoved:
            # Each token moves it. What a reader wants to see is when another limit became the next one.
            if found.limit == event.limit:  # type: ignore[attr-defined]
                return
            found.limit = event.limit  # type: ignore[attr-defined]
        if kind in ENDINGS:
            del self._open[event.request_id]
            self._end(found, event)
        elif isinstance(event, Traced):
            found.trace = event
            if not event.sampled:
                self.left_out += 1
                del self._open[event.request_id]
        elif len(found.events) < MAX_EVENTS:
            found.events.append(event)

    def counts(self) -> dict[str, int]:
        """Return what became of everything: spans made = sent + lost + waiting."""
        return {"requests": self.requests, "not_sampled": self.left_out, "live": len(self._open), **self._sdk.counts()}

    async def aclose(self) -> None:
        """Send what waits, within :data:`CLOSE_S`, and let go of everything."""
        loop, closed = asyncio.get_running_loop(), asyncio.Event()

        def close() -> None:
            self._sdk.close()
            with contextlib.suppress(RuntimeError):  # nobody waits any more
                loop.call_soon_threadsafe(closed.set)

        # Threads that nobody waits for: the collector may hold them for as long as it likes.
        threading.Thread(target=close, name="tracing-close", daemon=True).start()
        if not await _within(CLOSE_S, closed):
            threading.Thread(target=self._sdk.give_up, name="tracing-give-up", daemon=True).start()
            await _within(GIVE_UP_S, closed)
        self._sdk.settle()
        if lost := self._sdk.counts()["lost"]:
            log.warning("%d spans did not reach the collector", lost)

    def _end(self, found: _Open, ending: Event) -> None:
        trace = found.trace
        if trace is None:
            # It ended before anybody read where it belongs.
            chosen = self.begin(ending.request_id, None)
            if not chosen.sampled:
                self.left_out += 1
                return
        else:
            chosen = TraceContext(trace.trace_id, trace.span_id, True, trace.parent_id, trace.state)
        self.requests += 1
        self._sdk.emit([*found.events, ending], chosen)


async def _within(seconds: float, happened: asyncio.Event) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(happened.wait(), seconds)
    return happened.is_set()


class _Open:
    """A request on its way."""

    __slots__ = ("events", "limit", "trace")

    def __init__(self, first: Event) -> None:
        self.events = [first]
        self.limit = ""
        self.trace: Traced | None = None


def open_tracing(config: Config, environ: Mapping[str, str] = os.environ) -> Tracing | None:
    """Return what traces requests, or ``None`` where the configuration or OTEL_SDK_DISABLED does not want it."""
    if not config.monitoring.traces or environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    return Tracing(config)
