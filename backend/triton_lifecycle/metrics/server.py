"""What is read from the server's parts once a second: engine, admission, predictor, bus, sinks, store, accounts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from triton_lifecycle.metrics.page import Page

if TYPE_CHECKING:
    from triton_lifecycle.admission import Admission
    from triton_lifecycle.beat import Beat
    from triton_lifecycle.bus import Bus, NoBus
    from triton_lifecycle.context import Contexts
    from triton_lifecycle.engine import Engine
    from triton_lifecycle.engine.supervisor import Supervisor
    from triton_lifecycle.leaks import Accounts
    from triton_lifecycle.sinks import Sink
    from triton_lifecycle.store.history import History
    from triton_lifecycle.timeouts.predictor import Predictor

NAMED: Final = 20
"""Handlers of the bus that have a label of their own; further ones share one."""
SELDOM: Final = 5
"""Accounts and the bus are read with every fifth turn: they take longest, and change slowly."""
OUTCOMES: Final = ("handled", "failed", "timed_out", "dropped")


@dataclass(frozen=True)
class Parts:
    """Where figures are read from."""

    engine: Engine
    supervisor: Supervisor
    admission: Admission
    contexts: Contexts
    bus: Bus | NoBus
    sinks: Sequence[Sink]
    history: History
    accounts: Accounts
    predictor: Predictor | None
    beat: Beat


class ServerMetrics:
    """Reads the parts. Event-loop thread only.

    Args:
        page: where to.
        parts: where from.

    """

    def __init__(self, page: Page, parts: Parts) -> None:
        self._page = page
        self._parts = parts
        self._turn = 0
        self._handlers: set[str] = set()

    def read(self, whole: bool) -> None:  # noqa: FBT001 - a callback's one argument
        """Put the figures on the page: those that take longest only now and then, unless all are asked for."""
        self._read_requests()
        self._read_engine()
        self._read_admission()
        self._read_predictor()
        if whole or self._turn % SELDOM == 0:
            self._read_bus()
            self._read_outside()
            self._read_accounts()
            self._read_loop()
        self._turn += 1

    def _read_requests(self) -> None:
        page, contexts = self._page, self._parts.contexts
        for name, count in contexts.counts.items():
            if name == "received":
                page.counter("lifecycle_requests_received_total").reached(count)
            else:
                page.counter("lifecycle_requests_ended_total", outcome=name).reached(count)
        page.gauge("lifecycle_live_requests").set(len(contexts))
        for cause, count in contexts.deadline_moves.items():
            page.counter("lifecycle_deadline_moves_total", cause=cause).reached(count)

    def _read_engine(self) -> None:
        page, load, supervisor = self._page, self._parts.engine.load(), self._parts.supervisor
        page.gauge("vllm:num_requests_running").set(load.running)
        page.gauge("vllm:num_requests_waiting").set(load.waiting)
        page.gauge("vllm:kv_cache_usage_perc").set(load.kv_usage)
        page.counter("vllm:num_preemptions_total").reached(load.preemptions)
        page.counter("vllm:prefix_cache_queries_total").reached(load.cache_queries)
        page.counter("vllm:prefix_cache_hits_total").reached(load.cache_hits)
        page.counter("lifecycle_engine_output_tokens_total").reached(load.output_tokens)
        state = supervisor.state
        page.gauge("lifecycle_engine_up").set(state.status == "ready")
        page.counter("lifecycle_engine_restarts_total").reached(state.restarts)
        page.gauge("lifecycle_engine_silence_seconds").set(supervisor.silence() if load.requests else 0.0)

    def _read_admission(self) -> None:
        state = self._parts.admission.state()
        sequences, slots = state["sequences"], state["slots"]
        used = {
            "max_waiting_requests": max(0, sequences - slots),
            "max_prompt_tokens": state["prompt_tokens"],
        }
        for name, limit in state["limits"].items():
            self._page.gauge("lifecycle_admission_limit", limit=name).set(limit)
            self._page.gauge("lifecycle_admission_used", limit=name).set(used.get(name, sequences))

    def _read_predictor(self) -> None:
        predictor, page = self._parts.predictor, self._page
        if predictor is None:
            return
        report = predictor.report()
        page.counter("lifecycle_prediction_observations_total").reached(report["observations"])
        for target in ("first_token", "per_token", "total"):
            seen = report[target]
            if seen["seen"]:
                page.gauge("lifecycle_prediction_error_ratio", target=target).set(seen["mape"] / 100)
                page.gauge("lifecycle_prediction_coverage_ratio", target=target).set(seen["coverage"] / 100)
                page.gauge("lifecycle_prediction_predicted_seconds", target=target).set(seen["predicted"])
                page.gauge("lifecycle_prediction_actual_seconds", target=target).set(seen["actual"])

    def _read_bus(self) -> None:
        bus, page = self._parts.bus, self._page
        page.gauge("lifecycle_bus_backlog").set(bus.backlog)
        for event, count in bus.published.items():
            page.counter("lifecycle_bus_published_total", event=event).reached(count)
        others = dict.fromkeys(OUTCOMES, 0)
        for name, counts in bus.counts().items():
            if name in self._handlers or len(self._handlers) < NAMED:
                self._handlers.add(name)
                for outcome in OUTCOMES:
                    counter = page.counter("lifecycle_bus_handler_events_total", handler=name, outcome=outcome)
                    counter.reached(counts[outcome])
            else:
                for outcome in OUTCOMES:
                    others[outcome] += counts[outcome]
        if any(others.values()):
            for outcome, count in others.items():
                page.counter("lifecycle_bus_handler_events_total", handler="other", outcome=outcome).reached(count)

    def _read_outside(self) -> None:
        page = self._page
        for sink in self._parts.sinks:
            counts = sink.counts()
            page.gauge("lifecycle_sink_backlog", sink=sink.name).set(counts.pop("backlog", 0))
            for outcome, count in counts.items():
                page.counter("lifecycle_sink_events_total", sink=sink.name, outcome=outcome).reached(count)
        store = self._parts.history.state()
        if "up" in store:
            page.gauge("lifecycle_store_up").set(store["up"])
            page.counter("lifecycle_store_lost_total").reached(store["lost"])

    def _read_accounts(self) -> None:
        accounts, page = self._parts.accounts, self._page
        for name, held in accounts.read().items():
            page.gauge("lifecycle_held", account=name).set(held)
            leak = accounts.leaks.get(name)
            page.gauge("lifecycle_leaked", account=name).set(0.0 if leak is None else leak.held - leak.expected)

    def _read_loop(self) -> None:
        lag = self._parts.beat.state()["lag_p99_ms"]
        if lag is not None:
            self._page.gauge("lifecycle_loop_lag_seconds").set(lag / 1e3)
