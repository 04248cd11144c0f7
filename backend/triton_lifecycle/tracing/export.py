"""Where spans go: OTLP over gRPC or HTTP, every one counted as sent or lost."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from triton_lifecycle.config import Monitoring
from triton_lifecycle.errors import ConfigError
from triton_lifecycle.tracing.target import Target, target

log = logging.getLogger(__name__)


class CountedExporter(SpanExporter):
    """Passes batches on; says once that they do not arrive, and once that they do again. Runs on the SDK's thread."""

    def __init__(self, exporter: SpanExporter, where: Target) -> None:
        self.sent = 0
        self.failed = 0
        self._exporter = exporter
        self._where = where
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        result, reason = SpanExportResult.FAILURE, "it did not take them"
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # noqa: BLE001 - a fault of the exporter must not end the SDK's thread
            reason = type(error).__name__
        if result is SpanExportResult.SUCCESS:
            self.sent += len(spans)
            if self._failing:
                log.info("spans reach the collector at %s again", self._where.shown)
            self._failing = False
            return result
        self.failed += len(spans)
        if not self._failing:
            log.warning(
                "spans do not reach the collector at %s (%s): they are lost and counted", self._where.shown, reason
            )
        self._failing = True
        return result

    def shutdown(self) -> None:
        """Give up what is being sent."""
        self._exporter.shutdown()


def open_exporter(settings: Monitoring, environ: Mapping[str, str] = os.environ) -> CountedExporter:
    """Return the exporter that the configuration and the environment ask for; it connects by itself, later.

    Raises:
        ConfigError: the protocol is none that there is, or its package is not installed.

    """
    where = target(settings, environ)
    try:
        exporter = _http(where.url) if where.protocol == "http" else _grpc(where.url)
    except ImportError as error:
        raise ConfigError(
            f"monitoring.tracing_protocol: {where.protocol!r} needs OpenTelemetry's exporter, which is not installed "
            f"({error}); pip install 'triton-lifecycle[tracing]'"
        ) from error
    return CountedExporter(exporter, where)


def _http(url: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

    return OTLPSpanExporter(endpoint=url)


def _grpc(url: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

    return OTLPSpanExporter(endpoint=url)
