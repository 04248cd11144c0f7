"""The official backend's metrics, on Triton's own ``/metrics`` page: asked for by ``REPORT_CUSTOM_METRICS``.

A subscriber of the bus follows each request from its admission to its end and then hands one observation to a thread:
each of Triton's metric calls is a blocking round trip to the server. Names, kinds and labels are the official ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import queue
import threading
from typing import Any, Final

import msgspec

from triton_lifecycle.events import (
    ENDINGS,
    Admitted,
    Event,
    FirstToken,
    Received,
    Rejected,
    Scheduled,
)

log = logging.getLogger(__name__)

QUEUE: Final = 10_000
"""Requests whose observation may wait for the thread; more are dropped and counted."""

_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_WHOLE_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
_SEQUENCES = (1.0, 2.0, 5.0, 10.0, 20.0)


class Record(msgspec.Struct):
    """What is observed of one request. Times are on the server's monotonic clock; ``None`` until they come."""

    received: float
    first_token: float | None = None
    prompt_tokens: int = 0
    sequences: int = 1
    finished: float = 0.0
    output_tokens: int = 0
    completed: bool = False


class OfficialMetrics:
    """Counters and histograms of one model.

    Args:
        pb: the module ``triton_python_backend_utils``.
        labels: ``model`` and ``version``.
        max_model_len: the model's length, the last bound of the token histograms.

    """

    TYPES: tuple[type[Event], ...] = (Received, Admitted, Scheduled, FirstToken, *ENDINGS)

    def __init__(self, pb: Any, labels: dict[str, str], max_model_len: int) -> None:  # noqa: ANN401
        self.dropped = 0
        self._open: dict[str, Record] = {}
        self._queue: queue.Queue[Record | None] = queue.Queue(QUEUE)
        self._families: list[Any] = []
        self._metrics: dict[str, Any] = {}
        tokens = _one_two_five(max_model_len)
        counter, histogram = pb.MetricFamily.COUNTER, pb.MetricFamily.HISTOGRAM
        for name, about, kind, buckets in (
            ("prompt_tokens_total", "Number of prefill tokens processed.", counter, None),
            ("generation_tokens_total", "Number of generation tokens processed.", counter, None),
            ("time_to_first_token_seconds", "Histogram of time to first token in seconds.", histogram, _FIRST_TOKEN_S),
            ("time_per_output_token_seconds", "Histogram of a request's time per token.", histogram, _PER_TOKEN_S),
            ("e2e_request_latency_seconds", "Histogram of end to end request latency.", histogram, _WHOLE_S),
            ("request_prompt_tokens", "Number of prefill tokens processed.", histogram, tokens),
            ("request_generation_tokens", "Number of generation tokens processed.", histogram, tokens),
            ("request_params_n", "Histogram of the n request parameter.", histogram, _SEQUENCES),
        ):
            family = pb.MetricFamily(name=f"vllm:{name}", description=about, kind=kind)
            self._families.append(family)
            self._metrics[name] = (
                family.Metric(labels=labels) if buckets is None else family.Metric(labels=labels, buckets=list(buckets))
            )
        self._thread = threading.Thread(target=self._run, name="official-metrics", daemon=True)
        self._thread.start()

    def take(self, event: Event) -> None:
        """Follow one request; event-loop thread only."""
        if isinstance(event, Received):
            self._open[event.request_id] = Record(event.at)
            return
        record = self._open.get(event.request_id)
        if record is None:
            return
        match event:
            case Admitted():
                record.sequences = event.sequences
            case Scheduled():
                record.prompt_tokens = event.prompt_tokens
            case FirstToken():
                record.first_token = event.at
            case Rejected():
                del self._open[event.request_id]
            case _:
                del self._open[event.request_id]
                record.finished = event.at
                record.output_tokens = getattr(event, "output_tokens", 0)
                record.completed = ENDINGS[type(event)] == "completed"
                self._hand_over(record)

    def close(self) -> None:
        """Write down what waits (at most 5 s). Triton's objects are never deleted."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(timeout=5)
        if self.dropped:
            log.warning("%d requests are missing from Triton's metrics: its page was too slow for them", self.dropped)
        _keep_for_ever(*self._metrics.values(), *self._families)

    def _hand_over(self, record: Record) -> None:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def _run(self) -> None:
        while (record := self._queue.get()) is not None:
            try:
                self._write(record)
            except Exception:
                log.exception("a request could not be written to Triton's metrics")

    def _write(self, record: Record) -> None:
        """Count a request's tokens whatever its end; its times and sizes when it was completed, as vLLM does."""
        metrics = self._metrics
        metrics["prompt_tokens_total"].increment(record.prompt_tokens)
        metrics["generation_tokens_total"].increment(record.output_tokens)
        if record.first_token is not None:
            metrics["time_to_first_token_seconds"].observe(record.first_token - record.received)
        if not record.completed:
            return
        if record.first_token is not None and record.output_tokens > record.sequences:
            gaps = record.output_tokens / record.sequences - 1
            metrics["time_per_output_token_seconds"].observe((record.finished - record.first_token) / gaps)
        metrics["e2e_request_latency_seconds"].observe(record.finished - record.received)
        metrics["request_prompt_tokens"].observe(record.prompt_tokens)
        metrics["request_generation_tokens"].observe(record.output_tokens)
        metrics["request_params_n"].observe(record.sequences)


def _keep_for_ever(*things: Any) -> None:  # noqa: ANN401
    """See to it that Triton's objects are never deleted, not even when the interpreter ends.

    When a model is reloaded, its next instance writes to the same series before the old one has gone. Triton 2.51 then
    deletes the series under it, and crashes now and then if its page is read meanwhile. A few bytes a load stay.
    """
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _one_two_five(most: int) -> list[float]:
    """Return 1, 2, 5, 10, 20, 50, … up to ``most``."""
    bounds: list[float] = []
    power = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * power > most:
                return bounds
            bounds.append(float(mantissa * power))
        power *= 10
