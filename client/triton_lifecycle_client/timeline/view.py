"""What a timeline shows: the requests that were chosen, their totals, and how many waited and ran at each moment."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import msgspec

from triton_lifecycle import events
from triton_lifecycle.events import ENDINGS, Event
from triton_lifecycle.story import PHASES, Story
from triton_lifecycle_client.quantiles import quantiles
from triton_lifecycle_client.terminal import UsageFault

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from triton_lifecycle.recording import Recording
    from triton_lifecycle_client.types import Status

STATUSES: Final = (*ENDINGS.values(), "live")


class View(msgspec.Struct):
    """Requests to be shown.

    Attributes:
        source: where they come from, for people.
        stories: by arrival.
        events: how many the source holds in all.
        notes: what is missing, for people.

    """

    source: str
    stories: list[Story]
    events: int
    notes: list[str] = []

    @property
    def begin(self) -> float:
        """Clock time at which the first of them arrived."""
        return min((story.begin for story in self.stories), default=0.0)

    @property
    def end(self) -> float:
        """Clock time at which the last of them ended."""
        return max((story.end for story in self.stories), default=0.0)

    @property
    def wall(self) -> float | None:
        """Unix time of :attr:`begin`; ``None`` when no request's beginning is there."""
        for story in self.stories:
            if story.received is not None:
                return story.received.wall - story.received.at + self.begin
        return None


class Filter(msgspec.Struct, frozen=True):
    """Which requests to show; an empty choice means all."""

    statuses: frozenset[str] = frozenset()
    slugs: frozenset[str] = frozenset()
    ids: tuple[str, ...] = ()
    """Beginnings of the caller's id or ours."""
    slowest: int | None = None

    def check(self) -> None:
        """Raise ``UsageFault`` when it names a status that there is not."""
        if unknown := sorted(self.statuses - set(STATUSES)):
            raise UsageFault(f"--status {unknown[0]}: there are {', '.join(STATUSES)}")

    def apply(self, view: View) -> View:
        """Return the view with the chosen requests alone, still by arrival."""
        chosen = [story for story in view.stories if self._takes(story)]
        if self.slowest is not None and len(chosen) > self.slowest:
            slowest = sorted(chosen, key=lambda story: story.duration, reverse=True)[: self.slowest]
            chosen = sorted(slowest, key=lambda story: (story.begin, story.id))
        return msgspec.structs.replace(view, stories=chosen)

    def _takes(self, story: Story) -> bool:
        return (
            (not self.statuses or story.status in self.statuses)
            and (not self.slugs or story.slug in self.slugs)
            and (not self.ids or story.id.startswith(self.ids) or story.caller_id.startswith(self.ids))
        )


def of(recording: Recording, source: str) -> View:
    """Return the view of a recording."""
    missing = sum(story.received is None for story in recording.stories)
    live = sum(story.ending is None for story in recording.stories)
    notes = [
        note
        for count, note in (
            (recording.lost, f"{recording.lost} events were dropped by the recorder"),
            (recording.unreadable, f"{recording.unreadable} lines could not be read"),
            (missing, f"the beginning of {missing} requests is missing"),
            (live, f"the end of {live} requests is missing"),
            (recording.cut, f"only the first {recording.events} events were read"),
        )
        if count
    ]
    return View(source, recording.stories, recording.events, notes)


def of_status(status: Status) -> View:
    """Return the view of one request that a server told of, whichever replica served it: by its milestones."""
    at = {name: milliseconds / 1e3 for name, milliseconds in status.times_ms.items()}
    own: list[Event] = [events.Received(status.id, 0, 0.0, status.caller_id, status.model, status.received_at)]
    if "admitted" in at:
        own.append(events.Admitted(status.id, len(own), at["admitted"], 0, {}))
    if "scheduled" in at:
        own.append(
            events.Scheduled(
                status.id,
                len(own),
                at["scheduled"],
                status.attempts,
                status.prompt_tokens or 0,
                status.cached_tokens or 0,
            )
        )
    if "first_token" in at:
        own.append(events.FirstToken(status.id, len(own), at["first_token"]))
    latest = max(at.values(), default=0.0)
    if (ending := _ending(status, len(own), at.get("finished", latest))) is not None:
        own.append(ending)
    else:
        # Up to the moment of the record, or it would seem to have stopped at its last milestone.
        so_far = max(latest, status.updated_at - status.received_at)
        own.append(events.Progress(status.id, len(own), so_far, status.output_tokens, status.output_tokens))
    return View(status.caller_id or status.id, [Story.of(own)], len(own), list(_told(status)))


