"""The configuration loads as promised and reports every problem at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from triton_lifecycle import config
from triton_lifecycle.errors import ConfigError

SAMPLE = Path(__file__).parents[2] / "model_repository" / "smollm2" / "request_lifecycle.yaml"


def test_the_promised_file_loads_as_it_is():
    """Every key of the promised file is known and takes the promised value."""
    loaded = config.load(SAMPLE).model_dump()
    for section, keys in yaml.safe_load(SAMPLE.read_text())["request_lifecycle"].items():
        for key, value in keys.items():
            assert loaded[section][key] == value


def test_without_a_file_there_are_no_limits_of_ours(tmp_path):
    """No file means the official contract: no time limits."""
    assert config.load(tmp_path / "none.yaml") is config.OFFICIAL
    assert not config.OFFICIAL.timeout_handling.enabled


def test_all_problems_are_reported_at_once(tmp_path):
    """Unknown keys, wrong types and wrong ranges come in one message with their paths."""
    path = tmp_path / "request_lifecycle.yaml"
    path.write_text(
        "request_lifecycle:\n  event_driven: {enabled: 'yes', event_queue_size: 0}\n"
        "  timeout_handling: {min_timeout: 50.0}\n  monitoring: {log_levle: info}\n  nonsense: 1\n"
    )
    with pytest.raises(ConfigError) as caught:
        config.load(path)
    for part in (
        "5 problem(s)",
        "event_driven.enabled",
        "event_driven.event_queue_size",
        "timeout_handling",
        "min_timeout ≤ default_timeout",
        "monitoring.log_levle",
        "nonsense",
    ):
        assert part in caught.value.message


@pytest.mark.parametrize("text", ["{", "a: b", "- 1", "request_lifecycle: {}\nother: {}"])
def test_another_document_is_refused(tmp_path, text):
    """What is not YAML or has other top-level keys is a ConfigError that names the file."""
    path = tmp_path / "request_lifecycle.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"request_lifecycle\.yaml"):
        config.load(path)


def test_settings_without_effect_are_named():
    """What the release reads but does not act on is listed, not silently ignored."""
    assert "distributed.enabled" in config.Config(distributed=config.Distributed(enabled=True)).not_yet()
    assert "distributed.enabled" not in config.Config().not_yet()


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("event_driven", "handlers", "[{use: 'a:b'}]"),
        ("event_driven", "recorder", "{path: events.jsonl}"),
        ("context_management", "enable_layered_storage", "false"),
        ("context_management", "max_finished", "5"),
        ("context_management", "layer_timeouts", "{output: 5.0}"),
        ("context_management", "keep_prompts", "text"),
        ("context_management", "keep_outputs", "hash"),
    ],
)
def test_a_key_without_effect_is_named_only_where_it_is_set(section, key, value, tmp_path):
    """Whoever sets one reads at start that nothing comes of it; whoever does not is not bothered."""
    path = tmp_path / "request_lifecycle.yaml"
    path.write_text(f"request_lifecycle:\n  {section}:\n    {key}: {value}\n")
    assert f"{section}.{key}" in config.load(path).not_yet()
    assert f"{section}.{key}" not in config.Config().not_yet()


@pytest.mark.parametrize("stages", [("receive", "respond"), ("receive", "execute", "execute", "respond")])
def test_a_pipeline_needs_its_fixed_stages(stages):
    """A list of built-in stages must hold receive, execute and respond once each."""
    with pytest.raises(ValueError, match="exactly once"):
        config.Pipeline(stages=stages)
