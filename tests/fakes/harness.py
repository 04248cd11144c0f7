"""The pipeline between a scripted engine and a fake Triton, without threads, for virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec

from tests.fakes import pb_utils
from triton_lifecycle.admission import Admission
from triton_lifecycle.bus import Bus
from triton_lifecycle.config import OFFICIAL, Config
from triton_lifecycle.context import Contexts
from triton_lifecycle.engine import Chunk, Delta, EmbeddingRequest, EngineRequest, Limits, Load, Sampling
from triton_lifecycle.errors import EngineDied, GenerationFailed
from triton_lifecycle.events import Event
from triton_lifecycle.pipeline import Pipeline
from triton_lifecycle.stages import Services, build_route
from triton_lifecycle.triton import Call


class Step(msgspec.Struct, frozen=True):
    """One thing that the scripted engine does for a request."""

    do: str
    """``token``, ``raise``, ``die``, ``bug`` (an exception of no known class), ``vanish`` (ends without finishing)."""
    after: float = 0.0
    tokens: int = 1


class ScriptedEngine:
    """An engine that does for each request what its script says."""

    limits = Limits(max_model_len=1000, vocab_size=1000)
    sampling_fields: Mapping[str, Any] = {"max_tokens": int | None, "n": int}
    alive = True

    def __init__(self) -> None:
        self.scripts: dict[str, list[Step]] = {}
        self.known: dict[str, str] = {}
        self.most = 0
        """Requests that it had at once."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def sampling(self, values: Mapping[str, Any]) -> Sampling:
        return Sampling(n=values.get("n", 1), max_tokens=values.get("max_tokens", 16), native=None)

    async def prove(self, sampling: Sampling, limit: float) -> None: ...

    async def render(self, messages: list[dict[str, Any]], tools: Any) -> str:
        return "|".join(turn["content"] for turn in messages)

    async def embed(self, request: EmbeddingRequest) -> list[float]:
        raise AssertionError("the scripted engine does not embed")

    async def tokenize(self, prompt: str, *, special: bool = True, room: int = 1) -> list[int]:
        self._prompt = prompt
        return [1, 2, 3]

    def load(self) -> Load:
        return Load(running=len(self.known), waiting=0, kv_usage=0.0, requests=len(self.known))

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Chunk, None]:
        script = self.scripts[self._prompt]
        self.known[request.id] = self._prompt
        self.most = max(self.most, len(self.known))
        try:
            for position, step in enumerate(script):
                await asyncio.sleep(step.after)
                match step.do:
                    case "raise":
                        raise GenerationFailed("scripted")
                    case "die":
                        raise EngineDied("scripted")
                    case "bug":
                        raise ZeroDivisionError("scripted")
                    case "vanish":
                        return
                last = position == len(script) - 1
                delta = Delta(0, "x" * step.tokens, (7,) * step.tokens, "length" if last else None)
                yield Chunk((delta,), finished=last, scheduled_at=None, cached_tokens=0)
        finally:
            del self.known[request.id]


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

    def __init__(self, config: Config = OFFICIAL, engine: Any = None, send_delay: float = 0.0) -> None:
        self.engine = engine or ScriptedEngine()
        clock = asyncio.get_running_loop().time
        self.bus = Bus()
        self.events: list[Event] = []
        self.bus.subscribe(self.events.append)
        self.contexts = Contexts(clock=clock)
        self.admission = Admission(max_live=config.admission.max_live_requests or 10_000, clock=clock)
        route = build_route(Services(config, self.engine, self.admission))
        self.pipeline = Pipeline(route, self.contexts, self.bus, None, "test")
        self._send_delay = send_delay

    async def serve(self, request: pb_utils.InferenceRequest) -> None:
        """Serve one request to its end, its last response sent."""
        await self.pipeline.run(Call(request, pb_utils, VirtualLane(self._send_delay)))
        for _ in range(1000):
            if request.sender.finals:
                return
            await asyncio.sleep(max(self._send_delay, 0.001))
