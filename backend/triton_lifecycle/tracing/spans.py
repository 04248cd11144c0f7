"""One request's events → its span and one below it for each stage, with the events' own times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SpanEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from triton_lifecycle import __version__
from triton_lifecycle.events import (
    ENDINGS,
    OPERATIONS,
    PROVIDER,
    Admitted,
    Cancelled,
    DeadlineMoved,
    Event,
    Finished,
    FirstToken,
    LoadLimitMoved,
    Predicted,
    Prepared,
    Received,
    Retrying,
    Scheduled,
    Slow,
    StageDone,
)
from triton_lifecycle.tracing.w3c import TraceContext

SCOPE: Final = InstrumentationScope("triton_lifecycle", __version__)
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)


class Builder:
    """Makes the spans of one model's requests.

    Args:
        resource: what produced them.
        stages: the names of the stages up to the engine's, in order; a stage that a request ended in has no event.
        new_span_id: makes the ids of the stages' spans.

    """

    def __init__(self, resource: Resource, stages: Sequence[str], new_span_id: Callable[[], int]) -> None:
        self._resource = resource
        self._stages = tuple(stages)
        self._new_span_id = new_span_id

    def build(self, events: list[Event], trace: TraceContext) -> list[ReadableSpan]:
        """Return the spans of a request that has ended.

        Args:
            events: its own, from :class:`Received` to an ending.
            trace: where they stand.

        """
        received, ending = events[0], events[-1]
        if not isinstance(received, Received):
            raise TypeError(f"a request's events begin with Received, found {type(received).__name__}")
        offset = received.wall - received.at
        trace_id = int(trace.trace_id, 16)
        state = TraceState.from_header([trace.state]) if trace.state else None
        own = SpanContext(trace_id, int(trace.span_id, 16), False, _SAMPLED, state)
        parent = SpanContext(trace_id, int(trace.parent_id, 16), True, _SAMPLED, state) if trace.parent_id else None
        attributes = _attributes(events, received, ending)
        spans = [
            ReadableSpan(
                f"{attributes['gen_ai.operation.name']} {received.model}",
                context=own,
                parent=parent,
                resource=self._resource,
                attributes=attributes,
                events=[SpanEvent(name, told, _ns(at + offset)) for at, name, told in _notes(events)],
                kind=SpanKind.SERVER,
                status=_status(ending),
                start_time=_ns(received.wall),
                end_time=_ns(ending.at + offset),
                instrumentation_scope=SCOPE,
            )
        ]
        for name, begin, end, passed in self._stretches(events, received.at, ending):
            spans.append(
                ReadableSpan(
                    name,
                    context=SpanContext(trace_id, self._new_span_id(), False, _SAMPLED, state),
                    parent=own,
                    resource=self._resource,
                    kind=SpanKind.INTERNAL,
                    status=_OK if passed else _status(ending),
                    start_time=_ns(begin + offset),
                    end_time=_ns(end + offset),
                    instrumentation_scope=SCOPE,
                )
            )
        return spans

    def _stretches(self, events: list[Event], begin: float, ending: Event) -> list[tuple[str, float, float, bool]]:
        """Return name, begin, end of each stage, and whether it let the request pass."""
        found, at, done = [], begin, set()
        for event in events:
            if isinstance(event, StageDone):
                found.append((event.stage, event.at - event.seconds, event.at, True))
                done.add(event.stage)
                at = event.at
        if not isinstance(ending, Finished) and (left := [name for name in self._stages if name not in done]):
            found.append((left[0], at, ending.at, False))
        return found


_OK: Final = Status(StatusCode.UNSET)


def _status(ending: Event) -> Status:
    if isinstance(ending, Finished | Cancelled):
        return _OK
    # The slug alone: a message may quote what the caller sent.
    return Status(StatusCode.ERROR, getattr(ending, "slug", None))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _attributes(events: list[Event], received: Received, ending: Event) -> dict[str, Any]:
    found: dict[str, Any] = {
        "gen_ai.operation.name": OPERATIONS["prompt"],
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": received.model,
        "gen_ai.response.model": received.model,
        "gen_ai.response.id": received.request_id,
        "lifecycle.outcome": ENDINGS[type(ending)],
    }
    if received.caller_id:
        found["lifecycle.caller_id"] = received.caller_id
    for event in events:
        found |= _told_by(event, received.at)
    if retries := sum(isinstance(event, Retrying) for event in events):
        found["lifecycle.retries"] = retries
    if (tokens := getattr(ending, "output_tokens", None)) is not None:
        found["gen_ai.usage.output_tokens"] = tokens
    if isinstance(ending, Finished):
        found["gen_ai.response.finish_reasons"] = tuple(ending.finish_reason.split(","))
    else:
        found["error.type"] = getattr(ending, "slug", "")
    return found


def _told_by(event: Event, received_at: float) -> dict[str, Any]:
    """Return the attributes that one event adds."""
    match event:
        case Prepared():
            optional = {
                "gen_ai.request.max_tokens": event.max_tokens,
                "gen_ai.request.choice.count": event.sequences if event.sequences > 1 else None,
                "lifecycle.tenant": event.tenant or None,
            }
            return {
                "gen_ai.operation.name": OPERATIONS.get(event.kind, "other"),
                "gen_ai.request.stream": event.stream,
                "lifecycle.priority": event.priority,
                **{name: value for name, value in optional.items() if value is not None},
            }
        case Admitted():
            return {f"lifecycle.limit.{name}": seconds for name, seconds in event.limits.items()}
        case Scheduled():
            return {
                "gen_ai.usage.input_tokens": event.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": event.cached_tokens,
                "lifecycle.queue_s": event.at - received_at,
            }
        case FirstToken():
            return {"gen_ai.response.time_to_first_chunk": event.at - received_at}
    return {}


def _notes(events: list[Event]) -> list[tuple[float, str, dict[str, Any]]]:
    """Return what happened within the span: time, name, attributes."""
    return [(event.at, note.name, note.tell(event)) for event in events if (note := _NOTES.get(type(event)))]


class _Note(NamedTuple):
    name: str
    tell: Callable[[Any], dict[str, Any]]


_NOTES: Final[dict[type[Event], _Note]] = {
    Admitted: _Note("admitted", lambda event: {"lifecycle.priority": event.priority}),
    Predicted: _Note("predicted", lambda event: {"lifecycle.predicted_s": event.total[0]}),
    Scheduled: _Note("scheduled", lambda event: {"lifecycle.attempt": event.attempt}),
    FirstToken: _Note("first_token", lambda event: {"lifecycle.tokens": event.tokens}),
    DeadlineMoved: _Note(
        "deadline_moved",
        lambda event: {"lifecycle.limit": event.limit, "lifecycle.due_in_s": event.due - event.at},
    ),
    Slow: _Note("slow", lambda event: {"lifecycle.tokens": event.tokens}),
    Retrying: _Note("retrying", lambda event: {"lifecycle.attempt": event.attempt, "error.type": event.slug}),
    LoadLimitMoved: _Note("load_limit_moved", lambda event: {"lifecycle.limit": event.limit}),
}
