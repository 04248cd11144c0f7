"""One request as its caller sees it: what came when, and how it ended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from load.benchmark.records import COMPLETE, FAILED, Record
from triton_lifecycle.errors import LifecycleError, Overloaded

if TYPE_CHECKING:
    from load.benchmark.plan import Planned

GAVE_UP = "caller_gave_up"
"""The slug where the deadline passed and nobody had said a word about it."""
SHORT = "answer_too_short"


def now() -> float:
    """Return the running loop's time: the monotonic clock, or a test's own."""
    return asyncio.get_running_loop().time()


class Heard:
    """What one request has brought so far; targets tell it, the driver reads it."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self.gaps: list[float] = []
        self.chunks = 0
        self.tokens: int | None = None
        self.attempts = 0
        self.refusals = 0

    def attempt(self) -> None:
        """Note that the request is being sent."""
        self.attempts += 1

    def failed(self, error: LifecycleError) -> None:
        """Note how an attempt ended."""
        self.refusals += isinstance(error, Overloaded)

    def chunk(self) -> None:
        """Note that something of the answer has come."""
        at = now()
        if self.last is None:
            self.first = at
        else:
            self.gaps.append(at - self.last)
        self.last = at
        self.chunks += 1

    def counted(self, tokens: int) -> None:
        """Note how many tokens the server says have come in all; a target that does not say counts its chunks."""
        self.tokens = tokens

    @property
    def received(self) -> int:
        """Tokens that have come."""
        return self.chunks if self.tokens is None else self.tokens


class Target(Protocol):
    """A server under load. An attempt that fails before anything came is sent again by our client's retry policy."""

    metrics_url: str | None
    """A page with Prometheus counters, where the tokens that it made are counted."""

    async def wait_ready(self, limit_s: float) -> None:
        """Wait until it takes requests; raises ``LifecycleError``."""

    async def ask(self, planned: Planned, limit_s: float, tenant: str, heard: Heard) -> None:
        """Ask for an answer and return once it is complete.

        Raises:
            LifecycleError: there is none, or only a part of it.

        """

    async def close(self) -> None:
        """Close all connections."""


async def ask(
    target: Target, planned: Planned, begin: float, limit_s: float, tenant: int
) -> tuple[Record, list[float]]:
    """Ask one request and return what became of it, and the times between its chunks.

    Args:
        target: whom.
        planned: what.
        begin: of the cell, on the loop's clock; a record's times count from it.
        limit_s: what the caller allows.
        tenant: number of the caller.

    """
    heard, slug = Heard(), None
    sent = now()
    try:
        async with asyncio.timeout(limit_s):
            await target.ask(planned, limit_s, f"tenant-{tenant}", heard)
    except TimeoutError:
        slug = GAVE_UP
    except LifecycleError as error:
        slug = error.slug
    else:
        if heard.received < planned.ask.output_tokens:
            # A target that counts chunks may merge tokens; only one that counts tokens can be short.
            slug = SHORT if heard.tokens is not None or not heard.chunks else None
    end = now()
    record = Record(
        number=planned.ask.number,
        tenant=tenant,
        due=planned.at,
        sent=sent - begin,
        first=None if heard.first is None else heard.first - begin,
        end=end - begin,
        outcome=COMPLETE if slug is None else FAILED,
        slug=slug,
        attempts=heard.attempts,
        refusals=heard.refusals,
        tokens=heard.received,
    )
    return record, heard.gaps
