"""LoRA adapters by name: ``1/multi_lora.json``, read when ``model.json`` says ``enable_lora``."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Final

from triton_lifecycle.errors import ConfigError

log = logging.getLogger(__name__)

FILE: Final = "multi_lora.json"


def load(settings: dict[str, Any], directory: Path) -> dict[str, str]:
    """Return name → folder of the adapters; makes ``enable_lora`` a boolean if it came as a text.

    Args:
        settings: the content of ``model.json``, changed in place.
        directory: the model version's directory; a relative path that exists in it is taken from there.

    Raises:
        ConfigError: the file is not a JSON object of texts, or a folder has no adapter.

    """
    enabled = settings.get("enable_lora", False)
    if isinstance(enabled, str):
        if enabled.lower() not in {"true", "false"}:
            raise ConfigError(f"model.json: enable_lora must be true or false, found {enabled!r}")
        enabled = settings["enable_lora"] = enabled.lower() == "true"
    path = directory / FILE
    if not enabled:
        if path.exists():
            log.warning("%s is not read, since model.json does not set enable_lora", path)
        return {}
    if not path.exists():
        log.warning("enable_lora is set, but there is no %s: no request can name an adapter", path)
        return {}
    try:
        named = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(named, dict) or not all(isinstance(place, str) and place for place in named.values()):
        raise ConfigError(f"{path}: expected a JSON object of name and folder")
    return {name: _folder(path, name, directory, place) for name, place in named.items()}


def _folder(path: Path, name: str, directory: Path, place: str) -> str:
    folder = directory / place
    # What is no folder may be a hub's name, which vLLM resolves.
    if not folder.is_dir():
        return place
    if not (folder / "adapter_config.json").is_file():
        raise ConfigError(f"{path}: {name!r}: {folder} has no adapter_config.json")
    return str(folder)
