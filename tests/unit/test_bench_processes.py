"""The benchmark's own processes: they do what they are told, and none is left."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import psutil
import pytest
from load.overhead.child import make_source, serve
from load.overhead.children import Child
from load.overhead.cli import app
from load.overhead.measure import Answer, BenchFailed, Order, Prompt
from load.overhead.processes import ServingProcesses, settle
from typer.testing import CliRunner

from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path


class _OneSource:
    """Answers with one response, or never."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.hangs = hangs
        self.closed = False

    async def open(self) -> None: ...

    async def close(self) -> None:
        self.closed = True

    async def stream(self, prompt: Prompt, max_tokens: int, *, stream: bool) -> AsyncGenerator[str, None]:
        if prompt.text == "bad":
            raise BenchFailed("refused")
        await asyncio.sleep(3600 if self.hangs else 0)
        yield "text"


def _serve(source: _OneSource, *texts: str, answers: int) -> list[Answer]:
    out = io.BytesIO()

    async def run() -> None:
        reader = asyncio.StreamReader()
        for text in texts:
            reader.feed_data(msgspec.json.encode(Order([Prompt(text)], 1, 3, limit_s=30.0)) + b"\n")
        serving = asyncio.create_task(serve(source, reader, out))
        await eventually(lambda: out.getvalue().count(b"\n") == answers)
        reader.feed_eof()
        await asyncio.wait_for(serving, 10)

    asyncio.run(run())
    return [msgspec.json.decode(line, type=Answer) for line in out.getvalue().splitlines()]


def test_a_child_answers_each_order():
    """First comes the word that it is ready, then one answer an order; a failure is an answer too."""
    source = _OneSource()
    ready, first, failed, third = _serve(source, "a", "bad", "b", answers=4)
    assert (ready.sample, ready.error) == (None, None)
    assert first.sample is not None
    assert first.sample.tokens == 3
    assert failed.error == "refused"
    assert third.sample is not None
    assert source.closed


def test_a_child_ends_with_its_parent():
    """The end of the pipe ends a measurement under way, and the source is closed."""
    source = _OneSource(hangs=True)
    assert len(_serve(source, "a", answers=1)) == 1
    assert source.closed


def test_an_unknown_kind_of_load_is_refused():
    """Only the known kinds exist."""
    with pytest.raises(BenchFailed, match="no load of kind 'ftp'"):
        make_source("ftp", "x")


def test_a_child_process_reports_and_leaves_nothing(tmp_path: Path):
    """A real load process tells a refused connection as a failure, and is gone after the block."""
    order = Order([Prompt("a")], 1, 1, limit_s=20.0)
    with Child(["http", "127.0.0.1:1", "model"], tmp_path / "child.log") as child:
        child.wait_ready(60)
        with pytest.raises(BenchFailed, match=r"nothing answers at 127\.0\.0\.1:1"):
            child.ask(order)
        pid = child.process.pid
    assert not psutil.pid_exists(pid)


def test_a_child_that_dies_is_told(tmp_path: Path):
    """When a load process dies, the error shows the end of its log."""
    with Child(["ftp"], tmp_path / "child.log") as child, pytest.raises(BenchFailed, match="no load of kind 'ftp'"):
        child.wait_ready(60)


def _python(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code])


@pytest.mark.parametrize(("code", "asleep"), [("import time; time.sleep(60)", True), ("while True: pass", False)])
def test_waiting_for_an_engine_to_sleep_is_bounded(code: str, asleep: bool):  # noqa: FBT001
    """A sleeping process is seen as such; one that never sleeps is given up on at the limit."""
    process = _python(code)
    try:
        assert (settle([psutil.Process(process.pid)], limit_s=10.0 if asleep else 0.1) < 0.05) is asleep
    finally:
        process.kill()
        process.wait(60)


def test_a_server_without_a_stub_is_refused():
    """CPU figures need a stub; without one it is an error, not a zero."""
    process = _python("import time; time.sleep(60)")
    try:
        with pytest.raises(BenchFailed, match="runs no Python backend stub"):
            ServingProcesses(process.pid)
    finally:
        process.kill()
        process.wait(60)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--concurrency", "1,many"], "expected numbers"),
        (["--concurrency", "0"], "expected numbers"),
        (["--rounds", "0"], "rounds"),
        (["--json", "/no/such/folder/x.json"], "json"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(arguments: list[str], words: str):
    """A wrong option ends with code 2 and says what is wrong."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert words in result.output
