"""The Prometheus files: promtool accepts them, and each alert fires on what it is for and on nothing else."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "prometheus"
RULES = FOLDER / "rules.yml"
ALERTS = [
    rule["alert"]
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
    if "alert" in rule
]
WHO = 'job="triton",instance="h:8002",model="m",version="1"'


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("promtool")
    assert program is not None, "promtool is not installed; run `make system` as root"
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_promtool_accepts_the_files():
    """Configuration and rules are valid."""
    answer = promtool("check", "config", str(FOLDER / "prometheus.yml"))
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_every_alert_is_explained():
    """docs/operations.md has a row with cause and action for each."""
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(Lifecycle\w+)` \|", page, re.MULTILINE) == ALERTS


SCENES: dict[str, tuple[dict[str, str], str, str]] = {
    "LifecycleServerDown": ({f"up{{{WHO.partition(',model')[0]}}}": "1 0x10 1x30"}, "5m", "15m"),
    "LifecycleErrorBudgetFastBurn": (
        {
            f'lifecycle_requests_ended_total{{{WHO},outcome="completed"}}': "0+100x200",
            f'lifecycle_requests_ended_total{{{WHO},outcome="failed"}}': "0+5x20 100x200",
            f'lifecycle_refusals_total{{{WHO},limit="queue_full"}}': "0x200",
        },
        "15m",
        "40m",
    ),
    "LifecycleErrorBudgetSlowBurn": (
        {
            f'lifecycle_requests_ended_total{{{WHO},outcome="completed"}}': "0+100x200",
            f'lifecycle_requests_ended_total{{{WHO},outcome="timed_out"}}': "0x200",
            f'lifecycle_refusals_total{{{WHO},limit="token_budget"}}': "0+1x60 60x200",
        },
        "40m",
        "75m",
    ),
    "LifecycleEngineStalled": (
        {
            f"lifecycle_engine_output_tokens_total{{{WHO}}}": "0+50x5 250x10 250+50x30",
            f'vllm:num_requests_running{{{WHO},model_instance="m_0_0"}}': "4x60",
        },
        "12m",
        "25m",
    ),
    "LifecycleEngineDown": ({f'lifecycle_engine_up{{{WHO},model_instance="m_0_0"}}': "1 0x8 1x20"}, "6m", "15m"),
    "LifecycleEngineRestartLoop": ({f"lifecycle_engine_restarts_total{{{WHO}}}": "0 0 1 2 3 3x60"}, "8m", "40m"),
    "LifecycleQueueNearLimit": (
        {
            f'lifecycle_admission_used{{{WHO},model_instance="m_0_0",limit="max_waiting_requests"}}': "95x10 50x30",
            f'lifecycle_admission_limit{{{WHO},model_instance="m_0_0",limit="max_waiting_requests"}}': "100x60",
        },
        "8m",
        "20m",
    ),
    "LifecycleLeak": (
        {f'lifecycle_leaked{{{WHO},model_instance="m_0_0",account="permits"}}': "2x10 0x20"},
        "8m",
        "15m",
    ),
    "LifecyclePredictionOff": (
        {
            f'lifecycle_prediction_coverage_ratio{{{WHO},model_instance="m_0_0",target="total"}}': "0.5x30 0.9x30",
            f"lifecycle_prediction_observations_total{{{WHO}}}": "0+10x90",
        },
        "25m",
        "40m",
    ),
    "LifecycleEventsLost": (
        {f'lifecycle_sink_events_total{{{WHO},sink="kafka",outcome="lost"}}': "0 5 10 15 20 20x30"},
        "4m",
        "20m",
    ),
    "LifecycleHandlerFailing": (
        {f'lifecycle_bus_handler_events_total{{{WHO},handler="mine",outcome="failed"}}': "0 5 10 15 20 20x30"},
        "4m",
        "20m",
    ),
}
"""By alert: what is measured each minute, when the alert must fire, and when it must have cleared."""


def test_every_alert_has_a_scene():
    """None is without a test."""
    assert list(SCENES) == ALERTS


def test_alerts_fire_and_clear(tmp_path: Path):
    """By promtool's own unit tests of rules: each alert fires on its cause, alone, and clears when that has gone."""
    tests = []
    for alert, (series, fires, clears) in SCENES.items():
        samples = [{"series": name, "values": values} for name, values in series.items()]
        for other in ALERTS:
            if other == alert:
                continue
            # One cause, one alert: but who burns a budget fast burns it slowly too.
            if {alert, other} == {"LifecycleErrorBudgetFastBurn", "LifecycleErrorBudgetSlowBurn"}:
                continue
            quiet = [{"eval_time": fires, "alertname": other, "exp_alerts": []}]
            tests.append({"interval": "1m", "input_series": samples, "alert_rule_test": quiet})
        gone = [{"eval_time": clears, "alertname": alert, "exp_alerts": []}]
        tests.append({"interval": "1m", "input_series": samples, "alert_rule_test": gone})
    path = tmp_path / "tests.json"
    path.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    answer = promtool("test", "rules", str(path))
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_fires_on_its_cause(tmp_path: Path, alert: str):
    """That it does not fire is the expectation that fails; what promtool then shows has labels and a full summary."""
    series, fires, _ = SCENES[alert]
    samples = [{"series": name, "values": values} for name, values in series.items()]
    quiet = [{"eval_time": fires, "alertname": alert, "exp_alerts": []}]
    test = {"interval": "1m", "input_series": samples, "alert_rule_test": quiet}
    path = tmp_path / "tests.json"
    path.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
    answer = promtool("test", "rules", str(path))
    said = answer.stdout + answer.stderr
    assert answer.returncode == 1, f"{alert} does not fire: {said}"
    assert f'alertname="{alert}"' in said
    assert "summary" in said
    assert "no value" not in said


def test_the_dashboards_are_those_of_the_script():
    """The JSON files are what `python deploy/grafana/make.py` makes."""
    spec = importlib.util.spec_from_file_location("make", ROOT / "deploy" / "grafana" / "make.py")
    assert spec is not None
    assert spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    files = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "deploy" / "grafana").glob("*.json")}
    assert files == {name: make.text(name) for name in make.DASHBOARDS}
