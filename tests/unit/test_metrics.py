"""The official metrics: what each end of a request writes."""

from __future__ import annotations

import pytest

from tests.fakes import pb_utils
from triton_lifecycle import events
from triton_lifecycle.metrics import QUEUE, OfficialMetrics

LABELS = {"model": "m", "version": "1"}


def life(
    metrics: OfficialMetrics, ending: type[events.Event] | None, name: str = "r", tokens: int = 5, n: int = 1
) -> None:
    """Tell of one request: received at 10 s, first token at 10.5 s, ended at 12.5 s."""
    metrics.take(events.Received(name, 0, 10.0, caller_id="", model="m", wall=0.0))
    if ending is events.Rejected:
        metrics.take(events.Rejected(name, 1, 10.1, slug="invalid_input", message=""))
        return
    metrics.take(events.Admitted(name, 1, 10.1, priority=0, limits={}, sequences=n))
    metrics.take(events.Scheduled(name, 2, 10.2, attempt=1, prompt_tokens=7, cached_tokens=0))
    metrics.take(events.FirstToken(name, 3, 10.5))
    if ending is events.Finished:
        metrics.take(events.Finished(name, 4, 12.5, finish_reason="length", output_tokens=tokens))
    elif ending is events.Cancelled:
        metrics.take(events.Cancelled(name, 4, 12.5, slug="cancelled", output_tokens=tokens))


def written() -> dict[str, float | list[float]]:
    """Return what Triton's page would be made of."""
    return {
        name.removeprefix("vllm:"): metric.value if metric.buckets is None else metric.observed
        for name, metric in pb_utils.MetricFamily.made.items()
    }


@pytest.fixture
def metrics():
    """Return metrics whose thread is ended."""
    made = OfficialMetrics(pb_utils, LABELS, 4096)
    yield made
    made.close()


def test_a_completed_request_writes_everything(metrics):
    """Tokens, and the times of its life in seconds; the time per token is between its tokens."""
    life(metrics, events.Finished)
    metrics.close()
    assert written() == {
        "prompt_tokens_total": 7,
        "generation_tokens_total": 5,
        "time_to_first_token_seconds": [0.5],
        "time_per_output_token_seconds": [0.5],
        "e2e_request_latency_seconds": [2.5],
        "request_prompt_tokens": [7],
        "request_generation_tokens": [5],
        "request_params_n": [1],
    }
    assert pb_utils.MetricFamily.made["vllm:request_params_n"].labels == LABELS
    assert pb_utils.MetricFamily.made["vllm:request_prompt_tokens"].buckets[-2:] == [1000, 2000]


def test_sequences_share_their_time(metrics):
    """With n = 2 and five tokens each the gaps are those of one sequence."""
    life(metrics, events.Finished, tokens=10, n=2)
    metrics.close()
    assert written()["time_per_output_token_seconds"] == [0.5]
    assert written()["request_params_n"] == [2]


def test_a_cancelled_request_counts_its_tokens_alone(metrics):
    """What was made is counted; the request is in no histogram of whole requests."""
    life(metrics, events.Cancelled)
    metrics.close()
    assert (written()["generation_tokens_total"], written()["e2e_request_latency_seconds"]) == (5, [])


def test_a_rejected_request_leaves_no_trace(metrics):
    """Nothing is written and nothing is kept."""
    life(metrics, events.Rejected)
    metrics.close()
    assert written()["prompt_tokens_total"] == 0
    assert metrics._open == {}


def test_what_does_not_fit_is_dropped_and_counted(metrics, monkeypatch):
    """A page that cannot keep up costs no memory."""
    monkeypatch.setattr(metrics, "_queue", type(metrics._queue)(2))
    for number in range(5):
        life(metrics, events.Finished, name=str(number))
    assert metrics.dropped == 3
    assert QUEUE > 2
