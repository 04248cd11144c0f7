"""Every metric: name, kind, labels, meaning. ``docs/metrics.md`` is made from it, and nothing else is on the page."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

Kind = Literal["counter", "gauge", "histogram"]

FIRST_TOKEN_S: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
PER_TOKEN_S: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
OFFICIAL_WHOLE_S: Final = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
DURATION_S: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
"""OpenTelemetry's own advice for the duration of a request to a model."""
SHORT_S: Final = (
    0.0001,
    0.0005,
    0.001,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)
FINE_PER_TOKEN_S: Final = (0.001, 0.0025, 0.005, *PER_TOKEN_S)
SEQUENCES: Final = (1.0, 2.0, 5.0, 10.0, 20.0)

MODEL: Final = ("model", "version")
"""Labels of all counters and histograms: instances of one model add up."""
INSTANCE: Final = (*MODEL, "model_instance")
"""Labels of all gauges: each instance has its own."""
GEN_AI: Final = (*MODEL, "gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")


class Family(msgspec.Struct, frozen=True):
    """A metric with all its series."""

    name: str
    kind: Kind
    about: str
    labels: tuple[str, ...] = ()
    """Its own; :attr:`all_labels` has those of every metric too."""
    buckets: tuple[float, ...] = ()
    complete: bool = False
    """Of a histogram: whether each request is observed, whatever that costs."""

    @property
    def all_labels(self) -> tuple[str, ...]:
        """Every label that its series have."""
        if self.name.startswith("gen_ai"):
            return (*GEN_AI, *self.labels)
        return (*(INSTANCE if self.kind == "gauge" else MODEL), *self.labels)


def _counter(name: str, about: str, *labels: str) -> Family:
    return Family(name, "counter", about, labels)


def _gauge(name: str, about: str, *labels: str) -> Family:
    return Family(name, "gauge", about, labels)


def _histogram(name: str, buckets: tuple[float, ...], about: str, *labels: str) -> Family:
    return Family(name, "histogram", about, labels, buckets)


def _official(name: str, about: str, buckets: tuple[float, ...] = ()) -> Family:
    kind: Kind = "counter" if name.endswith("_total") else "histogram"
    return Family(f"vllm:{name}", kind, about, (), buckets, complete=True)


