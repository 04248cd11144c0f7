"""The caller's own span around a request, where the program that uses this library traces with OpenTelemetry."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from triton_lifecycle.errors import LifecycleError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .stream import Tally
    from .types import GenerateRequest


@contextmanager
def span_of(request: GenerateRequest, tally: Tally) -> Iterator[GenerateRequest]:
    """Yield the request, with a span around it that the server's span will stand below.

    A program that has set a tracer provider has loaded OpenTelemetry: where it is not loaded, nothing happens. Nor
    where the caller names a ``traceparent`` itself.
    """
    api = sys.modules.get("opentelemetry.trace")
    if api is None or request.traceparent is not None:
        yield request
        return
    asked = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "triton",
        "gen_ai.request.model": request.model,
        "gen_ai.request.stream": request.stream,
        "lifecycle.caller_id": request.request_id,
    }
    tracer = api.get_tracer("triton_lifecycle_client")
    span = tracer.start_span(f"text_completion {request.model}", kind=api.SpanKind.CLIENT, attributes=asked)
    try:
        yield _below(span, request)
    except BaseException as error:
        # Leaving a stream early is no fault.
        if isinstance(error, Exception):
            slug = error.slug if isinstance(error, LifecycleError) else type(error).__name__
            span.set_attribute("error.type", slug)
            span.set_status(api.StatusCode.ERROR, slug)
        raise
    finally:
        span.set_attributes(_brought(tally))
        span.end()


def _below(span: Any, request: GenerateRequest) -> GenerateRequest:  # noqa: ANN401 - typed only where it is installed
    """Return the request as one below the span; as it was where no provider has been set."""
    context = span.get_span_context()
    if not context.is_valid:
        return request
    traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
    return msgspec.structs.replace(
        request, traceparent=traceparent, tracestate=context.trace_state.to_header() or request.tracestate
    )


def _brought(tally: Tally) -> dict[str, Any]:
    """Return the attributes of what came."""
    found = {
        "gen_ai.usage.input_tokens": tally.prompt_tokens,
        "gen_ai.usage.output_tokens": tally.output_tokens,
        "gen_ai.response.time_to_first_chunk": tally.first_chunk_s,
        "lifecycle.attempts": tally.attempts,
    }
    return {name: value for name, value in found.items() if value is not None}
