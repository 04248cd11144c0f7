"""What a request will take, learned online: on numbers, and on the simulated engine in virtual time."""

from __future__ import annotations

import asyncio
import copy
import logging
import sys
from random import Random

import msgspec
import pytest

from tests.fakes import pb_utils
from tests.fakes.harness import Harness, Step
from triton_lifecycle.config import Config, TimeoutHandling
from triton_lifecycle.engine.simulated import Fault, SimulatedEngine
from triton_lifecycle.errors import ConfigError
from triton_lifecycle.events import Admitted, FirstToken, Predicted, Prepared
from triton_lifecycle.simulation.virtual_time import run
from triton_lifecycle.timeouts.predictor import Features, Observation, Online, Predictor, state
from triton_lifecycle.timeouts.predictor.calibration import Bound
from triton_lifecycle.timeouts.predictor.lengths import Lengths
from triton_lifecycle.timeouts.predictor.online import COLD
from triton_lifecycle.timeouts.predictor.subscriber import KEPT

MODELS = ("linear", "ml")
ENGINE = {"base_ms": 20.0, "per_sequence_us": 1000.0, "prefill_tokens_per_s": 20_000.0, "mean_output_tokens": None}
ENGINE |= {"token_sigma": 0.05, "max_num_seqs": 32, "prefix_cache": False, "kv_blocks": 8192}


def observe(chance, slow=1.0, noise=0.05):
    """Return a request of a world that is linear, but for its noise."""
    batch, prompt = chance.randrange(32), chance.randrange(8, 512)
    features = Features(prompt_tokens=prompt, max_tokens=64, running=batch, hour=12.0)
    rate = slow * (0.02 + 0.001 * batch) * chance.lognormvariate(0, noise)
    first = slow * (0.02 + 0.001 * batch + prompt / 5000) * chance.lognormvariate(0, noise)
    tokens = chance.choice((8, 16, 64))
    return Observation(features, first, rate, first + rate * (tokens - 1), tokens)


def teach(online, seen):
    """Let a model predict each and then learn it; return the predictions."""
    told = []
    for each in seen:
        told.append(online.predict(each.features))
        online.learn(each, told[-1])
    return told


def error(told, seen, kind="per_token"):
    """Return the mean absolute percentage error."""
    pairs = [(getattr(a, kind).value, getattr(b, kind)) for a, b in zip(told, seen, strict=True)]
    return 100 * sum(abs(value - actual) / actual for value, actual in pairs) / len(pairs)


@pytest.mark.parametrize("model", MODELS)
def test_both_models_learn_a_linear_world(model):
    """After 500 requests the error is that of the noise (5 %: a mean error of 4 %), and nine in ten are inside."""
    chance = Random(1)
    online = Online(model, slots=64)
    teach(online, [observe(chance) for _ in range(500)])
    seen = [observe(chance) for _ in range(500)]
    told = teach(online, seen)
    for kind in ("first_token", "per_token"):
        assert error(told, seen, kind) < 5.0
        inside = [
            getattr(a, kind).low <= getattr(b, kind) <= getattr(a, kind).high for a, b in zip(told, seen, strict=True)
        ]
        assert 86 <= 100 * sum(inside) / len(inside) <= 94


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("slow", [3.0, 0.4])
def test_a_drift_is_followed_within_500_requests(model, slow):
    """The world becomes slower or faster: 500 requests later the error is small again, and the interval covers."""
    chance = Random(2)
    online = Online(model, slots=64)
    teach(online, [observe(chance) for _ in range(1000)])
    before = [observe(chance, slow) for _ in range(20)]
    assert error(teach(online, before), before) > 10.0, "a drift that nobody notices tests nothing"
    teach(online, [observe(chance, slow) for _ in range(480)])
    seen = [observe(chance, slow) for _ in range(200)]
    told = teach(online, seen)
    assert error(told, seen) < 7.0
    assert error(told, seen, "first_token") < 7.0
    inside = [a.per_token.low <= b.per_token <= a.per_token.high for a, b in zip(told, seen, strict=True)]
    assert 85 <= 100 * sum(inside) / len(inside) <= 96


