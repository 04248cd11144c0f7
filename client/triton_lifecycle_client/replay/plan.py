"""From the options of `lifecycle replay --simulate` to what the simulation is to do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from triton_lifecycle import config as configuration
from triton_lifecycle.engine.simulated import settings
from triton_lifecycle.simulation import run
from triton_lifecycle_client.terminal import UsageFault

if TYPE_CHECKING:
    from pathlib import Path

    from triton_lifecycle.recording import Recording


def make_plan(
    found: Recording, seed: int, path: Path | None, change: list[str] | None, engine: Path | None
) -> run.Plan:
    """Return how to simulate.

    Raises:
        UsageFault: a file or a key is not what it should be.

    """
    pace = None
    if engine is not None:
        try:
            pace = settings.parse(json.loads(engine.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise UsageFault(f"--engine {engine}: {error}") from None
    if path is None and not change:
        return run.Plan(seed=seed, engine=pace)
    config, timeouts_changed = _config(found, path, change or [])
    return run.Plan(seed=seed, engine=pace, config=config, changed=timeouts_changed)


def _config(found: Recording, path: Path | None, change: list[str]) -> tuple[configuration.Config, bool]:
    """Return the configuration to decide by, and whether it sets time limits."""
    if path is not None and not path.exists():
        raise UsageFault(f"--config {path}: no such file")
    base = run.infer(found.stories) if path is None else configuration.load(path)
    document = base.model_dump()
    for item in change:
        _set(document, item)
    try:
        config = configuration.Config.model_validate(document)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise UsageFault(f"--set: {'; '.join(lines)}") from None
    return config, path is not None or any(item.startswith("timeout_handling.") for item in change)


def _set(document: dict[str, Any], item: str) -> None:
    where, equals, text = item.partition("=")
    *sections, key = where.split(".")
    inner: Any = document
    for section in sections:
        inner = inner.get(section) if isinstance(inner, dict) else None
    if not equals or not isinstance(inner, dict) or not sections:
        raise UsageFault(f"--set wants PATH=VALUE, such as admission.max_live_requests=4, got {item!r}")
    try:
        inner[key] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageFault(f"--set {where}: {error}") from None
