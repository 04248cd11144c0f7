"""Follows each request on the bus, and hands what its whole life was to the metrics once it has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from triton_lifecycle.events import (
    ENDINGS,
    Admitted,
    Event,
    FirstToken,
    Prepared,
    Received,
    Retrying,
    Scheduled,
    Slow,
    StageDone,
)


class Life(msgspec.Struct):
    """What was seen of one request. Times are on the server's monotonic clock; ``None`` until they come."""

    received: float
    kind: str = "prompt"
    sequences: int = 1
    admitted: float | None = None
    scheduled: float | None = None
    first_token: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    slow: bool = False
    retries: list[str] = []
    """Slugs of the attempts that failed."""
    stages: list[tuple[str, float]] = []
    """The stages that it left, and the seconds in each."""
    ending: Event | None = None

    @property
    def outcome(self) -> str:
        """How it ended; empty before."""
        return "" if self.ending is None else ENDINGS[type(self.ending)]

    @property
    def whole(self) -> float:
        """Seconds from its arrival to its end."""
        return 0.0 if self.ending is None else self.ending.at - self.received

    @property
    def queued(self) -> float | None:
        """Seconds between its permit and the engine's beginning."""
        return None if self.scheduled is None or self.admitted is None else self.scheduled - self.admitted

    @property
    def to_first_token(self) -> float | None:
        """Seconds from its arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.received

    @property
    def output_tokens(self) -> int:
        """Made for it, over all sequences."""
        return getattr(self.ending, "output_tokens", 0)

    @property
    def per_token(self) -> float | None:
        """Mean seconds between the tokens of one sequence; ``None`` when there was one alone."""
        if self.first_token is None or self.ending is None or self.output_tokens <= self.sequences:
            return None
        return (self.ending.at - self.first_token) / (self.output_tokens / self.sequences - 1)


class Follow:
    """Subscribe :meth:`take` in line to :data:`TYPES`. Event-loop thread only.

    Args:
        observers: each is told of every life that has ended.

    """

    TYPES: tuple[type[Event], ...] = (
        Received,
        StageDone,
        Prepared,
        Admitted,
        Slow,
        Scheduled,
        FirstToken,
        Retrying,
        *ENDINGS,
    )

    def __init__(self, observers: Iterable[Callable[[Life], None]]) -> None:
        self._observers = tuple(observers)
        self._open: dict[str, Life] = {}

    def __len__(self) -> int:
        """Return how many requests are being followed."""
        return len(self._open)

    def take(self, event: Event) -> None:
        """Follow one request."""
        if isinstance(event, Received):
            self._open[event.request_id] = Life(event.at)
            return
        life = self._open.get(event.request_id)
        if life is None:
            return
        if type(event) in ENDINGS:
            del self._open[event.request_id]
            life.ending = event
            for observer in self._observers:
                observer(life)
            return
        _note(life, event)


def _note(life: Life, event: Event) -> None:
    match event:
        case StageDone():
            life.stages.append((event.stage, event.seconds))
        case Prepared():
            life.kind, life.sequences = event.kind, event.sequences
        case Admitted():
            life.admitted, life.sequences = event.at, event.sequences
        case Scheduled():
            life.scheduled = event.at
            life.prompt_tokens, life.cached_tokens = event.prompt_tokens, event.cached_tokens
        case FirstToken():
            life.first_token = event.at
        case Slow():
            life.slow = True
        case Retrying():
            life.retries.append(event.slug)
