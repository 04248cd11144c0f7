"""The recorder: every event is a line, or is counted and told of as lost, within bounded files."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import os
import threading

import msgspec
import pytest

from tests.waiting import until
from triton_lifecycle import config
from triton_lifecycle.events import TYPES, FirstToken, Lost, decode, encode
from triton_lifecycle.sinks import files, jsonl
from triton_lifecycle.sinks.jsonl import Recorder


def event(seq):
    return FirstToken(request_id="r", seq=seq, at=0.0)


def recorder(folder, size=100_000, **settings):
    return Recorder(config.Recorder(path="events.jsonl", **settings), folder, TYPES, size=size)


def close(made):
    asyncio.run(made.aclose())


def lines(folder, name="events"):
    """Return every line of every file, oldest first."""
    numbered = sorted(folder.glob(f"{name}.*.jsonl*"), key=lambda path: int(path.name.split(".")[1]))
    found = []
    for path in [*numbered, folder / f"{name}.jsonl"]:
        found += (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).splitlines()
    return found


def test_a_line_for_each_event_within_a_moment(tmp_path):
    """What was taken is in the file soon, before any end, and reads back as the same events."""
    made = recorder(tmp_path)
    events = [event(seq) for seq in range(5)]
    for each in events:
        made.take(each)
    until(lambda: len(lines(tmp_path)) == 5)
    assert [decode(line) for line in lines(tmp_path)] == events
    close(made)
    assert made.counts() == {"taken": 5, "sent": 5, "lost": 0, "backlog": 0}


@pytest.mark.parametrize("compress", [False, True])
def test_full_files_are_numbered_compressed_and_in_the_end_dropped(tmp_path, compress):
    """No file is longer than allowed, no more are kept than allowed, and the kept ones are whole and the newest."""
    made = recorder(tmp_path, max_bytes=1000, max_files=4, compress=compress)
    for seq in range(200):
        made.take(event(seq))
    close(made)
    kept = sorted(path for path in tmp_path.iterdir() if path.suffix != ".lock")
    assert len(kept) == 4
    assert sum(path.suffix == ".gz" for path in kept) == 3 * compress
    assert made.counts()["sent"] == 200
    seen = [decode(line).seq for line in lines(tmp_path)]
    assert seen == list(range(seen[0], 200))
    if not compress:
        assert max(path.stat().st_size for path in kept) <= 1000


def test_a_line_longer_than_a_file_has_one_to_itself(tmp_path):
    """It is written whole; those before and behind it are in other files."""
    made = recorder(tmp_path, max_bytes=200, compress=False)
    long = FirstToken(request_id="x" * 500, seq=0, at=0.0)
    for each in (event(0), long, event(1)):
        made.take(each)
    close(made)
    assert [decode(line) for line in lines(tmp_path)] == [event(0), long, event(1)]
    assert decode((tmp_path / "events.2.jsonl").read_bytes()) == long


def test_what_finds_no_room_leaves_a_line_that_tells_how_many(tmp_path, monkeypatch):
    """Events between two that were kept are counted, and the line stands exactly where they are missing."""
    monkeypatch.setattr(jsonl, "EVERY_S", 0.5)
    made = recorder(tmp_path, size=10)
    for seq in range(25):
        made.take(event(seq))
    until(lambda: made.counts()["sent"] == 10)
    made.take(event(25))
    close(made)
    assert made.counts() == {"taken": 26, "sent": 11, "lost": 15, "backlog": 0}
    found = [json.loads(line) for line in lines(tmp_path)]
    assert [line.get("seq") for line in found] == [*range(10), None, 25]
    assert (found[10]["event"], found[10]["count"], found[10]["at"] > 0) == ("Lost", 15, True)


def test_what_was_lost_last_is_told_at_the_end(tmp_path, monkeypatch):
    """Also when no event follows the gap."""
    monkeypatch.setattr(jsonl, "EVERY_S", 30)
    made = recorder(tmp_path, size=1)
    for seq in range(3):
        made.take(event(seq))
    close(made)
    assert msgspec.json.decode(lines(tmp_path)[-1], type=Lost).count == 2


def test_a_disk_that_is_full_costs_the_events_and_nothing_else(tmp_path, monkeypatch):
    """No half line remains; once there is room again a line tells how many are missing."""
    real, full = os.write, [True]

    def write(descriptor, data):
        if full[0]:
            real(descriptor, data[:7])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(files.os, "write", write)
    made = recorder(tmp_path)
    for seq in range(3):
        made.take(event(seq))
    until(lambda: made.counts()["lost"] == 3)
    assert (tmp_path / "events.jsonl").read_bytes() == b""
    full[0] = False
    made.take(event(3))
    close(made)
    assert [json.loads(line).get("count") for line in lines(tmp_path)] == [3, None]
    assert made.counts() == {"taken": 4, "sent": 1, "lost": 3, "backlog": 0}


def test_a_line_that_a_crash_left_unfinished_is_cut_off(tmp_path):
    """Recording goes on in the same file, behind the last whole line, and numbers go on too."""
    (tmp_path / "events.jsonl").write_bytes(encode(event(0)) + b"\n" + encode(event(1))[:20])
    (tmp_path / "events.7.jsonl.gz").write_bytes(gzip.compress(b""))
    made = recorder(tmp_path, max_bytes=70, compress=False)
    made.take(event(2))
    close(made)
    assert [decode(line).seq for line in lines(tmp_path)] == [0, 2]
    assert (tmp_path / "events.8.jsonl").exists()


def test_two_writers_never_share_a_file(tmp_path):
    """The second one, as while a model is loaded anew, takes a name of its own; the first name is free afterwards."""
    first, second = recorder(tmp_path), recorder(tmp_path)
    first.take(event(1))
    second.take(event(2))
    close(first)
    close(second)
    assert [decode(line).seq for line in lines(tmp_path)] == [1]
    assert [decode(line).seq for line in lines(tmp_path, "events-2")] == [2]
    third = recorder(tmp_path)
    assert third.path.name == "events.jsonl"
    close(third)


def test_taking_an_event_never_waits_for_the_disk(tmp_path, monkeypatch):
    """While the disk takes nothing at all, 10,000 events are taken."""
    mended, tried = threading.Event(), threading.Event()

    def write(descriptor, data):
        tried.set()
        assert mended.wait(60)
        return len(data)

    monkeypatch.setattr(files.os, "write", write)
    made = recorder(tmp_path, size=2000)
    for seq in range(10_000):
        made.take(event(seq))
    assert tried.wait(60)
    assert made.counts()["taken"] == 10_000
    assert not made.counts()["sent"]
    mended.set()
    close(made)
    counts = made.counts()
    assert counts["taken"] == counts["sent"] + counts["lost"] + counts["backlog"] == 10_000
    assert counts["lost"] >= 7000