REQUESTS: Final = (
    _counter("lifecycle_requests_received_total", "Requests that came."),
    _counter(
        "lifecycle_requests_ended_total",
        "Requests that ended: completed, failed, cancelled, timed_out or rejected. Received = their sum + live.",
        "outcome",
    ),
    _counter("lifecycle_failures_total", "Requests that failed, by the slug of their error.", "reason"),
    _counter("lifecycle_refusals_total", "Requests refused, by the limit (or rule) that they met, as a slug.", "limit"),
    _counter("lifecycle_timeouts_total", "Requests that a time limit ended: first_token, stall or total.", "limit"),
    _counter("lifecycle_cancels_total", "Requests that were cancelled: caller_left or cancelled (by id).", "cause"),
    _histogram(
        "lifecycle_cancel_to_abort_seconds",
        SHORT_S,
        "From the moment a request is known to be cancelled until the engine has let go of it.",
    ),
    _counter("lifecycle_slow_requests_total", "Requests that took longer than was predicted for nineteen in twenty."),
    _counter("lifecycle_retries_total", "Attempts that failed and were followed by another, by slug.", "reason"),
    _counter("lifecycle_recovered_requests_total", "Requests completed after at least one failed attempt."),
    _counter("lifecycle_prompt_tokens_total", "Tokens of prompts that the engine began with."),
    _counter("lifecycle_cached_prompt_tokens_total", "Those of them that lay in the prefix cache."),
    _counter("lifecycle_output_tokens_total", "Tokens made for requests that have ended."),
    _counter("lifecycle_wasted_tokens_total", "Those of them whose request was not completed, by outcome.", "outcome"),
    _counter(
        "lifecycle_deadline_moves_total",
        "Deadlines moved, of requests that have ended: by progress (tokens came), prediction, patience (others had "
        "tokens) or recovery (of the engine).",
        "cause",
    ),
)
TIMES: Final = (
    _histogram("lifecycle_request_duration_seconds", DURATION_S, "From arrival to the end, by outcome.", "outcome"),
    _counter("lifecycle_request_time_seconds_total", "The same, summed over every request."),
    _histogram("lifecycle_stage_duration_seconds", SHORT_S, "Time in each stage that let the request pass.", "stage"),
    _counter(
        "lifecycle_stage_time_seconds_total",
        "The same, summed over every request, with the stage that a request did not leave as `unfinished`: the stages' "
        "sum is that of the requests.",
        "stage",
    ),
    _histogram("lifecycle_queue_seconds", SHORT_S, "From the permit until the engine began."),
    _histogram("lifecycle_first_token_seconds", FIRST_TOKEN_S, "From arrival to the first token."),
    _histogram(
        "lifecycle_inter_token_seconds",
        FINE_PER_TOKEN_S,
        "Mean time between a request's tokens; one observation for each completed request.",
    ),
    _histogram(
        "gen_ai_server_request_duration_seconds",
        DURATION_S,
        "OpenTelemetry: a request's duration; `error_type` is the error's slug, empty when completed.",
        "error_type",
    ),
    _histogram("gen_ai_server_time_to_first_token_seconds", FIRST_TOKEN_S, "OpenTelemetry: time to the first token."),
    _histogram(
        "gen_ai_server_time_per_output_token_seconds",
        FINE_PER_TOKEN_S,
        "OpenTelemetry: time per token after the first.",
    ),
)
ENGINE: Final = (
    _gauge("vllm:num_requests_running", "Sequences that the engine runs."),
    _gauge("vllm:num_requests_waiting", "Sequences that wait in the engine's queue."),
    _gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1."),
    _counter("vllm:num_preemptions_total", "Sequences that lost their KV blocks to another."),
    _counter("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."),
    _counter("vllm:prefix_cache_hits_total", "Prompt tokens found there."),
    _counter("lifecycle_engine_output_tokens_total", "Tokens that the engine made, as it makes them."),
    _gauge("lifecycle_engine_up", "1 while the engine is ready, 0 while it restarts or is dead."),
    _counter("lifecycle_engine_restarts_total", "Times that the engine was loaded again."),
    _gauge("lifecycle_engine_silence_seconds", "Since the engine's last token, while it has requests; else 0."),
)
ADMISSION: Final = (
    _gauge("lifecycle_live_requests", "Requests that have not ended."),
    _gauge("lifecycle_admission_used", "What counts against a limit of admission that is on.", "limit"),
    _gauge("lifecycle_admission_limit", "The limit's value.", "limit"),
)
PREDICTION: Final = (
    _counter("lifecycle_prediction_observations_total", "Requests that the predictor learned from."),
    _gauge(
        "lifecycle_prediction_error_ratio",
        "Mean absolute error as a share of what it was (MAPE), over about 500 requests.",
        "target",
    ),
    _gauge("lifecycle_prediction_coverage_ratio", "Share of requests within the interval that promises 0.9.", "target"),
    _gauge("lifecycle_prediction_predicted_seconds", "The last prediction whose outcome is known.", "target"),
    _gauge("lifecycle_prediction_actual_seconds", "That outcome.", "target"),
)
INSIDE: Final = (
    _gauge(
        "lifecycle_loop_lag_seconds",
        "How late the event loop got to what was due, 99th percentile of the last minute.",
    ),
    _counter("lifecycle_bus_published_total", "Events published, by type.", "event"),
    _counter(
        "lifecycle_bus_handler_events_total",
        "What became of a handler's events: handled, failed, timed_out or dropped. The first 20 handlers have their "
        "names, further ones are `other`.",
        "handler",
        "outcome",
    ),
    _gauge("lifecycle_bus_backlog", "Events that wait for handlers."),
    _counter(
        "lifecycle_sink_events_total", "What became of a sink's events: taken, sent, lost, retried.", "sink", "outcome"
    ),
    _gauge("lifecycle_sink_backlog", "Events that wait in a sink.", "sink"),
    _gauge("lifecycle_store_up", "Whether the shared store answers; present only with one."),
    _counter(
        "lifecycle_store_lost_total", "Ended requests that never reached the shared store; present only with one."
    ),
    _gauge("lifecycle_held", "What an account of the leak accounting holds.", "account"),
    _gauge(
        "lifecycle_leaked", "How much more than it may an account held at the last self-check while idle.", "account"
    ),
    _counter("lifecycle_metrics_sampled_out_total", "Observations that histograms took no part of: see below."),
    _counter("lifecycle_metrics_write_seconds_total", "CPU time of the thread that writes this page's values."),
)
OFFICIAL: Final = (
    _official("prompt_tokens_total", "Number of prefill tokens processed."),
    _official("generation_tokens_total", "Number of generation tokens processed."),
    _official("time_to_first_token_seconds", "Histogram of time to first token in seconds.", FIRST_TOKEN_S),
    _official("time_per_output_token_seconds", "Histogram of a request's time per token.", PER_TOKEN_S),
    _official("e2e_request_latency_seconds", "Histogram of end to end request latency.", OFFICIAL_WHOLE_S),
    _official("request_prompt_tokens", "Number of prefill tokens processed."),
    _official("request_generation_tokens", "Number of generation tokens processed."),
    _official("request_params_n", "Histogram of the n request parameter.", SEQUENCES),
)

GROUPS: Final[dict[str, tuple[Family, ...]]] = {
    "Requests": REQUESTS,
    "Times": TIMES,
    "Engine": ENGINE,
    "Admission": ADMISSION,
    "Prediction": PREDICTION,
    "Inside": INSIDE,
    "The official backend's": OFFICIAL,
}
FAMILIES: Final = {family.name: family for group in GROUPS.values() for family in group}


def one_two_five(most: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50, … up to ``most``: bounds for numbers of tokens."""
    bounds: list[float] = []
    power = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * power > most:
                return tuple(bounds)
            bounds.append(float(mantissa * power))
        power *= 10
