"""What is wrong with a configuration: where, what was found, the rule, and what to do about it."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, Final

import msgspec

from triton_lifecycle.config import keys
from triton_lifecycle.config.urls import masked
from triton_lifecycle.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import ValidationError

Path = tuple[str | int, ...]
SHOWN: Final = 60
"""Characters of a value that are shown."""


class Spot(msgspec.Struct, frozen=True):
    """Where a value was set: a place in a file, or a variable of the environment."""

    file: str = ""
    line: int | None = None
    column: int | None = None
    key_line: int | None = None
    key_column: int | None = None
    text: str | None = None
    """The scalar as it was written; ``None`` for anything else."""
    quoted: bool = False
    variable: str = ""

    @property
    def order(self) -> tuple[str, int, int]:
        """Sorts a file from top to bottom, variables behind it."""
        return self.variable, self.line or 0, self.column or 0

    def of_key(self) -> Spot:
        """Return the place of the key that the value stands under."""
        return msgspec.structs.replace(self, line=self.key_line, column=self.key_column)

    def written(self) -> str:
        """Return the scalar as it was written, shortened."""
        text = self.text or ""
        text = text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
        return f'"{text}"' if self.quoted or self.variable else text

    def __str__(self) -> str:
        if self.variable:
            return f"environment variable {self.variable}"
        return self.file if self.line is None else f"{self.file}:{self.line}:{self.column}"


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong."""

    path: str
    """The key, with dots; empty for the document as a whole."""
    rule: str
    """What must hold, or what is wrong."""
    spot: Spot
    found: str | None = None
    """The value, shortened, secrets hidden; ``None`` where there is nothing to show."""
    advice: str = ""

    def __str__(self) -> str:
        said = f"{self.path}: {self.rule}" if self.path else self.rule
        found = "" if self.found is None else f", found {self.found}"
        advice = f"; {self.advice}" if self.advice else ""
        return f"{self.spot}: {said}{found}{advice}"

    def as_json(self) -> dict[str, Any]:
        """Return it for programs."""
        where = {"file": self.spot.file or None, "line": self.spot.line, "column": self.spot.column}
        return {
            "path": self.path,
            **where,
            "variable": self.spot.variable or None,
            "rule": self.rule,
            "found": self.found,
            "advice": self.advice or None,
        }


class InvalidConfig(ConfigError):
    """A configuration with problems, all of them."""

    def __init__(self, name: str, problems: list[Problem]) -> None:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        problems = sorted(problems, key=lambda problem: problem.spot.order)
        super().__init__(f"{name}: {count}\n" + "\n".join(f"  {problem}" for problem in problems))
        self.problems = problems


def problems_of(error: ValidationError, spots: Mapping[Path, Spot]) -> list[Problem]:
    """Turn what pydantic found into problems with their places."""
    found: dict[tuple[str, Spot], Problem] = {}
    for details in error.errors():
        problem = _problem(details, spots)
        # Of a value that may be of several kinds each kind complains: one problem.
        other = found.get((problem.path, problem.spot))
        if other is not None and problem.rule.startswith("must be "):
            problem = msgspec.structs.replace(other, rule=f"{other.rule} or {problem.rule.removeprefix('must be ')}")
        found[problem.path, problem.spot] = problem
    within = {name.rpartition(".")[0] for name, _ in found}
    # A section with a mistake in it need not be told as well that it is no text.
    return [p for (name, _), p in found.items() if not (p.rule == _RULES["string_type"] and name in within)]


def _problem(details: Any, spots: Mapping[Path, Spot]) -> Problem:  # noqa: ANN401 - pydantic's ErrorDetails
    path = _path(details["loc"], spots)
    spot = _spot(path, spots)
    if keys.is_secret(path):
        spot = msgspec.structs.replace(spot, text=None)
    kind, context = details["type"], details.get("ctx") or {}
    name = ".".join(map(str, path))
    if kind == "extra_forbidden":
        return Problem(name, "unknown key", spot.of_key(), advice=_nearest_key(path))
    if kind == "literal_error" and details["loc"][-1] == "[key]":
        return Problem(name, f"the key must be one of {_plain(context['expected'])}", spot.of_key())
    if kind == "missing":
        return Problem(name, "must be given", spot)
    if kind == "value_error" and keys.is_section(path):
        return Problem(name, str(context["error"]), spot.of_key())
    rule = _rule(kind, context, details["msg"])
    return Problem(
        name,
        rule,
        spot,
        found=_found(path, details["input"], spot),
        advice=_advice(kind, context, details["input"], spot),
    )


