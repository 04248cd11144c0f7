"""Kill a replica under Locust's users: who loses an answer, and is the load spread evenly?

``python -m load.replicas`` starts what ``lifecycle serve --replicas 3`` keeps (three tritonservers on the simulated
engine, Envoy before them, dead ones started again), lets Locust's users ask through Envoy, some with our client and
some with tritonclient alone, and ends one tritonserver with kill -9. Its way back is waited for, under the same load.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from triton_lifecycle.launcher import project_root
from triton_lifecycle.launcher.envoy import Front, Policy
from triton_lifecycle.launcher.ports import free_ports
from triton_lifecycle.launcher.replicas import Fleet, make_fleet
from triton_lifecycle.launcher.server import TritonServer

MODEL: Final = "simulated"
REPLICAS: Final = 3
OURS: Final = ("grpc", "generate_stream", "generate")
PLAIN: Final = "tritonclient"
READY_S: Final = 180.0
BACK_S: Final = 90.0
FAREWELL_S: Final = 90.0
"""What Locust may take beyond its run time: its start, the drain, its files."""
MOST_UNEVEN: Final = 0.10
MOST_LOST: Final = 0.005


class Side(msgspec.Struct):
    """What one kind of caller has seen."""

    requests: int = 0
    failed: int = 0
    slugs: dict[str, int] = {}


class Outcome(msgspec.Struct):
    """What became of one run."""

    ours: Side
    plain: Side
    before: dict[str, list[int]]
    """Requests that each replica got until the kill, by protocol."""
    back_s: float
    """Seconds from the kill until the replica was in rotation again."""

    @property
    def uneven(self) -> float:
        """By what share of the mean a replica was off it, at most, until the kill."""
        return max(abs(count * len(got) / sum(got) - 1) for got in self.before.values() for count in got)

    @property
    def good(self) -> bool:
        """Whether it is as promised."""
        lost = self.plain.failed <= MOST_LOST * self.plain.requests
        return self.ours.requests > 0 and not self.ours.failed and lost and self.uneven <= MOST_UNEVEN


def run(fleet: Fleet, folder: Path, seconds: float, users: int, tell: Callable[[str], None]) -> Outcome:
    """Kill a ready fleet's first replica a third into a Locust run through its Envoy.

    Args:
        fleet: ready; looked after here, and still running afterwards.
        folder: for Locust's files.
        seconds: of the run; it goes on until the replica is back.
        users: of Locust; one third has tritonclient alone.
        tell: receives what happens.

    Raises:
        RuntimeError: Locust gave no figures, or the replica did not come back.

    """
    begin = fleet.balancer.counts()
    killed = fleet.servers[0]
    with (folder / "locust.log").open("wb") as log:
        locust = subprocess.Popen(_command(fleet, folder, seconds, users), cwd=folder, stdout=log, stderr=log)
        try:
            _until(fleet, lambda: _served(fleet, begin) >= 5 * users, FAREWELL_S, "Locust asks nothing")
            _pause(fleet, seconds / 3)
            before = _gained(fleet, begin)
            os.kill(killed.pid, signal.SIGKILL)
            at = time.monotonic()
            tell(f"replica 1 is killed under {users} users")
            _until(fleet, lambda: _is_back(fleet, killed), BACK_S, "the killed replica is not back")
            back_s = time.monotonic() - at
            tell(f"it is back in rotation after {back_s:.1f} s")
            _until(fleet, lambda: locust.poll() is not None, seconds + FAREWELL_S, "Locust does not end")
        finally:
            if locust.poll() is None:
                locust.kill()
            locust.wait(10)
    report = json.loads((folder / "run.json").read_text(encoding="utf-8")) if (folder / "run.json").exists() else {}
    if "series" not in report:
        raise RuntimeError(f"Locust gave no figures: {report or (folder / 'locust.log').read_text(errors='replace')}")
    return Outcome(_side(report, OURS), _side(report, (PLAIN,)), before, back_s)


def _command(fleet: Fleet, folder: Path, seconds: float, users: int) -> list[str]:
    front = fleet.balancer.front
    options: dict[str, Any] = {
        "-f": project_root() / "load" / "locustfile.py",
        "--grpc-url": f"127.0.0.1:{front.grpc}",
        "--http-url": f"127.0.0.1:{front.http}",
        "--model": MODEL,
        "--over": f"grpc,generate_stream:0.5,generate:0.5,{PLAIN}",
        "--attempts": 3,
        "--answer-tokens": "uniform:10-100",
        "-u": users,
        "-r": users,
        "-t": f"{seconds:.0f}s",
        "--report": folder / "run.json",
        # Counted is who loses what, not how fast it goes.
        "--max-lag-ms": 60_000,
    }
    given = [str(word) for pair in options.items() for word in pair]
    return [sys.executable, "-m", "locust", "--headless", "--only-summary", *given]


def _side(report: dict[str, Any], over: tuple[str, ...]) -> Side:
    side = Side()
    for name in over:
        found = report["series"].get(f"{name} end to end", {"count": 0, "failures": 0})
        side.requests += found["count"]
        side.failed += found["failures"]
        for slug, count in report["failures"].get(f"{name} end to end", {}).items():
            side.slugs[slug] = side.slugs.get(slug, 0) + count
    return side


def _gained(fleet: Fleet, begin: dict[str, list[int]]) -> dict[str, list[int]]:
    return {
        protocol: [now - then for now, then in zip(counts, begin[protocol], strict=True)]
        for protocol, counts in fleet.balancer.counts().items()
    }


def _served(fleet: Fleet, begin: dict[str, list[int]]) -> int:
    return sum(map(sum, _gained(fleet, begin).values()))


def _until(fleet: Fleet, so: Callable[[], bool], limit: float, otherwise: str) -> None:
    until = time.monotonic() + limit
    while not so():
        if fleet.wait(0.1) is not None:
            raise RuntimeError(fleet.end_story())
        if time.monotonic() > until:
            raise RuntimeError(f"{otherwise} after {limit:.0f} s")


def _is_back(fleet: Fleet, killed: TritonServer) -> bool:
    return fleet.servers[0] is not killed and fleet.members[0].ready and fleet.balancer.ready() == REPLICAS


def _pause(fleet: Fleet, seconds: float) -> None:
    until = time.monotonic() + seconds
    _until(fleet, lambda: time.monotonic() >= until, seconds + 1, "the clock stands still")


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--users", type=int, default=24)
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    options = parser.parse_args(arguments)
    http, grpc, admin = free_ports("127.0.0.1", 3)
    front = Front(http=http, grpc=grpc, admin=admin)
    fleet = make_fleet(
        project_root() / "model_repository", REPLICAS, models=[MODEL], front=front, policy=Policy(model=MODEL)
    )
    try:
        fleet.start()
        fleet.wait_ready(READY_S)
        with tempfile.TemporaryDirectory(prefix="lifecycle-replicas-") as folder:
            tell = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
            outcome = run(fleet, Path(folder), options.seconds, options.users, tell)
        fleet.stop()
    finally:
        fleet.kill()
    print(msgspec.json.encode(outcome).decode() if options.json else _text(outcome))
    return 0 if outcome.good else 1


def _text(outcome: Outcome) -> str:
    lines = []
    for name, side in (("our client", outcome.ours), ("tritonclient alone", outcome.plain)):
        share = side.failed / max(1, side.requests)
        lines.append(f"{name:36} {side.requests} requests, {side.failed} failed ({share:.2%}) {side.slugs or ''}")
    for protocol, got in outcome.before.items():
        lines.append(f"{f'until the kill, over {protocol}':36} {', '.join(map(str, got))} requests")
    lines.append(f"{'furthest from even':36} {outcome.uneven:.1%}")
    lines.append(f"{'kill -9 until in rotation again':36} {outcome.back_s:.1f} s")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
