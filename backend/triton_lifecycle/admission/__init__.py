"""Admission: a request gets its permit at once or is refused at once; nothing is held here.

The only queue is the engine's own. Refusals say which limit was met, its value, and when to try again (``drain``).
What is admitted gets its place in the engine's queue (``order``). All limits count sequences: a request for ``n``
answers counts ``n`` times, its prompt too. Nothing here waits, so a burst is counted exactly. Event-loop thread only.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import msgspec

from triton_lifecycle.admission.adaptive import Adaptive
from triton_lifecycle.admission.drain import Drain
from triton_lifecycle.admission.order import AsAsked, ByShare, Order, VirtualDeadline
from triton_lifecycle.config import Admission as Settings
from triton_lifecycle.errors import DeadlineUnreachable, Draining, Overloaded, QueueFull, TokenBudget

BYTES_PER_TOKEN: Final = 4.0
"""Of a prompt, before any was tokenized."""
FORGET: Final = 0.98
"""What the bytes and tokens of earlier prompts count for after each further one."""
SHARE_ROOM: Final = 4
"""Under fair share a tenant may hold this many times the room that is left."""


class Ask(msgspec.Struct, frozen=True):
    """What a request needs."""

    sequences: int = 1
    prompt_bytes: int = 0
    prompt_tokens: int | None = None
    """Known only when the caller sent token ids."""
    max_tokens: int | None = None
    priority: int = 0
    tenant: str = ""
    left: float | None = None
    """Seconds until its deadline."""
    at_least: float | None = None
    """Seconds that it will almost surely take, by the prediction; ``None``: no opinion."""


class Permit:
    """A request's share of the limits; given back exactly once, by :meth:`release`."""

    __slots__ = ("_admission", "admitted_at", "ask", "place", "released", "tokens")

    def __init__(self, admission: Admission, ask: Ask, place: int, tokens: int, admitted_at: float) -> None:
        self._admission = admission
        self.ask = ask
        self.place = place
        """The engine's priority: lower is sooner."""
        self.tokens = tokens
        """Of the prompt, once for each sequence."""
        self.admitted_at = admitted_at
        self.released = False

    def tokenized(self, found: int) -> None:
        """Put the prompt's tokens in the place of their estimate."""
        self._admission.tokenized(self, found)

    def release(
        self, *, tokens: int = 0, worked: float | None = None, timed_out: bool = False
    ) -> tuple[int, int] | None:
        """Give it back.

        Args:
            tokens: made, over all sequences.
            worked: seconds since the engine began with it; ``None`` when it never did.
            timed_out: whether one of its time limits passed.

        Returns:
            The adaptive limit before and after, when this moved it.

        """
        return self._admission.release(self, tokens, worked, timed_out=timed_out)


