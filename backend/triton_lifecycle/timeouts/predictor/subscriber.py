"""The predictor on the bus: it follows each request, knows the load from the others, and learns from every end."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from triton_lifecycle.errors import FirstTokenTimeout, StallTimeout
from triton_lifecycle.events import (
    ENDINGS,
    Admitted,
    Cancelled,
    Event,
    Finished,
    FirstToken,
    Prepared,
    Retrying,
    Scheduled,
    TimedOut,
)
from triton_lifecycle.timeouts.predictor.features import Features
from triton_lifecycle.timeouts.predictor.online import Model, Observation, Online, Prediction

KEPT: Final = 2048
"""Observations that are kept, to learn from again after a restart."""
_LATELY_S: Final = 5.0
"""Over which the rate of arriving prompt tokens is averaged."""
_LOOK_BACK: Final = 256
"""Waiting requests that are looked at for those that came during the engine's present step."""
_FURTHER: Final = 1.25
"""More prompt tokens than were ever seen at once, by this factor, are beyond what predictions know."""
_FADE: Final = 0.999
"""What the largest load that was seen is multiplied by with each first token: halved after 700."""
_BYTES_PER_TOKEN: Final = 4.0
"""Until it is known better."""


class _Open(msgspec.Struct):
    """A request that has not ended."""

    prompt_bytes: int
    max_tokens: int
    sequences: int
    features: Features | None = None
    told: Prediction | None = None
    admitted: float | None = None
    first_token: float | None = None
    with_first: int = 0
    prompt_tokens: float = 0.0
    pending: float = 0.0
    """Prompt tokens that waited or were read when it came, its own included."""
    disturbed: bool = False
    """Whether the engine failed meanwhile: its times say nothing."""


def hour_of_day() -> float:
    """Return the local time of day in hours."""
    now = time.localtime()
    return now.tm_hour + now.tm_min / 60


