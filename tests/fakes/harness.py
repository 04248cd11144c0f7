"""The pipeline between a scripted engine and a fake Triton, without threads, for virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import msgspec

from tests.fakes import pb_utils
from triton_lifecycle.admission import Admission
from triton_lifecycle.bus import Bus
from triton_lifecycle.config import OFFICIAL, Config, TimeoutHandling
from triton_lifecycle.context import Contexts
from triton_lifecycle.engine import Chunk, Delta, EmbeddingRequest, EngineRequest, Limits, Load, Remainder, Sampling
from triton_lifecycle.engine.supervisor import Supervisor
from triton_lifecycle.errors import EngineDied, GenerationFailed
from triton_lifecycle.events import Event
from triton_lifecycle.pipeline import Pipeline
from triton_lifecycle.stages import Services, build_route
from triton_lifecycle.timeouts.predictor import Predictor
from triton_lifecycle.tracing import Tracing
from triton_lifecycle.triton import Call


class Step(msgspec.Struct, frozen=True):
    """One thing that the scripted engine does for a request."""

    do: str
    """``token``, ``raise``, ``die``, ``bug`` (an exception of no known class), ``vanish`` (ends without finishing)."""
    after: float = 0.0
    tokens: int = 1
    times: int = 1_000_000
    """How often it does so, when it is no token; afterwards the engine goes on to the next step."""


class ScriptedEngine:
    """An engine that does for each request what its script says; a script's tokens are numbered from 0."""

    limits = Limits(max_model_len=1000, vocab_size=1000)
    sampling_fields: Mapping[str, Any] = {"max_tokens": int | None, "n": int}

    def __init__(self, startup: float = 0.5) -> None:
        self.scripts: dict[str, list[Step]] = {}
        self.known: dict[str, str] = {}
        self.traces: list[Mapping[str, str] | None] = []
        """Of each request, what named the span above the engine's."""
        self.most = 0
        """Requests that it had at once."""
        self.alive = True
        self.deaths = 0
        self.continuable = True
        self.startup = startup
        self._died = asyncio.Event()
        self._prompts: list[str] = []
        self._done: Counter[tuple[str, int]] = Counter()

    async def restart(self) -> None:
        await asyncio.sleep(self.startup)
        self._died = asyncio.Event()
        self.alive = True

    def die(self) -> None:
        self.alive = False
        self.deaths += 1
        self._died.set()

    def remainder(self, request: EngineRequest, made: Sequence[int]) -> Remainder | None:
        if not self.continuable:
            return None
        return Remainder(request.after(made, request.sampling.native), len(made))

    def repeatable(self, sampling: Sampling) -> bool:
        return True

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def sampling(self, values: Mapping[str, Any]) -> Sampling:
        return Sampling(n=values.get("n", 1), max_tokens=values.get("max_tokens", 16), native=None)

    async def prove(self, sampling: Sampling, limit: float) -> None: ...

    async def render(self, messages: list[dict[str, Any]], tools: Any) -> str:
        return "|".join(turn["content"] for turn in messages)

    async def embed(self, request: EmbeddingRequest) -> list[float]:
        raise AssertionError("the scripted engine does not embed")

    async def tokenize(self, prompt: str, *, special: bool = True, room: int = 1, images: int = 0) -> list[int]:
        if prompt not in self._prompts:
            self._prompts.append(prompt)
        return [self._prompts.index(prompt)]

    def load(self) -> Load:
        return Load(running=len(self.known), waiting=0, kv_usage=0.0, requests=len(self.known))

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Chunk, None]:
        prompt = self._prompts[request.token_ids[0]]
        script = self.scripts[prompt]
        made = len(request.token_ids) - 1
        self.known[request.id] = prompt
        self.traces.append(request.trace)
        self.most = max(self.most, len(self.known))
        try:
            start = 0
            for position, step in enumerate(script):
                ids = tuple(range(start, start + step.tokens))
                start += step.tokens if step.do == "token" else 0
                if step.do == "token" and start <= made:
                    continue
                await self._wait(step.after)
                if step.do != "token":
                    self._happen(step, (prompt, position))
                    continue
                last = position == len(script) - 1
                yield self._chunk(ids[max(0, made - ids[0]) :], last=last)
                if last:
                    return
            yield self._chunk((), last=True)
        except _VanishedError:
            return
        finally:
            del self.known[request.id]

    async def _wait(self, seconds: float) -> None:
        """Wait, unless the engine dies meanwhile."""
        if not self.alive:
            raise EngineDied("scripted")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._died.wait()
        if not self.alive:
            raise EngineDied("scripted")

    def _happen(self, step: Step, place: tuple[str, int]) -> None:
        if self._done[place] >= step.times:
            return
        self._done[place] += 1
        match step.do:
            case "raise":
                raise GenerationFailed("scripted")
            case "die":
                self.die()
                raise EngineDied("scripted")
            case "bug":
                raise ZeroDivisionError("scripted")
            case "vanish":
                raise _VanishedError

    @staticmethod
    def _chunk(ids: tuple[int, ...], *, last: bool) -> Chunk:
        delta = Delta(0, "".join(f"{number % 10}" for number in ids), ids, "length" if last else None)
        return Chunk((delta,), finished=last, scheduled_at=None, cached_tokens=0)


