"""A thousand streams at once: is the event loop late, what does a live request take, does every token arrive?

``python -m load.streams`` starts a real tritonserver with the simulated engine and opens all streams in one go, over
gRPC. While all are live it looks at the backend's process: how late its event loop is, how much memory it has more than
before. Every answer is compared with the one that a second model of the same seed gives in one piece, so that a token
that is lost, repeated or out of order fails the run. A client that was itself too slow refuses to report.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, Self

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from load.benchmark.servers import CLOSING_S, copy_model, model_folder
from load.holdings import Holdings
from load.overhead.children import Child
from load.overhead.measure import BenchFailed, Order, Prompt, Sample, combine, percentile
from load.swarm.health import Health, faults, refusal
from triton_lifecycle.launcher import LauncherError
from triton_lifecycle.launcher.installation import state_folder
from triton_lifecycle.launcher.server import TritonServer

MODEL: Final = "simulated"
REFERENCE: Final = "reference"
READY_S: Final = 120.0
LIMIT_S: Final = 290.0
"""For one stream; the longest that a caller may allow by default is 300 s."""
WINDOW_S: Final = 60.0
"""The backend knows its lag for so long back."""
LAG_MS: Final = 10.0
MEMORY_KIB: Final = 50.0
TOOL_LAG_MS: Final = 100.0
LOOK_S: Final = 0.25
MACHINE_S: Final = 0.02
REST_S: Final = 30.0
WARM_STREAMS: Final = 64
ENOUGH: Final = 0.99
"""Of the streams must be live at once: the first to arrive has the engine for itself, and may end before the last."""
FAST: Final = 50_000.0
REFUSED: Final = 3


class Setup(msgspec.Struct, frozen=True):
    """What is run."""

    streams: int
    tokens: int
    """Of each answer."""
    rate: float
    """Tokens/s of the engine, all streams together."""
    clients: int


class Report(msgspec.Struct):
    """What the run came to.

    Attributes:
        setup: what was asked for.
        live: requests live at once, at the time of the look in the middle.
        opened_s: from the first stream's start to the last one's first token.
        seconds: from the first stream's start to the last one's end.
        tokens: that arrived, complete and in order.
        responses: that brought them.
        lag_p50_ms: of the backend's event loop, from before the first stream until after the last one.
        lag_p99_ms: likewise.
        lag_max_ms: likewise.
        machine_p99_ms: how late a thread of this tool woke that only sleeps: the machine's own lag, which is in all
            others.
        before_mib: resident memory of the backend's process, after a warm-up of a few streams.
        live_mib: the most while streams were live.
        after_mib: when all had ended.
        client: how the client was.
        problems: what is wrong; none when every stream ended well.

    """

    setup: Setup
    live: int = 0
    opened_s: float = 0.0
    seconds: float = 0.0
    tokens: int = 0
    responses: int = 0
    lag_p50_ms: float = 0.0
    lag_p99_ms: float = 0.0
    lag_max_ms: float = 0.0
    machine_p99_ms: float = 0.0
    before_mib: float = 0.0
    live_mib: float = 0.0
    after_mib: float = 0.0
    client: Health | None = None
    problems: list[str] = []

    @property
    def kib_each(self) -> float:
        """Memory for each live request, in KiB."""
        return (self.live_mib - self.before_mib) * 1024 / max(1, self.live)


class Machine:
    """Notes how late a thread wakes that does nothing but sleep, for the length of a block."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._lags: list[float] = []
        self._thread = threading.Thread(target=self._look, name="machine-lag", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def p99_ms(self) -> float:
        """The 99th percentile of what was noted."""
        return percentile(self._lags, 99) * 1e3

    def _look(self) -> None:
        due = time.monotonic() + MACHINE_S
        while not self._over.wait(max(0.0, due - time.monotonic())):
            self._lags.append(max(0.0, time.monotonic() - due))
            due = time.monotonic() + MACHINE_S


class Run:
    """One run against one server.

    Args:
        server: serves the model and its reference.
        clients: share the streams.
        setup: what to do.
        say: told how far it is.

    """

    def __init__(self, server: TritonServer, clients: list[Child], setup: Setup, say: Callable[[str], None]) -> None:
        self.report = Report(setup)
        self._clients = clients
        self._setup = setup
        self._say = say
        self._holdings = Holdings(server, MODEL)

    def run(self, reference: Child) -> Report:
        """Open the streams, look at the server while they run, and return the report."""
        orders = self._orders(reference)
        self._warm_up()
        report = self.report
        report.before_mib = self._holdings.memory()
        self._say(f"opening {self._setup.streams} streams; the backend has {report.before_mib:.1f} MiB")
        with Machine() as machine:
            for client, order in zip(self._clients, orders, strict=True):
                client.send(order)
            self._watch()
            try:
                samples = [client.receive(order) for client, order in zip(self._clients, orders, strict=True)]
            except BenchFailed as error:
                report.problems.append(str(error))
                return report
            self._take_lag()
        report.machine_p99_ms = machine.p99_ms
        self._rest()
        self._count(samples)
        return report

    def _orders(self, reference: Child) -> list[Order]:
        setup = self._setup
        prompts = [Prompt(f"Story number {number} of a long winter:") for number in range(setup.streams)]
        whole = Order(prompts, WARM_STREAMS, setup.tokens, LIMIT_S, stream=False, keep_texts=True)
        answers = reference.ask(whole).texts
        self._say(f"{len(answers)} answers to compare with")
        shares = [slice(index, None, len(self._clients)) for index in range(len(self._clients))]
        return [
            Order(prompts[share], len(prompts[share]), setup.tokens, LIMIT_S, expected=answers[share])
            for share in shares
        ]

    def _warm_up(self) -> None:
        """Let everything that is made once be made, so that it does not count as a live request's."""
        prompts = [Prompt(f"Warm-up {number}") for number in range(WARM_STREAMS)]
        for client in self._clients:
            client.ask(Order(prompts, WARM_STREAMS, 20, LIMIT_S))
        self._holdings.state()

    def _watch(self) -> None:
        """Look at the memory until shortly before the end, and in the middle at how many are live."""
        expected = self._setup.streams * self._setup.tokens / self._setup.rate
        began = time.monotonic()
        while (elapsed := time.monotonic() - began) < expected * 0.9:
            self.report.live_mib = max(self.report.live_mib, self._holdings.memory())
            if not self.report.live and elapsed > expected / 2:
                self.report.live = int(self._holdings.state()["live"])
            time.sleep(LOOK_S)
        self.report.live_mib = max(self.report.live_mib, self._holdings.memory())

    def _take_lag(self) -> None:
        loop = self._holdings.state()["loop"]
        report = self.report
        report.lag_p50_ms, report.lag_p99_ms = loop["lag_p50_ms"], loop["lag_p99_ms"]
        report.lag_max_ms = loop["lag_max_ms"]

    def _rest(self) -> None:
        until = time.monotonic() + REST_S
        while (state := self._holdings.state())["live"] and time.monotonic() < until:
            time.sleep(0.1)
        report, counts = self.report, state["counts"]
        report.after_mib = self._holdings.memory()
        if state["live"]:
            report.problems.append(f"{state['live']} requests are still live {REST_S:.0f} s after the last stream")
        if counts["completed"] != counts["received"]:
            report.problems.append(f"not every request was completed: {counts}")
        if report.live < ENOUGH * self._setup.streams:
            report.problems.append(f"only {report.live} of {self._setup.streams} requests were live at once")

    def _count(self, samples: list[Sample]) -> None:
        report, found = self.report, combine(samples)
        report.opened_s, report.seconds = max(found.first), found.seconds
        report.tokens, report.responses = found.tokens, found.responses
        report.client = Health(
            lag_ms=round(percentile(found.lags, 99) * 1e3, 1),
            greenlet_ms=0.0,
            late_ms=0.0,
            cpu=round(max(sample.cpu_seconds / sample.seconds for sample in samples) * 100),
            dropped=0,
            samples=len(found.lags),
        )


@contextmanager
def served(setup: Setup, say: Callable[[str], None]) -> Iterator[TritonServer]:
    """Run the server, with the limits raised to what is asked, for the length of the block."""
    with ExitStack() as stack:
        repository = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lifecycle-streams-")))
        lifecycle = {"request_lifecycle": {"admission": {"max_live_requests": setup.streams + 10}}}
        for name, rate in ((MODEL, setup.rate), (REFERENCE, FAST)):
            copy_model(model_folder(MODEL), repository / name, lifecycle, say)
            path = repository / name / "1" / "model.json"
            path.write_text(json.dumps(_engine(json.loads(path.read_text(encoding="utf-8")), setup, rate)))
        say("starting tritonserver with the simulated engine, twice")
        with TritonServer(repository, models=[MODEL, REFERENCE]) as server:
            yield server.wait_ready(READY_S, say)
            time.sleep(CLOSING_S)
            say("stopping tritonserver")


def _engine(settings: dict[str, Any], setup: Setup, rate: float) -> dict[str, Any]:
    for key in ("base_ms", "per_sequence_us"):
        settings.pop(key, None)
    block = settings.get("block_size", 16)
    return settings | {
        "tokens_per_s": rate,
        "prefill_tokens_per_s": 1e6,
        "max_num_seqs": setup.streams,
        "max_num_batched_tokens": max(2048, 2 * setup.streams),
        "max_model_len": max(settings["max_model_len"], setup.tokens + 100),
        "kv_blocks": setup.streams * (1 + -(-(setup.tokens + 100) // block)),
        "token_sigma": 0.0,
        "first_token_sigma": 0.0,
        "mean_output_tokens": None,
    }


def run(setup: Setup, say: Callable[[str], None]) -> Report:
    """Start all that is needed, make the run, and end all."""
    logs = state_folder() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        server = stack.enter_context(served(setup, say))
        reference = stack.enter_context(Child(("http", server.http_url, REFERENCE), logs / "streams-reference.log"))
        clients = [
            stack.enter_context(Child(("grpc", server.grpc_url, MODEL), logs / f"streams-{number}.log"))
            for number in range(setup.clients)
        ]
        for child in (reference, *clients):
            child.wait_ready(READY_S)
        return Run(server, clients, setup, say).run(reference)


def verdicts(report: Report, lag_ms: float, memory_kib: float) -> dict[str, str]:
    """Return what became of each bound: ``met``, ``missed``, or ``undecided`` where the machine itself was too late."""
    lag = "met" if report.lag_p99_ms <= lag_ms else "missed" if report.machine_p99_ms <= lag_ms / 2 else "undecided"
    return {
        f"loop lag p99 ≤ {lag_ms:g} ms": lag,
        f"memory per live request ≤ {memory_kib:g} KiB": "met" if report.kib_each <= memory_kib else "missed",
        "0 errors, every token in its place": "missed" if report.problems else "met",
    }


def table(report: Report) -> Table:
    """Return the report as a table."""
    setup = report.setup
    shown = Table(
        title=f"{setup.streams:,} streams of {setup.tokens} tokens at once, {setup.rate:,.0f} tokens/s offered"
    )
    shown.add_column("")
    shown.add_column("measured", justify="right")
    rows = {
        "live at once": f"{report.live:,}",
        "last stream's first token, s": f"{report.opened_s:.2f}",
        "tokens that arrived": f"{report.tokens:,}",
        "tokens/s": f"{report.tokens / report.seconds:,.0f}" if report.seconds else "-",
        "responses": f"{report.responses:,}",
        "backend's loop lag, ms: p50": f"{report.lag_p50_ms:.2f}",
        "  p99": f"{report.lag_p99_ms:.2f}",
        "  longest": f"{report.lag_max_ms:.1f}",
        "the machine's own lag, ms: p99": f"{report.machine_p99_ms:.2f}",
        "backend's memory, MiB: before": f"{report.before_mib:.1f}",
        "  with all live": f"{report.live_mib:.1f}",
        "  after": f"{report.after_mib:.1f}",
        "memory per live request, KiB": f"{report.kib_each:.1f}",
    }
    if report.client is not None:
        rows["client's own loop lag, ms: p99"] = f"{report.client.lag_ms:.1f}"
        rows["client's CPU, % of a core"] = f"{report.client.cpu:.0f}"
    for name, value in rows.items():
        shown.add_row(name, value)
    return shown


def main(
    *,
    streams: Annotated[int, typer.Option(min=1, max=20_000, help="Opened in one go.")] = 1000,
    tokens: Annotated[int, typer.Option(min=2, help="Of each answer.")] = 60,
    rate: Annotated[float, typer.Option(min=1.0, help="Tokens/s of the engine, all streams together.")] = 2000.0,
    clients: Annotated[int, typer.Option(min=1, max=16, help="Processes that share the streams.")] = 1,
    lag_ms: Annotated[float, typer.Option(help="The backend's loop may be so late, 99 times in a hundred.")] = LAG_MS,
    memory_kib: Annotated[float, typer.Option(help="What a live request may take.")] = MEMORY_KIB,
    max_lag_ms: Annotated[
        float, typer.Option(help="By how much the client itself may be late; beyond, nothing is reported.")
    ] = TOOL_LAG_MS,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here too.", dir_okay=False)] = None,
) -> None:
    """Open so many streams at once on a real server and see what they cost.

    It needs no running server. On a machine that is busy with other work the lag is that work's: then the bound is
    undecided. Exit codes: 0 every bound is met, 1 one is missed or undecided, 2 wrong usage, 3 refused: the client was
    the bottleneck.
    """
    setup = Setup(streams, tokens, rate, clients)
    if (expected := streams * tokens / rate) > WINDOW_S * 0.9:
        raise typer.BadParameter(
            f"{streams} x {tokens} tokens take {expected:.0f} s at {rate:g} tokens/s; the backend knows its lag for a "
            f"minute: ask for fewer tokens, or for more at a time",
            param_hint="--tokens",
        )
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder {json_file.absolute().parent} does not exist", param_hint="--json")
    progress = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        report = run(setup, lambda line: progress.print(line, markup=False))
    except (BenchFailed, LauncherError) as error:
        progress.print(f"streams: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        progress.print("streams: interrupted; everything it started has ended")
        raise typer.Exit(130) from None
    if report.client is not None and (why := faults(report.client, max_lag_ms)):
        progress.print(refusal(why), markup=False)
        raise typer.Exit(REFUSED)
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    console.print(table(report))
    found = verdicts(report, lag_ms, memory_kib)
    for bound, verdict in found.items():
        console.print(f"{bound}: {verdict}", markup=False)
    for line in report.problems:
        console.print(f"  {line}", markup=False)
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    raise typer.Exit(0 if set(found.values()) == {"met"} else 1)


if __name__ == "__main__":
    typer.run(main)
