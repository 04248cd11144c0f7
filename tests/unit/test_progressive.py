"""Limits that follow predictions, at work: who is ended, who is not, when, and what the caller gets."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from tests.fakes import pb_utils
from tests.fakes.harness import Harness, Step
from triton_lifecycle.config import Admission as AdmissionSettings
from triton_lifecycle.config import Config, ErrorHandling, TimeoutHandling
from triton_lifecycle.engine.simulated import Fault, SimulatedEngine
from triton_lifecycle.events import Admitted, Finished, Slow, TimedOut
from triton_lifecycle.simulation.virtual_time import run
from triton_lifecycle.timeouts.predictor.online import COLD

TIGHT = Config(timeout_handling=TimeoutHandling(min_timeout=0.2, default_timeout=20.0))
"""min_timeout so short that only the predictions decide."""
ENGINE = {
    "base_ms": 20.0,
    "per_sequence_us": 1000.0,
    "prefill_tokens_per_s": 2000.0,
    "token_sigma": 0.2,
    "first_token_sigma": 0.2,
    "max_num_seqs": 16,
    "prefix_cache": False,
    "mean_output_tokens": None,
    "max_model_len": 256,
    "kv_blocks": 40,
}
"""So few blocks that sequences are preempted."""


async def simulated(config=TIGHT, **settings):
    """Return a harness around a running simulated engine."""
    engine = SimulatedEngine.from_settings({**ENGINE, **settings})
    await engine.start()
    return Harness(config, engine)


def ask(words, tokens, **parameters):
    """Return a request with a prompt of so many tokens."""
    text = " ".join(["river"] * words)
    return pb_utils.InferenceRequest(
        {"text_input": text, "stream": True}, {"max_tokens": tokens, "ignore_eos": True, **parameters}, "r"
    )


async def arrive(harness, count, rate, chance):
    """Serve requests of mixed sizes as they arrive, most alone, some in bursts of up to 60."""
    tasks = []
    while len(tasks) < count:
        burst = chance.randrange(20, 60) if chance.random() < 0.02 else 1
        for _ in range(min(burst, count - len(tasks))):
            words, tokens = chance.choice((4, 13, 14, 30, 120)), chance.choice((1, 2, 3, 4, 8))
            tasks.append(asyncio.ensure_future(harness.serve(ask(words, tokens))))
        await asyncio.sleep(chance.expovariate(rate / 1.6))
    await asyncio.gather(*tasks)


def test_no_false_kills_among_10000_mixed_requests():
    """All would have come within max_timeout: at most one in a thousand may be ended, through bursts and preemption."""

    async def scenario():
        harness = await simulated()
        await arrive(harness, 10_000, 16.0, Random(1))
        kinds = harness.contexts.counts
        waits = [len(harness.events), harness.engine.preemptions]
        await harness.close()
        assert kinds["received"] == 10_000
        assert kinds["completed"] >= 9_990, kinds
        assert waits[1] > 0, "without preemption the hardest case is missing"
        slow = sum(isinstance(event, Slow) for event in harness.events)
        assert 100 < slow < 1500, slow
        limits = [event.limits["first_token"] for event in harness.events if isinstance(event, Admitted)]
        assert sorted(limits)[len(limits) // 2] < 5.0, "limits so wide prove nothing"

    run(scenario)


def test_an_engine_that_reads_everything_again_is_not_taken_for_stalled():
    """After its death it reads in one step what it had read one by one: silent for ten seconds, and nobody is ended."""

    async def scenario():
        harness = await simulated(
            Config(
                timeout_handling=TimeoutHandling(min_timeout=0.2, default_timeout=20.0),
                error_handling=ErrorHandling(recovery_delay=0.0),
            ),
            kv_blocks=4096,
            prefill_tokens_per_s=200.0,
        )
        for _ in range(COLD + 10):
            await harness.serve(ask(120, 8))
        tasks = []
        for _ in range(16):
            tasks.append(asyncio.ensure_future(harness.serve(ask(120, 130))))
            await asyncio.sleep(0.8)
        mark, died = len(harness.events), asyncio.get_running_loop().time()
        harness.engine.inject(Fault(do="die"))
        await asyncio.gather(*tasks)
        ended = [event for event in harness.events[mark:] if isinstance(event, Finished | TimedOut)]
        limits = [event.limits["stall"] for event in harness.events if isinstance(event, Admitted)]
        await harness.close()
        assert limits[-1] < 8.0, "limits so wide prove nothing"
        assert min(event.at for event in ended) > died + 9.0, "so short a silence proves nothing"
        assert [event for event in ended if isinstance(event, TimedOut)] == []
        assert len(ended) == 16

    run(scenario)


def test_stalls_are_caught_within_the_limit_and_a_second():
    """200 requests on an engine that falls silent: each is ended in time, with its reason and the tokens it had."""

    async def scenario():
        harness = await simulated(kv_blocks=4096)
        chance, loop = Random(2), asyncio.get_running_loop()
        late, caught, lags = 0, 0, []
        await arrive(harness, 300, 40.0, chance)
        for _ in range(20):
            tasks = [
                asyncio.ensure_future(harness.serve(ask(chance.choice((16, 120)), chance.randrange(30, 60))))
                for _ in range(10)
            ]
            await asyncio.sleep(chance.uniform(0.0, 0.5))
            harness.engine.inject(Fault(do="stall", for_s=100.0))
            fell_silent, mark = loop.time(), len(harness.events)
            await asyncio.gather(*tasks)
            ended = [event for event in harness.events[mark:] if isinstance(event, TimedOut)]
            limits = {event.request_id: event.limits for event in harness.events if isinstance(event, Admitted)}
            for event in ended:
                named = event.slug.removesuffix("_timeout")
                bound = limits[event.request_id][named]
                caught += 1
                # A step that was under way when the engine fell silent still brings its tokens.
                late += event.at > fell_silent + bound + 1.0
                lags.append(event.at - fell_silent - bound)
                assert f"{bound:g} s passed; " in event.message
            await asyncio.sleep(110 - (loop.time() - fell_silent))
            # What was learned of the silence is learned again of normal work.
            await arrive(harness, 60, 40.0, chance)
        await harness.close()
        assert caught >= 190
        assert late <= 0.01 * caught

    run(scenario)


def test_the_deadline_is_kept_within_20_ms():
    """1,000 callers with bounds of their own: the error comes at its time."""

    async def scenario():
        harness = await simulated(kv_blocks=4096)
        chance = Random(3)
        await arrive(harness, 100, 40.0, chance)

        async def one():
            await asyncio.sleep(chance.uniform(0, 50))
            bound = chance.randrange(50, 3000)
            began = asyncio.get_running_loop().time()
            request = ask(16, 400, timeout_ms=bound)
            await harness.serve(request)
            [message] = [error.message() for error in request.sender.errors]
            assert f"{bound / 1e3:g} s" in message
            return began + bound / 1e3

        due = sorted(await asyncio.gather(*[one() for _ in range(1000)]))
        ended = sorted(event.at for event in harness.events if isinstance(event, TimedOut))
        errors = sorted(abs(at - when) for at, when in zip(ended, due, strict=True))
        await harness.close()
        assert errors[990] <= 0.020

    run(scenario)


def test_slow_is_an_event_and_tokens_that_flow_extend_the_limit():
    """An answer that takes many times as long as predicted is told of, and comes whole."""

    async def scenario():
        harness = Harness(TIGHT)
        harness.engine.scripts = {"usual": [Step("token", 0.1)] * 4, "long": [Step("token", 0.15)] * 200}
        for _ in range(COLD + 10):
            await harness.serve(pb_utils.InferenceRequest({"text_input": "usual"}, {"max_tokens": 4}, "r"))
        await harness.serve(pb_utils.InferenceRequest({"text_input": "long"}, {"max_tokens": 4}, "r"))
        [slow] = [event for event in harness.events if isinstance(event, Slow)]
        assert 0.3 < slow.after < 1.5
        assert slow.tokens >= 1
        assert isinstance(harness.events[-1], Finished)
        assert harness.events[-1].at - slow.at > 20, "longer than default_timeout"
        await harness.close()

    run(scenario)


def test_max_timeout_ends_what_flows():
    """Progress extends the limit up to max_timeout and no further."""

    async def scenario():
        config = Config(timeout_handling=TimeoutHandling(min_timeout=0.2, default_timeout=2.0, max_timeout=5.0))
        harness = Harness(config)
        harness.engine.scripts = {"long": [Step("token", 0.2)] * 200}
        request = pb_utils.InferenceRequest({"text_input": "long", "stream": True}, {}, "r")
        await harness.serve(request)
        [message] = [error.message() for error in request.sender.errors]
        assert message.startswith("total_timeout: the total limit of 5 s passed; 2")
        await harness.close()

    run(scenario)


@pytest.mark.parametrize("given", ["partial", "nothing", "stream"])
def test_partial_answers(given):
    """With partial a unary caller has the text so far, ended by ``timeout``; a stream, or no token, means an error."""

    async def scenario():
        harness = Harness()
        harness.engine.scripts = {"p": [Step("token", 0.4 if given != "nothing" else 9.0)] * 10}
        tensors = {"text_input": "p", "exclude_input_in_output": True, "return_finish_reason": True}
        tensors |= {"return_num_output_tokens": True, "stream": given == "stream"}
        request = pb_utils.InferenceRequest(tensors, {"timeout_ms": 1000, "partial": True}, "r")
        await harness.serve(request)
        assert isinstance(harness.events[-1], TimedOut), "it counts as what it is"
        if given != "partial":
            [message] = [error.message() for error in request.sender.errors]
            assert message.startswith("total_timeout: ")
            return
        assert request.sender.errors == []
        [outputs] = [response.tensors for response, _ in request.sender.sent if response is not None]
        assert outputs["text_output"] == ["01"]
        assert outputs["finish_reason"] == ["timeout"]
        assert outputs["num_output_tokens"] == [2]

    run(scenario)


def test_partial_must_be_a_boolean():
    """Anything else is refused, by name."""

    async def scenario():
        harness = Harness()
        request = pb_utils.InferenceRequest({"text_input": "p"}, {"partial": "yes"}, "r")
        await harness.serve(request)
        [message] = [error.message() for error in request.sender.errors]
        assert message == "invalid_input: partial: expected true or false, found 'yes'"

    run(scenario)


def test_what_is_surely_too_long_is_refused_before_it_costs_anything():
    """With the predictor: a caller whose bound lies under the predicted time is refused while others are served."""
    config = Config(
        timeout_handling=TimeoutHandling(min_timeout=0.2), admission=AdmissionSettings(refuse_unreachable=True)
    )

    async def scenario():
        harness = await simulated(config)
        for _ in range(COLD + 10):
            await harness.serve(ask(30, 60))
        beside = asyncio.ensure_future(harness.serve(ask(30, 100)))
        await asyncio.sleep(0.5)
        refused, served = ask(30, 60, timeout_ms=300.0), ask(30, 60, timeout_ms=30_000.0)
        await harness.serve(refused)
        await harness.serve(served)
        await beside
        await harness.close()
        [message] = [error.message() for error in refused.sender.errors]
        assert message.startswith("deadline_unreachable: it would take about ")
        assert served.sender.errors == []
        assert harness.contexts.counts["completed"] == COLD + 12

    run(scenario)
