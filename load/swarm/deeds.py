"""What a request does, and how it must end: in earnest, or as one of the callers that nobody wants and everybody has.

Each deed is a coroutine over our own client. It returns when the caller is done; a caller that leaves early says so by
raising the error that stands for it.
"""

from __future__ import annotations

import asyncio
import time
from random import Random
from typing import TYPE_CHECKING, Any, Final

from load.swarm.protocol import UNEXPECTED
from triton_lifecycle.errors import CallerLeft, LifecycleError, UnknownRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from load.swarm.protocol import Deed, Order
    from triton_lifecycle_client import AsyncClient
    from triton_lifecycle_client.stream import Stream

LONG: Final = 4.0
"""How much longer than planned an answer is that its caller will not see the end of."""
LEAVE_AFTER: Final = 5
"""A caller that leaves has seen at most so many responses."""
SLOW_S: Final = (0.02, 0.2)
"""How long a slow reader looks at one response; it looks at a few and then reads on."""
SLOW_LOOKS: Final = 10
SHORT_LIMIT_S: Final = (0.02, 0.15)
LATE_S: Final = 0.5
"""A limit of less than a token's time is met at the next chance; a cancel by id too."""

TIMED_OUT: Final = frozenset({"first_token_timeout", "stall_timeout", "total_timeout", "deadline_unreachable"})
REFUSED: Final = frozenset({"invalid_input", "invalid_request", "prompt_too_long", "unsupported"})
BUSY: Final = frozenset({"queue_full", "token_budget", "deadline_unreachable", "overloaded"})
"""A server that is full may refuse anybody, chaos too."""
EXPECTED: Final[dict[Deed, frozenset[str | None]]] = {
    "cancels": frozenset({"cancelled", "caller_left", None}) | BUSY,
    "reads_slowly": frozenset({None, "stall_timeout", "total_timeout"}) | BUSY,
    "times_out": TIMED_OUT | BUSY,
    "sends_rubbish": REFUSED | BUSY,
}
"""How chaos may end. ``None`` is a whole answer: one that was too quick to be cancelled."""

RUBBISH: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("", {}),
    ("\0", {}),
    ("Hello", {"max_tokens": -1}),
    ("Hello", {"sampling": {"max_tokenz": 4}}),
    ("Hello", {"sampling": {"temperature": "hot"}}),
    ("Hello", {"n": 100_000}),
    ("Hello", {"sampling": {"top_p": 7}}),
)


class Measured:
    """What one request brings, as it comes. Clock times in seconds."""

    def __init__(self) -> None:
        self.sent = time.monotonic()
        self.first: float | None = None
        self.gaps: list[float] = []
        self.tokens = 0
        self.size = 0
        self._last = 0.0

    def take(self, texts: tuple[str, ...], tokens: int) -> None:
        """Count one response."""
        now = time.monotonic()
        if self.first is None:
            self.first = now
        else:
            self.gaps.append((now - self._last) * 1e3)
        self._last = now
        self.tokens += tokens
        self.size += sum(map(len, texts))


async def ask(client: AsyncClient, order: Order, seen: Measured) -> None:
    """Take the whole answer: as it comes, or in one piece over ``generate``."""
    options = _options(order)
    if order.over == "generate":
        answer = await client.generate(order.prompt, **options)
        seen.take(answer.texts, answer.output_tokens)
        return
    async with client.stream(order.prompt, **options) as stream:
        async for chunk in stream:
            seen.take(chunk.texts, chunk.output_tokens)