def test_what_is_never_touched_does_not_explode():
    """A day at one load, then another load at once: the first prediction is wrong by its size, not by its order."""
    online = Online("linear", slots=64)
    features = Features(prompt_tokens=100, max_tokens=16, running=2, hour=3.0)
    for _ in range(20_000):
        online.learn(Observation(features, 0.05, 0.02, 0.35, 16), None)
    told = online.predict(Features(prompt_tokens=400, max_tokens=16, running=30, waiting=9, kv_usage=0.9, hour=15.0))
    assert told is not None
    assert 0.005 < told.per_token.value < 0.1
    assert 0.01 < told.first_token.value < 0.2


def test_the_bound_is_missed_as_often_as_promised():
    """One in twenty, also while the scores grow and shrink."""
    chance, bound, missed = Random(4), Bound(0.05), 0
    for number in range(10_000):
        scale = 1.0 + (number // 1000) % 3
        score = chance.gauss(0, scale)
        beyond = score > bound.value
        missed += beyond
        bound.learn(score, missed=beyond)
    assert 0.04 <= missed / 10_000 <= 0.06


def test_lengths_are_bounded_by_max_tokens_and_told_as_observed():
    """Unknown: anything up to the bound. Then the share that was used, apart for each size of bound."""
    lengths = Lengths()
    assert lengths.predict(100).high == 100
    for number in range(200):
        lengths.learn(100, 100)
        lengths.learn(1000, 10 + number % 10)
    assert (lengths.predict(100).low, lengths.predict(100).high) == (100, 100)
    known = lengths.predict(1000)
    assert 10 <= known.low <= known.mean <= known.high <= 20
    assert lengths.predict(3).high == 3


def test_ml_without_river_says_what_to_install(monkeypatch):
    """A clear error at start."""
    monkeypatch.setitem(sys.modules, "river", None)
    with pytest.raises(ConfigError, match=r"timeout_prediction_model.*triton-lifecycle\[ml\]"):
        Predictor("ml", max_model_len=100, slots=1)


# ---- on the simulated engine


async def callers(harness, number, requests, chance, prompts=(8, 64, 256), answers=(2, 3, 5)):
    """Serve requests, ``number`` at a time; each prompt another."""
    left = requests

    async def caller():
        nonlocal left
        while left > 0:
            left -= 1
            text = " ".join(["river"] * chance.choice(prompts))
            parameters = {"max_tokens": chance.choice(answers), "ignore_eos": True}
            await harness.serve(pb_utils.InferenceRequest({"text_input": text, "stream": True}, parameters, "r"))

    await asyncio.gather(*[caller() for _ in range(number)])


async def simulated(config=None, **settings):
    """Return a harness around a running simulated engine."""
    engine = SimulatedEngine.from_settings({**ENGINE, **settings})
    await engine.start()
    return Harness(config or Config(), engine)


def test_nine_in_ten_lie_within_the_interval_over_5000_requests_with_load_steps():
    """Each of the three covers 88…92 %, over everything that was predicted from the cold start on."""

    async def scenario():
        harness = await simulated()
        inside = {"first_token": [], "per_token": [], "total": []}
        learn = harness.predictor._online.learn

        def spy(seen, said):
            for kind, hits in inside.items():
                if said is not None and getattr(seen, kind):
                    hits.append(getattr(said, kind).low <= getattr(seen, kind) <= getattr(said, kind).high)
            learn(seen, said)

        harness.predictor._online.learn = spy
        chance = Random(5)
        for number in (4, 16, 2, 32, 8, 48, 12, 24, 1, 16):
            await callers(harness, number, 520, chance)
        await harness.close()
        for kind, hits in inside.items():
            assert len(hits) >= 5000, kind
            assert 88 <= 100 * sum(hits) / len(hits) <= 92, (kind, 100 * sum(hits) / len(hits))

    run(scenario)


def test_a_slower_engine_is_followed_within_500_requests():
    """The engine takes three times as long from one moment on; 500 requests later the predictions say so."""

    async def scenario():
        harness = await simulated()
        accuracy = harness.predictor._online.accuracy

        async def measured(requests):
            accuracy["per_token"] = type(accuracy["per_token"])()
            await callers(harness, 8, requests, chance)
            assert accuracy["per_token"].seen >= requests - 8
            return copy.copy(accuracy["per_token"])

        chance = Random(6)
        await callers(harness, 8, 400, chance)
        before = await measured(300)
        harness.engine.inject(Fault(do="slow", for_s=1e6, factor=3.0))
        at_once = await measured(20)
        await callers(harness, 8, 480, chance)
        after = await measured(300)
        await harness.close()
        assert at_once.mape > 2 * before.mape, "a drift that nobody notices tests nothing"
        assert after.mape < 1.2 * before.mape + 2.0
        assert 84 <= after.coverage <= 96

    run(scenario)


def test_a_cold_start_has_the_default_limits_and_ends_by_itself():
    """The first requests have the default timeout; once enough was seen, limits follow the predictions."""

    async def scenario():
        harness = await simulated(Config(timeout_handling=TimeoutHandling(min_timeout=0.1)))
        await callers(harness, 2, COLD + 20, Random(7))
        await harness.close()
        admitted = [event for event in harness.events if isinstance(event, Admitted)]
        assert all(event.limits == {"first_token": 30.0, "stall": 30.0, "total": 300.0} for event in admitted[:COLD])
        last = admitted[-1].limits
        assert 0.1 <= last["first_token"] < 5.0
        assert last["total"] == 300.0
        predicted = [event for event in harness.events if isinstance(event, Predicted)]
        assert 0 < len(predicted) <= 20
        assert all(0 < low <= high for _, low, high in (event.total for event in predicted))

    run(scenario)


@pytest.mark.parametrize("configured", [{}, {"safety_margin": 1.0}])
def test_a_prompt_longer_than_any_before_ends_nobody(configured):
    """While the engine reads what it never read before, it is silent for all: neither the prompt nor others end by it.

    That patience is the default timeout; afterwards the load is known, and an engine that stands still is found out.
    """

    async def scenario():
        timeouts = TimeoutHandling(min_timeout=0.2, default_timeout=20.0, **configured)
        settings = {"prefill_tokens_per_s": 200.0, "max_num_batched_tokens": 4096}
        harness = await simulated(Config(timeout_handling=timeouts), **settings)
        await callers(harness, 2, COLD + 40, Random(8), prompts=(4, 8, 16))
        others = [
            pb_utils.InferenceRequest(
                {"text_input": f"go {n}", "stream": True}, {"max_tokens": 400, "ignore_eos": True}
            )
            for n in range(3)
        ]
        running = [asyncio.create_task(harness.serve(request)) for request in others]
        await asyncio.sleep(0.5)
        long = pb_utils.InferenceRequest({"text_input": "river " * 1900, "stream": True}, {"max_tokens": 2}, "long")
        began = asyncio.get_running_loop().time()
        await harness.serve(long)
        limits = harness.contexts.find("long").limits
        assert limits["first_token"] < 9.0 < asyncio.get_running_loop().time() - began < 20.0, "it was to be tested"
        await asyncio.gather(*running)
        assert [error.message() for request in (long, *others) for error in request.sender.errors] == []
        harness.engine.inject(Fault(do="stall", for_s=1e6))
        began = asyncio.get_running_loop().time()
        stuck = pb_utils.InferenceRequest({"text_input": "river", "stream": True}, {"max_tokens": 2}, "stuck")
        await harness.serve(stuck)
        assert stuck.sender.errors[0].message().startswith("first_token_timeout: ")
        assert asyncio.get_running_loop().time() - began < 20.0
        await harness.close()

    run(scenario)


def test_the_load_returns_to_zero_whatever_the_ends():
    """Requests that finish, fail, time out and are refused leave nothing running or waiting behind."""

    async def scenario():
        harness = Harness(Config(timeout_handling=TimeoutHandling(stall_timeout=1.0)))
        harness.engine.scripts = {
            "good": [Step("token", 0.1), Step("token", 0.1)],
            "bad": [Step("token", 0.1), Step("bug")],
            "mute": [Step("token", 100.0)],
            "stalls": [Step("token", 0.1), Step("token", 100.0)],
        }
        requests = [
            pb_utils.InferenceRequest({"text_input": prompt, "stream": True}, {"timeout_ms": 3000}, prompt)
            for prompt in ("good", "bad", "mute", "stalls") * 5
        ]
        requests.append(pb_utils.InferenceRequest({"text_input": ""}, {}, "refused"))
        await asyncio.gather(*[harness.serve(request) for request in requests])
        predictor = harness.predictor
        assert (predictor.running, predictor.waiting, predictor._pending, predictor._open) == (0, 0, 0.0, {})
        await harness.close()

    run(scenario)


def test_the_present_step_is_told_apart_from_the_next():
    """Prompts that came after the engine's last token are not in the step that is under way."""
    clock = [100.0]
    predictor = Predictor(
        "linear", max_model_len=1000, slots=4, silence=lambda: 2.0, clock=lambda: clock[0], hour=lambda: 0.0
    )
    for name, at, size in (("early", 97.0, 400), ("late", 99.0, 80)):
        prepared = Prepared(
            name, 0, at, "prompt", size, stream=True, priority=0, tenant="", timeout=None, sequences=1, max_tokens=9
        )
        predictor.take(prepared)
        predictor.take(Admitted(name, 1, at, priority=0, limits={}))
    features = predictor.features(40, 9)
    assert (features.pending, features.in_step, features.elapsed) == (120.0, 100.0, 2.0)
    predictor.take(FirstToken("early", 2, 100.0))
    assert (predictor.running, predictor.waiting) == (1, 1)
    assert predictor.features(40, 9).in_step == 0.0


def test_waiting_in_vain_is_learned():
    """An engine so slow that every caller leaves before the first token is not taken for a fast one for ever."""

    async def scenario():
        harness = Harness(Config())
        harness.engine.scripts = {"fast": [Step("token", 0.1), Step("token", 0.1)], "slow": [Step("token", 100.0)]}
        for prompt, count in (("fast", 60), ("slow", 60)):
            for _ in range(count):
                await harness.serve(
                    pb_utils.InferenceRequest({"text_input": prompt, "stream": True}, {"timeout_ms": 4000}, "r")
                )
        told = harness.predictor.predict(harness.predictor.features(4, 16))
        assert told.first_token.value > 1.0
        await harness.close()

    run(scenario)


# ---- across restarts


def some(count=100):
    """Return observations."""
    chance = Random(8)
    return tuple(observe(chance) for _ in range(count))


def fresh():
    """Return a predictor that has seen nothing."""
    return Predictor("linear", max_model_len=1000, slots=64, hour=lambda: 12.0)


@pytest.mark.parametrize("model", MODELS)
def test_what_was_seen_outlives_a_restart(tmp_path, model):
    """A new process predicts from the start, with either model, as the old one did."""
    path = tmp_path / "deep" / "seen.json"
    old = fresh()
    old.relearn(some())
    state.save(path, old.kept)
    new = Predictor(model, max_model_len=1000, slots=64, hour=lambda: 12.0)
    new.relearn(state.load(path))
    assert new.kept == old.kept
    assert new.report()["ready"]
    features = old.features(400, 64)
    assert new.predict(features).per_token.value == pytest.approx(old.predict(features).per_token.value, rel=0.1)
    assert [each.name for each in path.parent.iterdir()] == ["seen.json"], "written beside, then put in its place"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\x00", b"[]", b'{"version": 99, "observations": []}', b" " * (state.MAX_BYTES + 1)]
)
def test_a_file_that_cannot_be_used_is_left_aside_with_a_warning(tmp_path, caplog, content):
    """Broken, foreign, of another version or too large: a cold start, not a failure."""
    path = tmp_path / "seen.json"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert state.load(path) == ()
    assert "state_path" in caplog.text
    assert path.read_bytes() == content


def test_no_file_is_a_cold_start_without_a_warning(tmp_path, caplog):
    """The first start is nothing to warn of."""
    assert state.load(tmp_path / "none.json") == ()
    assert caplog.text == ""


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    """A full or read-only disk costs the memory of the past, and nothing else."""
    (tmp_path / "file").write_text("")
    state.save(tmp_path / "file" / "seen.json", some(3))
    assert "cannot be written" in caplog.text


def test_the_file_is_bounded():
    """However long the server runs."""
    predictor = fresh()
    predictor.relearn(some(KEPT + 100))
    assert len(predictor.kept) == KEPT
    assert len(msgspec.json.encode(predictor.kept)) < state.MAX_BYTES // 2
