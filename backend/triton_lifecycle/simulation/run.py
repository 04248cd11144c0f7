"""Recorded requests through the real pipeline, in virtual time: the same seed gives the same events, byte for byte."""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Final

import msgspec

from triton_lifecycle.admission import Admission, Ask
from triton_lifecycle.bus import Bus
from triton_lifecycle.config import Admission as AdmissionConfig
from triton_lifecycle.config import Config, ErrorHandling, RequestLimits, TimeoutHandling
from triton_lifecycle.context import Context, Contexts
from triton_lifecycle.engine import Engine
from triton_lifecycle.engine.simulated import SimulatedEngine, SimulatedSettings
from triton_lifecycle.engine.supervisor import Supervisor
from triton_lifecycle.errors import Draining, LifecycleError, QueueFull
from triton_lifecycle.events import Event, Finished, Rejected
from triton_lifecycle.pipeline import Pipeline
from triton_lifecycle.simulation.call import RecordedCall
from triton_lifecycle.simulation.engine import PacedEngine, reach
from triton_lifecycle.simulation.trace import Pace, Trace
from triton_lifecycle.simulation.virtual_time import RepeatableLoop
from triton_lifecycle.stages import Route, Services, build_route
from triton_lifecycle.store.memory import MemoryStore
from triton_lifecycle.store.records import SUMMARY
from triton_lifecycle.story import Story
from triton_lifecycle.timeouts.deadline import Deadline
from triton_lifecycle.timeouts.limits import Limits

