"""One request's events, put together: when it was where, what it asked for, how it ended."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from triton_lifecycle.events import (
    ENDINGS,
    Admitted,
    DeadlineMoved,
    Event,
    Failed,
    Finished,
    FirstToken,
    Prepared,
    Progress,
    Received,
    Rejected,
    Retrying,
    Scheduled,
    StageDone,
    TimedOut,
)

PHASES: Final = ("receive", "preprocess", "queue", "prefill", "decode", "respond")
"""A request's time, split in this order. ``queue``: from being understood until the engine begins with it; ``respond``:
from the engine's last word to the end."""

_PLACES: Final[dict[type[Event], str]] = {
    Received: "received",
    Prepared: "prepared",
    Admitted: "admitted",
    Scheduled: "scheduled",
    **dict.fromkeys(ENDINGS, "ending"),
}
"""Where a story keeps what happens once."""


class Segment(msgspec.Struct, frozen=True):
    """One phase of a request, in clock seconds."""

    phase: str
    begin: float
    end: float


class Decision(msgspec.Struct, frozen=True):
    """What was decided about a request: what a replay must reproduce."""

    admitted: bool
    status: str
    slug: str | None
    finish_reason: str | None
    output_tokens: int
    retries: int


class Story(msgspec.Struct):
    """What a recording tells of one request. All times are seconds of one clock."""

    id: str
    begin: float
    """Of the first event that there is."""
    end: float
    """Of the last one."""
    received: Received | None = None
    """``None`` when the beginning is missing."""
    stages: list[StageDone] = []
    prepared: Prepared | None = None
    admitted: Admitted | None = None
    scheduled: Scheduled | None = None
    first_token: float | None = None
    tokens: list[tuple[float, int]] = []
    """When, and how many; empty when the recorder was not told to record tokens."""
    deadlines: list[tuple[float, float, str]] = []
    """When it moved, to when, and which limit is the next."""
    retries: list[Retrying] = []
    ending: Event | None = None
    """``None`` when the end is missing: the request was live when the recording stopped."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> Story:
        """Put one request's events together; they may come in any order and more than once."""
        by_number = {event.seq: event for event in events}
        ordered = [by_number[seq] for seq in sorted(by_number)]
        story = cls(ordered[0].request_id, ordered[0].at, ordered[0].at)
        for event in ordered:
            story.begin = min(story.begin, event.at)
            story.end = max(story.end, event.at)
            story._take(event)
        return story

    def _take(self, event: Event) -> None:
        if (place := _PLACES.get(type(event))) is not None:
            setattr(self, place, getattr(self, place) or event)
            return
        match event:
            case StageDone():
                self.stages.append(event)
            case FirstToken():
                self.first_token = event.at
            case Progress():
                self.tokens.append((event.at, event.tokens))
            case DeadlineMoved():
                self.deadlines.append((event.at, event.due, event.limit))
            case Retrying():
                self.retries.append(event)

    @property
    def caller_id(self) -> str:
        """What the caller named it."""
        return "" if self.received is None else self.received.caller_id

    @property
    def model(self) -> str:
        """Which model was asked; empty when the beginning is missing."""
        return "" if self.received is None else self.received.model

    @property
    def status(self) -> str:
        """``completed``, ``failed``, ``cancelled``, ``timed_out``, ``rejected``; ``live`` when the end is missing."""
        return "live" if self.ending is None else ENDINGS[type(self.ending)]

    @property
    def slug(self) -> str | None:
        """Why it ended badly."""
        return getattr(self.ending, "slug", None)

    @property
    def message(self) -> str | None:
        """What its caller was told about that."""
        return self.ending.message if isinstance(self.ending, (Failed, TimedOut, Rejected)) else None

    @property
    def output_tokens(self) -> int:
        """Tokens that were made for it, as far as is known."""
        told = getattr(self.ending, "output_tokens", None)
        return sum(count for _, count in self.tokens) if told is None else int(told)

    @property
    def duration(self) -> float:
        """Seconds from the first to the last event."""
        return self.end - self.begin

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from the arrival; ``None`` when there was none or the arrival is not known."""
        return None if self.first_token is None or self.received is None else self.first_token - self.received.at

    @property
    def decision(self) -> Decision:
        """What was decided."""
        return Decision(
            admitted=self.admitted is not None,
            status=self.status,
            slug=self.slug,
            finish_reason=self.ending.finish_reason if isinstance(self.ending, Finished) else None,
            output_tokens=self.output_tokens,
            retries=len(self.retries),
        )

    def stage_end(self, name: str) -> float | None:
        """Return when a stage let the request pass; ``None`` if it did not."""
        return next((stage.at for stage in self.stages if stage.stage == name), None)

    def segments(self) -> list[Segment]:
        """Return the request's time without a gap, split by phase; the last one is where it ended.

        Time that the recording does not tell apart belongs to the next phase that it does.
        """
        before = [stage.at for stage in self.stages if stage.stage not in {"receive", "schedule", "execute"}]
        begun = self.scheduled is not None
        marks = (  # when each phase ended
            self.stage_end("receive"),
            max(before, default=None),
            None if self.scheduled is None else self.scheduled.at,
            self.first_token,
            self.stage_end("execute") if begun else None,
        )
        found: list[Segment] = []
        at, reached = self.begin, 0
        for number, mark in enumerate(marks):
            if mark is not None:
                found.append(Segment(PHASES[number], at, max(at, mark)))
                at, reached = max(at, mark), number + 1
        if self.end > at or not found:
            found.append(Segment(PHASES[reached], at, self.end))
        return found