async def cancels(client: AsyncClient, order: Order, seen: Measured) -> None:
    """Leave: after some responses, at some moment, or by telling the server to cancel by id."""
    random = Random(order.number)  # noqa: S311 - repeatable, not secret
    options = _options(order, longer=True)
    if order.over == "generate":
        options["request_id"] = f"chaos-{order.id}-{order.number}-{time.monotonic_ns()}"
        await _cancel_by_id(client, order, options, random.uniform(0.0, 0.1))
        return
    async with client.stream(order.prompt, **options) as stream:
        if random.random() < 0.3:
            limit = random.uniform(0.0, 0.1)
            if await _read_for(stream, seen, limit):
                return
        else:
            leave = random.randint(1, LEAVE_AFTER)
            async for chunk in stream:
                seen.take(chunk.texts, chunk.output_tokens)
                leave -= 1
                if not leave:
                    break
            if leave:
                return
    raise CallerLeft("this caller left, on purpose")


async def _read_for(stream: Stream, seen: Measured, limit_s: float) -> bool:
    """Read for so long; return whether the answer was whole by then."""
    try:
        async with asyncio.timeout(limit_s):
            async for chunk in stream:
                seen.take(chunk.texts, chunk.output_tokens)
    except TimeoutError:
        return False
    return True


async def _cancel_by_id(client: AsyncClient, order: Order, options: dict[str, Any], after_s: float) -> None:
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(_error_of(client.generate(order.prompt, **options)))
        await asyncio.sleep(after_s)
        until = time.monotonic() + LATE_S
        # The order may have overtaken the request.
        while not asking.done() and time.monotonic() < until:
            try:
                await client.cancel(options["request_id"])
                break
            except UnknownRequest:
                await asyncio.sleep(0.02)
        error = await asking
    if error is not None:
        raise error


async def _error_of(work: Awaitable[object]) -> LifecycleError | None:
    try:
        await work
    except LifecycleError as error:
        return error
    return None


async def reads_slowly(client: AsyncClient, order: Order, seen: Measured) -> None:
    """Take the whole answer, but look at the first few responses for a long time."""
    random = Random(order.number)  # noqa: S311 - repeatable, not secret
    pauses: Iterator[float] = iter([random.uniform(*SLOW_S) for _ in range(SLOW_LOOKS)])
    async with client.stream(order.prompt, **_options(order)) as stream:
        async for chunk in stream:
            seen.take(chunk.texts, chunk.output_tokens)
            await asyncio.sleep(next(pauses, 0.0))


async def times_out(client: AsyncClient, order: Order, seen: Measured) -> None:
    """Allow far less time than the answer takes."""
    random = Random(order.number)  # noqa: S311 - repeatable, not secret
    options = _options(order, longer=True) | {"timeout": random.uniform(*SHORT_LIMIT_S)}
    async with client.stream(order.prompt, **options) as stream:
        async for chunk in stream:
            seen.take(chunk.texts, chunk.output_tokens)


async def sends_rubbish(client: AsyncClient, order: Order, seen: Measured) -> None:
    """Ask for what no server can give."""
    prompt, options = RUBBISH[order.number % len(RUBBISH)]
    async with client.stream(prompt, **options) as stream:
        async for chunk in stream:
            seen.take(chunk.texts, chunk.output_tokens)


DO: Final[dict[Deed, Callable[[AsyncClient, Order, Measured], Awaitable[None]]]] = {
    "ask": ask,
    "cancels": cancels,
    "reads_slowly": reads_slowly,
    "times_out": times_out,
    "sends_rubbish": sends_rubbish,
}


def judge(deed: Deed, error: LifecycleError | None) -> tuple[str | None, str]:
    """Return slug and message of how a request ended; chaos that ended as it must not has ``unexpected``."""
    slug = None if error is None else error.slug
    message = "" if error is None else error.message
    if deed == "ask" or slug in EXPECTED[deed]:
        return slug, message
    return f"{UNEXPECTED}_{slug or 'answer'}", f"{deed} ended as {slug or 'a whole answer'}: {message}"


def _options(order: Order, *, longer: bool = False) -> dict[str, Any]:
    tokens = max(64, round(order.output_tokens * LONG)) if longer else order.output_tokens
    options: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True}
    if order.timeout is not None:
        options["timeout"] = order.timeout
    return options
