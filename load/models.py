"""Copies of shipped models, set up otherwise."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def copy_with(
    source: Path, target: Path, engine: Mapping[str, Any], lifecycle: Mapping[str, Any] | None = None
) -> None:
    """Copy a model's folder, without its weights.

    Args:
        source: the model's folder.
        target: the copy, which must not exist.
        engine: the whole of its ``model.json``.
        lifecycle: the sections of its ``request_lifecycle.yaml``; ``None`` leaves that as it is.

    """
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("weights", "__pycache__"))
    (target / "1" / "model.json").write_text(json.dumps(dict(engine)), encoding="utf-8")
    if lifecycle is not None:
        document = {"request_lifecycle": dict(lifecycle)}
        (target / "request_lifecycle.yaml").write_text(json.dumps(document), encoding="utf-8")
