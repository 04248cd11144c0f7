"""The guardian ends what a dead stub leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.waiting import until
from triton_lifecycle.engine import guardian

STUB = """
import os, subprocess, sys, time
from multiprocessing import shared_memory, resource_tracker
from triton_lifecycle.engine.guardian import MARK, POLL_S, Guardian
os.environ[MARK] = sys.argv[1]
keeper = Guardian(sys.argv[1], sys.executable)
block = shared_memory.SharedMemory(name=sys.argv[2], create=True, size=64)
resource_tracker.unregister(block._name, "shared_memory")
# Without the mark, as vLLM's processes look once they have set their titles.
child = subprocess.Popen(["sleep", "600"], env={"PATH": os.environ["PATH"]})
time.sleep(2 * POLL_S)
keeper.tell_shared_memory()
print(child.pid, keeper._process.pid, flush=True)
if sys.argv[3] == "bye":
    keeper.expect_end(); keeper.dismiss(); child.wait(); block.close(); block.unlink()
else:
    time.sleep(600)
"""
SERVER = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", *sys.argv[1:]]).wait()
"""


def _gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in {"Z", "X"}
    except OSError:
        return True


def _stub_of(server):
    return int(Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()[0])


@pytest.fixture
def family():
    """A make-believe tritonserver with a stub that has an engine process, a guardian and shared memory."""
    mark, name = uuid.uuid4().hex, f"guardian_test_{uuid.uuid4().hex[:8]}"
    started = []

    def start(mode):
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER, STUB, mark, name, mode], stdout=subprocess.PIPE, text=True
        )
        started.append(server)
        child, keeper = map(int, server.stdout.readline().split())
        return server, child, keeper, Path("/dev/shm") / name

    yield start
    for server in started:
        server.kill()
        server.wait()
        server.stdout.close()
    family = guardian.Family(0, mark)
    family.look_closely()
    guardian.end_processes(family.alive())


def test_a_killed_stub_takes_its_engine_with_it(family):
    """kill -9 of the stub: the engine process ends; shared memory goes once the server has gone too."""
    server, child, keeper, block = family("stay")
    os.kill(_stub_of(server), 9)
    until(lambda: _gone(child))
    until(lambda: _gone(server.pid) or server.poll() is not None)
    until(lambda: _gone(keeper))
    assert not block.exists()


def test_a_killed_server_takes_its_stub_with_it(family):
    """kill -9 of the server: a stub that stays is ended, and all it left."""
    server, child, keeper, block = family("stay")
    stub = _stub_of(server)
    server.kill()
    server.wait()
    until(lambda: _gone(stub) and _gone(child) and _gone(keeper))
    assert not block.exists()


def test_an_orderly_end_leaves_no_process(family):
    """After ``bye`` what is left of the engine is ended, the stub's own memory is left to it, and the guardian goes."""
    server, child, keeper, _ = family("bye")
    assert server.wait(timeout=60) == 0
    assert _gone(child)
    until(lambda: _gone(keeper))
