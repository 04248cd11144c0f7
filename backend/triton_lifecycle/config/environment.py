"""Settings from environment variables: one scheme for every key, and short names for what is often secret.

``LIFECYCLE__TIMEOUT_HANDLING__DEFAULT_TIMEOUT=20`` sets ``timeout_handling.default_timeout``. A key that takes text
takes the value as it is; for any other the value is read as YAML. An empty variable counts as not set.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from triton_lifecycle.config import document
from triton_lifecycle.config.keys import KEYS, Key
from triton_lifecycle.config.problems import Problem, Spot

PREFIX: Final = "LIFECYCLE__"
SHORT: Final = {
    "LIFECYCLE_REDIS_URL": "distributed.redis_url",
    "LIFECYCLE_ETCD_URL": "distributed.etcd_url",
    "LIFECYCLE_KAFKA_SERVERS": "distributed.kafka_servers",
    "LIFECYCLE_CONTROL_TOKEN": "security.control_token",
}


class Setting(msgspec.Struct, frozen=True):
    """What one variable sets."""

    key: Key
    value: Any
    spot: Spot


def variable(key: Key) -> str:
    """Return the name of the variable that sets a key."""
    return PREFIX + "__".join(key.path).upper()


_BY_VARIABLE: Final = {variable(key): key for key in KEYS}
_BY_SHORT: Final = {short: key for short, name in SHORT.items() for key in KEYS if key.name == name}


def settings(environ: Mapping[str, str]) -> tuple[list[Setting], list[Problem]]:
    """Return what the environment sets, and what is wrong with it."""
    found: dict[str, Setting] = {}
    problems: list[Problem] = []
    for name in sorted(environ):
        key = _BY_SHORT.get(name)
        if key is None and not name.startswith(PREFIX):
            continue
        key = key or _BY_VARIABLE.get(name.upper())
        if key is None:
            problems.append(Problem("", "unknown", Spot(variable=name), advice=_nearest(name)))
            continue
        if not environ[name]:
            continue
        setting, wrong = _setting(key, name, environ[name])
        problems += wrong
        other = found.get(key.name)
        if other is not None and other.value != setting.value:
            rule = f"{other.spot.variable} sets the same key to another value"
            problems.append(Problem(key.name, rule, setting.spot, advice="keep one of the two"))
        found[key.name] = setting
    return list(found.values()), problems


def _setting(key: Key, name: str, text: str) -> tuple[Setting, list[Problem]]:
    spot = Spot(variable=name, text=text)
    if key.is_text:
        return Setting(key, text, spot), []
    read = document.read(text)
    wrong = [msgspec.structs.replace(problem, path=key.name, spot=spot) for problem in read.problems]
    # What is no single value in the text is shown as it was read, not as it was written.
    plain = not isinstance(read.value, dict | list)
    return Setting(key, read.value, spot if plain else Spot(variable=name)), wrong


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name.upper(), _BY_VARIABLE, 1)
    return f"did you mean {near[0]}?" if near else f"the form is {PREFIX}SECTION__KEY"
