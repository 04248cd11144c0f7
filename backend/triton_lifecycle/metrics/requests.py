"""Our own metrics of requests: counts by outcome, and where their time went, also under OpenTelemetry's names."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from triton_lifecycle import events
from triton_lifecycle.errors import BY_SLUG
from triton_lifecycle.metrics.follow import Life
from triton_lifecycle.metrics.page import Page

UNFINISHED: Final = "unfinished"
OTHER: Final = "other"


class RequestMetrics:
    """Writes down each request that has ended.

    Args:
        page: where to.
        model: the model's name.
        stages: the names of the configured stages; the only values of that label.

    """

    def __init__(self, page: Page, model: str, stages: tuple[str, ...]) -> None:
        self._page = page
        self._model = model
        self._stages = frozenset(stages)
        self._count = cache(page.counter)
        # What may stay 0 for long is on the page from the beginning: a rate needs a value before the first event.
        for outcome in ("failed", "cancelled", "timed_out"):
            page.counter("lifecycle_wasted_tokens_total", outcome=outcome)
        for limit in ("queue_full", "token_budget", "deadline_unreachable", "draining", "invalid_input"):
            page.counter("lifecycle_refusals_total", limit=limit)
        for limit in ("first_token", "stall", "total"):
            page.counter("lifecycle_timeouts_total", limit=limit)
        for cause in ("caller_left", "cancelled"):
            page.counter("lifecycle_cancels_total", cause=cause)
        for name in ("slow_requests", "recovered_requests", "prompt_tokens", "cached_prompt_tokens", "output_tokens"):
            page.counter(f"lifecycle_{name}_total")

    def ended(self, life: Life) -> None:
        """Take in a request's whole life."""
        ending = life.ending
        if ending is None:
            return
        outcome = life.outcome
        slug = _known(getattr(ending, "slug", ""))
        self._reason(ending, slug, outcome, life)
        self._tokens(life)
        self._times(life, outcome)
        self._gen_ai(life, slug)
        for failed in life.retries:
            self._count("lifecycle_retries_total", reason=_known(failed)).add()
        if life.retries and outcome == "completed":
            self._count("lifecycle_recovered_requests_total").add()
        if life.slow:
            self._count("lifecycle_slow_requests_total").add()

    def _reason(self, ending: events.Event, slug: str, outcome: str, life: Life) -> None:
        match ending:
            case events.Failed():
                self._count("lifecycle_failures_total", reason=slug).add()
            case events.Rejected():
                self._count("lifecycle_refusals_total", limit=slug).add()
            case events.TimedOut():
                self._count("lifecycle_timeouts_total", limit=slug.removesuffix("_timeout")).add()
            case events.Cancelled():
                self._count("lifecycle_cancels_total", cause=slug).add()
                self._page.histogram("lifecycle_cancel_to_abort_seconds").observe(ending.after)
        if life.output_tokens and outcome != "completed":
            self._count("lifecycle_wasted_tokens_total", outcome=outcome).add(life.output_tokens)

    def _tokens(self, life: Life) -> None:
        self._count("lifecycle_prompt_tokens_total").add(life.prompt_tokens)
        self._count("lifecycle_cached_prompt_tokens_total").add(life.cached_tokens)
        self._count("lifecycle_output_tokens_total").add(life.output_tokens)

    def _times(self, life: Life, outcome: str) -> None:
        page = self._page
        page.histogram("lifecycle_request_duration_seconds", outcome=outcome).observe(life.whole)
        self._count("lifecycle_request_time_seconds_total").add(life.whole)
        rest = life.whole
        for stage, seconds in life.stages:
            label = stage if stage in self._stages else OTHER
            page.histogram("lifecycle_stage_duration_seconds", stage=label).observe(seconds)
            self._count("lifecycle_stage_time_seconds_total", stage=label).add(seconds)
            rest -= seconds
        if outcome != "completed":
            self._count("lifecycle_stage_time_seconds_total", stage=UNFINISHED).add(max(0.0, rest))
        if life.queued is not None:
            page.histogram("lifecycle_queue_seconds").observe(life.queued)
        if life.to_first_token is not None:
            page.histogram("lifecycle_first_token_seconds").observe(life.to_first_token)
        if outcome == "completed" and life.per_token is not None:
            page.histogram("lifecycle_inter_token_seconds").observe(life.per_token)

    def _gen_ai(self, life: Life, slug: str) -> None:
        labels: dict[str, Any] = {
            "gen_ai_operation_name": events.OPERATIONS.get(life.kind, OTHER),
            "gen_ai_provider_name": events.PROVIDER,
            "gen_ai_request_model": self._model,
        }
        page = self._page
        page.histogram("gen_ai_server_request_duration_seconds", **labels, error_type=slug).observe(life.whole)
        if life.to_first_token is not None:
            page.histogram("gen_ai_server_time_to_first_token_seconds", **labels).observe(life.to_first_token)
        if life.per_token is not None:
            page.histogram("gen_ai_server_time_per_output_token_seconds", **labels).observe(life.per_token)


def _known(slug: str) -> str:
    """Return the slug if it is one of the error tree's, which bounds the label's values."""
    return slug if not slug or slug in BY_SLUG else OTHER
