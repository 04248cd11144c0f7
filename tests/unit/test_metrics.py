"""The metrics: what each end of a request writes, what is read, and how it comes onto Triton's page."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from tests.fakes import pb_utils
from tests.fakes.harness import Harness, Step
from triton_lifecycle import errors, events
from triton_lifecycle.beat import Beat
from triton_lifecycle.config import Config, TimeoutHandling
from triton_lifecycle.leaks import Accounts
from triton_lifecycle.metrics import Follow, OfficialMetrics, Page, Parts, Reporter, RequestMetrics, ServerMetrics
from triton_lifecycle.metrics import page as page_module
from triton_lifecycle.metrics.catalogue import FAMILIES
from triton_lifecycle.metrics.reference import renewed
from triton_lifecycle.metrics.server import NAMED
from triton_lifecycle.simulation.virtual_time import run
from triton_lifecycle.store.history import History

LABELS = {"model": "m", "version": "1"}
STAGES = ("receive", "preprocess", "schedule", "execute")
DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
value = pb_utils.MetricFamily.value


@pytest.fixture(autouse=True)
def fresh():
    """Forget what other tests wrote."""
    pb_utils.MetricFamily.made.clear()
    pb_utils.MetricFamily.series.clear()


@pytest.fixture
def page():
    return Page(pb_utils, "m", "1", "m_0_0")


def flush(page):
    page.write(page.collect())


def life(follow: Follow, ending: type[events.Event], name: str = "r", tokens: int = 5, n: int = 1, **fields) -> None:
    """Tell of one request: received at 10 s, first token at 10.5 s, ended at 12.5 s."""
    follow.take(events.Received(name, 0, 10.0, caller_id="", model="m", wall=0.0))
    if ending is events.Rejected:
        follow.take(events.Rejected(name, 1, 10.1, slug="queue_full", message=""))
        return
    follow.take(events.StageDone(name, 1, 10.1, stage="receive", seconds=0.1))
    follow.take(events.Admitted(name, 1, 10.1, priority=0, limits={}, sequences=n))
    follow.take(events.Scheduled(name, 2, 10.2, attempt=1, prompt_tokens=7, cached_tokens=3))
    follow.take(events.FirstToken(name, 3, 10.5))
    if ending is events.Finished:
        follow.take(events.StageDone(name, 4, 12.5, stage="execute", seconds=2.4))
        follow.take(events.Finished(name, 5, 12.5, finish_reason="length", output_tokens=tokens))
    elif ending is events.Cancelled:
        follow.take(events.Cancelled(name, 4, 12.5, slug="caller_left", output_tokens=tokens, after=0.25))
    elif ending is events.TimedOut:
        follow.take(events.TimedOut(name, 4, 12.5, slug="stall_timeout", message="", output_tokens=tokens))


# ---- the official names


def written() -> dict[str, float | list[float]]:
    """Return what Triton's page would be made of."""
    return {
        name.removeprefix("vllm:"): metric.value if metric.buckets is None else metric.observed
        for name, metric in pb_utils.MetricFamily.made.items()
        if name.startswith("vllm:")
    }


@pytest.fixture
def official(page):
    return Follow([OfficialMetrics(page, 4096).ended])


def test_a_completed_request_writes_everything(page, official):
    """Tokens, and the times of its life in seconds; the time per token is between its tokens."""
    life(official, events.Finished)
    flush(page)
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


def test_sequences_share_their_time(page, official):
    """With n = 2 and five tokens each the gaps are those of one sequence."""
    life(official, events.Finished, tokens=10, n=2)
    flush(page)
    assert written()["time_per_output_token_seconds"] == [0.5]
    assert written()["request_params_n"] == [2]


def test_a_cancelled_request_counts_its_tokens_alone(page, official):
    """What was made is counted; the request is in no histogram of whole requests."""
    life(official, events.Cancelled)
    flush(page)
    assert (written()["generation_tokens_total"], written()["e2e_request_latency_seconds"]) == (5, [])


def test_a_rejected_request_leaves_no_trace(page, official):
    """Nothing is written and nothing is kept."""
    life(official, events.Rejected)
    flush(page)
    assert written()["prompt_tokens_total"] == 0
    assert len(official) == 0


