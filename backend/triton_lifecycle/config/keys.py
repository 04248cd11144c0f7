"""All keys of the configuration as a flat list, read off the sections."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

import msgspec

from triton_lifecycle.config.sections import Config, Section
from triton_lifecycle.config.urls import Url

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


class Key(msgspec.Struct, frozen=True):
    """One key."""

    path: tuple[str, ...]
    default: Any
    kind: Any
    """Its type as declared, without ranges."""
    doc: str
    optional: bool = False
    """Whether it stands in a section that is absent by default."""

    @property
    def name(self) -> str:
        """The path with dots."""
        return ".".join(self.path)

    @property
    def is_text(self) -> bool:
        """Whether its values are texts and nothing else."""
        return all(kind is type(None) or issubclass(kind, str) for kind in _kinds(self.kind))


def is_section(path: tuple[str | int, ...]) -> bool:
    """Whether a section stands at a path."""
    return section_at(path) is not None


def is_secret(path: tuple[str | int, ...]) -> bool:
    """Whether the value at a path may hold a password."""
    return any(key.path == path and any(issubclass(kind, Url) for kind in _kinds(key.kind)) for key in KEYS)


def names_in(path: tuple[str | int, ...]) -> list[str]:
    """Return the keys that may stand at a path."""
    section = section_at(path)
    return [] if section is None else list(section.model_fields)


def section_at(path: tuple[str | int, ...]) -> type[Section] | None:
    """Return the section at a path; one in a list is found by any number."""
    section: type[Section] | None = Config
    for step in path:
        if isinstance(step, int):
            continue
        field = None if section is None else section.model_fields.get(step)
        section = None if field is None else _section_in(field.annotation)
    return section


def _walk(section: type[Section], path: tuple[str, ...], *, optional: bool = False) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        below = field.annotation if isinstance(field.annotation, type) else None
        if below is not None and issubclass(below, Section):
            yield from _walk(below, (*path, name), optional=optional)
            continue
        yield Key((*path, name), _default(field), field.annotation, field.description or "", optional)
        inner = _section_in(field.annotation)
        if inner is not None and field.default is None:
            yield from _walk(inner, (*path, name), optional=True)


def _default(field: FieldInfo) -> Any:  # noqa: ANN401 - as declared
    return ... if field.is_required() else field.get_default(call_default_factory=True)


def _section_in(annotation: Any) -> type[Section] | None:  # noqa: ANN401 - a type, in whatever form
    for kind in _kinds(annotation):
        if issubclass(kind, Section):
            return kind
    return None


def _kinds(annotation: Any) -> list[type]:  # noqa: ANN401
    """Return the plain types that an annotation is made of; of a list or mapping, also those within."""
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return [annotation]
    origin = get_origin(annotation)
    if origin is Literal:
        return [type(value) for value in get_args(annotation)]
    inner = [kind for part in get_args(annotation) if part is not ... for kind in _kinds(part)]
    if origin in {Union, types.UnionType} or not isinstance(origin, type):
        return inner
    return [origin, *inner]


KINDS: frozenset[object] = frozenset(
    {"str", "int", "float", "bool", *(kind.__name__ for kind in Section.__subclasses__())}
)
"""What pydantic calls the kinds of a value that may be of several."""

KEYS: tuple[Key, ...] = tuple(_walk(Config, ()))
"""In the order of the sections."""
