"""Whom the callers ask, and the ledger of what happened there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from triton_lifecycle.admission import Admission
from triton_lifecycle.config import Admission as AdmissionSettings
from triton_lifecycle.config import Config, TimeoutHandling
from triton_lifecycle.context import Contexts
from triton_lifecycle.engine.simulated import SimulatedEngine
from triton_lifecycle.engine.supervisor import Supervisor
from triton_lifecycle.errors import LifecycleError, from_wire
from triton_lifecycle.events import ENDINGS, Admitted, Event, Finished
from triton_lifecycle.pipeline import Pipeline
from triton_lifecycle.simulation.call import SilentCall
from triton_lifecycle.stages import Services, build_route
from triton_lifecycle.store.memory import MemoryStore
from triton_lifecycle.store.records import SUMMARY
from triton_lifecycle.triton import RawRequest

SLOTS: Final = 32
ENGINE: Final[dict[str, Any]] = {
    "max_num_seqs": SLOTS,
    "base_ms": 5.0,
    "per_sequence_us": 200.0,
    "token_sigma": 0.05,
    "first_token_sigma": 0.2,
    "kv_blocks": 8192,
    "mean_output_tokens": 100.0,
}
LIMITS: Final = AdmissionSettings(max_waiting_requests=2 * SLOTS, refuse_unreachable=True, earliest_deadline_first=True)


class Ledger:
    """Writes down when permits came back, and the tokens that were made."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.made = self.used = 0
        self._admitted: set[str] = set()

    def wants(self, event_type: type[Event]) -> bool:
        """Whether an event of this type is looked at."""
        return event_type is Admitted or event_type in ENDINGS

    def publish(self, event: Event) -> None:
        """Take an event as the pipeline publishes it."""
        if self.wants(type(event)):
            self.take(event)

    def take(self, event: Event) -> None:
        """Take an admission or an end."""
        if isinstance(event, Admitted):
            self._admitted.add(event.request_id)
        elif event.request_id in self._admitted:
            self._admitted.discard(event.request_id)
            self.ends.append(event.at)
            tokens = getattr(event, "output_tokens", 0)
            self.made += tokens
            self.used += tokens if isinstance(event, Finished) else 0


class Server(Protocol):
    """Whom the callers ask."""

    async def start(self) -> None:
        """Be ready for requests."""
        ...

    async def serve(self, prompt: str, max_tokens: int, left: float) -> LifecycleError | None:
        """Serve one request within ``left`` seconds; return its error, if any."""
        ...

    async def close(self) -> None:
        """End what runs by itself; the ledger is whole then."""
        ...


Open = Callable[[AdmissionSettings, Ledger], Server]


class InProcess:
    """The pipeline with the simulated engine. Build it inside a running loop."""

    def __init__(self, settings: AdmissionSettings, ledger: Ledger) -> None:
        clock = asyncio.get_running_loop().time
        config = Config(admission=settings, timeout_handling=TimeoutHandling(enabled=False))
        self._engine = SimulatedEngine.from_settings(ENGINE)
        self._admission = Admission(settings, most=1_000_000, slots=SLOTS, clock=clock)
        self._supervisor = Supervisor(self._engine, config.error_handling, startup=1.0, clock=clock)
        route = build_route(Services(config, self._engine, self._supervisor, self._admission))
        contexts = Contexts(
            max_live=1_000_000, ended=MemoryStore({SUMMARY: 1.0}, max_requests=0, clock=clock), clock=clock
        )
        self._pipeline = Pipeline(route, contexts, ledger, None, "m")

    async def start(self) -> None:
        """Start the engine."""
        await self._engine.start()

    async def serve(self, prompt: str, max_tokens: int, left: float) -> LifecycleError | None:
        """Serve one request; return its error, if any."""
        call = _Call(prompt, max_tokens, left)
        await self._pipeline.run(call)
        return call.error

    async def close(self) -> None:
        """End what runs by itself."""
        await self._supervisor.stop()
        await self._engine.stop()


class _Call(SilentCall):
    """Stands where a Triton request is."""

    def __init__(self, prompt: str, max_tokens: int, timeout: float) -> None:
        sampling = msgspec.json.encode({"max_tokens": max_tokens}).decode()
        tensors = {"text_input": prompt, "stream": True, "sampling_parameters": sampling}
        self.id = ""
        self._raw = RawRequest(tensors, {"timeout_ms": timeout * 1e3})
        self.error: LifecycleError | None = None

    def read(self) -> RawRequest:
        """Return the values."""
        return self._raw

    def fail(self, error: LifecycleError) -> asyncio.Future[None]:
        """Take an error, as it would arrive on the wire."""
        self.error = from_wire(error.wire())
        return super().fail(error)