def test_what_does_not_fit_is_dropped_and_counted(page, official, monkeypatch):
    """A page that cannot keep up costs no memory: complete histograms are bounded too, and what is lost is counted."""
    monkeypatch.setattr(page_module, "COMPLETE", 2)
    follow = Follow([OfficialMetrics(Page(pb_utils, "m", "2", "m_0_0"), 4096).ended])
    bounded = Page(pb_utils, "m", "3", "m_0_0")
    whole = bounded.histogram("vllm:e2e_request_latency_seconds")
    for number in range(5):
        life(follow, events.Finished, name=str(number))
        whole.observe(1.0)
    flush(bounded)
    assert value("vllm:e2e_request_latency_seconds", version="3") == 2
    assert value("lifecycle_metrics_sampled_out_total", version="3") == 3


# ---- ours


@pytest.fixture
def ours(page):
    return Follow([RequestMetrics(page, "m", STAGES).ended])


def test_each_end_is_counted_with_its_reason(page, ours):
    """A refusal by its limit, a timeout by its limit, a cancel by its cause with the time until the engine let go."""
    life(ours, events.Finished, "a")
    life(ours, events.Cancelled, "b")
    life(ours, events.TimedOut, "c")
    life(ours, events.Rejected, "d")
    flush(page)
    assert value("lifecycle_refusals_total", limit="queue_full") == 1
    assert value("lifecycle_refusals_total") == 1
    assert value("lifecycle_timeouts_total", limit="stall") == 1
    assert value("lifecycle_timeouts_total", limit="total") == 0
    assert value("lifecycle_cancels_total", cause="caller_left") == 1
    assert pb_utils.MetricFamily.made["lifecycle_cancel_to_abort_seconds"].observed == [0.25]
    assert value("lifecycle_wasted_tokens_total", outcome="cancelled") == 5
    assert value("lifecycle_wasted_tokens_total") == 10
    assert value("lifecycle_output_tokens_total") == 15
    assert value("lifecycle_cached_prompt_tokens_total") == 9
    assert len(ours) == 0


def test_times_stand_under_opentelemetrys_names_too(page, ours):
    """Duration with its error, time to first token and per token, with the operation and the model."""
    life(ours, events.Finished, "a")
    life(ours, events.TimedOut, "b")
    flush(page)
    labels = {"gen_ai_operation_name": "text_completion", "gen_ai_request_model": "m"}
    assert value("gen_ai_server_request_duration_seconds", error_type="", **labels) == 1
    assert value("gen_ai_server_request_duration_seconds", error_type="stall_timeout", **labels) == 1
    assert value("gen_ai_server_time_to_first_token_seconds", **labels) == 2
    assert value("gen_ai_server_time_per_output_token_seconds", **labels) == 2


def test_a_label_has_only_values_that_are_known(page, ours):
    """A slug or a stage that nobody knows, as a plug-in may bring it, is `other`."""
    ours.take(events.Received("r", 0, 1.0, caller_id="", model="m", wall=0.0))
    ours.take(events.StageDone("r", 1, 1.0, stage="stranger", seconds=0.5))
    ours.take(events.Failed("r", 2, 2.0, slug="never heard of", message="", output_tokens=0))
    flush(page)
    assert value("lifecycle_failures_total", reason="other") == 1
    assert value("lifecycle_stage_time_seconds_total", stage="other") == 0.5


def test_stage_times_sum_to_the_whole():
    """Over requests of every end, in virtual time, the stages' sum is that of the requests within one per cent."""

    async def scenario():
        harness = Harness(Config(timeout_handling=TimeoutHandling(default_timeout=5.0, min_timeout=1.0)))
        page = Page(pb_utils, "m", "1", "m_0_0")
        follow = Follow([RequestMetrics(page, "m", STAGES).ended])
        harness.bus.subscribe(follow.take, follow.TYPES)
        tokens = [Step("token", after=0.1) for _ in range(10)]
        harness.engine.scripts |= {"good": tokens, "stuck": [Step("token", after=100.0)], "bad": [Step("bug")]}
        asked = [pb_utils.InferenceRequest({"text_input": text}) for text in ("good", "stuck", "bad", "good")]
        refused = pb_utils.InferenceRequest({"text_input": "good"}, {"timeout_ms": "soon"})
        await asyncio.gather(*(harness.serve(request) for request in [*asked, refused]))
        flush(page)
        await harness.close()

    run(scenario)
    whole = value("lifecycle_request_time_seconds_total")
    assert whole == pytest.approx(2 * 1.0 + 5.0, rel=0.01)
    assert value("lifecycle_stage_time_seconds_total") == pytest.approx(whole, rel=0.01)
    assert value("lifecycle_stage_time_seconds_total", stage="execute") == pytest.approx(2.0, rel=0.01)
    assert value("lifecycle_request_duration_seconds", outcome="completed") == 2


