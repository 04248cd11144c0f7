"""The manager: builds everything from the configuration, owns the event-loop thread, starts, drains and stops it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable
from typing import Any, Final

from triton_lifecycle import control
from triton_lifecycle.admission import Admission
from triton_lifecycle.bus import Bus, NoBus
from triton_lifecycle.config import Config
from triton_lifecycle.context import Contexts
from triton_lifecycle.engine import Engine
from triton_lifecycle.engine.guardian import MARK, Guardian
from triton_lifecycle.errors import Draining, LifecycleError
from triton_lifecycle.interpreter import python_program
from triton_lifecycle.metrics import OfficialMetrics
from triton_lifecycle.pipeline import Pipeline
from triton_lifecycle.stages import Services, build_route
from triton_lifecycle.triton import Call, Lanes
from triton_lifecycle.watch import Watch

log = logging.getLogger(__name__)

LANES: Final = 2
STOP_MARGIN_S: Final = 10.0
"""What :meth:`Manager.stop` may take beyond the drain limit before it gives up waiting."""


class Manager:
    """One model instance's life: everything between Triton's calls and the engine.

    Args:
        config: the configuration.
        engine: not yet started.
        model: the model's name.
        version: its version, as Triton names it.
        pb: the module ``triton_python_backend_utils``.
        official_metrics: whether to write the official backend's metrics on Triton's page.

    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        model: str,
        version: str,
        pb: Any,  # noqa: ANN401 - exists only inside Triton
        *,
        official_metrics: bool = False,
    ) -> None:
        self._config = config
        self._engine = engine
        self._model = model
        self._version = version
        self._pb = pb
        self._metrics: OfficialMetrics | None = None
        self._wants_metrics = official_metrics
        self._drained: asyncio.Task[None] | None = None
        self._loop = _new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="lifecycle-loop", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self._mark = uuid.uuid4().hex
        self._guardian: Guardian | None = None
        self._stopped = False

    def start(self) -> None:
        """Load the engine and be ready; blocks until then.

        Raises:
            ConfigError: the configuration or the model cannot be loaded; nothing is left running.

        """
        os.environ[MARK] = self._mark
        self._guardian = Guardian(self._mark, python_program())
        self._thread.start()
        try:
            self._on_loop(self._start()).result()
        except BaseException:
            self.stop()
            raise
        self._guardian.tell_shared_memory()
        for path in self._config.not_yet():
            log.warning("%s is set, but this release does not act on it yet", path)

    def submit(self, requests: Iterable[Any]) -> None:
        """Take over requests from Triton; returns at once. Any thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._accept, list(requests))
            return
        for request in requests:
            _refuse(Call(request, self._pb, _Inline()))

    def stop(self) -> None:
        """Drain within the configured limit, then end what is left, the engine, the loop and the guardian."""
        if self._stopped:
            return
        self._stopped = True
        limit = self._config.shutdown.drain_timeout + STOP_MARGIN_S
        if self._guardian is not None:
            # vLLM kills what does not end in time, and the killed leave their shared memory: the guardian takes note.
            self._guardian.expect_end()
        if self._thread.is_alive():
            try:
                self._on_loop(self._stop()).result(timeout=limit)
            except concurrent.futures.TimeoutError:
                log.error("the engine did not stop within %.0f s; its processes are killed", limit)  # noqa: TRY400
            except Exception:
                log.exception("stopping failed; what is left is killed")
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=STOP_MARGIN_S)
        if self._guardian is not None:
            self._guardian.dismiss()

    def state(self) -> dict[str, Any]:
        """Return what is live and what became of everything else. Event-loop thread only."""
        load = self._engine.load()
        return {
            "model": self._model,
            "live": len(self._contexts),
            "permits": self._admission.out,
            "kept": self._contexts.kept,
            "draining": self._admission.draining,
            "engine": {
                "alive": self._engine.alive,
                "running": load.running,
                "waiting": load.waiting,
                "requests": load.requests,
                "kv_usage": load.kv_usage,
            },
            "counts": dict(self._contexts.counts),
            "handlers": self._bus.counts(),
        }

    async def _start(self) -> None:
        config = self._config
        self._bus: Bus | NoBus = (
            Bus(
                queue_size=config.event_driven.event_queue_size,
                time_limit=config.event_driven.event_processing_timeout,
                max_handlers=config.event_driven.max_event_handlers,
            )
            if config.event_driven.enabled
            else NoBus()
        )
        self._contexts = Contexts(
            max_kept=config.context_management.max_contexts if config.context_management.enabled else 0,
            keep_seconds=config.context_management.expired_context_timeout,
        )
        self._admission = Admission(
            max_live=config.admission.max_live_requests or config.context_management.max_contexts
        )
        route = build_route(Services(config, self._engine, self._admission))
        await self._engine.start()
        if self._wants_metrics:
            self._report_metrics()
        self._lanes = Lanes(self._loop, LANES)
        self._watch = Watch(
            self._loop,
            interval=config.cancellation.poll_interval,
            max_rate=config.cancellation.max_polls_per_second,
        )
        self._pipeline = Pipeline(route, self._contexts, self._bus, self._watch, self._model)
        self._cleaner = self._loop.create_task(self._clean(), name="context-cleaner")

    def _report_metrics(self) -> None:
        if not isinstance(self._bus, Bus):
            log.warning("REPORT_CUSTOM_METRICS is set, but event_driven.enabled is false: there is nothing to report")
            return
        labels = {"model": self._model, "version": self._version}
        self._metrics = OfficialMetrics(self._pb, labels, self._engine.limits.max_model_len)
        self._bus.subscribe(self._metrics.take, OfficialMetrics.TYPES, name="official metrics")

    def _accept(self, requests: list[Any]) -> None:
        for request in requests:
            try:
                call = Call(request, self._pb, self._lanes.pick())
            except Exception:
                # Without a sender there is no way to answer; the requests that came with it have theirs.
                log.exception("a request came from Triton that cannot be answered")
                continue
            try:
                self._begin(call)
            except Exception as error:
                log.exception("a request could not be begun")
                call.fail(LifecycleError(f"the request failed with {type(error).__name__}; see the server's log"))

    def _begin(self, call: Call) -> None:
        parameters = call.control()
        if parameters is not None:
            self._control(call, parameters)
            return
        task = self._loop.create_task(self._pipeline.run(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _control(self, call: Call, parameters: dict[str, Any]) -> None:
        try:
            document = control.answer(parameters, self._contexts, self.state)
        except LifecycleError as error:
            call.fail(error)
        except Exception as error:
            log.exception("a control request failed")
            call.fail(LifecycleError(f"the control request failed with {type(error).__name__}; see the server's log"))
        else:
            call.send({"text_output": [document]}, final=True)

    async def _clean(self) -> None:
        while True:
            await asyncio.sleep(self._config.context_management.context_cleanup_interval)
            self._contexts.expire()

    async def _stop(self) -> None:
        if hasattr(self, "_pipeline"):
            await self._begin_drain()
            self._cleaner.cancel()
            await self._bus.aclose()
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)
        await self._engine.stop()
        if hasattr(self, "_pipeline"):
            await asyncio.to_thread(self._watch.close)
            await asyncio.to_thread(self._lanes.close)

    def _begin_drain(self) -> asyncio.Task[None]:
        """Refuse new work and give running work its time; the first call counts."""
        if self._drained is None:
            self._admission.drain()
            self._drained = self._loop.create_task(self._drain(self._config.shutdown.drain_timeout), name="drain")
        return self._drained

    async def _drain(self, limit: float) -> None:
        began = time.monotonic()
        if self._tasks:
            log.info("draining: %d requests are live, at most %.1f s", len(self._tasks), limit)
            await asyncio.wait(self._tasks, timeout=limit)
        outlasted = self._contexts.live()
        for ctx in outlasted:
            ctx.interrupt(Draining(f"the model is being unloaded, and the request outlasted the drain of {limit:g} s"))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_MARGIN_S / 2)
        log.info("drained in %.1f s; %d requests were ended", time.monotonic() - began, len(outlasted))

    def _on_loop(self, coroutine: Any) -> concurrent.futures.Future[None]:  # noqa: ANN401
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


class _Inline:
    """Does a call's work on the spot: for refusals when the loop is gone."""

    def submit(self, job: Any) -> Any:  # noqa: ANN401
        job()


def _refuse(call: Call) -> None:
    call.fail(Draining("the model is being unloaded and takes no new requests; send it to another replica"))


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop  # noqa: PLC0415 - comes with vLLM; without it asyncio's own loop serves
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
