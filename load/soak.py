"""Users of every kind at a steady load for a long time: does anything grow, does anything fail?

``python -m load.soak --minutes 60`` starts a real tritonserver, measures what it can carry, and asks for a steady share
of that. Most callers want an answer; some cancel, allow too little time, read slowly or send rubbish, and each must end
as such a caller must. Every few seconds it looks at what the server's processes hold. After the warm-up no memory may
grow, and at the end everything must have come back.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from random import Random
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from load.benchmark.servers import copy_model, model_folder
from load.holdings import Holding, Holdings
from load.mixes import Mix, arrivals, lengths, shape
from load.overhead.measure import BenchFailed, percentile
from load.swarm.driver import Driver
from load.swarm.protocol import CHAOS, UNEXPECTED, Beat, Deed, FromDriver, Hello, Order, Outcome, Over
from load.trend import Trend, growth_words, trend
from triton_lifecycle.launcher import LauncherError
from triton_lifecycle.launcher.server import TritonServer

READY_S: Final = 300.0
CLOSING_S: Final = 1.5
"""Triton 2.51 ends with an error while a connection that was closed a moment ago still counts as open."""
REST_S: Final = 30.0
"""How long the server may take to come to rest; more than any caller of the mix allows."""
TIMEOUT_S: Final = 60.0
MOST_LIVE: Final = 256
"""Arrivals beyond so many live requests are not sent, and count as errors."""
AHEAD_S: Final = 0.5
TELL_S: Final = 60.0
EXAMPLES: Final = 20
SLOPE: Final = 1.0
KEPT: Final = 500
"""Ended requests that the server remembers, so that this memory is full long before the warm-up ends."""
SIMULATED: Final[dict[str, Any]] = {"base_ms": 20.0, "per_sequence_us": 50.0, "max_num_seqs": 16}
"""Of the simulated engine: about 770 tokens/s, of which half cost a fifth of a core."""
GROWS: Final = ("stub_mib", "triton_mib", "engine_mib", "shm_mib", "shm_files", "descriptors", "threads")
JUDGED: Final = ("stub_mib", "engine_mib")
"""Memory whose growth is ours; tritonserver's own is shown beside it."""


class Engine(Enum):
    """What computes."""

    simulated = "simulated"
    real = "real"


MODELS: Final = {Engine.simulated: "simulated", Engine.real: "smollm2"}


class Setup(msgspec.Struct, frozen=True):
    """What is run."""

    minutes: float
    warm_up: float
    """Minutes of these that do not count."""
    engine: str
    load: float
    """Share of what the server can carry."""
    chaos: float
    """Share of callers that misbehave."""
    every: float
    """Seconds between two looks."""
    over: dict[Over, float]
    seed: int


class Report(msgspec.Struct):
    """What the run came to.

    Attributes:
        setup: what was asked for.
        seconds: how long load was put on, warm-up included.
        capacity: tokens/s that the server made while callers asked without a pause.
        rate: requests/s that were sent.
        tokens: that arrived.
        ends: by deed, how its requests ended: ``whole``, or the error's slug.
        errors: requests that ended as they should not have, and the first few of them in words.
        late_p99_ms: how much later than due requests were sent, 99th percentile.
        tool_lag_p99_ms: of this program's own event loop.
        trends: by figure, after the warm-up; per hour.
        looks: all that was seen.
        problems: what else is wrong; none when all is well.
        interrupted: whether somebody ended it early.

    """

    setup: Setup
    seconds: float = 0.0
    capacity: float = 0.0
    rate: float = 0.0
    tokens: int = 0
    ends: dict[str, Counter[str]] = {}
    errors: int = 0
    examples: list[str] = []
    late_p99_ms: float = 0.0
    tool_lag_p99_ms: float = 0.0
    trends: dict[str, Trend] = {}
    looks: list[Holding] = []
    problems: list[str] = []
    interrupted: bool = False

    @property
    def requests(self) -> int:
        """How many ended."""
        return sum(counter.total() for counter in self.ends.values())


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


ZERO: Final = (
    "contexts", "permits", "pipelines", "watched_calls", "sends", "bus_queues", "engine_requests", "engine_sequences",
)  # fmt: skip
"""Accounts that must be 0 when nobody asks."""