class Predictor:
    """Subscribe :meth:`take` in line to :data:`TYPES`. Event-loop thread only.

    Args:
        model: ``linear`` or ``ml``.
        max_model_len: tokens that prompt and answer have together at most; not known yet, :meth:`fit` tells later.
        slots: sequences that the engine runs at once; likewise.
        kv_usage: returns the share of the KV cache in use.
        silence: returns the seconds since the engine's last token for anybody.
        clock: monotonic seconds, as the events have them.
        hour: returns the local time of day.

    Raises:
        ConfigError: the model's package is not installed.

    """

    TYPES: tuple[type[Event], ...] = (Prepared, Admitted, Scheduled, FirstToken, Retrying, *ENDINGS)

    def __init__(
        self,
        model: Model,
        *,
        max_model_len: int = 1,
        slots: int = 1,
        kv_usage: Callable[[], float] = lambda: 0.0,
        silence: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
        hour: Callable[[], float] = hour_of_day,
    ) -> None:
        self._model = model
        self.fit(max_model_len, slots)
        self._kv_usage = kv_usage
        self._silence = silence
        self._clock = clock
        self._hour = hour
        self._open: dict[str, _Open] = {}
        self._running = self._waiting = 0
        self._pending = 0.0
        self._queue: dict[str, _Open] = {}
        """Those that wait, oldest first."""
        self._arriving = 0.0
        """Prompt tokens a second, of late."""
        self._arriving_at = 0.0
        self._bytes_per_token = _BYTES_PER_TOKEN
        self._explored = 0.0
        """The most prompt tokens that waited or were read at once when one came that has had its first token since."""
        self._kept: deque[Observation] = deque(maxlen=KEPT)

    def fit(self, max_model_len: int, slots: int) -> None:
        """Count on such an engine; called before the first request."""
        self._max_model_len = max_model_len
        self._online = Online(self._model, slots)

    @property
    def running(self) -> int:
        """Sequences between their first and their last token."""
        return self._running

    @property
    def waiting(self) -> int:
        """Admitted sequences without a token."""
        return self._waiting

    @property
    def unexplored(self) -> bool:
        """Whether the engine reads more at once than it was ever seen to: how long it may be silent is not known."""
        return self._pending > _FURTHER * self._explored

    @property
    def kept(self) -> tuple[Observation, ...]:
        """The latest observations, oldest first."""
        return tuple(self._kept)

    def features(self, prompt_bytes: int, max_tokens: int | None, sequences: int = 1) -> Features:
        """Describe a request that would be admitted now."""
        prompt = max(1.0, prompt_bytes / self._bytes_per_token)
        room = max(1, int(self._max_model_len - prompt))
        others = self._running + self._waiting
        elapsed = self._silence() if others else 0.0
        in_step = max(0.0, self._pending - self._queued(self._clock() - elapsed)) if self._queue else 0.0
        return Features(
            prompt_tokens=prompt,
            max_tokens=room if max_tokens is None else min(max_tokens, room),
            sequences=sequences,
            running=self._running,
            waiting=self._waiting,
            pending=self._pending,
            in_step=in_step,
            elapsed=elapsed,
            # What comes in while this one runs is of the others: its own share of all that comes is taken out.
            arriving=self._arriving * others / (others + sequences),
            kv_usage=self._kv_usage(),
            hour=self._hour(),
        )

    def predict(self, features: Features) -> Prediction | None:
        """Return what such a request will take; ``None`` while too little was seen."""
        return self._online.predict(features)

    def forecast(self, request_id: str) -> Prediction | None:
        """Predict for a request that has been prepared, and remember it: it is held against what comes."""
        request = self._open.get(request_id)
        if request is None:
            return None
        request.features = self.features(request.prompt_bytes, request.max_tokens or None, request.sequences)
        request.told = self.predict(request.features)
        return request.told

    def take(self, event: Event) -> None:
        """Follow one request."""
        if isinstance(event, Prepared):
            if event.kind != "embedding":
                self._open[event.request_id] = _Open(event.prompt_bytes, event.max_tokens or 0, event.sequences)
            return
        request = self._open.get(event.request_id)
        if request is None:
            return
        match event:
            case Admitted():
                self._admit(event, request)
            case Scheduled():
                request.prompt_tokens = event.prompt_tokens
                # What was cached was not read: the same prompt may take far longer another time.
                request.pending = max(0.0, request.pending - event.cached_tokens)
                self._bytes_per_token += 0.02 * (request.prompt_bytes / event.prompt_tokens - self._bytes_per_token)
            case FirstToken():
                self._prefill(event.at, request.prompt_tokens)
                self._explored = max(_FADE * self._explored, request.pending)
                request.first_token, request.with_first = event.at, event.tokens
                self._begin(event.request_id, request)
            case Retrying():
                request.disturbed = True
            case _:
                self._end(event, request)

    def relearn(self, observations: Iterable[Observation]) -> None:
        """Learn from what an earlier process saw."""
        for seen in observations:
            self._kept.append(seen)
            self._online.learn(seen, None)
            if seen.per_token is not None or seen.total is not None:
                self._explored = max(self._explored, seen.features.pending + seen.features.prompt_tokens)

    def report(self) -> dict[str, Any]:
        """Return the model, how much it has seen, and how good it has been."""
        return {"model": self._model, **self._online.report()}

    def _admit(self, event: Admitted, request: _Open) -> None:
        if request.features is None:
            self.forecast(event.request_id)
        assert request.features is not None  # noqa: S101 - forecast has just written it
        self._queue[event.request_id] = request
        request.admitted = event.at
        request.prompt_tokens = request.features.prompt_tokens
        self._waiting += request.sequences
        self._pending += request.features.prompt_tokens
        request.pending = self._pending

    def _queued(self, since: float) -> float:
        """Return the prompt tokens that came after a moment: the engine's present step is without them."""
        tokens = 0.0
        for request in itertools.islice(reversed(self._queue.values()), _LOOK_BACK):
            if request.admitted is None or request.admitted <= since:
                break
            tokens += request.prompt_tokens
        return tokens

    def _begin(self, request_id: str, request: _Open) -> None:
        """The request waits no more."""
        self._queue.pop(request_id, None)
        if request.features is not None:
            self._waiting -= request.sequences
            self._pending = max(0.0, self._pending - request.features.prompt_tokens) if self._waiting else 0.0
            self._running += request.sequences

    def _prefill(self, now: float, tokens: float) -> None:
        self._arriving *= math.exp(-max(0.0, now - self._arriving_at) / _LATELY_S)
        self._arriving += tokens / _LATELY_S
        self._arriving_at = now

    def _end(self, event: Event, request: _Open) -> None:
        del self._open[event.request_id]
        if request.admitted is None or request.features is None:
            return
        if request.first_token is None:
            self._begin(event.request_id, request)
        self._running -= request.sequences
        if not request.disturbed and (seen := self._observed(event, request)) is not None:
            self._kept.append(seen)
            self._online.learn(seen, request.told)

    def _observed(self, event: Event, request: _Open) -> Observation | None:
        if request.features is None or request.admitted is None:
            return None
        features = msgspec.structs.replace(request.features, prompt_tokens=request.prompt_tokens)
        took = event.at - request.admitted
        if request.first_token is None:
            # It waited longer than predicted and had no token yet. That much must be learned, or an engine so slow that
            # nobody waits for it would go on being taken for a fast one. A silence of the engine is no slowness.
            late = isinstance(event, TimedOut | Cancelled) and not _silence(event)
            if not late or request.told is None or took <= request.told.first_token.value:
                return None
            return Observation(features, first_token=took, admitted=request.admitted, ended=event.at)
        tokens = getattr(event, "output_tokens", 0) / request.sequences
        further = tokens - request.with_first / request.sequences
        done = isinstance(event, Finished)
        decoding = event.at - request.first_token
        return Observation(
            features,
            first_token=request.first_token - request.admitted,
            # Of a silence the time per token says nothing.
            per_token=decoding / further if further > 0 and decoding > 0 and not _silence(event) else None,
            total=took if done else None,
            tokens=tokens if done else None,
            admitted=request.admitted,
            ended=event.at,
        )


def _silence(event: Event) -> bool:
    return isinstance(event, TimedOut) and event.slug in {FirstTokenTimeout.slug, StallTimeout.slug}
