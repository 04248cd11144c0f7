"""``lifecycle config check``, ``show`` and ``schema``: output and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from triton_lifecycle import config
from triton_lifecycle_client.cli import app

MODEL = Path(__file__).parents[2] / "model_repository" / "smollm2"
WRONG = "request_lifecycle:\n  monitoring:\n    log_levle: info\n    enabled: 'yes'\n"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    import os

    for name in list(os.environ):
        if name.startswith("LIFECYCLE_"):
            monkeypatch.delenv(name)


def lifecycle(*arguments, env=None):
    return CliRunner().invoke(app, ["config", *map(str, arguments)], env=env or {})


def test_a_file_without_mistakes_is_ok():
    """Exit code 0, and what was read; a folder and a file are alike."""
    for path in (MODEL, MODEL / "request_lifecycle.yaml"):
        found = lifecycle("check", path)
        assert found.exit_code == 0
        assert f"ok {MODEL}/request_lifecycle.yaml (39 keys set by the file, 0 by the environment)" in found.stdout
    document = json.loads(lifecycle("check", MODEL, "--json").stdout)
    assert document["ok"]
    assert document["problems"] == []


def test_every_mistake_is_shown_with_its_place(tmp_path):
    """Exit code 1; in JSON each problem is an object."""
    path = tmp_path / "request_lifecycle.yaml"
    path.write_text(WRONG)
    found = lifecycle("check", path, env={"LIFECYCLE__X": "1"})
    assert found.exit_code == 1
    assert "3 problems" in found.stderr
    assert f"{path}:3:5: monitoring.log_levle: unknown key; did you mean log_level?" in found.stderr
    assert "LIFECYCLE__X" in found.stderr
    found = lifecycle("check", path, "--json")
    assert found.exit_code == 1
    document = json.loads(found.stdout)
    assert not document["ok"]
    assert [(p["line"], p["column"], p["path"]) for p in document["problems"]] == [
        (3, 5, "monitoring.log_levle"),
        (4, 14, "monitoring.enabled"),
    ]
    assert document["problems"][1]["advice"] == "write true without quotes"


def test_what_is_not_imported_is_said(tmp_path):
    """A plug-in of the user's is judged when the model is loaded: the check says so, and names it."""
    path = tmp_path / "request_lifecycle.yaml"
    path.write_text(
        "request_lifecycle:\n  pipeline:\n    stages: [receive, preprocess, schedule, execute, postprocess, "
        "{use: 'shuot:Shout'}, respond]\n  event_driven: {handlers: [{use: 'audit:log'}]}\n"
    )
    found = lifecycle("check", path)
    assert found.exit_code == 0
    assert "not imported here, but when the model is loaded: shuot:Shout, audit:log" in found.stdout
    path.write_text("request_lifecycle: {}\n")
    assert "not imported" not in lifecycle("check", path).stdout


def test_a_model_without_a_file_has_the_official_defaults(tmp_path):
    """No file is no mistake, and it is said; a folder that is no model's, or nothing at all, is wrong usage."""
    assert lifecycle("check", tmp_path).exit_code == 2
    assert lifecycle("check", tmp_path / "none").exit_code == 2
    (tmp_path / "config.pbtxt").write_text("")
    found = lifecycle("check", tmp_path)
    assert found.exit_code == 0
    assert "no file: the official defaults apply" in found.stdout
    assert "no file: the official defaults apply" in lifecycle("show").stdout


def test_show_tells_value_and_origin(tmp_path):
    """Table, JSON and YAML agree; --changed leaves out what has its default; both forms at once are wrong usage."""
    path = tmp_path / "request_lifecycle.yaml"
    path.write_text(
        "request_lifecycle:\n  shutdown:\n    drain_timeout: 7\n  pipeline:\n    stages: [receive, execute, respond]\n"
    )
    env = {"LIFECYCLE__ADMISSION__MAX_LIVE_REQUESTS": "9"}
    table = lifecycle("show", path, env=env).stdout.splitlines()
    assert any(line.split() == ["shutdown.drain_timeout", "7.0", "request_lifecycle.yaml:3"] for line in table)
    assert any("[receive, execute, respond]" in line for line in table)
    assert any("LIFECYCLE__ADMISSION__MAX_LIVE_REQUESTS" in line for line in table)
    assert any(line.split()[:3] == ["cancellation.poll_interval", "0.05", "default"] for line in table)
    changed = json.loads(lifecycle("show", path, "--json", "--changed", env=env).stdout)
    assert changed["file"] == str(path)
    assert [(v["key"], v["value"], v["origin"], v["line"], v["variable"]) for v in changed["values"]] == [
        ("admission.max_live_requests", 9, "environment", None, "LIFECYCLE__ADMISSION__MAX_LIVE_REQUESTS"),
        ("shutdown.drain_timeout", 7.0, "file", 3, None),
        ("pipeline.stages", ["receive", "execute", "respond"], "file", 5, None),
    ]
    again = tmp_path / "again.yaml"
    again.write_text(lifecycle("show", path, "--yaml", env=env).stdout)
    assert config.load(again, {}) == config.load(path, env)
    assert lifecycle("show", "--yaml", "--json").exit_code == 2


@pytest.mark.parametrize("form", [[], ["--json"], ["--yaml"]])
def test_no_form_of_show_holds_a_password(form):
    """The address is shown without it."""
    shown = lifecycle("show", *form, env={"LIFECYCLE_REDIS_URL": "redis://me:hunter2@h:1/0"}).stdout
    assert "redis://***@h:1/0" in shown
    assert "hunter2" not in shown


def test_the_schema_is_json_schema():
    """It can be given to an editor."""
    schema = json.loads(lifecycle("schema").stdout)
    assert schema["properties"].keys() == {"request_lifecycle"}