def _path(loc: tuple[str | int, ...], spots: Mapping[Path, Spot]) -> Path:
    """Return the place without pydantic's own words in it: which kind of a value it tried, and that a key is meant."""
    path: Path = ()
    for step in loc:
        longer = (*path, step)
        if step == "[key]" or (step in keys.KINDS and longer not in spots and step not in keys.names_in(path)):
            continue
        path = longer
    return path


def _spot(path: Path, spots: Mapping[Path, Spot]) -> Spot:
    """Return where a value was set, or the nearest thing around it."""
    for length in range(len(path), -1, -1):
        if path[:length] in spots:
            return spots[path[:length]]
    return Spot()


def _nearest_key(path: Path) -> str:
    wrong = str(path[-1])
    here = keys.names_in(path[:-1])
    if near := difflib.get_close_matches(wrong, here, 1):
        return f"did you mean {near[0]}?"
    elsewhere = {key.path[-1]: key.name for key in keys.KEYS}
    if near := difflib.get_close_matches(wrong, elsewhere, 1, cutoff=0.8):
        return f"did you mean {elsewhere[near[0]]}?"
    return f"known here: {', '.join(here)}"


_RULES: Final = {
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "dict_type": "must be keys with values",
    "model_type": "must be keys with values",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le:g}",
}


def _rule(kind: str, context: Mapping[str, Any], message: str) -> str:
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return f"must be one of {_plain(context['expected'])}"
    template = _RULES.get(kind)
    return message if template is None else template.format(**context)


def _plain(expected: str) -> str:
    return expected.replace("'", "").replace(" or ", ", ")


def _found(path: Path, value: object, spot: Spot) -> str:
    if keys.is_secret(path):
        return f'"{masked(value)}"' if isinstance(value, str) else type(value).__name__
    if value is None:
        return "nothing"
    if spot.text is not None:
        return spot.written()
    kinds: dict[type, str] = {dict: "keys with values ", list: "a list "}
    return f"{kinds.get(type(value), '')}{_repr.repr(value)}"


_repr = reprlib.Repr()
_repr.maxother = _repr.maxstring = SHOWN
_repr.maxdict = _repr.maxlist = 3
_repr.maxlevel = 2


_NOT_QUITE_BOOLEANS: Final = frozenset({"yes", "no", "on", "off", "y", "n"})


def _advice(kind: str, context: Mapping[str, Any], value: object, spot: Spot) -> str:
    """Say what to write instead, above all where YAML reads a value otherwise than it looks."""
    if value is None:
        return "give a value, or remove the key to have its default"
    if isinstance(value, bool) and (spot.text or "").lower() in _NOT_QUITE_BOOLEANS and not spot.quoted:
        read = f"YAML reads {spot.text} as {str(value).lower()}"
        known = _plain(context["expected"]).split(", ") if kind == "literal_error" else [spot.text]
        return f"{read}; quote it if text is meant" if spot.text in known else f"{read}; choose one of these"
    if kind == "literal_error":
        near = difflib.get_close_matches(str(value).lower(), _plain(context["expected"]).split(", "), 1)
        return f"did you mean {near[0]}?" if near else ""
    if isinstance(value, str):
        return _advice_for_text(kind, value.strip(), spot)
    if isinstance(value, float) and kind in {"int_type", "int_from_float"} and value.is_integer():
        return f"write {value:.0f}"
    simple = {"string_type": f'quote it: "{spot.text}"', "tuple_type": "put it into [ ]"}
    return simple.get(kind, "") if spot.text is not None else ""


def _advice_for_text(kind: str, text: str, spot: Spot) -> str:
    without = " without quotes" if spot.quoted else ""
    if kind == "bool_type":
        meant = {"true": "true", "yes": "true", "on": "true", "1": "true", "y": "true"}
        meant |= {"false": "false", "no": "false", "off": "false", "0": "false", "n": "false"}
        return f"write {meant[text.lower()]}{without}" if text.lower() in meant else ""
    if kind in {"int_type", "float_type"}:
        try:
            number = Decimal(text)
        except InvalidOperation:
            return "write the number alone, in the unit that the key has" if text[:1].isdigit() else ""
        if "e" in text.lower() and number.is_finite() and abs(number.adjusted()) < SHOWN:
            return f"YAML reads {text} as text; write {number:f}"
        return f"write {text}{without}"
    return f"put it into a list: [{text[:SHOWN]}]" if kind == "tuple_type" else ""
