"""From a file and the environment to a :class:`Config`, and for each value where it came from."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path as File
from typing import Any, Final, Literal

import msgspec
from pydantic import ValidationError

from triton_lifecycle.config import document, environment
from triton_lifecycle.config.keys import KEYS
from triton_lifecycle.config.problems import InvalidConfig, Path, Problem, Spot, problems_of
from triton_lifecycle.config.sections import OFFICIAL, Config

FILE_NAME: Final = "request_lifecycle.yaml"
TOP: Final = "request_lifecycle"
_OFFICIAL_VALUES: Final[dict[str, Any]] = OFFICIAL.model_dump(exclude_unset=True)


class Origin(msgspec.Struct, frozen=True):
    """Where a value came from."""

    kind: Literal["default", "official default", "file", "environment"]
    spot: Spot = Spot()

    def __str__(self) -> str:
        if self.kind == "file":
            return f"{self.spot.file}:{self.spot.line}"
        return self.spot.variable if self.kind == "environment" else self.kind


class Loaded(msgspec.Struct, frozen=True):
    """A configuration and where it came from."""

    config: Config
    file: File | None
    """``None`` when there is no file, so that the official defaults apply."""
    origins: dict[str, Origin]
    """By the key's name; keys of absent sections are left out."""

    def summary(self) -> str:
        """Say in one line where the values come from."""
        name = f"no {FILE_NAME}: the official backend's contract" if self.file is None else str(self.file)
        variables = sorted(o.spot.variable for o in self.origins.values() if o.kind == "environment")
        return f"{name}; from the environment: {', '.join(variables) or 'nothing'}"


def load(path: File, environ: Mapping[str, str] | None = None) -> Config:
    """Read ``request_lifecycle.yaml`` and the environment; a missing file means :data:`OFFICIAL`.

    Args:
        path: the file.
        environ: variables; those of the process when left out.

    Raises:
        InvalidConfig: something is wrong; the message lists every problem with its place.

    """
    return read(path, environ).config


def read(path: File | None, environ: Mapping[str, str] | None = None) -> Loaded:
    """Do the same as :func:`load`, and tell where each value came from. Without a path there is no file."""
    there = path is not None and path.exists()
    values, spots, problems = _file(path) if path is not None and there else (copy.deepcopy(_OFFICIAL_VALUES), {}, [])
    settings, wrong = environment.settings(os.environ if environ is None else environ)
    problems += wrong
    for setting in settings:
        _overlay(values, spots, setting)
    config, found = _validated(values, spots)
    problems += [problem for problem in found if not _said_before(problem, problems)]
    if problems or config is None:
        raise InvalidConfig(str(path) if there else "configuration", problems)
    if not there and not settings:
        config = OFFICIAL
    return Loaded(config, path if there else None, _origins(config, spots, there=there))


def _file(path: File) -> tuple[dict[str, Any], dict[Path, Spot], list[Problem]]:
    whole = Spot(file=str(path))
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        return {}, {}, [Problem("", f"not UTF-8 at byte {error.start}", whole, advice="save it as UTF-8")]
    except OSError as error:
        return {}, {}, [Problem("", f"cannot be read: {error.strerror}", whole)]
    found = document.read(text, file=str(path))
    problems = found.problems
    if found.value is None:
        return {}, {}, problems
    form = f"the one key at the top must be {TOP!r}, and all sections stand below it"
    if not isinstance(found.value, dict):
        return {}, {}, [*problems, Problem("", form, found.spots[()])]
    problems += [Problem("", form, found.spots[(key,)].of_key(), found=key) for key in found.value if key != TOP]
    if TOP not in found.value and not found.value:
        problems.append(Problem("", form, whole))
    sections = found.value.get(TOP)
    if sections is not None and not isinstance(sections, dict):
        return {}, {}, [*problems, Problem(TOP, "must be keys with values", found.spots[(TOP,)])]
    spots = {path[1:]: spot for path, spot in found.spots.items() if path[:1] == (TOP,)}
    # A section whose keys are all commented out is a section of defaults.
    return (
        {k: {} if v is None and k in Config.model_fields else v for k, v in (sections or {}).items()},
        spots,
        problems,
    )


def _overlay(values: dict[str, Any], spots: dict[Path, Spot], setting: environment.Setting) -> None:
    path = setting.key.path
    at: Any = values
    for step in path[:-1]:
        if at.get(step) is None:
            at[step] = {}
        at = at[step]
        if not isinstance(at, dict):
            # The file has something else there, which is a problem of its own.
            return
    at[path[-1]] = setting.value
    for known in [known for known in spots if known[: len(path)] == path]:
        del spots[known]
    spots[path] = setting.spot


def _validated(values: dict[str, Any], spots: Mapping[Path, Spot]) -> tuple[Config | None, list[Problem]]:
    try:
        return Config.model_validate(values), []
    except ValidationError as error:
        details = error.errors()
        problems = problems_of(error, spots)
    # What a section asks of its keys together is looked at only once they are known: do without those that are not.
    for problem in details:
        if problem["type"] == "extra_forbidden":
            _remove(values, problem["loc"])
    try:
        Config.model_validate(values)
    except ValidationError as error:
        problems += [problem for problem in problems_of(error, spots) if problem not in problems]
    return None, problems


def _remove(values: Any, path: tuple[str | int, ...]) -> None:  # noqa: ANN401 - a tree of plain values
    for step in path[:-1]:
        values = values[step]
    values.pop(path[-1], None)


def _said_before(problem: Problem, problems: list[Problem]) -> bool:
    """Whether the value is missing only because of a problem that is known."""
    return any(known.path == problem.path and known.spot == problem.spot for known in problems)


def _origins(config: Config, spots: Mapping[Path, Spot], *, there: bool) -> dict[str, Origin]:
    return {key.name: _origin(key.path, spots, there=there) for key in KEYS if holds(config, key.path)}


def _origin(path: Path, spots: Mapping[Path, Spot], *, there: bool) -> Origin:
    spot = spots.get(path)
    if spot is not None:
        # Without the text, which may hold a secret.
        spot = msgspec.structs.replace(spot, text=None)
        return Origin("environment" if spot.variable else "file", spot.of_key() if spot.key_line else spot)
    section, key = str(path[0]), path[-1]
    if not there and key in _OFFICIAL_VALUES.get(section, {}):
        return Origin("official default")
    return Origin("default")


def holds(config: Config, path: tuple[str, ...]) -> bool:
    """Whether a configuration has this key: one of an absent section it has not."""
    at: Any = config
    for step in path:
        if at is None:
            return False
        at = getattr(at, step)
    return True
