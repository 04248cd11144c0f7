"""Replay: to the simulation and to a server, compared with the recording; progress, exit codes, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.fakes.front_ends import MODEL, Ask, Fail, Say, front_ends
from tests.fakes.recordings import WALL, busy_run, write
from triton_lifecycle import events as ev
from triton_lifecycle.recording import stories
from triton_lifecycle_client.cli import app
from triton_lifecycle_client.replay import server

REAL_RUN = Path(__file__).parents[1] / "fixtures" / "real_run.jsonl.gz"


def run(*arguments: str):
    return CliRunner().invoke(app, ["replay", *arguments], env={"COLUMNS": "150", "LIFECYCLE_URL": ""})


def asked(name: str, begin: float, *rest: ev.Event, **changes: object) -> list[ev.Event]:
    """Return the events of a request up to its permit, and what follows."""
    fields: dict[str, object] = {
        "kind": "prompt", "prompt_bytes": 40, "stream": True, "priority": 0, "tenant": "", "timeout": None,
        "sequences": 1, "max_tokens": 5,
    }  # fmt: skip
    prepared = ev.Prepared(name, 2, begin, **(fields | changes))
    head = [
        ev.Received(name, 0, begin, name, MODEL, WALL + begin),
        ev.StageDone(name, 1, begin, "receive", 0.0),
        prepared,
    ]
    return [*head, ev.Admitted(name, 3, begin, 0, {"total": 20.0}), *rest]


def mixed() -> list[ev.Event]:
    """Return a recording of every end that a server can be brought to again."""
    return [
        *asked("whole", 1.0, ev.FirstToken("whole", 5, 1.1), ev.Finished("whole", 6, 1.2, "stop", 3)),
        *asked(
            "unary", 1.1, ev.Finished("unary", 5, 1.2, "length", 5), stream=False, timeout=7.0, tenant="t", priority=3
        ),
        *asked("left", 1.2, ev.FirstToken("left", 5, 1.3), ev.Cancelled("left", 6, 1.4, "caller_left", 2)),
        *asked("ordered", 1.3, ev.Cancelled("ordered", 5, 1.5, "cancelled", 0), stream=False),
        *asked("late", 1.4, ev.TimedOut("late", 5, 1.6, "total_timeout", "", 0), timeout=0.2),
        ev.Received("bad", 0, 1.5, "bad", MODEL, WALL + 1.5),
        ev.Rejected("bad", 1, 1.5, "invalid_input", "unknown key"),
        ev.Finished("tail", 9, 1.6, "stop", 4),
        *asked("live", 1.7),
        *asked("vector", 1.8, ev.Finished("vector", 5, 1.9, "stop", 0), kind="embedding"),
    ]


def behaves(ask: Ask):
    """Answer as the backend would."""
    if "control" in ask.parameters:
        yield Say('{"id": "u", "cancelled": true}')
        return
    sampling = json.loads(ask.inputs["sampling_parameters"])
    timeout = int(ask.parameters.get("timeout", 0))
    if "not_a_sampling_parameter" in sampling:
        yield Fail("invalid_input: sampling_parameters: unknown key")
    elif timeout == 200_000:
        yield Fail("total_timeout: the total limit of 0.2 s passed")
    elif ask.inputs["stream"]:
        for number in range(sampling["max_tokens"]):
            yield Say("x", "length" if number == sampling["max_tokens"] - 1 else "None")
            ask.left.wait(0.05)
    elif ask.parameters.get("tenant") == "t":
        yield Say("x" * 5, "length", 5)
    else:
        ask.left.wait(0.7)
        yield Fail("cancelled: cancelled by a control request")


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_server_is_asked_what_was_asked(tmp_path: Path, protocol: str):
    """Sizes, limits, tenants and leavings are sent again at their distances; equal ends are found equal."""
    path = write(tmp_path / "events.jsonl", mixed())
    with front_ends(behaves) as fakes:
        began = time.monotonic()
        answer = run(str(path), "--url", fakes.url(protocol), f"--{protocol}", "--speed", "0.5", "--json")
        took = time.monotonic() - began
    report = json.loads(answer.stdout)
    assert (answer.exit_code, report["agree"], report["differences"]) == (0, True, [])
    assert report["requests"] == 6
    assert report["left_out"] == {"beginning missing": 1, "end missing": 1, "kind not replayed": 1}
    assert took > 0.9, "the last one was sent half a second later, at half the speed"
    assert len(fakes.cancels) == 1
    by_size = {ask.parameters.get("tenant", ""): ask for ask in fakes.prompts if not ask.inputs["stream"]}
    unary = by_size["t"]
    assert len(unary.prompt) == 40
    assert json.loads(unary.inputs["sampling_parameters"]) == {"n": 1, "max_tokens": 5, "ignore_eos": True}
    assert int(unary.parameters["timeout"]) == 7_000_000
    whole = next(ask for ask in fakes.prompts if json.loads(ask.inputs["sampling_parameters"]).get("max_tokens") == 3)
    assert int(whole.parameters["timeout"]) == 20_000_000, "the server's own limit, since the caller had set none"


def test_what_ends_otherwise_is_told(tmp_path: Path):
    """A server that fails where the recorded one had answered: exit code 4, and the request by name."""
    path = write(tmp_path / "events.jsonl", mixed())
    with front_ends(lambda ask: iter([Fail("queue_full: 6 requests are live; retry after 1.0 s")])) as fakes:
        answer = run(str(path), "--url", fakes.grpc, "--speed", "100")
    assert answer.exit_code == 4
    assert "differ: 6 of 6" in answer.output
    for words in ("whole", "completed", "rejected (queue_full)", "left out: 1 (beginning missing)"):
        assert words in answer.output


def test_prompts_have_the_recorded_size():
    """Every size is met to the byte, and no prompt is blank."""
    for size in (1, 2, 3, 4, 5, 39, 40, 4096, 100_001):
        text = server.words(size)
        assert len(text.encode()) == size
        assert text.strip()


def test_arrivals_are_scaled_in_time():
    """Distances shrink with the speed, and begin at zero."""
    planned, _ = server.arrivals(stories(mixed()), speed=2.0)
    assert [round(arrival.after, 6) for arrival in planned] == [0.0, 0.05, 0.1, 0.15, 0.2, 0.25]


def test_ctrl_c_cancels_what_is_under_way(tmp_path: Path):
    """The command ends with 130 within seconds, and the server sees its callers leave."""
    path = write(tmp_path / "e.jsonl", asked("a", 1.0, ev.Finished("a", 5, 60.0, "length", 5000), max_tokens=5000))

    def slow(ask: Ask):
        while not ask.left.wait(0.02):
            yield Say("x")

    with front_ends(slow) as fakes:
        command = [sys.executable, "-m", "triton_lifecycle_client", "replay", str(path), "--url", fakes.grpc]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ.copy())
        try:
            until = time.monotonic() + 30
            while not fakes.prompts and time.monotonic() < until:
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=20)
        finally:
            process.kill()
        assert process.returncode == 130, said
        assert b"Traceback" not in said
        assert all(ask.left.wait(30) for ask in fakes.prompts)


def test_the_real_run_simulated_by_command(tmp_path: Path):
    """Twice the same command: all decisions agree, and both event logs are the same, byte for byte."""
    logs = []
    for name in ("one.jsonl", "two.jsonl"):
        answer = run(str(REAL_RUN), "--simulate", "--seed", "7", "--out", str(tmp_path / name), "--json")
        assert (answer.exit_code, json.loads(answer.stdout)["agree"]) == (0, True), answer.output
        logs.append((tmp_path / name).read_bytes())
    assert logs[0] == logs[1]
    assert len(logs[0]) > 10_000


def test_what_if(tmp_path: Path):
    """One changed key shows which requests would have been decided otherwise; a whole file does too."""
    answer = run(str(REAL_RUN), "--simulate", "--set", "admission.max_live_requests=2", "--json")
    assert answer.exit_code == 4
    report = json.loads(answer.stdout)
    assert report["replayed"]["ends"]["rejected queue_full"] > report["recorded"]["ends"]["rejected queue_full"]
    config = tmp_path / "request_lifecycle.yaml"
    config.write_text("request_lifecycle: { timeout_handling: { min_timeout: 0.01, default_timeout: 0.05 } }")
    answer = run(str(REAL_RUN), "--simulate", "--config", str(config), "--json")
    assert answer.exit_code == 4
    recording = write(tmp_path / "events.jsonl", busy_run(1, 40))
    model = tmp_path / "model.json"
    model.write_text('{"max_num_seqs": 1, "base_ms": 300}')
    assert run(str(recording), "--simulate", "--engine", str(model)).exit_code == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seed", "4", "--url", "127.0.0.1:1"], "--seed: only with --simulate"),
        (["--simulate", "--url", "127.0.0.1:1"], "are for a server"),
        (["--simulate", "--set", "admission.max_live_requests"], "PATH=VALUE"),
        (["--simulate", "--set", "no.such.key=1"], "PATH=VALUE"),
        (["--simulate", "--set", "admission.max_live_requests=none"], "admission.max_live_requests"),
        (["--simulate", "--set", "admission.max_liv=3"], "admission.max_liv"),
        (["--simulate", "--config", "/no/file.yaml"], "no such file"),
        (["--simulate", "--engine", "/no/model.json"], "--engine /no/model.json"),
        (["--simulate", "--out", "/no/folder/x.jsonl"], "--out /no/folder"),
    ],
)
def test_wrong_usage_is_refused_with_what_to_do(arguments: list[str], words: str):
    """Options that do not go together or name nothing are exit code 2, with the option in the message."""
    answer = run(str(REAL_RUN), *arguments)
    assert answer.exit_code == 2, answer.output
    assert words in answer.output


def test_nothing_to_replay(tmp_path: Path):
    """A recording without a whole request compares nothing, and says so instead of agreeing."""
    path = write(tmp_path / "events.jsonl", [ev.Finished("tail", 9, 1.6, "stop", 4)])
    answer = run(str(path), "--simulate")
    assert answer.exit_code == 1
    assert "nothing to compare" in answer.output


def test_a_server_that_is_not_there():
    """Nothing is sent, and the exit code tells that the server is unreachable."""
    answer = run(str(REAL_RUN), "--url", "127.0.0.1:1", "--http")
    assert answer.exit_code == 3
