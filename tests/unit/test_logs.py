"""Logs: what a line tells, repeats, and Triton's own logger."""

from __future__ import annotations

import json
import logging
import threading

import pytest

from tests.fakes import pb_utils
from tests.fakes.harness import Harness, Step
from tests.unit.test_every_key import until
from triton_lifecycle import logs
from triton_lifecycle.config import Config, ErrorHandling, Monitoring
from triton_lifecycle.simulation.virtual_time import run


@pytest.fixture(autouse=True)
def restored():
    """The package's loggers are as before."""
    logger = logging.getLogger(logs.ROOT)
    before = (list(logger.handlers), logger.propagate, logger.level)
    yield
    logs.close()
    logger.handlers[:], logger.propagate = before[0], before[1]
    logger.setLevel(before[2])


class TritonLogger:
    """Keeps what it is given, by level; can be held."""

    def __init__(self):
        self.lines = []
        self.free = threading.Event()
        self.free.set()
        for level in ("error", "warn", "info", "verbose"):
            setattr(self, f"log_{level}", lambda line, level=level: self._take(level, line))

    def _take(self, level, line):
        self.free.wait(60)
        self.lines.append((level, line))


class Pb:
    def __init__(self):
        self.Logger = TritonLogger()


def served(capsys, script, parameters=None, level="info", text="p"):
    """Return the lines that one request to a scripted engine causes."""
    logs.configure(Monitoring(log_level=level))

    async def scenario():
        harness = Harness(Config(error_handling=ErrorHandling(enable_auto_recovery=False)))
        harness.engine.scripts[text] = script
        await harness.serve(pb_utils.InferenceRequest({"text_input": text}, parameters, "mine"))

    run(scenario)
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_about_a_request_names_it(capsys):
    """Its id, the caller's id, tenant, stage and slug are fields of their own."""
    [line] = [line for line in served(capsys, [Step("raise")], {"tenant": "t"}) if "slug" in line]
    assert {name: line[name] for name in ("caller_id", "tenant", "stage", "slug", "level")} == {
        "caller_id": "mine",
        "tenant": "t",
        "stage": "execute",
        "slug": "generation_failed",
        "level": "warning",
    }
    assert len(line["request_id"]) == 32


def test_text_lines_name_the_request_too(capsys):
    """The same fields stand behind the message."""
    logs.configure(Monitoring(log_format="text"))
    logging.getLogger(f"{logs.ROOT}.x").warning("it %s", "failed", extra={"request_id": "r1", "slug": "s"})
    assert capsys.readouterr().err.endswith("triton_lifecycle.x: it failed [request_id='r1' slug='s']\n")


@pytest.mark.parametrize(
    ("parameters", "level", "slug"),
    [({"max_tokenz": "secret"}, "debug", "invalid_input"), ({"timeout_ms": 5}, "info", "total_timeout")],
)
def test_ends_have_their_levels_and_no_words_of_the_caller(capsys, parameters, level, slug):
    """What a caller did wrong is a matter of debugging, a timeout is information; neither quotes what was sent."""
    lines = served(capsys, [Step("token", after=1.0)], parameters, "debug", text="my secret prompt")
    assert [(line["level"], line["slug"]) for line in lines if "slug" in line] == [(level, slug)]
    assert "secret" not in str(lines)


def test_repeats_are_counted_and_told():
    """Ten lines of a kind are written; the first one after the window tells how many were not. Others pass."""
    now = [0.0]
    repeats = logs.Repeats(lambda: now[0])

    def record(message, *args):
        return logging.LogRecord("n", logging.WARNING, "", 0, message, args, None)

    passed = [repeats.filter(record("request %s failed", number)) for number in range(25)]
    assert passed == [True] * logs.BURST + [False] * (25 - logs.BURST)
    assert repeats.filter(record("something else"))
    assert repeats.untold == 25 - logs.BURST
    now[0] = logs.WINDOW_S
    later = record("request %s failed", 99)
    assert repeats.filter(later)
    assert later.getMessage() == f"request 99 failed (repeated {25 - logs.BURST} times before)"
    assert repeats.untold == 0


def test_kinds_of_lines_are_bounded():
    """However many different messages come, only so many are remembered."""
    repeats = logs.Repeats(lambda: 0.0)
    for number in range(3 * logs.MAX_KINDS):
        repeats.filter(logging.LogRecord("n", logging.INFO, "", 0, f"message {number}", (), None))
    assert len(repeats._kinds) == logs.MAX_KINDS


def test_what_was_held_back_last_is_told_at_the_end(capsys):
    """A flood at the end is not silent about itself."""
    logs.configure(Monitoring())
    for _ in range(logs.BURST + 7):
        logging.getLogger(f"{logs.ROOT}.x").info("again")
    logs.close()
    assert "7 more repeated lines were not written" in capsys.readouterr().err.splitlines()[-1]


def test_lines_go_through_tritons_logger_at_its_levels(capsys):
    """``log_to: triton`` writes JSON by Triton's own calls, from a thread, and all of it before the end."""
    pb = Pb()
    logs.configure(Monitoring(log_to="triton", log_level="debug"), pb)
    log = logging.getLogger(f"{logs.ROOT}.x")
    for level in ("debug", "info", "warning", "error"):
        getattr(log, level)("a line")
    logs.close()
    assert [level for level, _ in pb.Logger.lines] == ["verbose", "info", "warn", "error"]
    assert {json.loads(line)["message"] for _, line in pb.Logger.lines} == {"a line"}
    assert capsys.readouterr().err == ""


def test_a_logger_that_hangs_holds_up_nobody(monkeypatch):
    """Lines beyond the queue are dropped and counted, and the last line says how many."""
    monkeypatch.setattr(logs, "QUEUE", 5)
    pb = Pb()
    logs.configure(Monitoring(log_to="triton"), pb)
    pb.Logger.free.clear()
    for number in range(50):
        logging.getLogger(f"{logs.ROOT}.x").info(f"line {number}")
    pb.Logger.free.set()
    front = logging.getLogger(logs.ROOT).handlers[0]
    assert front.dropped >= 44
    until(front.queue.empty)
    logs.close()
    assert f"{front.dropped} lines were lost" in pb.Logger.lines[-1][1]


def test_the_end_does_not_wait_for_a_logger_that_hangs(monkeypatch):
    """With its queue full and Triton's logger standing still, closing gives up after its limit."""
    monkeypatch.setattr(logs, "QUEUE", 2)
    monkeypatch.setattr(logs, "CLOSE_S", 0.05)
    pb = Pb()
    logs.configure(Monitoring(log_to="triton"), pb)
    pb.Logger.free.clear()
    for number in range(10):
        logging.getLogger(f"{logs.ROOT}.x").info(f"line {number}")
    closing = threading.Thread(target=logs.close, daemon=True)
    closing.start()
    closing.join(60)
    over = not closing.is_alive()
    pb.Logger.free.set()
    assert over
