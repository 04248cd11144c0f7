"""What a recorded request brings into a simulation: what its words were judged to be, its pace, and who ended it.

Three kinds of ends. What follows from the *request* (a bad value, a prompt too long) is brought along, since its words
are not: the error is raised where it was raised. What came from *outside* (a caller that left, a drain, a fault of the
engine) happens at its recorded time. What the server *decided* (a permit or a refusal, a deadline) is not brought
along: the simulation decides it anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from random import Random
from typing import Final

import msgspec

from triton_lifecycle.errors import (
    BY_SLUG,
    Cancelled,
    DeadlineExceeded,
    Draining,
    EngineError,
    LifecycleError,
    QueueFull,
    RequestError,
)
from triton_lifecycle.events import Cancelled as CancelledEvent
from triton_lifecycle.events import Failed, Finished, Rejected, TimedOut
from triton_lifecycle.story import Story

MARGIN_S: Final = 1e-6
"""By how much a limit that did not pass outlasts what it allowed."""

_LIMIT_OF: Final = {
    "first_token_timeout": "first_token",
    "stall_timeout": "stall",
    "total_timeout": "total",
}


class Pace(msgspec.Struct, frozen=True):
    """How fast the engine was on average, drawn from a recording, for requests whose own pace it does not tell."""

    waits: tuple[float, ...] = (0.05,)
    """Seconds from the permit to the first token."""
    gaps: tuple[float, ...] = (0.02,)
    """Mean seconds between two tokens of a request."""
    lengths: tuple[int, ...] = (16,)
    """Output tokens of completed requests, per sequence."""

    @classmethod
    def of(cls, stories: Iterable[Story]) -> Pace:
        """Take the measure of a recording."""
        waits, gaps, lengths = [], [], []
        for story in stories:
            if story.admitted is not None and story.first_token is not None:
                waits.append(story.first_token - story.admitted.at)
                if story.output_tokens > 1:
                    gaps.append(max(0.0, story.end - story.first_token) / (story.output_tokens - 1))
            if isinstance(story.ending, Finished) and story.output_tokens:
                sequences = 1 if story.prepared is None else story.prepared.sequences
                lengths.append(max(1, story.output_tokens // sequences))
        default = cls()
        return cls(
            tuple(sorted(waits)) or default.waits,
            tuple(sorted(gaps)) or default.gaps,
            tuple(sorted(lengths)) or default.lengths,
        )

    def draw(self, seed: int, request_id: str) -> tuple[float, float, int]:
        """Return a wait, a gap and a length for one request: the same for the same seed and id."""
        random = Random(f"{seed}/{request_id}")  # noqa: S311 - a simulation
        # Never at once: who ends a request at this very moment must come before what it would have made then.
        wait, gap = (max(MARGIN_S, random.choice(found)) for found in (self.waits, self.gaps))
        return wait, gap, random.choice(self.lengths)


class Trace:
    """One recorded request, as a simulation needs it.

    Args:
        story: what was recorded; its beginning is there.
        until: when the recording ends, and with it what was still live.

    """

    def __init__(self, story: Story, until: float = 0.0) -> None:
        if story.received is None:
            raise ValueError(f"request {story.id}: its beginning is not in the recording")
        self.story = story
        self.until = until
        self.received = story.received
        self.tokens = _tokens(story)
        """When, and how many, in the engine's order."""

    @property
    def began_again(self) -> bool:
        """Whether the engine failed and the answer was made from its beginning: more tokens came than there are."""
        return bool(self.story.retries) and sum(count for _, count in self.story.tokens) > self.story.output_tokens

    def tokens_of(self, attempt: int, made: int) -> Iterator[tuple[float, int]]:
        """Yield when the tokens of one attempt came and how many, without the first ``made`` that are known."""
        retries = self.story.retries
        begin = retries[attempt - 2].at if self.began_again and attempt > 1 else float("-inf")
        end = retries[attempt - 1].at if attempt <= len(retries) else float("inf")
        for at, count in self.tokens:
            if begin < at <= end:
                known = min(made, count)
                made -= known
                if count > known:
                    yield at, count - known

    def failure(self, attempt: int) -> tuple[float, EngineError] | None:
        """When an attempt failed so that another was made, and with what; ``None`` if it did not."""
        if attempt > len(self.story.retries):
            return None
        retry = self.story.retries[attempt - 1]
        return retry.at, type("Recorded", (EngineError,), {"slug": retry.slug})("as recorded")

    @property
    def identity(self) -> tuple[str, float]:
        """Its id and calendar time."""
        return self.story.id, self.received.wall

    @property
    def prompt_tokens(self) -> int:
        """Of the prompt; a guess from its size when the engine never saw it."""
        if self.story.scheduled is not None and self.story.scheduled.prompt_tokens:
            return self.story.scheduled.prompt_tokens
        return max(1, self.prompt_bytes // 4)

    @property
    def prompt_bytes(self) -> int:
        """Of the prompt in UTF-8."""
        return 16 if self.story.prepared is None else self.story.prepared.prompt_bytes

    @property
    def verdict(self) -> tuple[str, LifecycleError] | None:
        """Where the request was refused for what it is, and with what; ``None`` if it was not."""
        ending = self.story.ending
        if not isinstance(ending, (Rejected, Failed)) or self.outside is not None:
            return None
        if isinstance(ending, Rejected) and BY_SLUG.get(ending.slug) in {QueueFull, Draining}:
            return None
        error = _error(ending.slug, ending.message, RequestError if isinstance(ending, Rejected) else LifecycleError)
        if self.story.admitted is not None:
            return "execute", error
        for stage in ("receive", "preprocess"):
            if self.story.stage_end(stage) is None:
                return stage, error
        return "schedule", error

    @property
    def outside(self) -> tuple[float, LifecycleError] | None:
        """When somebody else ended it, and with what; ``None`` if nobody did."""
        ending = self.story.ending
        if ending is None:
            return max(self.story.end, self.until), Cancelled("the recording ends here")
        if isinstance(ending, CancelledEvent):
            return ending.at, _error(ending.slug, "as recorded", Cancelled)
        if isinstance(ending, Failed) and ending.slug == Draining.slug:
            return ending.at, _error(ending.slug, ending.message)
        if isinstance(ending, TimedOut) and ending.slug not in _LIMIT_OF:
            return ending.at, _error(ending.slug, ending.message, DeadlineExceeded)
        return None

    @property
    def decided(self) -> float | None:
        """When admission judged it; ``None`` if it never came so far."""
        if self.story.admitted is not None:
            return self.story.admitted.at
        if isinstance(self.story.ending, Rejected) and self.story.stage_end("preprocess") is not None:
            return self.story.ending.at
        return None

    @property
    def limits(self) -> dict[str, float] | None:
        """The limits it had, each as late as the real timer was; ``None`` if they were not recorded.

        A busy machine's timer fires late, and tokens may slip through before it does. So a limit that passed is
        lengthened to the moment when it did, and one that did not to what it let pass.
        """
        if self.story.admitted is None:
            return None
        begin, end = self.received.at, self.story.end
        arrivals = [at for at, _ in self.tokens]
        gaps = [later - earlier for earlier, later in pairwise([*arrivals, end])]
        used = {
            "first_token": (arrivals[0] if arrivals else end) - begin,
            "stall": max(gaps, default=0.0),
            "total": end - begin,
        }
        passed = _LIMIT_OF.get(self.story.slug or "") if isinstance(self.story.ending, TimedOut) else None
        return {
            name: (gaps[-1] if name == "stall" and gaps else used[name])
            if name == passed
            else max(limit, used.get(name, 0.0) + MARGIN_S)
            for name, limit in self.story.admitted.limits.items()
        }


def _tokens(story: Story) -> list[tuple[float, int]]:
    """Return when the tokens came; evenly between the first and the end where only their number was recorded."""
    if story.tokens or story.first_token is None:
        return story.tokens
    count = max(1, story.output_tokens)
    last = story.stage_end("execute") or story.end
    if story.slug == "stall_timeout" and story.admitted is not None:
        last -= story.admitted.limits.get("stall", 0.0)
    step = max(0.0, last - story.first_token) / count
    return [(story.first_token + number * step, 1) for number in range(count)]


def _error(slug: str, message: str, base: type[LifecycleError] = LifecycleError) -> LifecycleError:
    """Return the error of a slug; one that this release does not know becomes a leaf of ``base``."""
    known: type[LifecycleError] = BY_SLUG.get(slug) or type("Recorded", (base,), {"slug": slug})
    return known(message)
