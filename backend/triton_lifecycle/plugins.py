"""Plug-ins: from a name in the configuration to something that can be called, or to every reason why not.

A name is ``module:attribute`` or that of an entry point of an installed package. What stands there is a function, an
object that can be called, or a class, which is constructed once with the entry's ``settings``.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from triton_lifecycle.bus import is_async
from triton_lifecycle.config import Handler
from triton_lifecycle.errors import ConfigError
from triton_lifecycle.events import TYPES, Event

STAGES: Final = "triton_lifecycle.stages"
"""Group of entry points that are stages."""
HANDLERS: Final = "triton_lifecycle.handlers"
"""Group of entry points that are told of events."""


A = TypeVar("A")
B = TypeVar("B")


class EventHandler(msgspec.Struct, frozen=True):
    """A handler, ready to be subscribed."""

    name: str
    call: Callable[[Any], Any]
    types: tuple[type[Event], ...]


def look_in(folder: Path) -> None:
    """Let modules be imported from this folder too; what is installed comes first."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
        importlib.invalidate_caches()


def load_handlers(entries: Iterable[Handler]) -> list[EventHandler]:
    """Load ``event_driven.handlers``.

    Raises:
        ConfigError: names every problem of every entry.

    """
    known = {event_type.__name__: event_type for event_type in TYPES}
    handlers, problems = [], []
    for position, entry in enumerate(entries):
        where = f"event_driven.handlers.{position}"
        wrong = [
            f"{where}.events: there is no event {name!r}{near(name, known)}"
            for name in entry.events or ()
            if name not in known
        ]
        try:
            call = load(entry.use, entry.settings, group=HANDLERS, where=where)
            check_shape(call, 1, f"{where}: {entry.use!r} must take one argument, the event")
        except ConfigError as error:
            wrong.append(error.message)
        problems += wrong
        if not wrong:
            types = TYPES if entry.events is None else tuple(known[name] for name in entry.events)
            handlers.append(EventHandler(entry.use, call, types))
    refuse(problems)
    return handlers


def judged(first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
    """Return what both make; raises one ``ConfigError`` with the problems of both."""
    problems: list[str] = []

    def attempt(make: Callable[[], Any]) -> Any:  # noqa: ANN401
        try:
            return make()
        except ConfigError as error:
            problems.append(error.message)

    made = attempt(first), attempt(second)
    refuse(problems)
    return made


def load(
    use: str, settings: Mapping[str, Any], *, group: str, where: str, built_in: Iterable[str] = ()
) -> Callable[..., Any]:
    """Return what a name stands for, constructed if it is a class.

    Args:
        use: ``module:attribute`` or the name of an entry point.
        settings: keyword arguments for a class.
        group: of entry points.
        where: the configuration path that holds the name, for the error.
        built_in: further names that would have been right, for the error.

    Raises:
        ConfigError: says what was wrong, where, and what to do.

    """
    found = _find(use, group, where, built_in)
    if inspect.isclass(found):
        try:
            found = found(**settings)
        except Exception as error:
            raise ConfigError(f"{where}: {use!r} cannot be made with these settings: {_said(error)}") from error
    elif settings:
        raise ConfigError(f"{where}.settings: {use!r} takes none, since it is no class")
    if not callable(found):
        raise ConfigError(f"{where}: {use!r} cannot be called; a plug-in is a function, or a class with __call__")
    return found  # type: ignore[no-any-return]


def check_shape(call: Callable[..., Any], arguments: int, rule: str, *, asynchronous: bool = False) -> None:
    """Refuse what does not take so many arguments, or is no coroutine function where one is needed.

    Raises:
        ConfigError: ``rule`` and what was found.

    """
    if asynchronous and not is_async(call):
        raise ConfigError(f"{rule}; it is no coroutine function (async def)")
    try:
        signature = inspect.signature(call)
    except ValueError:  # some of C's functions do not tell
        return
    try:
        signature.bind(*[None] * arguments)
    except TypeError:
        raise ConfigError(f"{rule}; it takes {signature}") from None


def near(name: str, known: Iterable[str]) -> str:
    """Return the part of a message that names the nearest right word, and all of them if there are few."""
    words = sorted(known)
    close = get_close_matches(name, words, 1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are {', '.join(words)}" if words else ""


def refuse(problems: list[str]) -> None:
    """Raise one ``ConfigError`` for all problems; do nothing when there are none."""
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError(f"{len(problems)} problem(s):\n" + "\n".join(f"  {problem}" for problem in problems))


def _find(use: str, group: str, where: str, built_in: Iterable[str]) -> Any:  # noqa: ANN401 - a plug-in may be anything
    module, colon, attribute = use.partition(":")
    offered = {} if colon else {point.name: point for point in entry_points(group=group)}
    if colon and not (module and attribute):
        raise ConfigError(f"{where}: {use!r} is not of the form 'module:attribute'")
    if not colon and use not in offered:
        raise ConfigError(
            f"{where}: {use!r} is neither built in, nor an installed entry point of {group}, nor of the form "
            f"'module:attribute'{near(use, {*built_in, *offered})}"
        )
    try:
        if not colon:
            return offered[use].load()
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{where}: {use!r} cannot be imported: {error}; modules are looked for among the installed packages and "
            "in the model version's folder, beside model.json"
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where}: importing {use!r} failed: {_said(error)}") from error
    return _attribute(imported, attribute, where)


def _attribute(module: Any, path: str, where: str) -> Any:  # noqa: ANN401
    found = module
    for name in path.split("."):
        if not hasattr(found, name):
            public = [known for known in vars(found) if not known.startswith("_")] if hasattr(found, "__dict__") else []
            raise ConfigError(f"{where}: {module.__name__!r} has no {path!r}{near(name, public)}")
        found = getattr(found, name)
    return found


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
