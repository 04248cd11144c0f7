"""Which lists of stages can work: judged by their names alone, before anything is imported."""

from __future__ import annotations

from typing import Final

from triton_lifecycle.config import STAGES, Stage

BEFORE: Final = ("receive", "preprocess", "schedule")
AFTER: Final = ("postprocess", "respond")
_NEEDS: Final = (
    ("receive", "preprocess", "it reads the request that 'preprocess' prepares"),
    ("receive", "schedule", "it reads the priority and the time limit that 'schedule' goes by"),
    ("postprocess", "respond", "it makes the response that 'respond' sends"),
)
_WITHOUT: Final = {
    "receive": "nothing would read the request: name 'receive', or a plug-in before 'execute' in its place",
    "preprocess": "nothing would prepare the request: name 'preprocess', or a plug-in before 'execute' in its place",
    "postprocess": "nothing would make responses: name 'postprocess', or a plug-in behind 'execute' in its place",
    "respond": "nothing would answer: name 'respond', or a plug-in behind 'execute' in its place",
}


def entries(stages: tuple[str | Stage, ...]) -> tuple[Stage, ...]:
    """Return every entry in its long form."""
    return tuple(Stage(use=stage) if isinstance(stage, str) else stage for stage in stages)


def is_execute(stage: Stage) -> bool:
    """Whether this entry is the one execute stage."""
    return stage.use == "execute" or stage.role == "execute"


def judge(stages: tuple[Stage, ...]) -> list[str]:
    """Return everything that is wrong with the order of these stages; nothing when they can work."""
    names = [stage.use for stage in stages]
    engines = [position for position, stage in enumerate(stages) if is_execute(stage)]
    problems = [
        f"pipeline.stages: {name!r} is named {names.count(name)} times" for name in STAGES if names.count(name) > 1
    ]
    for position, stage in enumerate(stages):
        if stage.use in STAGES and (stage.settings or (stage.role and stage.use != "execute")):
            problems.append(
                f"pipeline.stages.{position}: {stage.use!r} is built in; settings and role are for plug-ins"
            )
    if not engines:
        problems.append("pipeline.stages: 'execute' is missing (a plug-in in its place says role: execute)")
    elif len({names[position] for position in engines}) > 1:
        problems.append(
            "pipeline.stages: there must be one execute stage, found " + ", ".join(names[i] for i in engines)
        )
    if problems:
        return problems
    return _misplaced(names, engines[0])


def _misplaced(names: list[str], at: int) -> list[str]:
    before, after = names[:at], names[at + 1 :]
    problems = [f"pipeline.stages: {name!r} must come before 'execute'" for name in BEFORE if name in after]
    problems += [f"pipeline.stages: {name!r} must come after 'execute'" for name in AFTER if name in before]
    for first, second, why in _NEEDS:
        for side in (before, after):
            if first in side and second in side and side.index(first) > side.index(second):
                problems.append(f"pipeline.stages: {first!r} must come before {second!r}: {why}")
    for name, why in _WITHOUT.items():
        side = before if name in BEFORE else after
        needless = name == "preprocess" and names[at] != "execute"
        if name not in names and not needless and all(other in STAGES for other in side):
            problems.append(f"pipeline.stages: {why}")
    return problems
