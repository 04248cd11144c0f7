"""OpenTelemetry's SDK: identities, sampling, and the way to the exporter. Imported only where tracing is on."""

from __future__ import annotations

import os
from typing import Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags, TraceState, set_span_in_context

from triton_lifecycle import __version__
from triton_lifecycle.config import Config, Monitoring
from triton_lifecycle.errors import ConfigError
from triton_lifecycle.events import Event
from triton_lifecycle.stages.order import entries, is_execute
from triton_lifecycle.tracing.export import CountedExporter, open_exporter
from triton_lifecycle.tracing.spans import Builder
from triton_lifecycle.tracing.target import Target
from triton_lifecycle.tracing.w3c import Parent, TraceContext

SERVICE: Final = "triton-lifecycle"
QUEUE: Final = 8192
"""Spans that may wait for the collector, unless OTEL_BSP_MAX_QUEUE_SIZE says otherwise; a request beyond is dropped."""
BATCH: Final = 64
"""Spans that are sent at once, unless OTEL_BSP_MAX_EXPORT_BATCH_SIZE says otherwise. Encoding them holds the
interpreter for about 25 µs each: with few at once no request waits long for it."""
_ID_DIGITS: Final = 32


class Sdk:
    """The part of tracing that needs OpenTelemetry.

    Args:
        config: the configuration; where it says nothing the ``OTEL_…`` environment variables count.
        exporter: takes the spans; by default the one that the configuration asks for.

    Raises:
        ConfigError: the protocol is none that there is, or its package is not installed.

    """

    def __init__(self, config: Config, exporter: SpanExporter | None = None) -> None:
        settings = config.monitoring
        batch = _number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", BATCH)
        self._size = _number("OTEL_BSP_MAX_QUEUE_SIZE", QUEUE, least=batch)
        provider = TracerProvider(sampler=_sampler(settings), resource=_resource(), shutdown_on_exit=False)
        self._sampler = provider.sampler
        self._ids = provider.id_generator
        names = [stage.use for stage in entries(config.pipeline.stages)]
        until = next((i for i, stage in enumerate(entries(config.pipeline.stages)) if is_execute(stage)), len(names))
        self._builder = Builder(provider.resource, (*names[:until], "execute"), self._ids.generate_span_id)
        self._exporter = (
            open_exporter(settings) if exporter is None else CountedExporter(exporter, Target("grpc", "://given"))
        )
        self._processor = BatchSpanProcessor(self._exporter, max_queue_size=self._size, max_export_batch_size=batch)
        self._made = 0
        self._dropped = 0
        self._closed = False

    def begin(self, request_id: str, parent: Parent | None) -> TraceContext:
        """Choose the ids of a request's span, and whether it is sampled."""
        span_id = f"{self._ids.generate_span_id():016x}"
        if parent is None:
            trace_id = request_id if len(request_id) == _ID_DIGITS else f"{self._ids.generate_trace_id():032x}"
            number, above, state = int(trace_id, 16), None, ""
        else:
            trace_id, number, state = parent.trace_id, int(parent.trace_id, 16), parent.state
            flags = TraceFlags(TraceFlags.SAMPLED if parent.sampled else TraceFlags.DEFAULT)
            carried = TraceState.from_header([state]) if state else None
            caller = SpanContext(
                number, int(parent.span_id, 16), is_remote=True, trace_flags=flags, trace_state=carried
            )
            above = set_span_in_context(NonRecordingSpan(caller))
        decided = self._sampler.should_sample(above, number, "request", SpanKind.SERVER)
        sampled = decided.decision is Decision.RECORD_AND_SAMPLE
        return TraceContext(trace_id, span_id, sampled, "" if parent is None else parent.span_id, state)

    def emit(self, events: list[Event], trace: TraceContext) -> None:
        """Hand a request's spans over; all or none of them are dropped when too many wait."""
        spans = self._builder.build(events, trace)
        self._made += len(spans)
        if self._waiting > self._size:
            self._dropped += len(spans)
            return
        for span in spans:
            self._processor.on_end(span)

    def counts(self) -> dict[str, int]:
        """Return what became of the spans: made = sent + lost + waiting."""
        waiting = 0 if self._closed else self._waiting
        return {
            "spans": self._made,
            "sent": self._exporter.sent,
            "lost": self._made - self._exporter.sent - waiting,
            "waiting": waiting,
        }

    def close(self) -> None:
        """Send what waits and end the SDK's thread. Blocks for as long as the collector lets it."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]

    def give_up(self) -> None:
        """Let :meth:`close` come to its end without the collector."""
        self._exporter.shutdown()

    def settle(self) -> None:
        """Count as lost what has not been sent: nothing waits any more."""
        self._closed = True

    @property
    def _waiting(self) -> int:
        return self._made - self._dropped - self._exporter.sent - self._exporter.failed


def _sampler(settings: Monitoring) -> Sampler | None:
    """Return the sampler; ``None`` lets OTEL_TRACES_SAMPLER decide, and all be sampled without it."""
    ratio = settings.tracing_sample_ratio
    return None if ratio is None else ParentBased(TraceIdRatioBased(ratio))


def _resource() -> Resource:
    """Return what produces the spans; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win."""
    found = Resource.create()
    ours = {"service.version": __version__}
    if str(found.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
        ours["service.name"] = SERVICE
    return found.merge(Resource(ours))


def _number(name: str, default: int, least: int = 1) -> int:
    """Return what the environment says, or the default."""
    given = os.environ.get(name) or str(default)
    if not given.isdecimal() or int(given) < least:
        raise ConfigError(f"{name}: expected a whole number from {least} on, found {given!r}")
    return int(given)
