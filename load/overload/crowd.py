"""The callers: when they ask, when they come back, and what they hear."""

from __future__ import annotations

import asyncio
import random
import time
from bisect import bisect_right
from collections import Counter
from typing import Final

import msgspec

from load.overload.servers import LIMITS, SLOTS, InProcess, Ledger, Open, Server
from triton_lifecycle.config import Admission as AdmissionSettings
from triton_lifecycle.errors import Overloaded, QueueFull
from triton_lifecycle_client import RetryPolicy

MAX_TOKENS: Final = (50, 100, 200, 400)
DEADLINE_S: Final = 10.0
LOADS: Final = (0.5, 0.8, 0.9, 1.0, 1.5, 2.0, 3.0)
WARM_UP: Final = 1 / 6
"""Of a run, not counted."""


class Outcome(msgspec.Struct):
    """What became of one load."""

    load: float
    limits: bool
    sent: int = 0
    served: int = 0
    goodput: float = 0.0
    wasted: float = 0.0
    """Share of the tokens made that belong to answers nobody got."""
    refusals_ms: list[float] = []
    hint_errors: list[float] = []
    returned: int = 0
    """Refused callers that came back when they were told to."""
    let_in: int = 0
    ends: Counter[str] = msgspec.field(default_factory=Counter)


def together(rounds: list[Outcome]) -> Outcome:
    """Return several rounds of one load as one: sums, and the means of shares and rates."""
    whole = Outcome(rounds[0].load, rounds[0].limits)
    for each in rounds:
        whole.sent += each.sent
        whole.served += each.served
        whole.goodput += each.goodput / len(rounds)
        whole.wasted += each.wasted / len(rounds)
        whole.refusals_ms += each.refusals_ms
        whole.hint_errors += each.hint_errors
        whole.returned += each.returned
        whole.let_in += each.let_in
        whole.ends += each.ends
    return whole


class _Refusal(msgspec.Struct):
    at: float
    hint: float
    places: int


class Crowd:
    """Callers of one load."""

    def __init__(self, server: Server, outcome: Outcome) -> None:
        self._server = server
        self._outcome = outcome
        self._policy = RetryPolicy()
        self._pausing = 0
        self.refusals: list[_Refusal] = []
        self.served: list[float] = []

    async def call(self, prompt: str, max_tokens: int) -> None:
        """Ask until there is an answer, the deadline is near, or the policy gives up: as our client does."""
        clock = asyncio.get_running_loop().time
        began, attempt, hinted = clock(), 0, False
        self._outcome.sent += 1
        while True:
            attempt += 1
            asked, real = clock(), time.perf_counter()
            error = await self._server.serve(prompt, max_tokens, max(DEADLINE_S - (asked - began), 0.001))
            self._outcome.let_in += hinted and not isinstance(error, Overloaded)
            if error is None:
                self.served.append(clock())
                return
            pause = self._policy.pause(error, attempt)
            if isinstance(error, Overloaded):
                self._outcome.refusals_ms.append((time.perf_counter() - real) * 1e3)
                if isinstance(error, QueueFull) and error.retry_after is not None:
                    self.refusals.append(_Refusal(asked, error.retry_after, 1 + self._pausing))
            if pause is None or pause >= DEADLINE_S - (clock() - began):
                self._outcome.ends[error.slug] += 1
                return
            self._pausing += 1
            await asyncio.sleep(pause)
            self._pausing -= 1
            hinted = error.retry_after is not None
            self._outcome.returned += hinted


async def capacity(seconds: float, open_server: Open = InProcess) -> float:
    """Return answers a second with always twice as many callers as the engine runs."""
    ledger = Ledger()
    server = open_server(AdmissionSettings(), ledger)
    await server.start()
    chance = random.Random(1)  # noqa: S311 - a load
    clock = asyncio.get_running_loop().time
    until = clock() + seconds

    async def caller() -> None:
        while clock() < until:
            await server.serve(*_request(chance), 1e3)

    await asyncio.gather(*(caller() for _ in range(2 * SLOTS)))
    await server.close()
    begin = until - seconds * (1 - WARM_UP)
    return sum(begin < at <= until for at in ledger.ends) / (until - begin)


async def run(
    load: float,
    per_second: float,
    seconds: float,
    settings: AdmissionSettings,
    open_server: Open = InProcess,
    *,
    seed: int = 2,
) -> Outcome:
    """Send ``load`` times the capacity for so many seconds; then wait until nobody asks any more."""
    outcome, ledger = Outcome(load, settings is LIMITS), Ledger()
    server = open_server(settings, ledger)
    await server.start()
    crowd = Crowd(server, outcome)
    chance = random.Random(seed)  # noqa: S311 - a load
    clock = asyncio.get_running_loop().time
    began = due = clock()
    callers = []
    while (due := due + chance.expovariate(load * per_second)) < began + seconds:
        await asyncio.sleep(due - clock())
        callers.append(asyncio.create_task(crowd.call(*_request(chance))))
    await asyncio.wait(callers)
    await server.close()
    begin, end = began + seconds * WARM_UP, began + seconds
    outcome.served = len(crowd.served)
    outcome.goodput = sum(begin < at <= end for at in crowd.served) / (end - begin)
    outcome.wasted = 1 - ledger.used / ledger.made
    outcome.hint_errors = _errors([refusal for refusal in crowd.refusals if refusal.at > begin], ledger.ends)
    return outcome


def _errors(refusals: list[_Refusal], ends: list[float]) -> list[float]:
    """Return how far each hint was from the truth, as a share of it."""
    found = []
    for refusal in refusals:
        at = bisect_right(ends, refusal.at) + refusal.places - 1
        if at < len(ends):
            actual = ends[at] - refusal.at
            found.append(abs(refusal.hint - actual) / actual)
    return found


def _request(chance: random.Random) -> tuple[str, int]:
    words = " ".join(chance.choices(("the", "of", "server", "tokens", "a", "time", "request"), k=chance.randint(5, 60)))
    return words, chance.choice(MAX_TOKENS)
