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
from pathlib import Path
from typing import Any, Final

import msgspec

from triton_lifecycle import control, metrics, sinks
from triton_lifecycle.admission import Admission
from triton_lifecycle.beat import Beat
from triton_lifecycle.bus import Bus, NoBus
from triton_lifecycle.config import Config
from triton_lifecycle.engine import Engine
from triton_lifecycle.engine.guardian import MARK, Guardian
from triton_lifecycle.engine.supervisor import Supervisor
from triton_lifecycle.errors import ConfigError, Draining, EngineDied, EngineRestarting, LifecycleError, QueueFull
from triton_lifecycle.interpreter import python_program
from triton_lifecycle.leaks import POOL, Accounts, SelfCheck, add_process_accounts
from triton_lifecycle.pipeline import Pipeline
from triton_lifecycle.plugins import EventHandler, judged, load_handlers
from triton_lifecycle.sinks import Sink
from triton_lifecycle.stages import Services, build_route
from triton_lifecycle.store.archive import ANSWER_LIMIT_S
from triton_lifecycle.store.history import History
from triton_lifecycle.threads import named, show_name
from triton_lifecycle.timeouts.predictor import Predictor, state
from triton_lifecycle.tracing import Tracing, open_tracing
from triton_lifecycle.triton import Call, InlineLanes, Lanes
from triton_lifecycle.watch import Watch

log = logging.getLogger(__name__)

