"""Many requests of every fate, and an account of what is left of them: ``python -m load.leaks --requests 100000``.

The real manager, pipeline, bus, lanes and cancel watch serve the simulated engine in this process, in real time; only
Triton's objects are stood in for. Requests complete, stop at a word, fail, meet their deadline, are refused, are left
by their callers or cancelled by id; the engine stalls, slows down and dies. The last tenth goes to servers that are
stopped in the middle of their work. It fails if anything is left, if a request did not end exactly once, if callers and
server count differently, or if memory grew after the warm-up.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import heapq
import itertools
import json
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from random import Random
from typing import Annotated, Any, Final

import msgspec
import psutil
import typer
from rich.console import Console
from rich.table import Table
from tests.fakes import pb_utils

from triton_lifecycle import config as settings
from triton_lifecycle import errors, logs
from triton_lifecycle.engine import open_engine, supervisor
from triton_lifecycle.events import ENDINGS
from triton_lifecycle.leaks import Accounts, add_process_accounts
from triton_lifecycle.manager import Manager

GROWTH_MIB: Final = 5.0
WARM_UP: Final = 0.2
STOPPED: Final = 0.1
ROUNDS: Final = 10
STOPS: Final = 10
IDLE_S: Final = 30.0
"""How long the server may take to come to rest; far more than any request lives."""

ENGINE: Final[dict[str, Any]] = {
    "base_ms": 1.0,
    "per_sequence_us": 5.0,
    "prefill_tokens_per_s": 1e6,
    "max_num_seqs": 48,
    "mean_output_tokens": 24.0,
    "faults": [
        {"do": "raise", "on": {"probability": 0.02}},
        {"do": "raise", "on": {"probability": 0.03, "token": 4}},
        {"do": "stall", "on": {"probability": 0.0005, "token": 2}, "for_s": 0.05},
        {"do": "slow", "on": {"probability": 0.0005}, "for_s": 0.1, "factor": 4.0},
        {"do": "die", "on": {"probability": 0.0002, "token": 3}},
    ],
}
OURS: Final = settings.Config(
    timeout_handling=settings.TimeoutHandling(default_timeout=10.0),
    admission=settings.Admission(max_live_requests=120),
    cancellation=settings.Cancellation(poll_interval=0.005, max_polls_per_second=5000),
    monitoring=settings.Monitoring(leak_check_interval=0.0),
)
WRONG: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("", {}),
    ("\0", {}),
    ("x", {"max_tokenz": 4}),
    ("x", {"max_tokens": -1}),
    ("x", {"temperature": "hot"}),
    ("x", {"n": 100_000}),
    ("x", {"timeout_ms": -5}),
    ("word " * 3000, {}),
)
CALLS: Final = {
    errors.Draining: "drained",
    errors.Cancelled: "cancelled",
    errors.DeadlineExceeded: "timed_out",
    errors.RequestError: "rejected",
    errors.Overloaded: "rejected",
}


class Row(msgspec.Struct):
    """What one round came to."""

    name: str
    counts: dict[str, int]
    left: dict[str, float]
    """Accounts that did not come back."""
    rss_mib: float
    seconds: float


class Report(msgspec.Struct):
    """What the run came to."""

    requests: int
    rows: list[Row] = []
    problems: list[str] = []
    growth_mib: float = 0.0
    """Resident memory after the last round of the long-lived server, less that after the warm-up."""
    deaths: int = 0
    """How often the engine died and was started again."""
    seconds: float = 0.0


class Request(pb_utils.InferenceRequest):
    """A request that says when its last response was sent."""

    def __init__(self, text: str, parameters: dict[str, Any], name: str, *, stream: bool) -> None:
        super().__init__({"text_input": text, "stream": stream}, parameters, name)
        self.done: Callable[[Request], None] = _nobody
        send = self.sender.send

        def told(response: pb_utils.InferenceResponse | None = None, flags: int = 0) -> None:
            send(response, flags)
            if flags:
                self.done(self)

        self.sender.send = told  # type: ignore[method-assign]


def _nobody(_: Request) -> None:
    return


class Callers:
    """Makes requests, leaves some of them, and counts what came of each.

    Args:
        random: decides everything.
        concurrency: requests under way at once, about.

    """

    def __init__(self, random: Random, concurrency: int) -> None:
        self._random = random
        self._concurrency = concurrency
        self._room = threading.Semaphore(concurrency)
        self._lock = threading.Lock()
        self._leaving: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.sent = 0
        self.ended = 0
        self.told: Counter[str] = Counter()
        """What callers were told, by ending; ``quiet`` where no error came: completed, or left by the caller;
        ``drained`` is refused or failed, by whether the request had begun."""

    def call(self, manager: Manager, count: int) -> None:
        """Send so many requests, in small batches, as room comes free."""
        while count > 0:
            size = min(count, self._concurrency, self._random.choice((1, 1, 2, 5, 20)))
            batch = [self._request(manager) for _ in range(size)]
            for request in batch:
                self._await_room()
                request.done = self._done
            self.sent += len(batch)
            manager.submit(batch)
            count -= len(batch)
            self.leave()

    def _await_room(self) -> None:
        limit = time.monotonic() + IDLE_S
        while not self._room.acquire(timeout=0.002):
            self.leave()
            if time.monotonic() > limit:
                raise TimeoutError(f"no request has ended for {IDLE_S:g} s")

    def leave(self) -> None:
        """Let those callers go whose time has come."""
        while self._leaving and self._leaving[0][0] <= time.monotonic():
            heapq.heappop(self._leaving)[2]()

    def await_all(self) -> bool:
        """Wait until every request has its last response; return whether it came to that."""
        limit = time.monotonic() + IDLE_S
        while self.ended < self.sent and time.monotonic() < limit:
            self.leave()
            time.sleep(0.002)
        self._leaving.clear()
        return self.ended == self.sent

    def _request(self, manager: Manager) -> Request:
        random, number = self._random, next(self._numbers)
        # Some callers use the same id again and again.
        name = f"r{number}" if random.random() < 0.9 else f"again{random.randrange(5)}"
        stream = random.random() < 0.7
        if random.random() < 0.05:
            text, parameters = random.choice(WRONG)
            return Request(text, dict(parameters), name, stream=stream)
        parameters = {"max_tokens": random.randint(1, 48)}
        if random.random() < 0.1:
            parameters["n"] = random.randint(2, 3)
        if random.random() < 0.1:
            parameters["ignore_eos"] = True
        if random.random() < 0.15:
            parameters["stop"] = random.choice([["the"], ["a", "and"], ["never said"]])
        if random.random() < 0.15:
            parameters["timeout_ms"] = random.choice([1, 5, 20, 40, 80])
        request = Request(f"Story {random.randrange(50)} of a long winter", parameters, name, stream=stream)
        chance, after = random.random(), time.monotonic() + random.random() * 0.1
        if chance < 0.1:
            heapq.heappush(self._leaving, (after, number, lambda: setattr(request, "cancelled", True)))
        elif chance < 0.15:
            heapq.heappush(self._leaving, (after, number, lambda: self._cancel(manager, name)))
        return request

    @staticmethod
    def _cancel(manager: Manager, name: str) -> None:
        control = pb_utils.InferenceRequest({}, {"control": "cancel", "control_id": name})
        manager.submit([control])

    def _done(self, request: Request) -> None:
        with self._lock:
            self.ended += 1
            self.told[_told(request)] += 1
        self._room.release()


def _told(request: Request) -> str:
    found = request.sender.errors
    error = errors.from_wire(found[-1].message()) if found else None
    if request.sender.finals != 1 or len(found) > 1:
        return "more than one end"
    if not found:
        return "quiet"
    return next((name for kind, name in CALLS.items() if isinstance(error, kind)), "failed")


class Faults(logging.Handler):
    """Keeps what is logged as an error: nothing that a request does may be a fault of the server.

    The supervisor's errors are left out: the engine is made to die on purpose.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the first few."""
        if len(self.texts) < 10 and record.name != supervisor.__name__:
            self.texts.append(record.getMessage())