def _told(status: Status) -> Iterator[str]:
    if status.status == "lost":
        yield f"the replica {status.node!r} that served it is gone; this is what was last known"
    elif status.node:
        yield f"served by the replica {status.node!r}"


def _ending(status: Status, seq: int, at: float) -> Event | None:
    slug, tokens = status.slug or "", status.output_tokens
    match status.status:
        case "finished":
            return events.Finished(status.id, seq, at, status.finish_reason or "", tokens)
        case "failed":
            return events.Failed(status.id, seq, at, slug, "", tokens)
        case "cancelled":
            return events.Cancelled(status.id, seq, at, slug, tokens)
        case "timed_out":
            return events.TimedOut(status.id, seq, at, slug, "", tokens)
        case "rejected":
            return events.Rejected(status.id, seq, at, slug, "")
        case _:
            return None


def depth(stories: Iterable[Story]) -> list[tuple[float, int, int]]:
    """Return how many requests waited for the engine and how many it worked on: a point for each change."""
    changes: list[tuple[float, int, int]] = []
    for story in stories:
        scheduled = None if story.scheduled is None else story.scheduled.at
        if story.admitted is not None:
            changes += [(story.admitted.at, 1, 0), (story.end if scheduled is None else scheduled, -1, 0)]
        if scheduled is not None:
            changes += [(scheduled, 0, 1), (story.end, 0, -1)]
    points: list[tuple[float, int, int]] = []
    waiting = running = 0
    for at, more_waiting, more_running in sorted(changes, key=lambda change: change[0]):
        waiting += more_waiting
        running += more_running
        if points and points[-1][0] == at:
            points.pop()
        points.append((at, waiting, running))
    return points


def totals(stories: list[Story]) -> dict[str, Any]:
    """Return counts and quantiles, in seconds."""
    phases: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for segment in chain.from_iterable(story.segments() for story in stories):
        phases[segment.phase].append(segment.end - segment.begin)
    ends = Counter(story.status for story in stories)
    return {
        "requests": len(stories),
        "ends": {status: ends[status] for status in STATUSES if ends[status]},
        "slugs": dict(sorted(Counter(story.slug for story in stories if story.slug).items())),
        "output_tokens": sum(story.output_tokens for story in stories),
        "retries": sum(len(story.retries) for story in stories),
        "first_token_s": quantiles(s.time_to_first_token for s in stories if s.time_to_first_token is not None),
        "total_s": quantiles(story.duration for story in stories),
        "phases_s": {phase: quantiles(values) for phase, values in phases.items() if values},
    }


def document(view: View) -> dict[str, Any]:
    """Return what ``--json`` prints: totals, and each request with its phases in seconds from the first arrival."""
    begin = view.begin
    return {
        "source": view.source,
        "events": view.events,
        "notes": view.notes,
        "begin_unix_s": view.wall,
        "totals": totals(view.stories),
        "requests": [
            {
                "id": story.id,
                "caller_id": story.caller_id,
                "model": story.model,
                "status": story.status,
                "slug": story.slug,
                "message": story.message,
                "at": round(story.begin - begin, 6),
                "total_s": round(story.duration, 6),
                "output_tokens": story.output_tokens,
                "retries": len(story.retries),
                "phases": [
                    {"phase": part.phase, "at": round(part.begin - begin, 6), "s": round(part.end - part.begin, 6)}
                    for part in story.segments()
                ],
            }
            for story in view.stories
        ],
    }