@contextmanager
def served(setup: Setup, say: Callable[[str], None]) -> Iterator[TritonServer]:
    """Run the server for the length of the block; afterwards nothing of it is left."""
    source = model_folder(MODELS[Engine(setup.engine)])
    folder = Path(tempfile.mkdtemp(prefix="lifecycle-soak-"))
    try:
        document = {"context_management": {"max_finished": KEPT}}
        copy_model(source, folder / source.name, {"request_lifecycle": document}, say)
        if setup.engine == Engine.simulated.value:
            path = folder / source.name / "1" / "model.json"
            path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | SIMULATED), encoding="utf-8")
        say(f"starting tritonserver with {source.name}")
        with TritonServer(folder, models=[source.name]) as server:
            yield server.wait_ready(READY_S, say)
            time.sleep(CLOSING_S)
            say("stopping tritonserver")
        if server.exit_code or server.leftovers:
            raise BenchFailed(f"tritonserver ended with code {server.exit_code}; left over: {server.leftovers}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(setup: Setup, say: Callable[[str], None]) -> Report:
    """Start the server, put the load on, stop it, and return the report: what was found so far if something broke."""
    soak: Soak | None = None
    try:
        with served(setup, say) as server:
            soak = Soak(server, setup, say)
            with asyncio.Runner(loop_factory=_new_loop) as runner:
                runner.run(soak.run())
    except (BenchFailed, LauncherError) as error:
        if soak is None:
            raise
        soak.report.problems.append(str(error))
    return soak.report


def _new_loop() -> asyncio.AbstractEventLoop:
    import uvloop  # noqa: PLC0415 - comes with vLLM, as on the server

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def verdicts(report: Report, slope: float) -> dict[str, str]:
    """Return what became of each bound: ``met``, ``missed`` or ``undecided``."""
    found = {"errors: 0": "missed" if report.errors else "met"}
    for name in JUDGED:
        if name in report.trends and report.trends[name].most > 0:
            found[f"{name} per hour ≤ {slope:g}"] = report.trends[name].verdict(slope)
    if "stub_mib" not in report.trends:
        found[f"stub_mib per hour ≤ {slope:g}"] = "undecided"
    found["everything came back"] = "missed" if report.problems else "met"
    return found


def ends_table(report: Report) -> Table:
    """Return how the callers ended."""
    shown = Table(
        title=f"{report.requests:,} requests, {report.tokens:,} tokens in {report.seconds / 60:.1f} min: "
        f"{report.rate:.2f} requests/s, {report.setup.load:.0%} of {report.capacity:,.0f} tokens/s"
    )
    for heading in ("caller", "requests", "how they ended"):
        shown.add_column(heading, justify="right" if heading == "requests" else "left")
    for deed, counter in report.ends.items():
        shown.add_row(deed, f"{counter.total():,}", ", ".join(f"{slug} {n:,}" for slug, n in counter.most_common()))
    return shown


def growth_table(report: Report) -> Table:
    """Return what the server held."""
    shown = Table(title=f"held, after {report.setup.warm_up:g} min of warm-up (slope: 95 % interval)")
    for heading in ("", "first", "last", "most", "per hour"):
        shown.add_column(heading, justify="right" if heading else "left")
    for name, found in report.trends.items():
        figures = [f"{value:,.1f}" for value in (found.first, found.last, found.most)]
        shown.add_row(name.replace("_mib", ", MiB").replace("_", " "), *figures, growth_words(found))
    return shown


def show(report: Report, slope: float, console: Console) -> None:
    """Print the tables and the verdicts."""
    console.print(ends_table(report), growth_table(report))
    worst = max((look.lag_p99_ms or 0.0 for look in report.looks), default=0.0)
    console.print(
        f"the server's loop lag, p99 of a minute: at most {worst:.1f} ms; this tool's own p99 "
        f"{report.tool_lag_p99_ms:.1f} ms, requests sent late p99 {report.late_p99_ms:.1f} ms"
    )
    for bound, verdict in verdicts(report, slope).items():
        console.print(f"{bound}: {verdict}", markup=False)
    for line in (*report.problems, *report.examples):
        console.print(f"  {line}", markup=False)


def _over(text: str) -> dict[Over, float]:
    from load.swarm.settings import _weights  # noqa: PLC0415

    return _weights(text)


def main(
    *,
    minutes: Annotated[float, typer.Option(min=0.2, help="How long load is put on, warm-up included.")] = 60.0,
    warm_up: Annotated[
        float | None, typer.Option(help="Minutes that do not count; a fifth of all, at most 10, if not given.")
    ] = None,
    engine: Annotated[Engine, typer.Option(help="What computes; `real` is vLLM with SmolLM2.")] = Engine.simulated,
    load: Annotated[float, typer.Option(min=0.01, max=1.0, help="Share of what the server can carry.")] = 0.5,
    chaos: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of callers that cancel, time out, read slowly, send rubbish.")
    ] = 0.2,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 5.0,
    over: Annotated[
        str, typer.Option(help="Front ends with weights; `generate_stream` is one more.")
    ] = "grpc:4,generate:1",
    slope: Annotated[float, typer.Option(help="MiB per hour that memory may grow after the warm-up.")] = SLOPE,
    seed: Annotated[int, typer.Option(help="Of who comes when and asks what.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here too.", dir_okay=False)] = None,
) -> None:
    """Put a steady load of good and bad callers on a real server and see whether anything grows or fails.

    It needs no running server. Ctrl-C ends it in order, with a report of what was seen so far. Exit codes: 0 every
    bound is met, 1 one is missed or the run was too short to decide it, 2 wrong usage.
    """
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder {json_file.absolute().parent} does not exist", param_hint="--json")
    try:
        weights = _over(over)
    except ValueError:
        raise typer.BadParameter("front ends with weights, such as grpc:4,generate:1", param_hint="--over") from None
    warm = min(10.0, minutes / 5) if warm_up is None else warm_up
    if not 0 <= warm < minutes:
        raise typer.BadParameter(f"must be less than the {minutes:g} minutes of the run", param_hint="--warm-up")
    progress = Console(stderr=True, highlight=False, soft_wrap=True)
    setup = Setup(minutes, warm, engine.value, load, chaos, every, weights, seed)
    try:
        report = run(setup, lambda line: progress.print(f"{time.strftime('%H:%M:%S')} {line}", markup=False))
    except (BenchFailed, LauncherError) as error:
        progress.print(f"soak: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
    show(report, slope, Console(width=None if sys.stdout.isatty() else 200, highlight=False))
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    raise typer.Exit(0 if set(verdicts(report, slope).values()) == {"met"} else 1)


if __name__ == "__main__":
    typer.run(main)
