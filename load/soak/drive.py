"""The load: how many come, who they are, what is seen of the server meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Final

import msgspec

from load.holdings import Holdings
from load.mixes import Mix, arrivals, lengths, shape
from load.overhead.measure import BenchFailed, percentile
from load.soak.report import GROWS, MODELS, Engine, Report, Setup
from load.swarm.driver import Driver
from load.swarm.protocol import CHAOS, UNEXPECTED, Beat, Deed, FromDriver, Hello, Order, Outcome, Over
from load.trend import growth_words, trend
from triton_lifecycle.launcher.server import TritonServer

REST_S: Final = 30.0
"""How long the server may take to come to rest; more than any caller of the mix allows."""
TIMEOUT_S: Final = 60.0
MOST_LIVE: Final = 256
"""Arrivals beyond so many live requests are not sent, and count as errors."""
AHEAD_S: Final = 0.5
TELL_S: Final = 60.0
EXAMPLES: Final = 20
ZERO: Final = (
    "contexts", "permits", "pipelines", "watched_calls", "sends", "bus_queues", "engine_requests", "engine_sequences",
)  # fmt: skip
"""Accounts that must be 0 when nobody asks."""


class Soak:
    """One run against one server.

    Args:
        server: ready.
        setup: what to do.
        say: told how far it is.

    """

    def __init__(self, server: TritonServer, setup: Setup, say: Callable[[str], None]) -> None:
        self.report = Report(setup)
        self._server = server
        self._setup = setup
        self._say = say
        self._model = MODELS[Engine(setup.engine)]
        self._holdings = Holdings(server, self._model)
        self._mix = Mix(lengths("lognormal:24,0.8,200"), lengths("lognormal:24,0.6,160"), setup.seed)
        self._numbers = itertools.count()
        self._live = 0
        self._counting = False
        self._ended = asyncio.Event()
        self._stop = asyncio.Event()
        self._late: list[float] = []
        self._lags: list[float] = []

    async def run(self) -> None:
        """Put the load on; what is found stands in :attr:`report` at any time.

        Raises:
            BenchFailed: the server carried nothing, or is gone.

        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        driver = Driver(Hello(self._server.grpc_url, self._server.http_url, self._model, TIMEOUT_S), self._told)
        beating = asyncio.create_task(driver.beat())
        try:
            await self._measure_capacity(driver)
            if not self._stop.is_set():
                await self._steadily(driver)
            await self._come_to_rest()
        finally:
            beating.cancel()
            await driver.close()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _interrupt(self) -> None:
        self.report.interrupted = True
        self._say("interrupted: what is under way may end, then there is a report")
        self._stop.set()

    async def _measure_capacity(self, driver: Driver) -> None:
        """Keep as many callers asking as the engine runs at once, and see what it makes."""
        slots = int((await asyncio.to_thread(self._holdings.state))["admission"]["slots"])
        seconds = min(15.0, self._setup.minutes * 60 * 0.1)
        self._say(f"measuring what the server can carry: {slots} callers for {seconds:.0f} s")
        began, until = time.monotonic(), time.monotonic() + seconds
        while time.monotonic() < until and not self._stop.is_set():
            while self._live < slots:
                self._send(driver, None, "ask", "grpc")
            self._ended.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), 1.0)
        # Answers under way count too: what the server made, not what has ended.
        while self._live:
            self._ended.clear()
            await asyncio.wait_for(self._ended.wait(), TIMEOUT_S)
        self.report.capacity = self.report.tokens / (time.monotonic() - began)
        if not self.report.tokens or self.report.errors:
            raise BenchFailed(f"the server did not carry even the first callers: {self.report.examples}")
        mean = sum(self._mix.ask(number).output_tokens for number in range(2000)) / 2000
        self.report.rate = self._setup.load * self.report.capacity / mean

    async def _steadily(self, driver: Driver) -> None:
        setup, report = self._setup, self.report
        seconds = setup.minutes * 60
        self._say(
            f"it carries {report.capacity:,.0f} tokens/s; now {report.rate:.2f} requests/s for {setup.minutes:g} min"
        )
        self._counting, self._lags = True, []
        report.tokens, report.ends = 0, {}
        began = time.monotonic()
        looking = asyncio.create_task(self._look(began))
        try:
            for at in arrivals(shape("steady", seconds), report.rate, setup.seed):
                early = began + at - AHEAD_S - time.monotonic()
                if early > 0 and await self._stopped_within(early):
                    break
                if looking.done() or self._stop.is_set():
                    break
                self._arrive(driver, began + at)
            await self._stopped_within(began + seconds - time.monotonic())
        finally:
            report.seconds = time.monotonic() - began
            looking.cancel()
            await asyncio.wait([looking])
            if not looking.cancelled() and (error := looking.exception()) is not None:
                raise error

    async def _stopped_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), max(0.0, seconds))
        return self._stop.is_set()

    def _arrive(self, driver: Driver, due: float) -> None:
        """Send the next request: who comes and what he does is a matter of its number."""
        number = next(self._numbers)
        random = Random(f"{self._setup.seed}/soak/{number}")  # noqa: S311 - repeatable, not secret
        deed: Deed = random.choice(CHAOS) if random.random() < self._setup.chaos else "ask"
        over = random.choices(list(self._setup.over), weights=list(self._setup.over.values()))[0]
        if self._live >= MOST_LIVE:
            self._fault(deed, "not_sent", f"{MOST_LIVE} requests were under way")
            return
        self._send(driver, due, deed, over, number)

    def _send(self, driver: Driver, due: float | None, deed: Deed, over: Over, number: int | None = None) -> None:
        number = next(self._numbers) if number is None else number
        ask = self._mix.ask(number)
        self._live += 1
        driver.take(Order(number, number, over, ask.prompt, ask.output_tokens, deed, TIMEOUT_S, due))

    def _told(self, line: bytes) -> None:
        message = msgspec.json.decode(line, type=FromDriver)
        if isinstance(message, Beat):
            self._lags += message.lags
        else:
            self._ended_as(message)

    def _ended_as(self, outcome: Outcome) -> None:
        self._live -= 1
        self._ended.set()
        self.report.tokens += outcome.tokens
        if self._counting and outcome.late is not None:
            self._late.append(outcome.late)
        if outcome.slug is not None and (outcome.deed == "ask" or outcome.slug.startswith(UNEXPECTED)):
            self._fault(outcome.deed, outcome.slug, outcome.message)
        else:
            self.report.ends.setdefault(outcome.deed, Counter())[outcome.slug or "whole"] += 1

    def _fault(self, deed: Deed, slug: str, message: str) -> None:
        self.report.ends.setdefault(deed, Counter())[slug] += 1
        self.report.errors += 1
        if len(self.report.examples) < EXAMPLES:
            self.report.examples.append(f"{time.strftime('%H:%M:%S')} {deed}: {slug}: {message}")

    async def _look(self, began: float) -> None:
        """Look at the server every few seconds until cancelled."""
        tell = TELL_S
        for number in itertools.count():
            await asyncio.sleep(max(0.0, began + number * self._setup.every - time.monotonic()))
            self.report.looks.append(await asyncio.to_thread(self._holdings.look))
            self.judge(began)
            if (elapsed := time.monotonic() - began) >= tell:
                tell = elapsed + TELL_S
                self._say(self._progress(elapsed))

    def _progress(self, elapsed: float) -> str:
        report, look = self.report, self.report.looks[-1]
        warm = "" if elapsed > self._setup.warm_up * 60 else " (warming up)"
        grows = growth_words(report.trends.get("stub_mib"))
        return (
            f"{elapsed / 60:3.0f} of {self._setup.minutes:g} min{warm}: {report.requests:,} requests, "
            f"{report.errors} errors; stub {look.stub_mib:.1f} MiB, per hour {grows}"
        )

    def judge(self, began: float) -> None:
        """Renew the trends from what was seen after the warm-up."""
        counted = [look for look in self.report.looks if look.at - began >= self._setup.warm_up * 60]
        for name in GROWS:
            found = trend([look.at for look in counted], [getattr(look, name) for look in counted])
            if found is not None:
                self.report.trends[name] = found
        self.report.late_p99_ms = percentile(self._late, 99) if self._late else 0.0
        self.report.tool_lag_p99_ms = percentile(self._lags, 99) if self._lags else 0.0

    async def _come_to_rest(self) -> None:
        """Wait until nothing is live, and see that everything came back and every request ended once."""
        until = time.monotonic() + REST_S + TIMEOUT_S
        while True:
            state = await asyncio.to_thread(self._holdings.state)
            held = {name: state["accounts"]["held"][name] for name in ZERO if state["accounts"]["held"][name]}
            if not (self._live or held) or time.monotonic() > until:
                break
            await asyncio.sleep(0.2)
        counts = state["counts"]
        if self._live:
            self.report.problems.append(f"{self._live} callers have no end of their request")
        if held:
            self.report.problems.append(f"left over when nobody asks any more: {held}")
        if state["accounts"]["leaks"]:
            self.report.problems.append(f"the server's self-check found: {state['accounts']['leaks']}")
        ended = sum(count for name, count in counts.items() if name != "received")
        if counts["received"] != ended:
            self.report.problems.append(f"the server received {counts['received']} requests, and {ended} ended")
