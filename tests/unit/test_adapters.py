"""LoRA adapters by name, from multi_lora.json."""

from __future__ import annotations

import json

import pytest

from triton_lifecycle.engine import adapters
from triton_lifecycle.errors import ConfigError


@pytest.mark.parametrize("enabled", [True, "true", "True"])
def test_adapters_are_found_beside_the_model(tmp_path, enabled):
    """A relative folder that exists is taken from the version folder; what is no folder goes to vLLM as it is."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text("{}")
    (tmp_path / "multi_lora.json").write_text(json.dumps({"x": "a", "y": "somebody/adapter"}))
    settings = {"enable_lora": enabled}
    assert adapters.load(settings, tmp_path) == {"x": str(tmp_path / "a"), "y": "somebody/adapter"}
    assert settings["enable_lora"] is True


@pytest.mark.parametrize("settings", [{}, {"enable_lora": False}, {"enable_lora": "false"}])
def test_without_enable_lora_the_file_is_not_read(tmp_path, settings):
    """As in the official backend."""
    (tmp_path / "multi_lora.json").write_text("{")
    assert adapters.load(settings, tmp_path) == {}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ('{"x": 5}', "expected a JSON object of name and folder"),
        ('{"x": "."}', "has no adapter_config.json"),
    ],
)
def test_a_wrong_file_fails_the_load_with_its_name(tmp_path, content, says):
    """The model does not load, and the error says which file and why."""
    (tmp_path / "multi_lora.json").write_text(content)
    with pytest.raises(ConfigError, match=r"multi_lora\.json") as caught:
        adapters.load({"enable_lora": True}, tmp_path)
    assert says in caught.value.message


def test_enable_lora_is_a_boolean(tmp_path):
    """Anything else fails the load."""
    with pytest.raises(ConfigError, match="enable_lora must be true or false, found 'maybe'"):
        adapters.load({"enable_lora": "maybe"}, tmp_path)
