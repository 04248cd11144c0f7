"""A YAML text as plain values, with the place of each in the text, and the traps of YAML told apart.

PyYAML reads YAML 1.1 and keeps the last of two equal keys without a word. Here the tree of nodes is read, so that every
value has a line and a column, and what YAML would read otherwise than it looks is a problem, not a surprise.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
import yaml

from triton_lifecycle.config.problems import Path, Problem, Spot

MAX_BYTES: Final = 2**20
MAX_DEPTH: Final = 32
MAX_VALUES: Final = 20_000
"""Aliases counted each time: a short text can stand for billions of values."""
_OCTAL: Final = re.compile(r"[-+]?0[0-7_]+")
_SIXTIES: Final = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
_MERGE: Final = "tag:yaml.org,2002:merge"
_NULL: Final = "tag:yaml.org,2002:null"


class Document(msgspec.Struct, frozen=True):
    """What was read."""

    value: Any
    spots: dict[Path, Spot]
    """Where each value is, by its path."""
    problems: list[Problem]


def read(text: str, *, file: str = "") -> Document:
    """Read one YAML document.

    Args:
        text: the YAML.
        file: the name that problems give its place.

    Returns:
        The document; with ``problems`` its value may lack what they are about.

    """
    if "\0" in text or len(text) > MAX_BYTES:
        return Document(None, {}, [Problem("", f"must be text of at most {MAX_BYTES} characters", Spot(file=file))])
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        return Document(None, {}, [_syntax(error, text, file)])
    except yaml.YAMLError as error:
        return Document(None, {}, [Problem("", f"not valid YAML: {' '.join(str(error).split())}", Spot(file=file))])
    except RecursionError:
        return Document(None, {}, [Problem("", f"nested deeper than {MAX_DEPTH} levels", Spot(file=file))])
    reader = _Reader(file)
    value = None if node is None else reader.value(node, ())
    return Document(value, reader.spots, reader.problems)


class _Reader:
    def __init__(self, file: str) -> None:
        self._file = file
        self._constructor = yaml.constructor.SafeConstructor()
        self.spots: dict[Path, Spot] = {}
        self.problems: list[Problem] = []
        self._values = 0

    def value(self, node: yaml.Node, path: Path, key: yaml.Node | None = None) -> Any:  # noqa: ANN401
        self.spots[path] = self._spot(node, key)
        if len(path) > MAX_DEPTH:
            # Also what a text that refers to itself comes to.
            return self._problem(path, f"nested deeper than {MAX_DEPTH} levels")
        self._values += 1
        if self._values >= MAX_VALUES:
            return self._problem(path, f"more than {MAX_VALUES} values") if self._values == MAX_VALUES else None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node, path) if isinstance(node, yaml.ScalarNode) else None

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        inherited: dict[str, Any] = {}
        here = self.spots[path]
        for key, item in node.value:
            if key.tag == _MERGE:
                for part in item.value if isinstance(item, yaml.SequenceNode) else [item]:
                    content = self.value(part, path, key)
                    inherited = {**content, **inherited} if isinstance(content, dict) else inherited
        self.spots[path] = here
        for key, item in node.value:
            if key.tag == _MERGE:
                continue
            # The key as it is written: YAML would make `on` a boolean and `1` a number.
            name = key.value if isinstance(key, yaml.ScalarNode) else "?"
            if name in found:
                first = self.spots[*path, name]
                self.spots[*path, name] = self._spot(item, key)
                self._problem(
                    (*path, name),
                    f"the key is here a second time, first in line {first.line}",
                    advice="keep one of the two",
                    at_key=True,
                )
                self.spots[*path, name] = first
                continue
            found[name] = self.value(item, (*path, name), key)
        return {**inherited, **found}

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> Any:  # noqa: ANN401
        text = node.value
        if node.tag == "tag:yaml.org,2002:int" and _OCTAL.fullmatch(text):
            return self._problem(path, f"YAML reads a number with a leading zero as octal, here {int(text, 8)}")
        if node.tag in {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"} and _SIXTIES.fullmatch(text):
            return self._problem(path, "YAML reads digits with colons as a number to the base 60", advice="quote it")
        make = self._constructor.yaml_constructors.get(node.tag)
        if make is None:
            return self._problem(path, f"the tag {node.tag!r} means nothing here", advice="leave it out")
        try:
            return make(self._constructor, node)
        except (ValueError, yaml.YAMLError) as error:
            return self._problem(path, f"not a value that can be read: {error}")

    def _spot(self, node: yaml.Node, key: yaml.Node | None) -> Spot:
        at, key_at = node.start_mark, (key or node).start_mark
        scalar = node if isinstance(node, yaml.ScalarNode) else None
        return Spot(
            file=self._file,
            line=at.line + 1,
            column=at.column + 1,
            key_line=key_at.line + 1,
            key_column=key_at.column + 1,
            text=None if scalar is None or scalar.tag == _NULL else scalar.value,
            quoted=scalar is not None and scalar.style is not None,
        )

    def _problem(self, path: Path, rule: str, *, advice: str = "", at_key: bool = False) -> None:
        spot = self.spots[path]
        self.problems.append(
            Problem(
                ".".join(map(str, path)).removeprefix("request_lifecycle."),
                rule,
                spot.of_key() if at_key else spot,
                found=None if at_key or spot.text is None else spot.written(),
                advice=advice,
            )
        )


def _syntax(error: yaml.MarkedYAMLError, text: str, file: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line, mark.column) if mark is not None else (0, 0)
    lines = text.splitlines()
    written = lines[line] if line < len(lines) else ""
    spot = Spot(file=file, line=line + 1, column=column + 1)
    if "\t" in written[: column + 1] or "\t" in written[: len(written) - len(written.lstrip())]:
        return Problem("", "a tab stands where YAML takes only spaces", spot, advice="indent with spaces")
    what = " ".join(part for part in (error.context, error.problem) if part)
    return Problem("", f"not valid YAML: {what}", spot, advice=_guess(written))


def _guess(line: str) -> str:
    value = line.partition(":")[2].strip()
    if re.match(r"[\w.]+:[^\s]", line.strip()):
        return "put a space behind the colon"
    if value[:1] in set("@`%&*!|>"):
        return "quote the value"
    if value.count('"') % 2 or value.count("'") % 2:
        return "close the quote"
    return ""
