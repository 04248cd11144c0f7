"""Waiting until something holds, and being in time on a machine that may falter: no test hangs on how fast it is.

A condition that holds at once costs nothing, so limits are wide: they only end what would never come.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")

LIMIT_S: Final = 60.0
PAUSE_S: Final = 0.02
TRIES: Final = 4


def until(condition: Callable[[], T], limit_s: float = LIMIT_S, *, despite: tuple[type[Exception], ...] = ()) -> T:
    """Ask again and again until the answer is true, and return it.

    Args:
        condition: what is asked.
        limit_s: seconds after which the test fails.
        despite: errors that mean "not yet".

    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            if found := condition():
                return found
            last = repr(found)
        except despite as error:
            last = repr(error)
        assert time.monotonic() < deadline, f"not within {limit_s:g} s; last seen: {last}"
        time.sleep(PAUSE_S)


async def eventually(
    condition: Callable[[], Any], limit_s: float = LIMIT_S, *, despite: tuple[type[Exception], ...] = ()
) -> Any:
    """Do as :func:`until` on an event loop, whose time counts; the condition may be a coroutine function."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while True:
        try:
            found = condition()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return found
            last = repr(found)
        except despite as error:
            last = repr(error)
        assert loop.time() < deadline, f"not within {limit_s:g} s; last seen: {last}"
        await asyncio.sleep(PAUSE_S)


def in_time(action: Callable[[], T], limit_s: float, *, tries: int = TRIES) -> T:
    """Do something that must take less than so many seconds, and return what it returns.

    It is done again where it took longer: a machine that falters makes one try slow, and a fault makes them all slow.
    """
    took: list[float] = []
    for _ in range(tries):
        began = time.monotonic()
        result = action()
        took.append(time.monotonic() - began)
        if took[-1] < limit_s:
            return result
    raise AssertionError(f"it takes longer than {limit_s:g} s each time: {took}")


async def soon(action: Callable[[], Awaitable[T]], limit_s: float, *, tries: int = TRIES) -> T:
    """Do as :func:`in_time` on an event loop."""
    took: list[float] = []
    for _ in range(tries):
        began = time.monotonic()
        result = await action()
        took.append(time.monotonic() - began)
        if took[-1] < limit_s:
            return result
    raise AssertionError(f"it takes longer than {limit_s:g} s each time: {took}")