class Admission:
    """Counts what is live and refuses beyond the limits.

    Args:
        settings: the ``admission`` section.
        most: live requests in any case.
        slots: sequences that the engine runs at once, where that is known already; else :meth:`fit` tells.
        clock: monotonic seconds.

    """

    def __init__(
        self,
        settings: Settings,
        *,
        most: int,
        slots: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._max_live = most if settings.max_live_requests is None else min(most, settings.max_live_requests)
        self.fit(slots)
        self._order: Order = AsAsked()
        if settings.fair_share:
            self._order = ByShare()
        elif settings.earliest_deadline_first:
            self._order = VirtualDeadline(settings.ageing, clock)
        self._requests = 0
        self._sequences = 0
        self._tokens = 0
        self._places: list[int] = []
        self._held: Counter[str] = Counter()
        self._seen = (0.0, 0.0)
        self._refused: Counter[str] = Counter()
        self._draining = False

    def fit(self, slots: int) -> None:
        """Count on so many sequences that the engine runs at once; called before the first request."""
        waiting = self._settings.max_waiting_requests
        ceiling = self._max_live if waiting is None else min(self._max_live, slots + waiting)
        self._slots = slots
        self._drain = Drain(min(slots, ceiling), self._clock)
        self._adaptive = Adaptive(ceiling, slots // 4, self._clock) if self._settings.adaptive else None

    @property
    def out(self) -> int:
        """Permits that are out."""
        return self._requests

    @property
    def draining(self) -> bool:
        """Whether all new work is refused because the server is stopping, or was told to."""
        return self._draining

    def drain(self) -> None:
        """Refuse all new work from now on."""
        self._draining = True

    def resume(self) -> None:
        """Admit new work again."""
        self._draining = False

    def state(self) -> dict[str, Any]:
        """Return what is counted, and the limits that are on."""
        limits = {
            "max_live_requests": self._max_live,
            "max_waiting_requests": self._settings.max_waiting_requests,
            "max_prompt_tokens": self._settings.max_prompt_tokens,
            "adaptive": None if self._adaptive is None else self._adaptive.limit,
        }
        return {
            "sequences": self._sequences,
            "prompt_tokens": self._tokens,
            "slots": self._slots,
            "released_per_s": self._drain.rate(),
            "refused": dict(self._refused),
            "limits": {name: value for name, value in limits.items() if value is not None},
        }

    def admit(self, ask: Ask) -> Permit:
        """Return a permit.

        Raises:
            Draining: the server is stopping.
            QueueFull: as many requests as allowed are live, or wait.
            TokenBudget: the prompts that are live have as many tokens as allowed.
            DeadlineUnreachable: it would end behind its deadline.

        """
        try:
            return self._admit(ask)
        except Overloaded as refusal:
            self._refused[refusal.slug] += 1
            raise

    def _admit(self, ask: Ask) -> Permit:
        if self._draining:
            raise Draining("the model drains and takes no new requests; send it to another replica")
        prompt = self._estimate(ask)
        tokens = prompt * ask.sequences
        self._check_sequences(ask)
        self._check_tokens(ask, tokens)
        cost = tokens + ask.sequences * self._drain.length(ask.max_tokens)
        if ask.left is not None and self._settings.refuse_unreachable:
            self._check_deadline(ask, ask.left)
        place = self._order.place(ask.priority, ask.left, ask.tenant, cost)
        permit = Permit(self, ask, place, tokens, self._clock())
        self._requests += 1
        self._sequences += ask.sequences
        self._tokens += tokens
        self._drain.admitted(ask.sequences)
        if self._settings.refuse_unreachable:
            insort(self._places, place)
        if self._settings.fair_share:
            self._held[ask.tenant] += ask.sequences
        return permit

    def _check_sequences(self, ask: Ask) -> None:
        live, waiting = self._sequences, self._settings.max_waiting_requests
        limits = [("admission.max_live_requests", self._max_live, self._max_live)]
        if waiting is not None:
            limits.append(("admission.max_waiting_requests", waiting, self._slots + waiting))
        if self._adaptive is not None:
            limits.append(("the limit that admission.adaptive has set", self._adaptive.limit, self._adaptive.limit))
        name, value, most = min(limits, key=lambda limit: limit[2])
        if live + ask.sequences > most:
            found = f"{max(0, live - self._slots)} wait" if "waiting" in name else f"{live} requests are live"
            raise QueueFull(
                f"{found}{_counts(ask)}, and {name} is {value}",
                retry_after=self._hint(ask, live + ask.sequences - most),
            )
        if self._settings.fair_share and self._held[ask.tenant] + ask.sequences > max(1, SHARE_ROOM * (most - live)):
            raise QueueFull(
                f"tenant {ask.tenant!r} has {self._held[ask.tenant]} of {live} live requests, and with "
                f"admission.fair_share the room that is left ({most - live} of {most}) is for others",
                retry_after=self._hint(ask, ask.sequences),
            )

    def _check_tokens(self, ask: Ask, tokens: int) -> None:
        most = self._settings.max_prompt_tokens
        if most is not None and self._tokens + tokens > most:
            mean = max(1.0, self._tokens / max(1, self._sequences))
            places = max(1, round((self._tokens + tokens - most) / mean))
            raise TokenBudget(
                f"{self._tokens} prompt tokens are live, this prompt has about {tokens}{_counts(ask)}, and "
                f"admission.max_prompt_tokens is {most}",
                retry_after=self._hint(ask, places) if tokens <= most else None,
            )

    def _check_deadline(self, ask: Ask, left: float) -> None:
        if not self._sequences:
            # It is in nobody's way, and a prediction that has gone wrong would never be found out.
            return
        seconds = max(ask.at_least or 0.0, self._by_the_queue(ask, left) or 0.0)
        if seconds > left:
            raise DeadlineUnreachable(
                f"it would take about {seconds:.1f} s, and its deadline is in {left:.1f} s",
                retry_after=max(0.1, seconds - left),
            )

    def _by_the_queue(self, ask: Ask, left: float) -> float | None:
        """Return the seconds until it would be done behind those before it; ``None`` when it begins at once."""
        if self._sequences + ask.sequences <= self._slots:
            return None
        place = self._order.place(ask.priority, left, ask.tenant, 0.0)
        before = min(self._sequences - self._slots, bisect_left(self._places, place + 1))
        return self._drain.expected(max(0, before) + ask.sequences, ask.max_tokens)

    def _hint(self, ask: Ask, places: int) -> float | None:
        # What needs more than there is at all fits at no time.
        return self._drain.hint(places, ask.sequences, ask.left) if places <= self._sequences else None

    def _estimate(self, ask: Ask) -> int:
        if ask.prompt_tokens is not None:
            return ask.prompt_tokens
        size, tokens = self._seen
        return max(1, round(ask.prompt_bytes * tokens / size if size else ask.prompt_bytes / BYTES_PER_TOKEN))

    def tokenized(self, permit: Permit, found: int) -> None:
        """Count a prompt's tokens as they are, and learn from them."""
        if permit.ask.prompt_bytes:
            size, tokens = self._seen
            self._seen = (FORGET * size + permit.ask.prompt_bytes, FORGET * tokens + found)
        if not permit.released:
            self._tokens += found * permit.ask.sequences - permit.tokens
            permit.tokens = found * permit.ask.sequences

    def release(self, permit: Permit, tokens: int, worked: float | None, *, timed_out: bool) -> tuple[int, int] | None:
        """Take a permit back; see :meth:`Permit.release`."""
        if permit.released:
            raise RuntimeError("a permit was given back twice")
        permit.released = True
        ask, live = permit.ask, self._sequences
        self._requests -= 1
        self._sequences -= ask.sequences
        self._tokens -= permit.tokens
        self._drain.released(ask.sequences, tokens=tokens / ask.sequences, worked=worked)
        if self._settings.refuse_unreachable:
            del self._places[bisect_left(self._places, permit.place)]
        if self._settings.fair_share:
            self._held[ask.tenant] -= ask.sequences
            if not self._held[ask.tenant]:
                del self._held[ask.tenant]
        if worked is not None:
            self._order.served(permit.place, ask.priority)
        if self._adaptive is None:
            return None
        return self._adaptive.ended(live, permit.admitted_at, timed_out=timed_out)


def _counts(ask: Ask) -> str:
    return f" (n = {ask.sequences} counts as {ask.sequences})" if ask.sequences > 1 else ""
