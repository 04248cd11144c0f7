"""What events, metrics and the recorder cost through a real Triton: ``python -m load.metrics_cost``.

One tritonserver holds the same simulated model several times: with events and metrics off, with all of it on (bus,
metrics on Triton's page, recorder), the same with the official backend's metrics too, and off again, which shows what
the machine's own noise makes of equal things. Each is asked in turn by as many gRPC streams as its engine runs at once,
from a process of its own, while Triton's page is read once a second. Compared are tokens each second, the time to the
first response, and the CPU time of tritonserver and stubs for each token, which tells more where nothing is saturated.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import threading
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import typer
import yaml
from rich.console import Console
from rich.table import Table

from load.overhead.children import Child
from load.overhead.measure import Order, Prompt, percentile
from load.overhead.processes import ServingProcesses
from load.rounds import COLUMNS, Round, cells, later, lost, more_cpu, take_turns, verdict
from triton_lifecycle.launcher import project_root
from triton_lifecycle.launcher.server import TritonServer

AIM_LOST: Final = 0.01
AIM_FIRST_S: Final = 0.001
RATE: Final = 23_000
"""Of the engine while its batch is full; as requests follow each other some steps are not, and 20,000 arrive."""
STREAMS: Final = 64
TOKENS: Final = 100
START_S: Final = 60.0
LIMIT_S: Final = 120.0
OFF: Final[dict[str, Any]] = {"event_driven": {"enabled": False}, "monitoring": {"metrics_enabled": False}}
ON: Final[dict[str, Any]] = {"event_driven": {"recorder": {"path": "events.jsonl"}}}
VARIANTS: Final[dict[str, dict[str, Any]]] = {"off": OFF, "on": ON, "on_and_official": ON, "off_again": OFF}
LIMITS: Final[dict[str, Any]] = {"timeout_handling": {"enabled": False}}
"""Predictions are not what is measured here."""


def repository(folder: Path) -> None:
    """Write a model for each variant."""
    source = project_root() / "model_repository" / "simulated"
    for name, settings in VARIANTS.items():
        model = folder / name
        shutil.copytree(source, model, ignore=shutil.ignore_patterns("__pycache__"))
        engine: dict[str, Any] = {"tokens_per_s": RATE, "prefill_tokens_per_s": 500_000.0, "max_num_seqs": STREAMS}
        engine |= {"max_model_len": 4096, "mean_output_tokens": None}
        (model / "1" / "model.json").write_text(json.dumps(engine))
        (model / "request_lifecycle.yaml").write_text(yaml.safe_dump({"request_lifecycle": settings | LIMITS}))
        if "official" in name:
            with (model / "config.pbtxt").open("a") as config:
                config.write('parameters { key: "REPORT_CUSTOM_METRICS" value { string_value: "true" } }\n')


class Scraper:
    """Reads Triton's page once a second, as a Prometheus would, from a thread of this process."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scraper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Read no more."""
        self._end.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._end.wait(1.0):
            with urllib.request.urlopen(self._url, timeout=10) as page:  # noqa: S310 - this machine's own server
                page.read()


def ask(child: Child, serving: ServingProcesses, requests: int) -> Round:
    """Run one round."""
    prompts = [Prompt(f"the quick brown fox number {number}") for number in range(requests)]
    before = serving.used()
    sample = child.ask(Order(prompts, STREAMS, TOKENS, LIMIT_S))
    used = serving.used() - before
    return Round(
        sample.rate,
        percentile(sample.first, 50),
        percentile(sample.first, 99),
        used.both / sample.tokens,
    )


def main(rounds: int = 10, requests: int = 800) -> None:
    """Measure and print."""
    console = Console()
    with tempfile.TemporaryDirectory() as name, ExitStack() as open_things:
        folder = Path(name)
        repository(folder / "models")
        server = TritonServer(folder / "models", log_path=folder / "triton.log")
        open_things.callback(server.kill)
        server.start().wait_ready(START_S)
        children = {}
        for variant in VARIANTS:
            child = Child(["grpc", server.grpc_url, variant], folder / f"{variant}.log")
            children[variant] = open_things.enter_context(child)
            child.wait_ready(START_S)
        scraper = Scraper(server.metrics_url)
        open_things.callback(scraper.close)
        serving = ServingProcesses(server.pid)
        for variant in VARIANTS:
            ask(children[variant], serving, requests // 4)
        found = take_turns(VARIANTS, rounds, lambda variant: ask(children[variant], serving, requests))
        page = urllib.request.urlopen(server.metrics_url, timeout=10).read().decode()  # noqa: S310 - as above
    _show(console, found, rounds, requests)
    for variant in ("on", "on_and_official"):
        [spent] = re.findall(
            rf'^lifecycle_metrics_write_seconds_total{{model="{variant}",.*}} (\S+)$', page, re.MULTILINE
        )
        busy = sum(requests * TOKENS / each.tokens_per_s for each in found[variant])
        console.print(f"{variant.replace('_', ' ')}: {float(spent) / busy:.2%} of a core's time was spent on writing")


def _show(console: Console, found: dict[str, list[Round]], rounds: int, requests: int) -> None:
    table = Table(title=f"Through tritonserver, gRPC, {STREAMS} streams, {rounds} rounds of {requests} requests")
    for column in ("events and metrics", *COLUMNS):
        table.add_column(column, justify="left" if column.startswith("events") else "right")
    for variant, measured in found.items():
        table.add_row(variant.replace("_", " "), *cells(measured))
    console.print(table)
    off, again = found["off"], found["off_again"]
    for variant in ("on", "on_and_official"):
        on = found[variant]
        console.print(
            f"{variant.replace('_', ' ')}: throughput lost {lost(off, on):+.2%} (off again: {lost(off, again):+.2%}), "
            f"aim ≤ {AIM_LOST:.0%}: {verdict(lost(off, on), lost(off, again), AIM_LOST)}; first p99, quiet rounds "
            f"{later(off, on) * 1e3:+.2f} ms (off again: {later(off, again) * 1e3:+.2f} ms), aim ≤ "
            f"{AIM_FIRST_S * 1e3:g} ms: {verdict(later(off, on), later(off, again), AIM_FIRST_S)}; CPU "
            f"{more_cpu(off, on) * 1e6:+.1f} µs per token (off again: {more_cpu(off, again) * 1e6:+.1f})"
        )


if __name__ == "__main__":
    typer.run(main)
