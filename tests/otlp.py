"""A real OTLP receiver: the trace service of the protocol's own package, over gRPC and over HTTP, on free ports."""

from __future__ import annotations

import base64
import contextlib
import http.server
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import grpc
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service

LIMIT_S = 30.0


class Span(NamedTuple):
    """A span as it was received."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    begin: int
    """Nanoseconds since the epoch."""
    end: int
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    error: str | None
    """What its status says, if that is an error."""


class Receiver(service.TraceServiceServicer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.grpc_url = ""
        self.http_url = ""
        self.delay = 0.0
        """Seconds that it takes for each batch."""
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's name
        """Take a batch."""
        time.sleep(self.delay)
        found = [
            _span(_values(resource.resource.attributes).get("service.name", ""), span)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans += found
        return messages.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Span]:
        """Return all spans so far."""
        with self._lock:
            return list(self._spans)

    def until(self, enough: Callable[[list[Span]], Any]) -> list[Span]:
        """Wait until the spans are as wanted, and return them."""
        deadline = time.monotonic() + LIMIT_S
        while not enough(found := self.spans):
            assert time.monotonic() < deadline, (
                f"not in {LIMIT_S:g} s; there are {[(s.name, s.service) for s in found]}"
            )
            time.sleep(0.02)
        return found

    def trace(self, trace_id: str, *names: str) -> dict[str, Span]:
        """Wait until a trace has spans of these names, and return them by name."""
        found = self.until(lambda spans: {s.name for s in spans if s.trace_id == trace_id} >= set(names))
        return {span.name: span for span in found if span.trace_id == trace_id}


@contextlib.contextmanager
def otlp_receiver() -> Iterator[Receiver]:
    """Run a receiver for both protocols."""
    receiver = Receiver()
    server = grpc.server(ThreadPoolExecutor(2))
    service.add_TraceServiceServicer_to_server(receiver, server)
    receiver.grpc_url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(receiver))
    receiver.http_url = f"http://127.0.0.1:{web.server_address[1]}"
    serving = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.05})
    serving.start()
    try:
        yield receiver
    finally:
        web.shutdown()
        serving.join()
        web.server_close()
        server.stop(0).wait()


def _handler(receiver: Receiver) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            right = self.path == "/v1/traces"
            if right:
                receiver.Export(_read(body, self.headers["Content-Type"]), None)
            self.send_response(200 if right else 404)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    return Handler


def _read(body: bytes, kind: str) -> Any:
    """Read a batch: Triton itself sends JSON, in which ids are hexadecimal where protobuf's own JSON has base64."""
    if "json" not in kind:
        return messages.ExportTraceServiceRequest.FromString(body)
    text = re.sub(
        rb'("(?:traceId|spanId|parentSpanId)"\s*:\s*")([0-9a-fA-F]+)(")',
        lambda found: found[1] + base64.b64encode(bytes.fromhex(found[2].decode())) + found[3],
        body,
    )
    return json_format.Parse(text, messages.ExportTraceServiceRequest(), ignore_unknown_fields=True)


def _span(service_name: str, span: Any) -> Span:
    return Span(
        service_name,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _values(span.attributes),
        [(event.name, _values(event.attributes)) for event in span.events],
        span.status.message if span.status.code == 2 else None,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None
