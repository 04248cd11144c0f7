"""The stages of a request, one file each, and how their configured list becomes a route.

Three shapes: a stage before the engine takes the context; the one execute stage also takes ``deliver``; a stage behind
it takes each chunk and returns what the next one gets, or ``None`` when nothing is to go further. A stage's place in
the list decides its shape.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from triton_lifecycle.admission import Admission
from triton_lifecycle.config import Config
from triton_lifecycle.context import Context
from triton_lifecycle.engine import Chunk, Engine
from triton_lifecycle.errors import ConfigError
from triton_lifecycle.plugins import load_object

Deliver = Callable[[Chunk], Awaitable[None]]
RequestStage = Callable[[Context], Awaitable[None]]
ExecuteStage = Callable[[Context, Deliver], Awaitable[None]]
ChunkStage = Callable[[Context, Any], Awaitable[Any]]


class Services(msgspec.Struct, frozen=True):
    """What the built-in stages work with."""

    config: Config
    engine: Engine
    admission: Admission


class Route(msgspec.Struct, frozen=True):
    """The stages in the order in which a request meets them."""

    before: tuple[tuple[str, RequestStage], ...]
    execute: ExecuteStage
    after: tuple[tuple[str, ChunkStage], ...]


def build_route(services: Services) -> Route:
    """Turn ``pipeline.stages`` of the configuration into callables.

    Raises:
        ConfigError: a name is unknown, a plug-in cannot be loaded, or ``execute`` is missing.

    """
    from triton_lifecycle.stages.execute import Execute
    from triton_lifecycle.stages.postprocess import postprocess
    from triton_lifecycle.stages.preprocess import Preprocess
    from triton_lifecycle.stages.receive import Receive
    from triton_lifecycle.stages.respond import respond
    from triton_lifecycle.stages.schedule import Schedule

    built_in: dict[str, Callable[[], Any]] = {
        "receive": lambda: Receive(services.config.request_limits, services.config.timeout_handling),
        "preprocess": lambda: Preprocess(services.engine, services.config.request_limits),
        "schedule": lambda: Schedule(services.config, services.admission),
        "execute": lambda: Execute(services.engine),
        "postprocess": lambda: postprocess,
        "respond": lambda: respond,
    }
    names = services.config.pipeline.stages
    if names.count("execute") != 1:
        raise ConfigError("pipeline.stages must name 'execute' exactly once")
    stages = [(name, built_in[name]() if name in built_in else load_object(name, "pipeline.stages")) for name in names]
    at = names.index("execute")
    return Route(before=tuple(stages[:at]), execute=stages[at][1], after=tuple(stages[at + 1 :]))
