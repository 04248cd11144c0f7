"""The table of all keys in ``docs/configuration.md``, made from the sections themselves.

``python -m triton_lifecycle.config.reference docs/configuration.md`` writes it anew between its two marks; a test sees
to it that this was done.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

from triton_lifecycle.config.keys import KEYS, Key, section_at
from triton_lifecycle.config.show import json_schema, scalar

BEGIN: Final = "<!-- made by python -m triton_lifecycle.config.reference -->"
END: Final = "<!-- end of what is made -->"
_KINDS: Final = {
    "boolean": "true, false",
    "string": "text",
    "null": "nothing",
    "array": "list",
    "section": "the keys below",
}


def reference() -> str:
    """Return the sections and their keys as Markdown."""
    lines: list[str] = []
    section = ""
    for key in KEYS:
        if key.path[0] != section:
            section = key.path[0]
            lines += ["", f"### {section}", "", _meaning((section_at((section,)) or object).__doc__ or ""), ""]
            lines += ["| key | default | takes | meaning |", "|---|---|---|---|"]
        lines.append(_row(key))
    return "\n".join(lines)


def rewrite(path: Path) -> None:
    """Put the present table between the marks of a file."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n{reference()}\n\n{END}{after}", encoding="utf-8")


def _row(key: Key) -> str:
    added = " +" if key.optional or key.doc.startswith("Added") else ""
    name = ".".join(key.path[1:])
    return f"| `{name}`{added} | {_default(key)} | {_range(_node(key.path))} | {_meaning(key.doc)} |"


def _meaning(doc: str) -> str:
    text = " ".join(doc.replace("``", "`").split()).removeprefix("Added: ")
    return f"{text[:1].upper()}{text[1:]}"


def _default(key: Key) -> str:
    if key.default is ...:
        return "must be given"
    if key.default is None:
        return "absent"
    text = str(key.default) if isinstance(key.default, str) else scalar(_plain(key.default))
    return f"`{text}`"


def _plain(value: Any) -> Any:  # noqa: ANN401 - a default, of whatever kind
    return list(value) if isinstance(value, tuple) else value


def _node(path: tuple[str, ...]) -> dict[str, Any]:
    """Return the part of the schema that describes a key."""
    schema = json_schema()
    at: dict[str, Any] = schema["properties"]["request_lifecycle"]
    for step in path:
        if "anyOf" in at:
            at = next(kind for kind in at["anyOf"] if kind.get("type") != "null")
        if "$ref" in at:
            at = schema["$defs"][at["$ref"].rpartition("/")[2]]
        at = at["properties"][step]
    return at


def _range(node: dict[str, Any]) -> str:
    if "anyOf" in node:
        return " or ".join(_range(kind) for kind in node["anyOf"])
    if "enum" in node:
        return ", ".join(f"`{value}`" for value in node["enum"])
    kind = node.get("type", "section")
    if kind == "object":
        each = node.get("additionalProperties")
        return f"for each name: {_range(each)}" if isinstance(each, dict) else "keys with values"
    if kind in _KINDS:
        return _KINDS[kind]
    word = "whole number" if kind == "integer" else "number"
    for bound, sign in (("minimum", "≥"), ("exclusiveMinimum", ">")):
        if bound in node:
            return f"{word} {sign} {node[bound]:g}"
    return word


if __name__ == "__main__":
    rewrite(Path(sys.argv[1]))
