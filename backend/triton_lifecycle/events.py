"""The events of a request's life: frozen, typed, numbered without a gap per request.

A request's events begin with :class:`Received`, end with exactly one of :data:`ENDINGS`, and nothing follows.
:func:`encode` and :func:`decode` are their one codec (JSON objects with the event's name under ``event``).
"""

from __future__ import annotations

import msgspec


class Event(msgspec.Struct, frozen=True, tag_field="event", gc=False):
    """What all events carry.

    Attributes:
        request_id: our id of the request (32 hexadecimal digits at random).
        seq: position among this request's events, from 0.
        at: seconds on the server's monotonic clock.

    """

    request_id: str
    seq: int
    at: float


class Received(Event, frozen=True, tag=True, gc=False):
    """A request has arrived; nothing of it has been looked at yet."""

    caller_id: str
    model: str
    wall: float
    """Unix seconds of ``at``, which ties the monotonic clock to the calendar."""


class StageDone(Event, frozen=True, tag=True, gc=False):
    """A stage before or after the engine has let the request pass."""

    stage: str
    seconds: float


class Prepared(Event, frozen=True, tag=True, gc=False):
    """The request is understood: what it asks for, without its words."""

    kind: str
    """``prompt``, ``messages`` or ``embedding``."""
    prompt_bytes: int
    """Of the prompt in UTF-8, as the engine will read it; 0 for an embedding of token ids."""
    stream: bool
    priority: int
    tenant: str
    timeout: float | None
    """Seconds the caller allows; ``None`` when it set no bound."""
    sequences: int
    max_tokens: int | None
    """Per sequence; ``None`` means up to the model's length."""


class Admitted(Event, frozen=True, tag=True, gc=False):
    """Admission gave the request its permit and its deadline."""

    priority: int
    limits: dict[str, float]
    """Seconds by name: ``first_token``, ``stall``, ``total``; a limit that is off is absent."""
    sequences: int = 1
    """How many the caller asked for (``n``)."""


class Predicted(Event, frozen=True, tag=True, gc=False):
    """How long the request is expected to take, counted from here. Published only while somebody subscribes to it.

    Seconds: the value, and the bounds between which nine in ten lie.
    """

    first_token: tuple[float, float, float]
    per_token: tuple[float, float, float]
    total: tuple[float, float, float]


class Slow(Event, frozen=True, tag=True, gc=False):
    """The request has taken longer than was predicted for nineteen in twenty. Nothing is done to it."""

    after: float
    """Seconds since its arrival."""
    tokens: int
    """Made so far."""


class Scheduled(Event, frozen=True, tag=True, gc=False):
    """The engine began to work on the request. ``at`` is the engine's own time of it."""

    attempt: int
    prompt_tokens: int
    cached_tokens: int


class FirstToken(Event, frozen=True, tag=True, gc=False):
    """The first token left the engine."""

    tokens: int = 1
    """How many came with it: a chunk that nobody was free to take grows."""


class Progress(Event, frozen=True, tag=True, gc=False):
    """Tokens left the engine. Published only while somebody subscribes to it."""

    tokens: int
    """Tokens in this step."""
    total: int
    """Tokens so far."""


class DeadlineMoved(Event, frozen=True, tag=True, gc=False):
    """The deadline moved because the request made progress. Published only while somebody subscribes to it."""

    due: float
    limit: str


class Retrying(Event, frozen=True, tag=True, gc=False):
    """An attempt failed; the next one begins."""

    attempt: int
    slug: str


class LoadLimitMoved(Event, frozen=True, tag=True, gc=False):
    """The end of this request moved the limit on live requests (``admission.adaptive``)."""

    limit: int
    before: int


class Traced(Event, frozen=True, tag=True, gc=False):
    """Where the request's own span stands. Published only while requests are traced."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 of them."""
    parent_id: str
    """The caller's span; empty where the trace begins with this request."""
    sampled: bool
    state: str


class Finished(Event, frozen=True, tag=True, gc=False):
    """Ending: the whole answer was made."""

    finish_reason: str
    output_tokens: int


class Failed(Event, frozen=True, tag=True, gc=False):
    """Ending: the engine or this backend failed."""

    slug: str
    message: str
    output_tokens: int


class Cancelled(Event, frozen=True, tag=True, gc=False):
    """Ending: the caller left or asked for the end."""

    slug: str
    output_tokens: int
    after: float = 0.0
    """Seconds from the moment this was known until the engine had let go of the request."""


class TimedOut(Event, frozen=True, tag=True, gc=False):
    """Ending: a time limit passed."""

    slug: str
    message: str
    output_tokens: int


class Rejected(Event, frozen=True, tag=True, gc=False):
    """Ending: refused before any engine time was spent (bad input, overload, drain)."""

    slug: str
    message: str


class Lost(msgspec.Struct, frozen=True, tag_field="event", tag=True, gc=False):
    """No event of a request, but a line of a recording: so many events are missing here."""

    at: float
    """When recording went on, on the server's monotonic clock."""
    count: int


ENDINGS: dict[type[Event], str] = {
    Finished: "completed",
    Failed: "failed",
    Cancelled: "cancelled",
    TimedOut: "timed_out",
    Rejected: "rejected",
}
"""The five endings and the counter each belongs to: received = their sum + live."""

OPERATIONS = {"prompt": "text_completion", "messages": "chat", "embedding": "embeddings"}
"""OpenTelemetry's names for what a request may ask, by :attr:`Prepared.kind`."""
PROVIDER = "triton"
"""Who serves, in OpenTelemetry's words: the same in metrics, in spans, and in our client's spans."""

TYPES: tuple[type[Event], ...] = (
    Received,
    StageDone,
    Prepared,
    Admitted,
    Predicted,
    Slow,
    Scheduled,
    FirstToken,
    Progress,
    DeadlineMoved,
    Retrying,
    LoadLimitMoved,
    Traced,
    *ENDINGS,
)
"""Every concrete event type."""

_AnyEvent = (
    Received
    | StageDone
    | Prepared
    | Admitted
    | Predicted
    | Slow
    | Scheduled
    | FirstToken
    | Progress
    | DeadlineMoved
    | Retrying
    | LoadLimitMoved
    | Traced
    | Finished
    | Failed
    | Cancelled
    | TimedOut
    | Rejected
)
_decoder = msgspec.json.Decoder(_AnyEvent)
_encoder = msgspec.json.Encoder()


def encode(event: Event | Lost) -> bytes:
    """Return one JSON object, without a line end."""
    return _encoder.encode(event)


def decode(data: bytes | str) -> Event:
    """Turn what :func:`encode` made back into the same event. Raises ``msgspec.DecodeError`` on anything else."""
    return _decoder.decode(data)