LOOP: Final = "lifecycle-loop"
BEAT_LIMIT_S: Final = 1.0
"""An event loop that has not moved for so long serves nobody."""
MAX_CONTROL: Final = 1000
"""Control requests answered at once; those that ask a slow store wait for it."""
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
        directory: the model's folder, against which the configured files' paths are looked up.
        instance: the model instance's name, as Triton gives it.
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
        directory: Path | None = None,
        instance: str = "0",
        official_metrics: bool = False,
    ) -> None:
        self._config = config
        self._engine = engine
        self._model = model
        self._version = version
        self._pb = pb
        self._directory = directory or Path.cwd()
        self._bus: Bus | NoBus = NoBus()
        self._sinks: list[Sink] = []
        self._instance = instance
        self._metrics: metrics.Reporter | None = None
        self._official_metrics = official_metrics
        self._background: list[asyncio.Task[Any]] = []
        self._drained: asyncio.Task[None] | None = None
        self._predictor: Predictor | None = None
        self._tracing: Tracing | None = None
        self._loop = _new_event_loop()
        self._pool = concurrent.futures.ThreadPoolExecutor(
            thread_name_prefix=POOL, initializer=show_name, initargs=(POOL,)
        )
        self._loop.set_default_executor(self._pool)
        self._thread = threading.Thread(target=named(LOOP, self._loop.run_forever), name=LOOP, daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked: set[asyncio.Task[None]] = set()
        self._mark = uuid.uuid4().hex
        self._guardian: Guardian | None = None
        self._stopped = False
        self._beat = Beat(self._loop)
        self.accounts = Accounts()
        """What is held now. Whoever holds something for requests adds it here."""

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
        self._pool.shutdown(wait=False, cancel_futures=True)
        if not self._thread.is_alive():
            self._loop.close()
        if self._guardian is not None:
            self._guardian.dismiss()

    def fault(self) -> LifecycleError | None:
        """Return why new requests would not be served now, or ``None``. Any thread; never blocks."""
        if self._stopped or not hasattr(self, "_pipeline"):
            return Draining("the model is not loaded, or is being unloaded")
        if self._admission.draining:
            return Draining("the model drains and takes no new requests; send it to another replica")
        stalled = self._beat.stalled
        if stalled > BEAT_LIMIT_S:
            return EngineRestarting(f"the backend's event loop has not moved for {stalled:.1f} s")
        engine = self._supervisor.state
        if engine.status == "restarting":
            return EngineRestarting(f"the engine is being restarted: {engine.reason}", retry_after=engine.expected_in)
        if engine.status != "ready":
            return EngineDied("the engine's process has died")
        return None

    def state(self) -> dict[str, Any]:
        """Return what is live and what became of everything else. Event-loop thread only."""
        load = self._engine.load()
        return {
            "model": self._model,
            "live": len(self._contexts),
            "permits": self._admission.out,
            "kept": len(self._contexts.ended),
            "draining": self._admission.draining,
            "loop": self._beat.state(),
            "admission": self._admission.state(),
            "engine": {
                "alive": self._engine.alive,
                **msgspec.structs.asdict(self._supervisor.state),
                "running": load.running,
                "waiting": load.waiting,
                "requests": load.requests,
                "kv_usage": load.kv_usage,
            },
            "counts": dict(self._contexts.counts),
            "published": self._bus.published,
            "store": self._history.state(),
            "handlers": self._bus.counts(),
            "accounts": self.accounts.state(),
            "sinks": {sink.name: sink.counts() for sink in self._sinks},
            "tracing": None if self._tracing is None else self._tracing.counts(),
            "prediction": None if self._predictor is None else self._predictor.report(),
        }

    def drain(self) -> dict[str, Any]:
        """Refuse new requests and give those under way the drain's limit. Event-loop thread only.

        Triton tells nobody that it unloads a model before its last request has ended; who asks for this first waits
        no longer than the limit.

        Returns:
            Whether it is ``draining``, how many requests are ``live``, and the ``limit`` in seconds.

        """
        self._begin_drain()
        return self._drain_state()

    def resume(self) -> dict[str, Any]:
        """Take new requests again, and limit those under way no more; returns as :meth:`drain`.

        Raises:
            Draining: the model is being unloaded.

        """
        if self._stopped:
            raise Draining("the model is being unloaded and cannot take requests again; send them to another replica")
        if self._drained is not None:
            self._drained.cancel()
            self._drained = None
            self._admission.resume()
            log.info("taking requests again")
        return self._drain_state()

    def _drain_state(self) -> dict[str, Any]:
        limit = self._config.shutdown.drain_timeout
        return {"draining": self._admission.draining, "live": len(self._contexts), "limit": limit}

    async def _start(self) -> None:
        config = self._config
        if config.event_driven.enabled:
            self._bus = Bus(
                queue_size=config.event_driven.event_queue_size,
                time_limit=config.event_driven.event_processing_timeout,
                max_handlers=config.event_driven.max_event_handlers,
            )
        self._history = History(config)
        self._contexts = self._history.contexts
        self._admission = Admission(config.admission, most=config.context_management.max_contexts)
        self._supervisor = Supervisor(self._engine, config.error_handling, clock=time.monotonic)
        self._predictor = self._learner()
        self._tracing = self._tracer()
        services = Services(config, self._engine, self._supervisor, self._admission, self._predictor, self._tracing)
        route, handlers = judged(lambda: build_route(services), lambda: load_handlers(config.event_driven.handlers))
        self._listen(handlers)
        await self._supervisor.start()
        self._fit_admission()
        await self._recall()
        performance = config.performance_optimization
        self._lanes = Lanes(self._loop, performance.pool_size) if performance.asynchronous else InlineLanes(self._loop)
        self._watch = Watch(
            self._loop,
            interval=config.cancellation.poll_interval,
            max_rate=config.cancellation.max_polls_per_second,
        )
        self._pipeline = Pipeline(
            route, self._contexts, self._bus, self._watch, self._model, capture=config.error_handling.captures
        )
        self._history.start()
        if self._predictor is not None and self._state_path is not None:
            self._background.append(self._loop.create_task(self._keep_in_mind(), name="predictor-state"))
        self._keep_accounts()
        self._metrics = self._report_metrics((*(name for name, _ in route.before), "execute"))
        self._beat.start()

    def _keep_accounts(self) -> None:
        reads = {
            "contexts": lambda: len(self._contexts),
            "permits": lambda: self._admission.out,
            "pipelines": lambda: len(self._tasks),
            "watched_calls": lambda: len(self._watch),
            "sends": lambda: self._lanes.backlog,
            "bus_queues": lambda: self._bus.backlog,
            "engine_requests": lambda: self._engine.load().requests,
            "engine_sequences": lambda: self._engine.load().running + self._engine.load().waiting,
            "kv_usage": lambda: self._engine.load().kv_usage,
        }
        for name, read in reads.items():
            self.accounts.add(name, read)
        memory = add_process_accounts(self.accounts, self._loop)
        settings = self._config.monitoring
        if settings.enabled and settings.leak_check_interval:
            check = SelfCheck(
                self.accounts,
                received=lambda: self._contexts.counts["received"],
                live=lambda: len(self._tasks),
                interval=settings.leak_check_interval,
                prepare=lambda: asyncio.to_thread(memory.look),
            )
            self._background.append(self._loop.create_task(check.run(), name="leak-check"))

    def _listen(self, handlers: list[EventHandler]) -> None:
        """Subscribe what the configuration names: plug-ins, recorder, broker."""
        if not isinstance(self._bus, Bus):
            if handlers or sinks.wanted(self._config):
                log.warning(
                    "event_driven.enabled is false: its handlers and recorder and the broker are told of nothing"
                )
            return
        self._sinks = sinks.open_sinks(self._config, self._directory)
        try:
            for sink in self._sinks:
                self._bus.subscribe(sink.take, sink.types, name=sink.name)
            for handler in handlers:
                self._bus.subscribe(handler.call, handler.types, name=handler.name)
        except ValueError as error:
            raise ConfigError(f"event_driven.handlers: {error}") from None

    def _tracer(self) -> Tracing | None:
        """Open tracing where it is wanted."""
        if not isinstance(self._bus, Bus):
            if self._config.monitoring.traces:
                log.warning("monitoring.tracing_enabled needs event_driven.enabled; without it nothing is traced")
            return None
        tracing = open_tracing(self._config)
        if tracing is not None:
            self._bus.subscribe(tracing.take, Tracing.TYPES, name="tracing", counted=False)
        return tracing

    def _fit_admission(self) -> None:
        settings, limits = self._config.admission, self._engine.limits
        if (settings.earliest_deadline_first or settings.fair_share) and not limits.by_priority:
            log.warning(
                "admission.earliest_deadline_first and admission.fair_share have no effect: the engine takes requests "
                'in the order of arrival; set "scheduling_policy": "priority" in model.json'
            )
        self._admission.fit(limits.max_num_seqs)

    def _learner(self) -> Predictor | None:
        """Build the predictor; it is fitted to the engine once that has started."""
        settings = self._config.timeout_handling
        if not settings.enabled or not settings.enable_intelligent_timeout:
            return None
        if not isinstance(self._bus, Bus):
            log.warning("enable_intelligent_timeout needs event_driven.enabled; without it the default limits apply")
            return None
        engine = self._engine
        predictor = Predictor(
            settings.timeout_prediction_model,
            kv_usage=lambda: engine.load().kv_usage,
            silence=self._supervisor.silence,
        )
        self._bus.subscribe(predictor.take, Predictor.TYPES, name="predictor", counted=False)
        return predictor

    async def _recall(self) -> None:
        """Fit the predictor to the engine, and have it learn from what an earlier process saw."""
        if self._predictor is None:
            return
        self._predictor.fit(self._engine.limits.max_model_len, self._engine.limits.max_num_seqs)
        if (path := self._state_path) is not None:
            seen = await asyncio.to_thread(state.load, path)
            await asyncio.to_thread(self._predictor.relearn, seen)

    @property
    def _state_path(self) -> Path | None:
        path = self._config.timeout_handling.state_path
        return None if path is None else self._directory / path

    async def _keep_in_mind(self) -> None:
        while True:
            await asyncio.sleep(self._config.context_management.context_cleanup_interval)
            await self._remember()

    async def _remember(self) -> None:
        """Write down what the predictor saw."""
        if (path := self._state_path) is not None and self._predictor is not None and self._predictor.kept:
            await asyncio.to_thread(state.save, path, self._predictor.kept)

    def _report_metrics(self, stages: tuple[str, ...]) -> metrics.Reporter | None:
        """Write to Triton's page from now on, if that is asked for."""
        settings = self._config.monitoring
        ours = settings.enabled and settings.metrics_enabled
        if not ours and not self._official_metrics:
            return None
        page = metrics.Page(self._pb, self._model, self._version, self._instance)
        observers = []
        if ours:
            observers.append(metrics.RequestMetrics(page, self._model, stages).ended)
        if self._official_metrics:
            observers.append(metrics.OfficialMetrics(page, self._engine.limits.max_model_len).ended)
        if isinstance(self._bus, Bus):
            follow = metrics.Follow(observers)
            self._bus.subscribe(follow.take, follow.TYPES, name="metrics", counted=False)
        else:
            log.warning("event_driven.enabled is false: Triton's metrics page shows counts and gauges, but no times")
        parts = metrics.Parts(
            engine=self._engine,
            supervisor=self._supervisor,
            admission=self._admission,
            contexts=self._contexts,
            bus=self._bus,
            sinks=self._sinks,
            history=self._history,
            accounts=self.accounts,
            predictor=self._predictor,
            beat=self._beat,
        )
        reporter = metrics.Reporter(page, metrics.ServerMetrics(page, parts).read if ours else lambda _: None)
        reporter.start()
        return reporter

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
            except LifecycleError as error:
                call.fail(error)
            except Exception as error:
                log.exception("a request could not be begun")
                call.fail(LifecycleError(f"the request failed with {type(error).__name__}; see the server's log"))

    def _begin(self, call: Call) -> None:
        parameters = call.control()
        if parameters is not None:
            control.authorize(parameters, self._config.security.control_token)
            if len(self._asked) >= MAX_CONTROL:
                raise QueueFull(f"{MAX_CONTROL} control requests are being answered; ask again", retry_after=0.1)
            asked = self._loop.create_task(self._control(call, parameters))
            self._asked.add(asked)
            asked.add_done_callback(self._asked.discard)
            return
        task = self._loop.create_task(self._pipeline.run(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _control(self, call: Call, parameters: dict[str, Any]) -> None:
        try:
            document = await control.answer(parameters, self._contexts, self._history.archive, self)
        except LifecycleError as error:
            call.fail(error)
        except asyncio.CancelledError:
            call.fail(Draining("the model is being unloaded before this could be answered; ask another replica"))
            raise
        except Exception as error:
            log.exception("a control request failed")
            call.fail(LifecycleError(f"the control request failed with {type(error).__name__}; see the server's log"))
        else:
            call.send({"text_output": [document]}, final=True)

    async def _stop(self) -> None:
        if hasattr(self, "_pipeline"):
            await self._begin_drain()
            for task in self._background:
                task.cancel()
            await self._end_control()
        # Whatever is slow to take the last figures, the engine does not wait for it.
        await asyncio.gather(self._write_last(), self._stop_engine())
        if hasattr(self, "_pipeline"):
            await asyncio.to_thread(self._watch.close)
            await asyncio.to_thread(self._lanes.close)

    async def _end_control(self) -> None:
        """Let control requests be answered; one that waits for another replica still is told so."""
        if self._asked:
            await asyncio.wait(self._asked, timeout=ANSWER_LIMIT_S)
        for task in self._asked:
            task.cancel()
        if self._asked:
            await asyncio.wait(self._asked, timeout=1.0)

    async def _write_last(self) -> None:
        """Hand over what store, sinks, collector, file and page have not got yet; each has its limit."""
        if hasattr(self, "_pipeline"):
            await self._history.aclose()
        await self._bus.aclose()
        closing = [sink.aclose() for sink in self._sinks]
        if self._tracing is not None:
            closing.append(self._tracing.aclose())
        await asyncio.gather(self._remember(), *closing)
        if self._metrics is not None:
            await self._metrics.aclose()

    async def _stop_engine(self) -> None:
        if hasattr(self, "_supervisor"):
            await self._supervisor.stop()
        await self._engine.stop()

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
            ctx.interrupt(Draining(f"the model drains, and the request outlasted its limit of {limit:g} s"))
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
