"""The doctor: each fault it knows is found and comes with what to do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest
from rich.console import Console

from triton_lifecycle.launcher import LauncherError, doctor, leftovers
from triton_lifecycle.launcher.doctor import Check
from triton_lifecycle.launcher.installation import Installation, find_installation
from triton_lifecycle.launcher.ports import Ports

CARRIED = Installation(Path("bin/tritonserver"), Path("backends"), Path("stubs"), Path("libs"))
NATIVE = Installation(Path("bin/tritonserver"), Path("backends"))
GIB = doctor.GIB


def test_this_environment_is_sound():
    """On the environment the tests run in nothing fails, and every look was made."""
    checks = doctor.run_checks()
    assert [check.name for check in checks if check.result == "fail"] == []
    assert len({check.name for check in checks}) == 15
    assert all(check.to_do for check in checks if check.result == "warn")


@pytest.mark.parametrize(
    ("check", "result", "part"),
    [
        (doctor.tritonserver(None), "fail", "make setup"),
        (doctor.tritonserver(NATIVE), "ok", ""),
        (doctor.stub(CARRIED), "fail", "Python 3.11"),
        (doctor.libpython(CARRIED), "fail", "See above"),
        (doctor.numpy(CARRIED, "2.3.1"), "fail", "numpy==1.26.4"),
        (doctor.numpy(NATIVE, "2.3.1"), "ok", ""),
        (doctor.numpy(CARRIED, "1.26.4"), "ok", ""),
        (doctor.numpy(CARRIED, None), "fail", "make setup"),
        (doctor.torch_companions("2.13.0+cpu", {"torchvision": "0.28"}.get), "fail", "pip uninstall torchvision"),
        (doctor.torch_companions("2.13.0+cu130", {"torchvision": "0.28"}.get), "ok", ""),
        (doctor.torch_companions("2.13.0+cpu", {}.get), "ok", ""),
        (doctor.torch_companions(None, {}.get), "fail", "make setup"),
        (doctor.protobuf("4.25.8", "1.85.3"), "fail", "protobuf==6.33.6"),
        (doctor.protobuf("6.33.6", None), "fail", "make setup"),
        (doctor.protobuf("6.33.6", "1.85.3"), "ok", ""),
        (doctor.vllm(None, None, gpu_seen=False), "fail", "simulated"),
        (doctor.vllm(None, "0.32.0", gpu_seen=True), "warn", "vllm"),
        (doctor.vllm(None, "0.32.0", gpu_seen=False), "ok", ""),
        (doctor.vllm("0.32.0", None, gpu_seen=True), "ok", ""),
        (doctor.shared_memory(64 * 1024 * 1024 - 1), "fail", "--shm-size"),
        (doctor.shared_memory(128 * 1024 * 1024), "warn", "--shm-size"),
        (doctor.shared_memory(GIB), "ok", ""),
        (doctor.memory(2 * GIB), "fail", "3 GiB"),
        (doctor.memory(3 * GIB), "warn", "3 GiB"),
        (doctor.memory(8 * GIB), "ok", ""),
        (doctor.scheduler("1", gpu_seen=False), "warn", "sched_autogroup_enabled=0"),
        (doctor.scheduler("1", gpu_seen=True), "ok", ""),
        (doctor.scheduler("0", gpu_seen=False), "ok", ""),
        (doctor.scheduler("", gpu_seen=False), "ok", ""),
    ],
    ids=lambda value: value.name if isinstance(value, Check) else None,
)
def test_each_fault_has_its_remedy(check: Check, result: str, part: str):
    """What is wrong fails or warns and says what to do; what is right asks for nothing."""
    assert check.result == result
    assert part in check.to_do
    assert bool(check.to_do) == (result != "ok")


def test_a_missing_tritonserver_does_not_stop_the_other_looks(monkeypatch: pytest.MonkeyPatch):
    """Without a server the checks go on and say so."""

    def none() -> Installation:
        raise LauncherError("no tritonserver")

    monkeypatch.setattr(doctor, "find_installation", none)
    results = {check.name: check.result for check in doctor.run_checks()}
    assert results["tritonserver"] == results["Python backend stub"] == results["libpython"] == "fail"
    assert results["numpy"] == "ok"


def test_a_foreign_libpython_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The loader is asked which libpython the stub would get; another than this interpreter's fails."""
    assert doctor.libpython(find_installation()).result == "ok"
    monkeypatch.setattr(doctor, "libpython_folder", lambda: tmp_path)
    check = doctor.libpython(find_installation())
    assert check.result == "fail"
    assert "LD_LIBRARY_PATH" in check.to_do


def test_a_taken_port_names_its_holder(monkeypatch: pytest.MonkeyPatch):
    """The warning holds port and process."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        free = Ports.free()
        monkeypatch.setattr(doctor, "Ports", lambda: Ports(port, free.grpc, free.metrics))
        check = doctor.ports()
    assert check.result == "warn"
    assert f"{port} by " in check.found
    assert f"pid {os.getpid()}" in check.found


def test_left_overs_of_killed_servers_are_found(tmp_path: Path):
    """A recorded server whose processes are gone but whose shared memory is not is reported."""
    with subprocess.Popen(["true"]) as gone:
        created = time.time()
    prefix = f"tlc_doctor{os.getpid()}_"
    record = tmp_path / "x.json"
    leftovers.write_record(record, leftovers.Footprint("none", prefix, gone.pid, created))
    record.write_text(json.dumps(json.loads(record.read_text()) | {"launcher_pid": gone.pid}))
    assert doctor.dead_servers(tmp_path).result == "ok"
    region = leftovers.SHM / f"{prefix}region"
    region.touch()
    try:
        check = doctor.dead_servers(tmp_path)
    finally:
        region.unlink()
    assert check.result == "warn"
    assert "1 shared memory region" in check.found


def test_a_look_that_raises_is_a_warning(monkeypatch: pytest.MonkeyPatch):
    """The doctor reports what it could not see instead of failing itself."""

    def broken() -> Check:
        raise OSError("no such device")

    monkeypatch.setattr(doctor, "gpu", broken)
    assert doctor.run_checks()[-1] == Check("GPU", "warn", "could not look: no such device", "Report this fault.")


def test_the_exit_code_is_1_when_something_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """JSON output holds every field; a warning alone is no failure."""
    checks = [Check("a", "ok", "fine"), Check("b", "warn", "odd", "look")]
    monkeypatch.setattr(doctor, "run_checks", lambda: checks)
    assert doctor.main(json=True) == 0
    assert json.loads(capsys.readouterr().out)[1] == {"name": "b", "result": "warn", "found": "odd", "to_do": "look"}
    checks.append(Check("c", "fail", "broken", "mend"))
    assert doctor.main() == 1
    assert "mend" in capsys.readouterr().out


def test_found_text_is_shown_as_it_is():
    """Square brackets in what was found are no markup."""
    console = Console(width=120)
    with console.capture() as shown:
        console.print(doctor.table([Check("a", "fail", "[/]x [red]y", "do")]))
    assert "[/]x [red]y" in shown.get()
