"""Load on a Triton with our backend, by Locust: ``locust -f load/locustfile.py``; see docs/load.md.

This file ties Locust's events to what lies in ``load/swarm``.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any, Final

# Locust puts the file's own folder on the path, not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gevent
import msgspec
from locust import events
from locust.runners import MasterRunner, WorkerRunner
from locust.stats import CSV_STATS_INTERVAL_SEC

from load.swarm import series
from load.swarm.campaign import Campaign
from load.swarm.course import Course
from load.swarm.health import LAG_SERIES, TOOL, faults, refusal
from load.swarm.options import add_options
from load.swarm.settings import Settings
from load.swarm.users import (
    Arrivals,
    Cancels,
    Generate,
    GenerateStream,
    GrpcStream,
    ReadsSlowly,
    SendsRubbish,
    TimesOut,
    TritonclientStream,
)
from triton_lifecycle.errors import InvalidInput

__all__ = [
    "Arrivals", "Cancels", "Course", "Generate", "GenerateStream", "GrpcStream", "ReadsSlowly", "SendsRubbish",
    "TimesOut", "TritonclientStream",
]  # fmt: skip

EXIT_FAILED: Final = 1
EXIT_REFUSED: Final = 3

log = logging.getLogger("load")


def begin(environment: Any, runner: Any, **_: Any) -> None:  # noqa: ANN401
    """Check the options before anything starts, and let master and workers understand each other."""
    environment.campaign = None
    environment.turn = (0, 1)
    environment.started, environment.refused = False, None
    if Arrivals not in environment.user_classes:
        environment.user_classes = [*environment.user_classes, Arrivals]
    if isinstance(runner, WorkerRunner):
        runner.register_message("lifecycle_turn", _take_turn)
        runner.register_message("lifecycle_drain", _drain, concurrent=True)
        return
    try:
        Settings.read(environment.parsed_options)
    except InvalidInput as error:
        sys.exit(error.message)
    if isinstance(runner, MasterRunner):
        runner.register_message("lifecycle_drained", _drained)


def _take_turn(environment: Any, msg: Any) -> None:  # noqa: ANN401
    index, count, run_time = msg.data
    environment.turn = (index, count)
    environment.parsed_options.run_time = run_time  # of Locust's own options it tells workers none


def _drain(environment: Any, **_: Any) -> None:  # noqa: ANN401
    if environment.campaign is not None:
        environment.campaign.drain()
    environment.runner.send_message("lifecycle_drained")


def _drained(environment: Any, msg: Any) -> None:  # noqa: ANN401
    environment.shape_class.worker_drained(msg.node_id)


def start(environment: Any, **_: Any) -> None:  # noqa: ANN401
    """Give out the turns, or take one: a worker's driver is started here."""
    runner = environment.runner
    environment.started, environment.refused = True, None
    if isinstance(runner, MasterRunner):
        active = runner.clients.ready + runner.clients.running + runner.clients.spawning
        for index, client in enumerate(active):
            turn = [index, len(active), environment.parsed_options.run_time]
            runner.send_message("lifecycle_turn", turn, client.id)
        return
    if environment.campaign is not None:
        environment.campaign.close()
        environment.campaign = None
    try:
        settings = Settings.read(environment.parsed_options)
    except InvalidInput as error:  # a file that only the master has
        log.error("this worker takes no part, and the run will be refused: %s", error.message)  # noqa: TRY400
        series.Series(environment).fail(TOOL, LAG_SERIES, series.DIED)
        return
    environment.campaign = Campaign(environment, settings, *environment.turn)
    if environment.shape_class is not None:
        environment.shape_class.reset_time()  # the driver's start is no part of the run


def stop(environment: Any, **_: Any) -> None:  # noqa: ANN401
    """End this process's part; beside a web page, give the verdict."""
    if environment.campaign is not None:
        environment.campaign.end()
    if not environment.parsed_options.headless and not isinstance(environment.runner, WorkerRunner):
        judge(environment)


def judge(environment: Any) -> None:  # noqa: ANN401
    """Say whether the run can be believed; empty the statistics if it cannot."""
    if not environment.started or environment.refused is not None:
        return
    stats, options = environment.stats, environment.parsed_options
    found = faults(series.health(stats), options.max_lag_ms)
    environment.refused = bool(found)
    document: dict[str, Any] = {"refused": found, "tool": msgspec.to_builtins(series.health(stats))}
    if found:
        log.error("%s", refusal(found))
        stats.clear_all()
        for fault in found:
            series.Series(environment).fail(TOOL, "refused", fault)
        environment.process_exit_code = EXIT_REFUSED
    else:
        document |= series.report(stats)
        failed = series.bad(stats) or len(environment.runner.exceptions)
        environment.process_exit_code = EXIT_FAILED if failed else 0
    if options.report:
        Path(options.report).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def leave(environment: Any, **_: Any) -> None:  # noqa: ANN401
    """Give the verdict before Locust prints; let its CSV files see the last figures, or none."""
    if environment.campaign is not None:
        environment.campaign.close()
        environment.campaign = None
    if isinstance(environment.runner, WorkerRunner):
        environment.process_exit_code = 0
        return
    judge(environment)
    if environment.parsed_options.csv_prefix:
        gevent.sleep(CSV_STATS_INTERVAL_SEC + 0.5)


events.init_command_line_parser.add_listener(add_options)
events.init.add_listener(begin)
events.test_start.add_listener(start)
events.test_stop.add_listener(stop)
events.quitting.add_listener(leave)