def parts(harness, accounts=None):
    return Parts(
        engine=harness.engine,
        supervisor=harness.supervisor,
        admission=harness.admission,
        contexts=harness.contexts,
        bus=harness.bus,
        sinks=(),
        history=History(Config()),
        accounts=accounts or Accounts(),
        predictor=harness.predictor,
        beat=Beat(asyncio.get_running_loop()),
    )


def test_what_is_counted_elsewhere_is_read():
    """Ends, deadline moves, retries, the engine's restarts, the bus and the accounts; everybody adds up."""

    async def scenario():
        harness = Harness(Config(timeout_handling=TimeoutHandling(stall_timeout=4.0)))
        page = Page(pb_utils, "m", "1", "m_0_0")
        follow = Follow([RequestMetrics(page, "m", STAGES).ended])
        harness.bus.subscribe(follow.take, follow.TYPES, name="metrics")
        accounts = Accounts()
        accounts.add("things", lambda: 3.0)
        accounts.check()
        harness.engine.scripts["dies"] = [Step("token"), Step("die", times=1), Step("token"), Step("token")]
        await harness.serve(pb_utils.InferenceRequest({"text_input": "dies"}))
        ServerMetrics(page, parts(harness, accounts)).read(True)
        flush(page)
        await harness.close()

    run(scenario)
    assert value("lifecycle_requests_received_total") == 1
    assert value("lifecycle_requests_ended_total", outcome="completed") == 1
    assert value("lifecycle_requests_ended_total") == 1
    assert value("lifecycle_retries_total", reason="engine_died") == 1
    assert value("lifecycle_recovered_requests_total") == 1
    assert value("lifecycle_engine_restarts_total") == 1
    assert value("lifecycle_engine_up", model_instance="m_0_0") == 1
    assert value("lifecycle_deadline_moves_total", cause="progress") == 3
    assert value("lifecycle_deadline_moves_total", cause="recovery") == 1
    assert value("lifecycle_bus_published_total", event="Finished") == 1
    assert value("lifecycle_bus_handler_events_total", handler="metrics", outcome="handled") > 5
    assert (value("lifecycle_held", account="things"), value("lifecycle_leaked", account="things")) == (3, 3)


def test_many_handlers_share_a_label():
    """Beyond the first twenty the handlers of the bus are one series: their names cannot fill the page."""

    async def scenario():
        harness = Harness()
        page = Page(pb_utils, "m", "1", "m_0_0")
        for number in range(40):
            harness.bus.subscribe(lambda _: None, [events.Received], name=f"handler {number}")
        reader = ServerMetrics(page, parts(harness))
        harness.bus.publish(events.Received("r", 0, 1.0, caller_id="", model="m", wall=0.0))
        reader.read(True)
        flush(page)
        await harness.close()

    run(scenario)
    names = {metric.labels.get("handler") for metric in pb_utils.MetricFamily.series.values()} - {None}
    assert len(names) == NAMED + 1
    assert value("lifecycle_bus_handler_events_total", handler="other", outcome="handled") > 0


# ---- the page


def test_counters_write_what_was_added_and_gauges_what_changed(page):
    """A series is on the page with its first turn, also at 0; afterwards only news is written."""
    counter, gauge = page.counter("lifecycle_slow_requests_total"), page.gauge("lifecycle_live_requests")
    flush(page)
    assert (value("lifecycle_slow_requests_total"), value("lifecycle_live_requests")) == (0, 0)
    assert page.counter("lifecycle_slow_requests_total") is counter
    counter.add(2)
    gauge.set(5)
    changed = {series.family.name: values for series, values in page.collect()}
    changed.pop("lifecycle_metrics_write_seconds_total")
    assert changed == {"lifecycle_slow_requests_total": [2], "lifecycle_live_requests": [5]}


