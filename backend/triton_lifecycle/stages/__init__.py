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
from triton_lifecycle.config import STAGES, Config, Stage
from triton_lifecycle.context import Context
from triton_lifecycle.engine import Chunk, Engine
from triton_lifecycle.engine.supervisor import Supervisor
from triton_lifecycle.errors import ConfigError
from triton_lifecycle.plugins import STAGES as STAGE_PLUGINS
from triton_lifecycle.plugins import check_shape, load, refuse
from triton_lifecycle.timeouts.predictor import Predictor
from triton_lifecycle.tracing import Tracing

Deliver = Callable[[Chunk], Awaitable[None]]
RequestStage = Callable[[Context], Awaitable[None]]
ExecuteStage = Callable[[Context, Deliver], Awaitable[None]]
ChunkStage = Callable[[Context, Any], Awaitable[Any]]


class Services(msgspec.Struct, frozen=True):
    """What the built-in stages work with."""

    config: Config
    engine: Engine
    supervisor: Supervisor
    admission: Admission
    predictor: Predictor | None = None
    """``None`` when limits do not follow predictions."""
    tracing: Tracing | None = None
    """``None`` when requests are not traced."""


class Route(msgspec.Struct, frozen=True):
    """The stages in the order in which a request meets them."""

    before: tuple[tuple[str, RequestStage], ...]
    execute: ExecuteStage
    after: tuple[tuple[str, ChunkStage], ...]


def build_route(services: Services) -> Route:
    """Turn ``pipeline.stages`` of the configuration into callables.

    Raises:
        ConfigError: lists everything that is wrong: names that are unknown, plug-ins that cannot be loaded or have the
            wrong shape, an order that cannot work.

    """
    from triton_lifecycle.stages.execute import Execute
    from triton_lifecycle.stages.order import entries, is_execute, judge
    from triton_lifecycle.stages.postprocess import Response, postprocess
    from triton_lifecycle.stages.preprocess import Preprocess
    from triton_lifecycle.stages.receive import Receive
    from triton_lifecycle.stages.respond import respond, respond_each
    from triton_lifecycle.stages.schedule import Schedule

    performance, errors = services.config.performance_optimization, services.config.error_handling
    built_in: dict[str, Callable[[], Any]] = {
        "receive": lambda: Receive(
            services.config.request_limits,
            services.config.timeout_handling,
            strict=errors.validates,
            off_loop=performance.asynchronous,
            tracing=services.tracing,
        ),
        "preprocess": lambda: Preprocess(services.engine, services.config.request_limits, strict=errors.validates),
        "schedule": lambda: Schedule(services),
        "execute": lambda: Execute(services.engine, services.supervisor, services.config.error_handling),
        "postprocess": lambda: postprocess,
        "respond": lambda: respond if performance.merging else respond_each,
    }
    takes = {"postprocess": Chunk, "respond": Response}
    stages = entries(services.config.pipeline.stages)
    problems = judge(stages)
    at = next((i for i, stage in enumerate(stages) if is_execute(stage)), len(stages))
    made: list[tuple[str, Any]] = []
    for position, stage in enumerate(stages):
        if stage.use in built_in:
            made.append((stage.use, built_in[stage.use]()))
            continue
        following = stages[position + 1].use if position > at and position + 1 < len(stages) else ""
        try:
            made.append((stage.use, _plugin(services, position, stage, _shape(position, at), takes.get(following))))
        except ConfigError as error:
            problems.append(error.message)
    refuse(problems)
    return Route(before=tuple(made[:at]), execute=made[at][1], after=tuple(made[at + 1 :]))


def _shape(position: int, at: int) -> str:
    if position == at:
        return "the context and what delivers a chunk"
    return "the context alone" if position < at else "the context and a chunk"


def _plugin(services: Services, position: int, stage: Stage, shape: str, hands_on: type | None) -> Any:  # noqa: ANN401
    from triton_lifecycle.stages.plugin import PluginStage

    where = f"pipeline.stages.{position}"
    call = load(stage.use, stage.settings, group=STAGE_PLUGINS, where=where, built_in=STAGES)
    arguments = 1 if shape.endswith("alone") else 2
    check_shape(call, arguments, f"{where}: {stage.use!r} must take {shape}", asynchronous=True)
    limit = None if stage.role == "execute" else services.config.pipeline.plugin_timeout
    return PluginStage(stage.use, call, limit, hands_on)
