"""Reading recordings: whole, cut, compressed, in parts, and from several clocks."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from tests.fakes.recordings import WALL, write
from triton_lifecycle import events as ev
from triton_lifecycle.errors import InvalidInput
from triton_lifecycle.recording import MAX_LINE, find, read


def request(name: str, begin: float, *, wall: float = WALL) -> list[ev.Event]:
    """Return the events of a request that completes after a second."""
    return [
        ev.Received(name, 0, begin, f"caller-{name}", "m", wall + begin),
        ev.StageDone(name, 1, begin + 0.1, "receive", 0.1),
        ev.Prepared(name, 2, begin + 0.2, "prompt", 12, True, 0, "t", None, 1, 8),
        ev.StageDone(name, 3, begin + 0.2, "preprocess", 0.1),
        ev.Admitted(name, 4, begin + 0.25, 0, {"total": 30.0}),
        ev.Scheduled(name, 5, begin + 0.4, 1, 5, 0),
        ev.FirstToken(name, 6, begin + 0.5),
        ev.Progress(name, 7, begin + 0.5, 1, 1),
        ev.DeadlineMoved(name, 8, begin + 0.5, begin + 9.0, "stall"),
        ev.Progress(name, 9, begin + 0.8, 2, 3),
        ev.StageDone(name, 10, begin + 0.9, "execute", 0.6),
        ev.Finished(name, 11, begin + 1.0, "length", 3),
    ]


def test_a_request_is_put_together(tmp_path: Path):
    """Its phases follow each other without a gap, from arrival to end; what it asked and how it ended is known."""
    (story,) = read(write(tmp_path / "events.jsonl", request("a", 10.0))).stories
    parts = story.segments()
    assert [part.phase for part in parts] == ["receive", "preprocess", "queue", "prefill", "decode", "respond"]
    assert [part.begin for part in parts[1:]] == [part.end for part in parts[:-1]]
    assert (parts[0].begin, parts[-1].end) == (10.0, 11.0)
    assert (story.status, story.slug, story.output_tokens, story.caller_id) == ("completed", None, 3, "caller-a")
    assert story.tokens == [(10.5, 1), (10.8, 2)]
    assert story.time_to_first_token == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("kept", "phase"), [(1, "receive"), (2, "preprocess"), (4, "queue"), (6, "prefill"), (8, "decode"), (11, "respond")]
)
def test_a_request_that_stopped_somewhere_stands_there(tmp_path: Path, kept: int, phase: str):
    """Whatever its last event, all its time is told, and the last part is the phase in which it was."""
    cut = [*request("a", 10.0)[:kept], ev.Cancelled("a", kept, 20.0, "caller_left", 0)]
    (story,) = read(write(tmp_path / "events.jsonl", cut)).stories
    parts = story.segments()
    assert (parts[-1].phase, parts[-1].end) == (phase, 20.0)
    assert sum(part.end - part.begin for part in parts) == pytest.approx(10.0)


def test_parts_are_read_in_order_whatever_names_them(tmp_path: Path):
    """The current file brings its older ones, a folder and a glob all of them; other files are left alone."""
    events = request("a", 1.0)
    for number, part in ((2, events[3:6]), (10, events[6:9])):
        (tmp_path / f"events.{number}.jsonl.gz").write_bytes(
            gzip.compress(b"".join(ev.encode(event) + b"\n" for event in part))
        )
    write(tmp_path / "events.1.jsonl", events[:3])
    current = write(tmp_path / "events.jsonl", events[9:])
    other = write(tmp_path / "events-2.jsonl", request("b", 1.5))
    (tmp_path / "events.jsonl.lock").touch()
    names = ["events.1.jsonl", "events.2.jsonl.gz", "events.10.jsonl.gz", "events.jsonl"]
    assert [path.name for path in find(current)] == names
    assert sorted(path.name for path in find(tmp_path)) == sorted([*names, other.name])
    assert [path.name for path in find(tmp_path / "events.1.jsonl")] == ["events.1.jsonl"]
    (story,) = read(current).stories
    assert story.decision == read(tmp_path).stories[0].decision
    assert len(read(str(tmp_path / "*.jsonl*")).stories) == 2


def test_what_was_cut_costs_only_itself(tmp_path: Path):
    """A torn last line, rubbish, an endless line and a torn gzip file are counted; the rest is read."""
    whole = b"".join(ev.encode(event) + b"\n" for event in request("a", 1.0))
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"\xff\n[1]\n" + b'{"event":"Unheard","at":1}\n' + b"x" * (MAX_LINE + 9) + b"\n" + whole[:-20])
    found = read(path)
    assert (found.events, found.unreadable) == (11, 5)
    assert found.stories[0].status == "live"
    packed = tmp_path / "torn.jsonl.gz"
    packed.write_bytes(gzip.compress(whole + os.urandom(5000))[:-2000])
    torn = read(packed)
    assert torn.stories[0].received is not None
    assert torn.unreadable >= 1


def test_a_request_without_its_beginning_is_still_told(tmp_path: Path):
    """A recording that began in the middle of a request shows what it has; events come once, in any order."""
    events = request("a", 1.0)
    path = write(tmp_path / "events.jsonl", [*reversed(events[5:]), *events[7:], *request("b", 2.0)])
    late, whole = read(path).stories
    assert (late.received, late.status, late.output_tokens) == (None, "completed", 3)
    assert late.tokens == [(1.5, 1), (1.8, 2)]
    assert whole.received is not None


def test_dropped_events_are_counted(tmp_path: Path):
    """The recorder's own lines about what it lost add up."""
    path = write(tmp_path / "events.jsonl", request("a", 1.0))
    path.write_bytes(
        b'{"event":"Lost","at":1.5,"count":7}\n' + path.read_bytes() + b'{"event":"Lost","at":2,"count":3}\n'
    )
    assert read(path).lost == 10