AS_RECORDED: Final = ErrorHandling(max_recovery_attempts=1_000_000, recovery_delay=0.0)
"""Tries again as often as was recorded, when it was."""
_current: contextvars.ContextVar[Trace] = contextvars.ContextVar("trace")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How to simulate.

    Attributes:
        seed: of everything that the recording does not settle.
        config: what to decide by; ``None`` infers it from the recording.
        changed: whether ``config`` differs from what was recorded in its time limits, so that requests get theirs
            from it and not as recorded.
        engine: settings of the simulated engine, which then keeps its own pace; ``None`` keeps the recorded pace.

    """

    seed: int = 0
    config: Config | None = None
    changed: bool = False
    engine: SimulatedSettings | None = None


def simulate(stories: Iterable[Story], plan: Plan, *, progress: Callable[[int], None] = lambda _: None) -> list[Event]:
    """Run the requests whose beginning was recorded, and return what happened.

    Args:
        stories: the recorded requests.
        plan: how.
        progress: told how many requests have ended.

    """
    given = sorted(stories, key=lambda story: (story.begin, story.id))
    if not any(story.received is not None for story in given):
        return []
    with asyncio.Runner(loop_factory=lambda: RepeatableLoop(given[0].begin)) as runner:
        return runner.run(_simulate(given, plan, progress))


def infer(stories: list[Story]) -> Config:
    """Return the configuration that the recorded decisions tell of.

    The number of live sequences allowed is what was live when a request for a single one was refused for it; the time
    limits are those that most requests had.
    """
    changes = []
    for story in stories:
        if story.admitted is not None or (story.received is None and not isinstance(story.ending, Rejected)):
            began = story.begin if story.admitted is None else story.admitted.at
            size = _sequences(story)
            changes.append((began, size, 0))
            if story.ending is not None:
                changes.append((story.end, -size, 0))
        elif isinstance(story.ending, Rejected) and story.ending.slug == QueueFull.slug:
            changes.append((story.ending.at, 0, _sequences(story)))
    live, full = 0, list[tuple[bool, int]]()
    # Of one moment the ends first, then the refusals: never is more counted than was allowed.
    for _, change, asked in sorted(changes, key=lambda change: change[:2]):
        live += change
        if asked:
            full.append((asked == 1, live))
    prepared = [story.prepared for story in stories if story.prepared is not None]
    return Config(
        admission=AdmissionConfig(max_live_requests=max(1, max(full)[1]) if full else None),
        timeout_handling=_timeouts(stories),
        request_limits=RequestLimits(
            max_sequences=max([128, *(item.sequences for item in prepared)]),
            max_prompt_bytes=max([4 * 2**20, *(item.prompt_bytes for item in prepared)]),
        ),
    )


def _timeouts(stories: list[Story]) -> TimeoutHandling:
    seen: dict[str, Counter[float]] = {"first_token": Counter(), "stall": Counter(), "total": Counter()}
    for story in stories:
        if story.admitted is None:
            continue
        for name, limit in story.admitted.limits.items():
            by_caller = name == "total" and story.prepared is not None and story.prepared.timeout is not None
            if name in seen and not by_caller:
                seen[name][limit] += 1
    common = {name: counts.most_common(1)[0][0] for name, counts in seen.items() if counts}
    if not common:
        return TimeoutHandling(enabled=False)
    total = common.get("total", 30.0)
    return TimeoutHandling(
        default_timeout=total,
        min_timeout=min(5.0, total),
        max_timeout=max(300.0, total),
        first_token_timeout=common.get("first_token"),
        stall_timeout=common.get("stall"),
    )


async def _simulate(stories: list[Story], plan: Plan, progress: Callable[[int], None]) -> list[Event]:
    bus = Bus()
    events: list[Event] = []
    bus.subscribe(events.append, name="recording")
    by_model: dict[str, list[Story]] = {}
    for story in stories:
        by_model.setdefault(story.model, []).append(story)
    unknown = by_model.pop("", []) if len(by_model) > 1 else []
    models = {model: _Model(model, own + unknown, plan, bus) for model, own in by_model.items()}
    tasks: set[asyncio.Task[None]] = set()
    until = max(story.end for story in stories)
    ended = 0

    def count(task: asyncio.Task[None]) -> None:
        nonlocal ended
        ended += 1
        tasks.discard(task)
        progress(ended)

    for model in models.values():
        await model.start()
    for story in stories:
        if story.received is None:
            continue
        trace = Trace(story, until)
        await reach(trace.received.at)
        task = asyncio.create_task(models[story.model].serve(trace))
        tasks.add(task)
        task.add_done_callback(count)
    while tasks:
        await asyncio.wait(set(tasks))
    for model in models.values():
        await model.close()
    return events


class _Model:
    """One model's server: its admission, its engine, its pipeline."""

    def __init__(self, name: str, stories: list[Story], plan: Plan, bus: Bus) -> None:
        clock = asyncio.get_running_loop().time
        config = plan.config or infer(stories)
        if plan.engine is None:
            # The recorded engine's failures are repeated, and so is that it was tried again.
            config = config.model_copy(update={"error_handling": AS_RECORDED})
        self._contexts = Contexts(
            max_live=config.context_management.max_contexts,
            ended=MemoryStore({SUMMARY: 1.0}, max_requests=0, clock=clock),
            clock=clock,
            identity=lambda: _current.get().identity,
        )
        self._admission = Admission(config.admission, most=config.context_management.max_contexts, clock=clock)
        self._engine: Engine = (
            PacedEngine(_current.get, Pace.of(stories), plan.seed, _longest(stories))
            if plan.engine is None
            else SimulatedEngine(plan.engine.model_copy(update={"seed": plan.seed}))
        )
        self._supervisor = Supervisor(
            self._engine,
            ErrorHandling(enable_auto_recovery=False) if plan.engine is None else config.error_handling,
            clock=clock,
        )
        route = build_route(Services(config, self._engine, self._supervisor, self._admission))
        self._pipeline = Pipeline(self._as_recorded(route, limits=not plan.changed), self._contexts, bus, None, name)
        drained = [
            story.end for story in stories if isinstance(story.ending, Rejected) and story.ending.slug == Draining.slug
        ]
        self._draining_from = min(drained, default=None)
        self._until = max(story.end for story in stories)
        # A request from before the recording is not run again, but it held its permit until its end.
        self._holders = [
            asyncio.create_task(self._hold(story))
            for story in stories
            if story.received is None and not isinstance(story.ending, Rejected)
        ]

    async def start(self) -> None:
        """Start the engine."""
        await self._supervisor.start()
        self._admission.fit(self._engine.limits.max_num_seqs)

    async def serve(self, trace: Trace) -> None:
        """Serve one request to its end."""
        _current.set(trace)
        handle = None
        if trace.outside is not None:
            at, error = trace.outside
            handle = asyncio.get_running_loop().call_at(at, self._interrupt, trace.story.id, error)
        try:
            await self._pipeline.run(RecordedCall(trace))
        finally:
            if handle is not None:
                handle.cancel()

    async def close(self) -> None:
        """End what is left."""
        for holder in self._holders:
            holder.cancel()
        if self._holders:
            await asyncio.wait(self._holders)
        await self._supervisor.stop()
        await self._engine.stop()

    async def _hold(self, story: Story) -> None:
        try:
            permit = self._admission.admit(Ask(sequences=_sequences(story)))
        except LifecycleError:
            return
        try:
            await reach(story.end if story.ending is not None else self._until)
        finally:
            permit.release()

    def _interrupt(self, request_id: str, error: LifecycleError) -> None:
        for ctx in self._contexts.live():
            if ctx.id == request_id:
                ctx.interrupt(error)

    def _as_recorded(self, route: Route, *, limits: bool) -> Route:
        """Let each stage take the time that it took."""
        wrappers: dict[str, Callable[..., Awaitable[None]]] = {
            "receive": partial(self._receive, limits=limits),
            "preprocess": self._preprocess,
            "schedule": self._schedule,
        }
        before = tuple(
            (name, partial(wrappers[name], stage) if name in wrappers else stage) for name, stage in route.before
        )
        return msgspec.structs.replace(route, before=before)

    async def _receive(self, stage: Callable[[Context], Awaitable[None]], ctx: Context, *, limits: bool) -> None:
        trace = _current.get()
        if trace.verdict is not None and trace.verdict[0] == "receive":
            await reach(trace.story.end)
        await stage(ctx)
        if limits and trace.limits is not None and trace.story.admitted is not None:
            if ctx.deadline is not None:
                ctx.deadline.close()
            first_token, stall, total = map(trace.limits.get, ("first_token", "stall", "total"))
            received = ctx.execution.times["received"]
            ctx.deadline = Deadline(Limits(first_token, stall, total), ctx.interrupt, began=received)
            ctx.held.callback(ctx.deadline.close)
            ctx.execution.limits = trace.story.admitted.limits
        await reach(trace.story.stage_end("receive") or trace.story.end)

    async def _preprocess(self, stage: Callable[[Context], Awaitable[None]], ctx: Context) -> None:
        trace = _current.get()
        await reach(trace.story.stage_end("preprocess") or trace.story.end)
        await stage(ctx)

    async def _schedule(self, stage: Callable[[Context], Awaitable[None]], ctx: Context) -> None:
        trace = _current.get()
        if trace.decided is not None:
            await reach(trace.decided)
        if trace.verdict is not None and trace.verdict[0] == "schedule":
            raise trace.verdict[1]
        if self._draining_from is not None and asyncio.get_running_loop().time() >= self._draining_from:
            self._admission.drain()
        await stage(ctx)


def _sequences(story: Story) -> int:
    """Return how often a request counts."""
    for told in (story.admitted, story.prepared):
        if told is not None:
            return told.sequences
    return story.ending.finish_reason.count(",") + 1 if isinstance(story.ending, Finished) else 1


def _longest(stories: list[Story]) -> int:
    """Return a model length into which every recorded request fits."""
    most = 2048
    for story in stories:
        if story.received is not None and story.prepared is not None:
            most = max(most, Trace(story).prompt_tokens + (story.prepared.max_tokens or story.output_tokens) + 1)
    return most