class Run:
    """One run.

    Args:
        requests: in all.
        seed: of every decision.
        concurrency: requests under way at once, about; more than are admitted.
        say: told how far it is.
        rounds: of the server that lives long.
        stops: servers that are stopped at work.

    """

    def __init__(
        self,
        requests: int,
        seed: int,
        concurrency: int,
        say: Callable[[str], None],
        *,
        rounds: int = ROUNDS,
        stops: int = STOPS,
    ) -> None:
        self._rounds = rounds
        self._stops = stops
        self._random = Random(seed)  # noqa: S311 - a load, not a secret
        self._seed = seed
        self._concurrency = concurrency
        self._say = say
        self.report = Report(requests)
        self._process = psutil.Process()

    def run(self) -> Report:
        """Make the requests and return the report."""
        began = time.monotonic()
        logs.configure(settings.Monitoring(log_level="error", log_format="text"))
        faults = Faults()
        logging.getLogger(logs.ROOT).addHandler(faults)
        stopped = int(self.report.requests * STOPPED)
        # What the process as a whole holds is compared over the lives of servers, too. Libraries make some things once
        # and for good, so one server has come and gone before.
        with self._server(OURS, self._seed):
            pass
        with self._restored():
            self._long_life(self.report.requests - stopped)
        with self._restored():
            for number in range(self._stops):
                self._stopped_at_work(number, stopped // self._stops + (number < stopped % self._stops))
        logging.getLogger(logs.ROOT).removeHandler(faults)
        self.report.problems += [f"logged as an error: {text}" for text in faults.texts]
        self.report.seconds = time.monotonic() - began
        self._judge()
        return self.report

    def _long_life(self, requests: int) -> None:
        callers = Callers(self._random, self._concurrency)
        with self._server(OURS, self._seed) as manager:
            on_loop(manager, _compare(manager.accounts))
            before: Counter[str] = Counter()
            for number in range(self._rounds):
                began = time.monotonic()
                callers.call(manager, requests // self._rounds + (number < requests % self._rounds))
                if not callers.await_all():
                    self._problem(f"{callers.sent - callers.ended} requests did not end within {IDLE_S:g} s")
                left = self._at_rest(manager)
                counts = Counter(manager.state()["counts"])
                self._row(f"round {number + 1}", counts - before, left, began)
                before = counts
            self._compare(callers, before)
        warm = self.report.rows[max(0, int(self._rounds * WARM_UP) - 1)]
        self.report.growth_mib = self.report.rows[-1].rss_mib - warm.rss_mib

    def _stopped_at_work(self, number: int, requests: int) -> None:
        callers = Callers(self._random, self._concurrency)
        ours = OURS.model_copy(update={"shutdown": settings.Shutdown(drain_timeout=self._random.choice([0, 0.02, 1]))})
        began = time.monotonic()
        with self._server(ours, self._seed + 1 + number) as manager:
            callers.call(manager, requests)
        if not callers.await_all():
            self._problem(f"stop {number + 1}: {callers.sent - callers.ended} requests have no last response")
        held = manager.accounts.read()
        names = ("contexts", "permits", "pipelines", "watched_calls", "sends", "bus_queues", "engine_requests")
        counts = Counter(manager.state()["counts"])
        self._row(f"stop {number + 1}", counts, {name: held[name] for name in names if held[name]}, began)
        self._compare(callers, counts)

    @contextmanager
    def _server(self, ours: settings.Config, seed: int) -> Iterator[Manager]:
        engine = open_engine("simulated", {**ENGINE, "seed": seed}, "")
        manager = Manager(ours, engine, "simulated", "1", pb_utils)
        manager.start()
        ended = threading.Event()
        reviver = threading.Thread(target=self._revive, args=(manager, engine, ended), daemon=True)
        reviver.start()
        try:
            yield manager
        finally:
            ended.set()
            reviver.join(5)
            manager.stop()

    def _revive(self, manager: Manager, engine: Any, ended: threading.Event) -> None:  # noqa: ANN401
        """Start an engine that died again."""
        while not ended.wait(0.02):
            if not engine.alive:
                self.report.deaths += 1
                on_loop(manager, engine.start())

    @staticmethod
    def _at_rest(manager: Manager) -> dict[str, float]:
        """Return what is left once nothing more comes back."""
        limit = time.monotonic() + IDLE_S
        while (left := on_loop(manager, _compare(manager.accounts))) and time.monotonic() < limit:
            time.sleep(0.02)
        return {name: leak.held for name, leak in left.items()}

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """See to it that the process holds afterwards what it held before."""

        async def accounts() -> dict[str, float]:
            found = Accounts()
            memory = add_process_accounts(found, asyncio.get_running_loop())
            memory.look()
            return found.read() | {"children": float(len(self._process.children()))}

        before = asyncio.run(accounts())
        yield
        gc.collect()
        after = asyncio.run(accounts())
        for name, held in after.items():
            if held > before[name]:
                self._problem(f"after the servers have stopped {name} is {held:g}, before it was {before[name]:g}")

    def _row(self, name: str, counts: Counter[str], left: dict[str, float], began: float) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        rss = self._process.memory_info().rss / 2**20
        self.report.rows.append(Row(name, dict(counts), left, rss, time.monotonic() - began))
        if left:
            self._problem(f"{name}: left over: {left}")
        self._say(f"{name}: {counts['received']:,} requests in {time.monotonic() - began:.1f} s, {rss:.1f} MiB")

    def _compare(self, callers: Callers, counts: Counter[str]) -> None:
        """Hold what callers were told against what the server counted."""
        told, drained = callers.told, callers.told["drained"]
        agree = (
            counts["received"] == callers.sent == told.total()
            and told["timed_out"] == counts["timed_out"]
            and told["quiet"] + told["cancelled"] == counts["completed"] + counts["cancelled"]
            and told["failed"] <= counts["failed"] <= told["failed"] + drained
            and told["failed"] + told["rejected"] + drained == counts["failed"] + counts["rejected"]
        )
        if not agree:
            self._problem(f"callers counted {callers.sent} sent, {dict(callers.told)}; the server {dict(counts)}")

    def _judge(self) -> None:
        for row in self.report.rows:
            endings = sum(row.counts.get(name, 0) for name in ENDINGS.values())
            if row.counts.get("received", 0) != endings:
                self._problem(f"{row.name}: {row.counts.get('received')} received, but {endings} ended")
        if (received := sum(row.counts.get("received", 0) for row in self.report.rows)) != self.report.requests:
            self._problem(f"{self.report.requests} requests were made, {received} received")

    def _problem(self, text: str) -> None:
        self.report.problems.append(text)
        self._say(f"PROBLEM {text}")


def on_loop(manager: Manager, work: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401 - whatever the coroutine returns
    """Run a coroutine on the server's loop and return its result."""
    return asyncio.run_coroutine_threadsafe(work, manager._loop).result(IDLE_S)  # noqa: SLF001 - a test from within


async def _compare(accounts: Accounts) -> Any:  # noqa: ANN401
    return accounts.compare()


def table(report: Report) -> Table:
    """Return the report as a table."""
    shown = Table(
        title=f"{report.requests:,} requests in {report.seconds:.0f} s; the engine died {report.deaths} times"
    )
    names = ["received", *ENDINGS.values()]
    for heading in ("", *names, "left over", "MiB"):
        shown.add_column(heading, justify="right")
    for row in report.rows:
        counts = [f"{row.counts.get(name, 0):,}" for name in names]
        shown.add_row(row.name, *counts, str(sum(row.left.values()) or 0), f"{row.rss_mib:.1f}")
    totals = [f"{sum(row.counts.get(name, 0) for row in report.rows):,}" for name in names]
    shown.add_section()
    shown.add_row("all", *totals, str(sum(sum(row.left.values()) for row in report.rows) or 0), "")
    return shown


def main(
    *,
    requests: Annotated[int, typer.Option(min=ROUNDS, help="Requests in all.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Of every decision.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at once, about.")] = 128,
    growth: Annotated[float, typer.Option(help="MiB that memory may grow after the warm-up.")] = GROWTH_MIB,
    as_json: Annotated[bool, typer.Option("--json", help="Write the report in JSON.")] = False,
) -> None:
    """Make requests of every fate and look for what is left of them."""
    progress = Console(stderr=True, highlight=False)
    report = Run(requests, seed, concurrency, lambda text: progress.print(text, markup=False)).run()
    if report.growth_mib > growth:
        report.problems.append(f"memory grew by {report.growth_mib:.1f} MiB after the warm-up")
    if as_json:
        sys.stdout.write(json.dumps(msgspec.to_builtins(report)) + "\n")
    else:
        console = Console()
        console.print(table(report))
        console.print(f"memory after the warm-up: {report.growth_mib:+.1f} MiB; aim ≤ {growth:g} MiB")
        verdict = "nothing is left, every count agrees" if not report.problems else "\n".join(report.problems)
        console.print(verdict, markup=False)
    raise typer.Exit(1 if report.problems else 0)


if __name__ == "__main__":
    typer.run(main)