class _VanishedError(Exception):
    """The engine ends a request's stream without finishing it."""


def text_of(script: list[Step]) -> str:
    """Return the whole text that a script's tokens make."""
    return "".join(f"{number % 10}" for number in range(sum(step.tokens for step in script if step.do == "token")))


class VirtualLane:
    """Does the job when its turn comes, ``delay`` virtual seconds after the one before."""

    def __init__(self, delay: float = 0.0) -> None:
        self._delay = delay
        self._free_at = 0.0

    def submit(self, job: Any) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._free_at = max(self._free_at, loop.time()) + self._delay

        def work() -> None:
            try:
                job()
            except Exception as error:  # noqa: BLE001 - belongs to the future
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(None)

        loop.call_at(self._free_at, work)
        return future


class Harness:
    """A pipeline with everything around it in reach of a test. Build it inside a running loop."""

    def __init__(
        self,
        config: Config = OFFICIAL,
        engine: Any = None,
        send_delay: float = 0.0,
        startup: float = 0.5,
        hour: Callable[[], float] = lambda: 12.0,
        tracing: Tracing | None = None,
    ) -> None:
        self.engine = engine or ScriptedEngine()
        clock = asyncio.get_running_loop().time
        self.bus = Bus()
        self.events: list[Event] = []
        self.bus.subscribe(self.events.append)
        self.contexts = Contexts(max_live=config.context_management.max_contexts, clock=clock)
        self.admission = Admission(config.admission, most=10_000, slots=self.engine.limits.max_num_seqs, clock=clock)
        self.supervisor = Supervisor(self.engine, config.error_handling, startup=startup, clock=clock)
        self.predictor = self._learner(config.timeout_handling, hour)
        if tracing is not None:
            self.bus.subscribe(tracing.take, Tracing.TYPES, name="tracing")
        route = build_route(Services(config, self.engine, self.supervisor, self.admission, self.predictor, tracing))
        self.pipeline = Pipeline(route, self.contexts, self.bus, None, "test")
        self._send_delay = send_delay

    def _learner(self, settings: TimeoutHandling, hour: Callable[[], float]) -> Predictor | None:
        if not settings.enabled or not settings.enable_intelligent_timeout:
            return None
        limits = self.engine.limits
        predictor = Predictor(
            settings.timeout_prediction_model,
            max_model_len=limits.max_model_len,
            slots=limits.max_num_seqs,
            kv_usage=lambda: self.engine.load().kv_usage,
            silence=self.supervisor.silence,
            clock=asyncio.get_running_loop().time,
            hour=hour,
        )
        self.bus.subscribe(predictor.take, Predictor.TYPES, name="predictor")
        return predictor

    async def close(self) -> None:
        """End what runs by itself."""
        await self.supervisor.stop()
        await self.engine.stop()

    def watch(self) -> None:
        """Have the engine looked at, as in a server; ends with ``supervisor.stop()``."""
        self.supervisor.watch()

    async def serve(self, request: pb_utils.InferenceRequest) -> None:
        """Serve one request to its end, its last response sent."""
        await self.pipeline.run(Call(request, pb_utils, VirtualLane(self._send_delay)))
        for _ in range(1000):
            if request.sender.finals:
                return
            await asyncio.sleep(max(self._send_delay, 0.001))