def test_clocks_of_two_machines_become_one(tmp_path: Path):
    """A second recorder's requests stand where the calendar says, also when its machine was started later."""
    write(tmp_path / "one.jsonl", request("a", 1000.0))
    write(tmp_path / "two.jsonl", [*request("b", 505.0, wall=WALL + 500.0), *request("c", 2.0, wall=WALL + 1100.0)])
    a, b, c = read(tmp_path).stories
    assert (a.begin, b.begin, b.end, c.begin) == (1000.0, 1005.0, 1006.0, 1102.0)
    assert b.deadlines == [(1005.5, 1014.0, "stall")]


def test_a_calendar_that_is_set_moves_no_request(tmp_path: Path):
    """A wall clock that jumps while the server runs changes no recorded distance."""
    path = write(tmp_path / "events.jsonl", [*request("a", 10.0), *request("b", 20.0, wall=WALL + 3600.0)])
    assert [story.begin for story in read(path).stories] == [10.0, 20.0]


def test_a_recording_that_is_too_large_is_read_up_to_a_point(tmp_path: Path):
    """The number of events in memory is bounded, and the result says that there is more."""
    found = read(write(tmp_path / "events.jsonl", request("a", 1.0) + request("b", 2.0)), max_events=15)
    assert (found.events, found.cut, len(found.stories)) == (15, True, 2)


@pytest.mark.parametrize("name", ["none.jsonl", "folder", "*.jsonl", "empty.jsonl", "text.jsonl"])
def test_what_is_no_recording_is_refused_by_name(tmp_path: Path, name: str):
    """A missing, empty or other file is an error that says which and what was expected."""
    (tmp_path / "folder").mkdir()
    if "." in name and name[0] in "et":
        (tmp_path / name).write_text("" if name[0] == "e" else "a letter\n")
    with pytest.raises(InvalidInput, match=r"no such file|holds no event"):
        read(tmp_path / name)
