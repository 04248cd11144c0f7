"""Going on with a stream whose connection broke, on whichever server takes the request next.

Where the server told the tokens of what it sent, they are sent back with the same request, and the next server goes on
behind them: that costs it a prefill. Where it did not, or the next one will not take them, the request is sent again
and what the caller has already is left out of the new answer. That is exact only where the answer is always the same,
at temperature 0, and it is proved on the way: the new answer must begin with the very text that was received. It needs
no help of the server, so it also works when that is not ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from triton_lifecycle.errors import Cancelled, DeadlineExceeded, Draining, LifecycleError

from .errors import ResumeFailed, ServerUnreachable, WrongPort
from .types import Chunk

if TYPE_CHECKING:
    from .retry import RetryPolicy
    from .types import GenerateRequest


class Received:
    """What a request's attempts have brought, and what of the present one is new."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._ids: list[int] = []
        self._known: list[str] = []
        self._known_tokens: list[int] = []
        self._known_ids = 0
        self._continued = self._further = False
        self.brought = False
        """Whether the present attempt has brought anything."""

    @property
    def anything(self) -> bool:
        """Whether the caller has anything of the answer that another attempt could contradict."""
        return any(self._texts) or any(self._tokens)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of all that is there; none unless each of them is known, and there is one sequence."""
        return tuple(self._ids) if self._tokens == [len(self._ids)] else ()

    def begin(self, *, continued: bool) -> None:
        """Begin a further attempt: all that is there is going to come again, unless it is ``continued``."""
        self._known = [] if continued else list(self._texts)
        self._known_tokens = [] if continued else list(self._tokens)
        self._known_ids = 0 if continued else len(self._ids)
        self._continued, self._further = continued, bool(self._texts)
        self.brought = False

    def new(self, chunk: Chunk) -> Chunk | None:
        """Return what of a chunk was not there before; ``None`` when nothing is.

        Raises:
            ResumeFailed: the answer differs from what was received.

        """
        self.brought = True
        texts = tuple(self._new_text(index, text) for index, text in enumerate(chunk.texts))
        counts = tuple(self._new_tokens(index, count) for index, count in enumerate(chunk.token_counts))
        again = min(self._known_ids, len(chunk.token_ids))
        self._known_ids -= again
        self._ids.extend(chunk.token_ids[again:])
        if chunk.texts and not any(texts) and not any(counts) and not any(chunk.finish_reasons):
            # An empty chunk of a first attempt tells that the answer has begun; of a further one it tells nothing.
            return None if self._further else chunk
        # Tokens that were sent along count as prompt there.
        prompt = None if self._continued else chunk.prompt_tokens
        return msgspec.structs.replace(chunk, texts=texts, token_counts=counts, prompt_tokens=prompt)

    def finish(self) -> None:
        """Prove at the end of an attempt that nothing is missing.

        Raises:
            ResumeFailed: the answer ended before what was received.

        """
        if any(self._known):
            raise ResumeFailed(_DIFFERS)

    def _new_text(self, index: int, text: str) -> str:
        known = self._known[index] if index < len(self._known) else ""
        again = min(len(known), len(text))
        if text[:again] != known[:again]:
            raise ResumeFailed(_DIFFERS)
        if known:
            self._known[index] = known[again:]
        _grow(self._texts, index, "")
        self._texts[index] += text[again:]
        return text[again:]

    def _new_tokens(self, index: int, count: int) -> int:
        known = self._known_tokens[index] if index < len(self._known_tokens) else 0
        again = min(known, count)
        if known:
            self._known_tokens[index] -= again
        _grow(self._tokens, index, 0)
        self._tokens[index] += count - again
        return count - again


class Course:
    """The attempts of one request: when there is another one, and what it asks.

    Args:
        request: as the caller made it.
        retry: when a request is sent again.

    """

    def __init__(self, request: GenerateRequest, retry: RetryPolicy) -> None:
        self.received = Received()
        self._request = request
        self._retry = retry
        self._continued = False
        self._continuable = True
        self._broke: LifecycleError | None = None

    def pause(self, error: LifecycleError, attempts: int) -> float | None:
        """Return the seconds until the next attempt; ``None`` when there is none.

        Args:
            error: how the last one ended.
            attempts: how many there were.

        """
        pause = self._retry.pause(error, attempts)
        if _broken(error):
            return pause
        if self.received.brought:
            return None
        if self._continued and _declined(error):
            # It has cost the server nothing, so it is not one of the attempts.
            self._continuable = False
            return 0.0
        return pause

    def next(self, error: LifecycleError, timeout: float) -> GenerateRequest:
        """Return what to send now.

        Args:
            error: how the last attempt ended.
            timeout: seconds that it may take.

        Raises:
            ResumeFailed: the answer has begun, and can neither be continued nor repeated.

        """
        if _broken(error):
            self._broke = error
        known = self.received.token_ids if self._continuable else ()
        if self.received.anything and not known and not _repeatable(self._request):
            raise ResumeFailed(
                f"{(self._broke or error).message}; the answer had begun and cannot go on elsewhere, since the server "
                "does not continue it and another attempt would not be the same (only temperature 0 is): send it "
                "again as a whole"
            )
        self._continued = bool(known)
        self.received.begin(continued=self._continued)
        return msgspec.structs.replace(self._request, timeout=timeout, continued=known)


def _broken(error: LifecycleError) -> bool:
    """Whether a stream ended for a reason that another server does not share."""
    return isinstance(error, (ServerUnreachable, Draining)) and not isinstance(error, WrongPort)


def _declined(error: LifecycleError) -> bool:
    """Whether a server's answer to a continued request may mean that it does not continue any."""
    return not error.retryable and not isinstance(error, (Cancelled, DeadlineExceeded))


def _repeatable(request: GenerateRequest) -> bool:
    """Whether a request has the same answer each time."""
    return request.sampling.as_dict().get("temperature") == 0


def _grow(values: list[str] | list[int], index: int, empty: str | int) -> None:
    while len(values) <= index:
        values.append(empty)  # type: ignore[arg-type]


_DIFFERS = (
    "the connection broke, and the answer of the server that took the request next differs from what was received "
    "already; send it again as a whole"
)
