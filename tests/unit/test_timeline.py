"""The timeline on a terminal, as JSON and as a Chrome trace; and the command around it."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.fakes.front_ends import MODEL, Ask, Say, front_ends
from tests.fakes.recordings import busy_run, write
from triton_lifecycle import events as ev
from triton_lifecycle.recording import read
from triton_lifecycle_client.cli import app
from triton_lifecycle_client.timeline import terminal, view


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a recording of a busy server."""
    return write(tmp_path_factory.mktemp("timeline") / "events.jsonl", busy_run(3))


def run(*arguments: str):
    return CliRunner().invoke(app, ["timeline", *arguments], env={"COLUMNS": "150"})


def drawn(shown: view.View, rows: int = 50, *, colored: bool = True) -> str:
    console = Console(file=io.StringIO(), force_terminal=colored, width=150, highlight=False, legacy_windows=False)
    terminal.show(shown, rows, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_waterfall_shows_each_request_where_it_was(recorded: Path):
    """One line a request in the order of arrival, with its phases in order; then the totals."""
    answer = run(str(recorded), "--rows", "1000")
    assert answer.exit_code == 0, answer.output
    shown = view.of(read(recorded), "")
    bars = [line for line in answer.output.splitlines() if line.startswith("r") and line.split()[0][1:].isdigit()]
    assert [line.split()[0] for line in bars] == [story.caller_id for story in shown.stories]
    for story in shown.stories:
        bar = terminal._bar(story, shown.begin, 120 / (shown.end - shown.begin), 120, colored=False).plain
        phases = [list(terminal.MARKS.values()).index(char) for char in bar.strip()]
        assert phases == sorted(phases)
        assert abs(len(bar) - len(bar.lstrip()) - 120 * (story.begin - shown.begin) / (shown.end - shown.begin)) <= 1
    for word in ("completed", "timed_out", "first token", "whole request", "p99", "output tokens"):
        assert word in answer.output


def test_filters_choose(recorded: Path):
    """Status, reason, id and the slowest hold together; what is not a status is refused by name."""
    stories = read(recorded).stories

    def ids(*arguments: str) -> list[str]:
        return [request["id"] for request in json.loads(run(str(recorded), "--json", *arguments).stdout)["requests"]]

    assert ids("--status", "timed_out", "--status", "failed") == [
        story.id for story in stories if story.status in {"timed_out", "failed"}
    ]
    assert ids("--slug", "queue_full") == [story.id for story in stories if story.slug == "queue_full"]
    assert ids("--id", stories[3].id[:12]) == [stories[3].id]
    assert ids("--id", stories[3].caller_id + "")[0] == stories[3].id
    slowest = sorted(stories, key=lambda story: -story.duration)[:5]
    assert set(ids("--slowest", "5")) == {story.id for story in slowest}
    wrong = run(str(recorded), "--status", "broken")
    assert (wrong.exit_code, "timed_out" in wrong.output) == (2, True)
    assert "no request" in run(str(recorded), "--id", "zzz").output


def test_json_adds_up(recorded: Path):
    """The phases of each request fill its time; the totals are those of the requests."""
    document = json.loads(run(str(recorded), "--json").stdout)
    for request in document["requests"]:
        assert sum(part["s"] for part in request["phases"]) == pytest.approx(request["total_s"], abs=1e-4)
    totals = document["totals"]
    assert totals["requests"] == len(document["requests"]) == sum(totals["ends"].values())
    assert totals["output_tokens"] == sum(request["output_tokens"] for request in document["requests"])


def test_the_chrome_trace_is_one_that_viewers_take(recorded: Path, tmp_path: Path):
    """Slices lie within their request, requests of a lane never overlap, and the counters end at zero."""
    target = tmp_path / "trace.json"
    assert run(str(recorded), "--chrome", str(target)).exit_code == 0
    trace = json.loads(target.read_text())
    found = defaultdict(list)
    for event in trace["traceEvents"]:
        found[event["ph"]].append(event)
        assert {"ph", "pid", "name"} <= event.keys()
        assert event["ph"] == "M" or event["ts"] >= -1e-3
    requests = [event for event in found["X"] if event["cat"] == "request"]
    assert len(requests) == len(read(recorded).stories)
    lanes = defaultdict(list)
    for event in requests:
        lanes[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in lanes.values():
        assert all(before[1] <= after[0] + 0.01 for before, after in pairwise(spans))
    for part in found["X"]:
        if part["cat"] == "phase":
            whole = next(
                span
                for span in lanes[part["tid"]]
                if span[0] - 0.01 <= part["ts"] and part["ts"] + part["dur"] <= span[1] + 0.01
            )
            assert whole
    counts = [(event["args"]["waiting"], event["args"]["running"]) for event in found["C"]]
    assert min(map(min, counts)) == 0
    assert counts[-1] == (0, 0)
    assert max(running for _, running in counts) >= 6
    assert {event["name"] for event in found["M"]} == {"process_name", "thread_name"}
    assert {event["name"].split()[-1] for event in found["i"]} >= {"token", "moved"}


def test_a_terminal_is_safe_from_what_a_recording_holds():
    """Control characters and markup in an id are shown as text, and move no cursor."""
    name = "\x1b[2J[red]x[/red]\r\n" + "y" * 300
    events = [ev.Received("a", 0, 1.0, name, "m", 1.8e9), ev.Failed("a", 1, 2.0, "\x07[bold]", "", 0)]
    from triton_lifecycle.recording import stories

    text = drawn(view.View("source\x1b[2J", stories(events), 2), colored=False)
    assert "[red]" in text
    assert not {"\x1b", "\r", "\x07"} & set(text)


def test_colours_on_a_terminal(recorded: Path):
    """On a terminal a bar is made of blocks, in as many colours as phases."""
    text = drawn(view.of(read(recorded), "x"))
    assert "█" in text
    assert len({part.split("m")[0] for part in text.split("\x1b[")[1:]}) > 5


def test_gaps_are_told(recorded: Path, tmp_path: Path):
    """What the recording lacks is said beside the timeline."""
    events = busy_run(3)
    path = write(tmp_path / "events.jsonl", events[len(events) // 3 : -len(events) // 3])
    path.write_bytes(path.read_bytes() + b'{"event":"Lost","at":1,"count":3}\n{"ev')
    answer = run(str(path))
    for words in ("3 events were dropped", "1 lines could not be read", "beginning of", "end of"):
        assert words in answer.stderr


def test_one_request_of_a_running_server():
    """An id is asked of the server, and drawn like a recorded request; an unknown one is an error."""
    status = {
        "id": "u", "caller_id": "mine", "model": MODEL, "status": "timed_out", "stage": "execute",
        "slug": "stall_timeout",
        "times_ms": {"received": 0.0, "admitted": 1.0, "scheduled": 5.0, "first_token": 9.0, "finished": 50.0},
        "received_at": 1.8e9, "prompt_tokens": 5, "cached_tokens": 4, "output_tokens": 3, "attempts": 1,
        "finish_reason": None,
    }  # fmt: skip

    def answer(ask: Ask):
        yield Say(json.dumps(status))

    with front_ends(answer) as fakes:
        answer = run("mine", "--url", fakes.grpc, "--model", MODEL, "--json")
    (request,) = json.loads(answer.stdout)["requests"]
    assert (request["caller_id"], request["status"], request["slug"]) == ("mine", "timed_out", "stall_timeout")
    assert [(part["phase"], part["s"]) for part in request["phases"]] == [
        ("queue", 0.005), ("prefill", 0.004), ("decode", 0.041),
    ]  # fmt: skip


def test_what_cannot_be_read_or_written(recorded: Path, tmp_path: Path):
    """A missing recording and a folder that is not there are wrong usage, with the name in the message."""
    missing = run(str(tmp_path / "none.jsonl"))
    assert (missing.exit_code, "none.jsonl" in missing.output) == (2, True)
    for option in ("--html", "--chrome"):
        answer = run(str(recorded), option, str(tmp_path / "no" / "folder"))
        assert answer.exit_code == 2
        assert "No such file" in answer.output
