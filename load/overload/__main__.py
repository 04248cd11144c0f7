"""``python -m load.overload``."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from load import overload
from load.overload.crowd import LOADS, Outcome, capacity, run, together
from load.overload.servers import ENGINE, LIMITS, InProcess, Ledger, Open, Server
from load.overload.triton import TritonServed
from load.overload.verdict import judge, share
from triton_lifecycle.config import Admission as AdmissionSettings
from triton_lifecycle.simulation import virtual_time

SLOWER: Final = ENGINE | {"base_ms": 20.0}
"""The engine behind Triton."""


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; 1 when an aim was missed."""
    parser = argparse.ArgumentParser(description=overload.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    parser.add_argument("--rounds", type=int, default=1, help="of each load, with other callers; means are shown")
    parser.add_argument("--real", action="store_true", help="in real time (each load takes that long)")
    parser.add_argument("--triton", action="store_true", help="through a real tritonserver, in real time")
    options = parser.parse_args(arguments)
    how = "through Triton" if options.triton else "real" if options.real else "virtual"
    start: Any = virtual_time.run if how == "virtual" else _real
    open_server: Open = through_triton if options.triton else InProcess
    say = Console(stderr=True)
    say.print(f"measuring the capacity ({options.seconds:g} s)")
    per_second = start(capacity, options.seconds, open_server)
    outcomes = []
    for load, settings in (*((load, LIMITS) for load in LOADS), (LOADS[-1], AdmissionSettings())):
        say.print(f"{load:g} times {per_second:.1f} requests/s, limits {'on' if settings is LIMITS else 'off'}")
        seeds = range(2, 2 + options.rounds)
        rounds = [
            start(partial(run, seed=seed), load, per_second, options.seconds, settings, open_server) for seed in seeds
        ]
        outcomes.append(together(rounds))
        if options.rounds > 1:
            say.print(f"  goodput in the rounds: {', '.join(f'{each.goodput:.1f}' for each in rounds)}")
    return _print(outcomes, per_second, options.seconds, how)


def _real(function: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> Any:  # noqa: ANN401
    return asyncio.run(function(*arguments))


def through_triton(settings: AdmissionSettings, ledger: Ledger) -> Server:
    """Return a real tritonserver."""
    return TritonServed(settings, ledger.take, SLOWER)


def _print(outcomes: list[Outcome], per_second: float, seconds: float, how: str) -> int:
    table = Table(title=f"Capacity {per_second:.1f} requests/s; {seconds:g} s a load, {how}")
    for name in ("load", "limits", "sent", "served", "goodput/s", "tokens wasted"):
        table.add_column(name, justify="right")
    for name in ("refusals", "p99 ms", "hint error", "let in when back", "other ends"):
        table.add_column(name, justify="right")
    for outcome in outcomes:
        table.add_row(
            f"{outcome.load:g}",
            "on" if outcome.limits else "off",
            str(outcome.sent),
            f"{outcome.served / outcome.sent:.0%}",
            f"{outcome.goodput:.1f}",
            f"{outcome.wasted:.0%}",
            str(len(outcome.refusals_ms)),
            f"{share(outcome.refusals_ms, 0.99):.1f}",
            f"{statistics.median(outcome.hint_errors):.0%}" if outcome.hint_errors else "-",
            f"{outcome.let_in / outcome.returned:.0%}" if outcome.returned else "-",
            " ".join(f"{slug} {count}" for slug, count in outcome.ends.items()) or "-",
        )
    console = Console(width=160)
    console.print(table)
    verdicts = judge(outcomes)
    for name, (figure, met) in verdicts.items():
        console.print(f"{name}: {figure:.3f}: {'met' if met else 'missed'}")
    return 0 if all(met for _, met in verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
