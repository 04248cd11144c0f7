"""A configuration as others see it: values with their origins, as YAML, and as a JSON Schema; no secret is shown."""

from __future__ import annotations

from typing import Any

import msgspec
import yaml

from triton_lifecycle.config.keys import KEYS
from triton_lifecycle.config.loading import TOP, Loaded, Origin
from triton_lifecycle.config.sections import Config

COMMENT_COLUMN = 56


class Entry(msgspec.Struct, frozen=True):
    """One key's effective value."""

    name: str
    value: Any
    """Plain; addresses without their passwords."""
    origin: Origin

    def as_json(self) -> dict[str, Any]:
        """Return it for programs."""
        spot = self.origin.spot
        place = {"file": spot.file or None, "line": spot.line, "variable": spot.variable or None}
        return {
            "key": self.name,
            "value": self.value,
            "origin": self.origin.kind,
            **place,
        }


def entries(loaded: Loaded) -> list[Entry]:
    """Return every key's value in the order of the sections; keys of absent sections are left out."""
    values = loaded.config.model_dump(mode="json")
    found = []
    for key in KEYS:
        if key.name not in loaded.origins:
            continue
        value: Any = values
        for step in key.path:
            value = value[step]
        if isinstance(value, dict) and any(other.startswith(f"{key.name}.") for other in loaded.origins):
            continue
        found.append(Entry(key.name, value, loaded.origins[key.name]))
    return found


def as_yaml(entries: list[Entry]) -> str:
    """Return a file that says the same, with each value's origin behind it."""
    lines = [f"{TOP}:"]
    here: tuple[str, ...] = ()
    for entry in entries:
        *sections, key = entry.name.split(".")
        for depth, section in enumerate(sections):
            if tuple(sections[: depth + 1]) != here[: depth + 1]:
                lines.append(f"{'  ' * (depth + 1)}{section}:")
        here = tuple(sections)
        line = f"{'  ' * (len(sections) + 1)}{key}: {scalar(entry.value)}"
        lines.append(f"{line:<{COMMENT_COLUMN}}  # {entry.origin}")
    return "\n".join(lines) + "\n"


def scalar(value: Any) -> str:  # noqa: ANN401 - plain values
    """Return a value in one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("...\n").strip()


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the whole file, with the meaning of every key, for editors."""
    schema = Config.model_json_schema()
    definitions = schema.pop("$defs")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "request_lifecycle.yaml",
        "type": "object",
        "properties": {TOP: schema},
        "required": [TOP],
        "additionalProperties": False,
        "$defs": definitions,
    }