def test_a_gauge_is_written_again_now_and_then(page):
    """The instance that a reload ends may have written last: after ten turns the value of the living one stands."""
    page.gauge("lifecycle_live_requests").set(5)
    flush(page)
    pb_utils.MetricFamily.made["lifecycle_live_requests"].set(99)
    for _ in range(page_module.REFRESH):
        flush(page)
    assert value("lifecycle_live_requests") == 5


def test_a_count_kept_elsewhere_may_begin_anew(page):
    """An engine that was loaded again counts from 0, and the page goes on."""
    counter = page.counter("vllm:num_preemptions_total")
    for total in (3, 5, 1, 2):
        counter.reached(total)
    flush(page)
    assert value("vllm:num_preemptions_total") == 7


def test_of_many_observations_a_uniform_sample_is_written(page):
    """At most so many a turn, each with the same chance, and the rest is counted."""
    histogram = page.histogram("lifecycle_queue_seconds")
    chosen = []
    for _ in range(200):
        for number in range(100):
            histogram.observe(number)
        flush(page)
    chosen = pb_utils.MetricFamily.made["lifecycle_queue_seconds"].observed
    assert len(chosen) == 200 * page_module.SAMPLE
    assert value("lifecycle_metrics_sampled_out_total") == 200 * (100 - page_module.SAMPLE)
    assert sum(chosen) / len(chosen) == pytest.approx(49.5, abs=5)
    assert 0.3 < sum(number < 50 for number in chosen) / len(chosen) < 0.7


def test_series_have_a_bound(page, monkeypatch, caplog):
    """Whatever the labels do, the page stays small, and the log says so once."""
    monkeypatch.setattr(page_module, "MAX_SERIES", 10)
    for number in range(50):
        page.counter("lifecycle_failures_total", reason=f"r{number}").add()
    flush(page)
    assert len([name for name, _ in pb_utils.MetricFamily.series if name == "lifecycle_failures_total"]) == 8
    assert len([record for record in caplog.records if "metric series exist" in record.message]) == 1


def test_a_label_that_is_not_in_the_catalogue_is_refused(page):
    """A metric has the labels that its page in the docs names."""
    with pytest.raises(ValueError, match="has the labels"):
        page.counter("lifecycle_failures_total", tenant="me")


def test_triton_that_fails_harms_nobody(page, monkeypatch, caplog):
    """What Triton refuses is told once; the rest of the page goes on."""

    def broken(*_, **__):
        raise RuntimeError("no room")

    page.counter("lifecycle_slow_requests_total")
    monkeypatch.setattr(pb_utils.MetricFamily, "Metric", broken)
    for _ in range(3):
        flush(page)
    assert len([record for record in caplog.records if "could not be written" in record.message]) == 1


def test_the_reporter_writes_each_second_and_at_the_end():
    """What is read and told is on the page a turn later, all of it after closing; a raising reader is survived."""

    async def scenario():
        page = Page(pb_utils, "m", "1", "m_0_0")
        counter = page.counter("lifecycle_slow_requests_total")
        reads = []

        def read(whole):
            reads.append(whole)
            if len(reads) == 2:
                raise ZeroDivisionError

        reporter = Reporter(page, read, every=0.01)
        reporter.start()
        counter.add()
        async with asyncio.timeout(10):
            while len(reads) < 4:  # noqa: ASYNC110 - turns are what is waited for
                await asyncio.sleep(0.005)
        first = value("lifecycle_slow_requests_total")
        counter.add()
        await reporter.aclose()
        assert reads[-1]
        assert not any(reads[:-1])
        return first

    assert asyncio.run(scenario()) == 1
    assert value("lifecycle_slow_requests_total") == 2


# ---- the docs


def test_the_docs_list_every_metric():
    """The tables of docs/metrics.md are those of the catalogue; `metrics/reference.py` renews them."""
    text = DOCS.read_text(encoding="utf-8")
    assert renewed(text) == text
    for name in FAMILIES:
        assert f"| `{name}` |" in text


def test_every_slug_may_be_a_label():
    """No error's slug is so long or so formed that it could not be a label, and there are few."""
    assert len(errors.BY_SLUG) < 40
    assert all(re.fullmatch(r"[a-z_]{3,30}", slug) for slug in errors.BY_SLUG)
