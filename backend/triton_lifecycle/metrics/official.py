"""The official backend's metrics, its names, kinds and labels; asked for by ``REPORT_CUSTOM_METRICS``."""

from __future__ import annotations

from triton_lifecycle.metrics.catalogue import one_two_five
from triton_lifecycle.metrics.follow import Life
from triton_lifecycle.metrics.page import Page


class OfficialMetrics:
    """Counters and histograms of one model.

    Args:
        page: where they are.
        max_model_len: the model's length, the last bound of the token histograms.

    """

    def __init__(self, page: Page, max_model_len: int) -> None:
        tokens = one_two_five(max_model_len)
        self._prompt_total = page.counter("vllm:prompt_tokens_total")
        self._made_total = page.counter("vllm:generation_tokens_total")
        self._first_token = page.histogram("vllm:time_to_first_token_seconds")
        self._per_token = page.histogram("vllm:time_per_output_token_seconds")
        self._whole = page.histogram("vllm:e2e_request_latency_seconds")
        self._prompt = page.histogram("vllm:request_prompt_tokens", tokens)
        self._made = page.histogram("vllm:request_generation_tokens", tokens)
        self._n = page.histogram("vllm:request_params_n")

    def ended(self, life: Life) -> None:
        """Count a request's tokens whatever its end; its times and sizes when it was completed, as vLLM does."""
        if life.outcome == "rejected":
            return
        self._prompt_total.add(life.prompt_tokens)
        self._made_total.add(life.output_tokens)
        if life.to_first_token is not None:
            self._first_token.observe(life.to_first_token)
        if life.outcome != "completed":
            return
        if life.per_token is not None:
            self._per_token.observe(life.per_token)
        self._whole.observe(life.whole)
        self._prompt.observe(life.prompt_tokens)
        self._made.observe(life.output_tokens)
        self._n.observe(life.sequences)
