"""The programs that tests need from the system: found, installed, or asked for clearly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from triton_lifecycle.launcher import system


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only folder on PATH."""
    for name in ("timeout", "sh", "cat", "chmod"):
        found = next(Path(folder) / name for folder in ("/usr/bin", "/bin") if (Path(folder) / name).exists())
        (tmp_path / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(system.CHOICE, raising=False)
    return tmp_path


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(f"#!{folder}/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_nothing_happens_when_a_browser_is_there(bare: Path, capsys: pytest.CaptureFixture[str]):
    """Any of the known names will do; nothing is installed and nothing is said."""
    program(bare, "apt-get", "exit 9")
    for name in ("prometheus", "promtool"):
        program(bare, name, "exit 0")
    found = program(bare, "google-chrome", "exit 0")
    assert system.main() == 0
    assert system.browser() == str(found)
    assert capsys.readouterr() == ("", "")


def test_it_is_installed_when_missing(bare: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """As root, with the distribution's own tool, without recommended packages; its steps are told."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    program(
        bare,
        "apt-get",
        f'echo "Get:1 chromium" "$@"; echo "$@" >> {bare}/calls\n'
        f'if [ "$1" = install ]; then for name in chromium prometheus promtool; do\n'
        f"echo > {bare}/$name; chmod +x {bare}/$name; done; fi",
    )
    assert system.main() == 0
    assert (bare / "calls").read_text().splitlines() == [
        "update",
        "install -y --no-install-recommends chromium prometheus",
    ]
    said = capsys.readouterr().out
    assert "1/2" in said
    assert "installing chromium" in said


@pytest.mark.parametrize("case", ["no apt", "not root", "apt fails", "not found afterwards"])
def test_what_cannot_be_installed_is_asked_for(
    bare: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, case: str
):
    """Whatever is in the way, the message says what and what to do instead."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000 if case == "not root" else 0)
    if case != "no apt":
        program(bare, "apt-get", "echo cannot resolve; exit 100" if case == "apt fails" else "exit 0")
    assert system.main() == 1
    said = capsys.readouterr().err
    assert "apt-get install --no-install-recommends chromium" in said
    assert system.CHOICE in said
    assert {"no apt": "no apt-get", "not root": "only root", "apt fails": "cannot resolve"}.get(case, "PATH") in said


def test_only_what_is_missing_is_installed(bare: Path, monkeypatch: pytest.MonkeyPatch):
    """A browser that is there is left alone when Prometheus is not."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    program(bare, "chromium", "exit 0")
    program(bare, "apt-get", f'echo "$@" >> {bare}/calls')
    assert system.main() == 1, "it was not there afterwards"
    assert (bare / "calls").read_text().splitlines()[-1] == "install -y --no-install-recommends prometheus"


def test_a_chosen_browser_that_is_not_there(
    bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A wrong choice is not silently replaced by another browser."""
    program(bare, "chromium", "exit 0")
    monkeypatch.setenv(system.CHOICE, "/no/such/browser")
    assert system.main() == 1
    assert "/no/such/browser" in capsys.readouterr().err


def test_it_needs_no_package():
    """It runs with the standard library alone, before any environment exists."""
    path = Path(system.__file__)
    command = [sys.executable, "-I", "-S", str(path)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode in {0, 1}
    assert "Traceback" not in answer.stderr
