"""An engine that dies or hangs comes back, and requests go on from where they were; in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import json
from random import Random

import pytest

from tests.fakes import pb_utils
from tests.fakes.harness import Harness, ScriptedEngine, Step, text_of
from tests.waiting import eventually
from triton_lifecycle.config import Config, ErrorHandling, TimeoutHandling
from triton_lifecycle.engine import Chunk, Delta, Limits
from triton_lifecycle.engine.simulated import Fault, SimulatedEngine
from triton_lifecycle.engine.splice import Known, Splice
from triton_lifecycle.errors import ConfigError, GenerationFailed
from triton_lifecycle.events import Retrying
from triton_lifecycle.recovery import Step as Next
from triton_lifecycle.recovery import Trouble, decide
from triton_lifecycle.simulation.virtual_time import run

NO_LIMITS = TimeoutHandling(enabled=False)


def request_of(prompt="p", *, stream=True, request_id="r", timeout_ms=None, **sampling):
    """Return a request that asks for every output there is."""
    tensors = {"text_input": prompt, "stream": stream, "exclude_input_in_output": True}
    wants = ("finish_reason", "cumulative_logprob", "logprobs", "num_output_tokens")
    tensors |= {f"return_{name}": True for name in wants}
    return pb_utils.InferenceRequest(
        {**tensors, "sampling_parameters": json.dumps(sampling)},
        {} if timeout_ms is None else {"timeout_ms": timeout_ms},
        request_id,
    )


def whole(request):
    """Return what the caller has in the end, however it was cut: by sequence text, tokens, logprobs, reason, sum."""
    responses = [response.tensors for response, _ in request.sender.sent if response is not None]
    assert request.sender.errors == []
    count = len(responses[-1]["text_output"])
    return [
        (
            "".join(outputs["text_output"][index] for outputs in responses),
            sum(outputs["num_output_tokens"][index] for outputs in responses),
            [record for outputs in responses for record in json.loads(outputs["logprobs"][index]) or ()],
            responses[-1]["finish_reason"][index],
            pytest.approx(responses[-1]["cumulative_logprob"][index], abs=1e-4),
        )
        for index in range(count)
    ]


async def simulated(config=None, *, startup=2.0, **settings):
    """Return a harness around a simulated engine that has started."""
    engine = SimulatedEngine.from_settings({"startup_s": startup, "mean_output_tokens": None, **settings})
    await engine.start()
    return Harness(config or Config(timeout_handling=NO_LIMITS), engine, startup=startup)


async def answers(harness, requests):
    """Serve all at once; return their texts."""
    await asyncio.gather(*[harness.serve(request) for request in requests])
    assert [request.sender.errors for request in requests if request.sender.errors] == []
    return [request.sender.text() for request in requests]


@pytest.mark.parametrize(
    ("trouble", "facts", "step"),
    [
        (Trouble(1, 3), {}, Next.AGAIN),
        (Trouble(4, 3), {}, Next.FAIL),
        (Trouble(1, 0), {}, Next.FAIL),
        (Trouble(0, 0), {"made": True, "continuable": True}, Next.FAIL),
        (Trouble(0, 3), {"made": True, "sent": True, "continuable": True}, Next.CONTINUE),
        (Trouble(0, 3), {"made": True, "sent": False}, Next.AGAIN),
        (Trouble(0, 3), {"made": True, "sent": True, "repeatable": True}, Next.REPEAT),
        (Trouble(0, 3), {"made": True, "sent": True}, Next.FAIL),
        (Trouble(1, 3, quarantined=True), {"made": True, "continuable": True}, Next.FAIL),
    ],
)
def test_the_table(trouble, facts, step):
    """Each situation has one next step."""
    assert decide(trouble, **facts) is step


def test_a_stream_goes_on_after_the_engines_death():
    """The caller sees a pause and then its next token; nothing is lost or repeated."""

    async def scenario():
        harness = Harness(Config(timeout_handling=NO_LIMITS))
        script = [Step("token", 0.1, 2), Step("token", 0.1), Step("die", times=1), Step("token", 0.1, 3)]
        harness.engine.scripts["p"] = script
        request = pb_utils.InferenceRequest({"text_input": "p", "stream": True}, {}, "r")
        await harness.serve(request)
        assert request.sender.text() == text_of(script)
        assert request.sender.errors == []
        [retry] = [event for event in harness.events if isinstance(event, Retrying)]
        assert (retry.attempt, retry.slug) == (1, "engine_died")
        assert harness.contexts.find("r").attempts == 2
        assert harness.supervisor.state.restarts == 1

    run(scenario)


CASES = {
    "greedy": {"temperature": 0.0},
    "greedy with a seed": {"temperature": 0.0, "seed": 5},
    "stop ids, bias, minimum": {
        "temperature": 0.0,
        "stop_token_ids": [1023],
        "min_tokens": 20,
        "logit_bias": {"7": -1},
    },
    "logprobs": {"temperature": 0.0, "logprobs": 2},
    "stop strings": {"temperature": 0.0, "stop": ["never to be seen"]},
    "penalties": {"temperature": 0.0, "presence_penalty": 1.0},
    "seeded": {"temperature": 1.0, "seed": 5},
    "several with a seed": {"temperature": 1.0, "seed": 5, "n": 3},
}


@pytest.mark.parametrize("sampling", CASES.values(), ids=CASES)
@pytest.mark.parametrize("stream", [True, False])
def test_a_disturbed_answer_equals_the_undisturbed_one(sampling, stream):
    """Continued or repeated: text, tokens and logprobs are those of a run without a fault, streamed and unary."""

    async def scenario():
        wanted = {"max_tokens": 60, "ignore_eos": True, **sampling}
        outcomes = []
        for kills in (0, 3):
            harness = await simulated(startup=0.2, base_ms=20.0)
            request = request_of(stream=stream, **wanted)
            task = asyncio.create_task(harness.serve(request))
            for _ in range(kills):
                await asyncio.sleep(0.47)
                harness.engine.inject(Fault(do="die"))
            await task
            assert harness.supervisor.state.restarts == kills
            outcomes.append(whole(request))
            await harness.close()
        assert outcomes[0] == outcomes[1]
        assert [sequence[1] for sequence in outcomes[0]] == [60] * wanted.get("n", 1)

    run(scenario)


def test_what_cannot_be_continued_exactly_says_so():
    """Random and several sequences, half of it sent: a clear error that may be retried; unary: simply made again."""

    async def scenario():
        for stream in (True, False):
            harness = await simulated()
            request = request_of(stream=stream, max_tokens=60, ignore_eos=True, n=2)
            task = asyncio.create_task(harness.serve(request))
            await asyncio.sleep(0.2)
            harness.engine.inject(Fault(do="die"))
            await task
            if stream:
                [error] = request.sender.errors
                assert error.message().startswith("engine_died: ")
                assert "cannot be continued exactly" in error.message()
            else:
                assert harness.contexts.find("r").output_tokens == 120
            await harness.close()

    run(scenario)


def test_a_thousand_deaths_lose_nothing():
    """32 streams at a time, 1,000 deaths: no request fails, and every answer is the undisturbed one."""

    async def scenario():
        prompts = [f"tell me about number {number}" for number in range(32)]
        sampling = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}
        calm = await simulated()
        wanted = dict(zip(prompts, await answers(calm, [request_of(p, **sampling) for p in prompts]), strict=True))
        await calm.close()
        harness = await simulated(startup=0.5, base_ms=200.0)
        random, numbers, served = Random(7), itertools.count(), 0

        async def caller(prompt):
            nonlocal served
            while harness.supervisor.state.restarts < 1000:
                request = request_of(prompt, request_id=f"r{next(numbers)}", **sampling)
                await harness.serve(request)
                assert [error.message() for error in request.sender.errors] == []
                assert request.sender.text() == wanted[prompt]
                served += 1

        async def killer():
            while harness.supervisor.state.restarts < 1000:
                # Longer than all prompts take to be read again: with no token in between, who killed could not be told.
                await asyncio.sleep(0.5 + random.uniform(0.5, 1.5))
                harness.engine.inject(Fault(do="die"))

        await asyncio.gather(killer(), *[caller(prompt) for prompt in prompts])
        assert served > 32
        assert harness.contexts.counts["completed"] == harness.contexts.counts["received"] == served
        assert (len(harness.contexts), harness.admission.out, harness.engine.load().requests) == (0, 0, 0)
        await harness.close()

    run(scenario)


@pytest.mark.parametrize("token", [None, 4])
@pytest.mark.parametrize("company", [0, 1, 12])
def test_a_request_that_kills_the_engine_fails_alone(token, company):
    """Before its first token or at its fourth, alone or not: it is found out, and every other one completes."""

    async def scenario():
        harness = await simulated(
            faults=[{"do": "die", "on": {"prompt_contains": "poison", **({} if token is None else {"token": token})}}]
        )
        others = [request_of(f"good {n}", request_id=f"g{n}", max_tokens=50, ignore_eos=True) for n in range(company)]
        poison = request_of("poison", request_id="bad", max_tokens=50, ignore_eos=True)
        tasks = [asyncio.create_task(harness.serve(request)) for request in [*others, poison]]
        late = request_of("late", request_id="late", max_tokens=50)
        await asyncio.sleep(1)
        await asyncio.gather(*tasks, harness.serve(late))
        assert [request.sender.errors for request in [*others, late] if request.sender.errors] == []
        [error] = poison.sender.errors
        assert error.message().startswith("generation_failed: the engine died each time")
        assert harness.supervisor.state.restarts <= 4
        await harness.close()

    run(scenario)


def test_two_requests_that_kill_are_both_found():
    """Each costs its own deaths; the rest complete."""

    async def scenario():
        harness = await simulated(faults=[{"do": "die", "on": {"prompt_contains": "poison"}}])
        bad = [request_of(f"poison {n}", request_id=f"b{n}", max_tokens=5) for n in range(2)]
        good = [request_of(f"good {n}", request_id=f"g{n}", max_tokens=50, ignore_eos=True) for n in range(6)]
        await asyncio.gather(*[harness.serve(request) for request in [*bad, *good]])
        assert [request.sender.errors for request in good if request.sender.errors] == []
        assert all("died each time" in request.sender.errors[0].message() for request in bad)
        assert harness.supervisor.state.restarts <= 5
        await harness.close()

    run(scenario)


def test_a_request_without_the_time_for_a_restart_is_told_at_once():
    """engine_restarting, with the seconds that are missing as the hint; before the deadline, not at it."""

    async def scenario():
        harness = await simulated(startup=20.0)
        request = request_of(timeout_ms=5000, max_tokens=2000, ignore_eos=True)
        task = asyncio.create_task(harness.serve(request))
        await asyncio.sleep(1)
        harness.engine.inject(Fault(do="die"))
        began = asyncio.get_running_loop().time()
        await task
        assert asyncio.get_running_loop().time() - began < 0.1
        [error] = request.sender.errors
        assert error.message().startswith("engine_restarting: the engine is being restarted, which takes about")
        assert "retry after" in error.message()
        await harness.close()

    run(scenario)


def test_only_the_total_limit_counts_while_the_engine_is_away():
    """First-token and stall limits begin anew when it is back."""

    async def scenario():
        limits = TimeoutHandling(default_timeout=30, first_token_timeout=1, stall_timeout=1, min_timeout=1)
        harness = await simulated(Config(timeout_handling=limits), startup=5.0)
        waiting, running = (
            request_of("a", request_id="a", max_tokens=20),
            request_of("b", request_id="b", max_tokens=50),
        )
        tasks = [asyncio.create_task(harness.serve(running))]
        await asyncio.sleep(0.1)
        harness.engine.inject(Fault(do="die"))
        tasks.append(asyncio.create_task(harness.serve(waiting)))
        await asyncio.gather(*tasks)
        assert running.sender.errors == []
        assert waiting.sender.errors == []
        await harness.close()

    run(scenario)


def test_who_waits_for_the_trials_of_others_is_not_late():
    """Eight long prompts are read one by one after two deaths: who comes meanwhile waits, and has its limit after."""

    async def scenario():
        limits = TimeoutHandling(default_timeout=60, first_token_timeout=5, stall_timeout=5, min_timeout=1)
        harness = await simulated(Config(timeout_handling=limits), startup=1.0, prefill_tokens_per_s=1000.0)
        suspects = [request_of(f"{n} " + "word " * 1500, request_id=f"s{n}", max_tokens=3) for n in range(8)]
        tasks = [asyncio.create_task(harness.serve(request)) for request in suspects]
        for deaths in (1, 2):
            await asyncio.sleep(0.5)
            harness.engine.inject(Fault(do="die"))
            await eventually(lambda deaths=deaths: harness.supervisor.state.restarts == deaths)
        assert not harness.supervisor.admits
        late = request_of("late", request_id="late", max_tokens=3)
        began = asyncio.get_running_loop().time()
        await asyncio.gather(harness.serve(late), *tasks)
        assert [request.sender.errors for request in [*suspects, late] if request.sender.errors] == []
        assert asyncio.get_running_loop().time() - began > 5
        assert harness.supervisor.admits
        await harness.close()

    run(scenario)


def test_an_engine_that_is_away_is_not_silent():
    """However long it takes to be back, nobody's patience with its silence is used up."""

    async def scenario():
        harness = await simulated(startup=30.0)
        task = asyncio.create_task(harness.serve(request_of(max_tokens=100, ignore_eos=True)))
        await asyncio.sleep(0.2)
        harness.engine.inject(Fault(do="die"))
        await asyncio.sleep(20.0)
        assert harness.supervisor.state.status == "restarting"
        assert harness.supervisor.silence() == 0.0
        await task
        assert harness.supervisor.silence() < 0.1
        await harness.close()

    run(scenario)


class Unloadable(ScriptedEngine):
    """An engine that cannot be loaded again for a while."""

    failures = 5

    async def restart(self):
        await asyncio.sleep(self.startup)
        if self.failures:
            self.failures -= 1
            raise ConfigError("no memory")
        await super().restart()


def test_an_engine_that_does_not_come_back_is_said_so_and_goes_on_being_tried():
    """After max_recovery_attempts who waits is told why; once it loads, requests are served."""

    async def scenario():
        harness = Harness(
            Config(timeout_handling=NO_LIMITS, error_handling=ErrorHandling(recovery_delay=1.0)), Unloadable()
        )
        harness.engine.scripts["p"] = [Step("die", times=1), Step("token", 0.1)]
        request = pb_utils.InferenceRequest({"text_input": "p", "stream": True}, {}, "r")
        await harness.serve(request)
        [error] = request.sender.errors
        assert error.message().startswith("engine_restarting: the engine does not come back: ConfigError: no memory")
        assert harness.supervisor.state.status == "restarting"
        await asyncio.sleep(60)
        assert harness.supervisor.state.status == "ready"
        again = pb_utils.InferenceRequest({"text_input": "p", "stream": True}, {}, "s")
        await harness.serve(again)
        assert again.sender.text() == "0"

    run(scenario)


def test_a_stuck_engine_is_restarted():
    """Work, but no token for engine_stall_timeout: it is restarted and the stream goes on."""

    async def scenario():
        config = Config(timeout_handling=NO_LIMITS, error_handling=ErrorHandling(engine_stall_timeout=3.0))
        harness = await simulated(config)
        harness.watch()
        request = request_of(max_tokens=100, ignore_eos=True)
        task = asyncio.create_task(harness.serve(request))
        await asyncio.sleep(0.2)
        harness.engine.inject(Fault(do="stall", for_s=1e6))
        await asyncio.sleep(3.3)
        assert "no token for 3 s" in harness.supervisor.state.reason
        await task
        assert request.sender.errors == []
        assert harness.contexts.find("r").output_tokens == 100
        await harness.close()

    run(scenario)


def test_a_stuck_engine_is_restarted_though_each_request_gives_up_before():
    """Requests whose own limits are shorter come one by one: the silence that they saw is added up."""

    async def scenario():
        config = Config(timeout_handling=NO_LIMITS, error_handling=ErrorHandling(engine_stall_timeout=10.0))
        harness = await simulated(config)
        harness.watch()
        harness.engine.inject(Fault(do="stall", for_s=1e6))
        for number in range(4):
            request = request_of(request_id=f"r{number}", max_tokens=5, timeout_ms=3000)
            await harness.serve(request)
            assert (
                request.sender.errors[0]
                .message()
                .startswith("total_timeout: " if number < 3 else "engine_restarting: ")
            )
            await asyncio.sleep(60)
        assert harness.supervisor.state.restarts == 1
        assert "no token for 10 s" in harness.supervisor.state.reason
        [text] = await answers(harness, [request_of(request_id="after", max_tokens=5, timeout_ms=3000)])
        assert text
        await harness.close()

    run(scenario)


class Deaf(ScriptedEngine):
    """Its first request never hears of the engine's death."""

    deaf = True

    async def _wait(self, seconds):
        if self.deaf and self.deaths:
            self.deaf = False
            await asyncio.Event().wait()
        await super()._wait(seconds)


@pytest.mark.parametrize("others", [0, 3])
def test_who_does_not_hear_of_the_death_leaves_with_it(others):
    """An attempt that waits for the engine before is ended when the next is there: it goes on, and nobody waits for it.

    Nor is the new engine taken for dead because of it.
    """

    async def scenario():
        harness = Harness(Config(timeout_handling=NO_LIMITS), Deaf())
        harness.watch()
        names = ["p", *(f"q{number}" for number in range(others))]
        for name in names:
            harness.engine.scripts[name] = [Step("token", 0.3, 2), Step("token", 0.3), Step("token", 0.3)]
        requests = [pb_utils.InferenceRequest({"text_input": name, "stream": True}, {}, name) for name in names]
        tasks = [asyncio.create_task(harness.serve(request)) for request in requests]
        await asyncio.sleep(0.2)
        harness.engine.deaths = 1  # the next step of the first one waits for ever
        await asyncio.sleep(0.2)
        harness.engine.die()
        await asyncio.gather(*tasks)
        assert [request.sender.errors for request in requests] == [[]] * len(requests)
        assert [request.sender.text() for request in requests] == ["0123"] * len(requests)
        await asyncio.sleep(5)
        assert harness.supervisor.state.restarts == 1
        await harness.close()

    run(scenario)


class Embedder(ScriptedEngine):
    """A second for each vector."""

    limits = Limits(max_model_len=1000, vocab_size=1000, tasks=frozenset({"generate", "embed"}))

    async def embed(self, request):
        await asyncio.sleep(1.0)
        return [0.0]


def test_a_healthy_engine_is_not_taken_for_stuck():
    """Requests that end, embeddings too, show that it works, however long it has work without a pause."""

    async def scenario():
        config = Config(timeout_handling=NO_LIMITS, error_handling=ErrorHandling(engine_stall_timeout=3.0))
        harness = Harness(config, Embedder())
        harness.watch()

        async def caller(number):
            await asyncio.sleep(number * 0.06)
            for turn in range(40):
                document = json.dumps({"input": "some words"})
                request = pb_utils.InferenceRequest({"embedding_request": document}, {}, f"e{number}.{turn}")
                await harness.serve(request)
                assert [error.message() for error in request.sender.errors] == []
                await asyncio.sleep(0.3)

        await asyncio.gather(*[caller(number) for number in range(20)])
        assert harness.supervisor.state.restarts == 0
        await harness.close()

    run(scenario)


def test_an_idle_engines_death_is_noticed_and_mended():
    """Within a second, without any request."""

    async def scenario():
        harness = await simulated()
        harness.watch()
        harness.engine.inject(Fault(do="die"))
        await asyncio.sleep(1)
        assert harness.supervisor.state.status == "restarting"
        await asyncio.sleep(3)
        assert (harness.supervisor.state.status, harness.supervisor.state.restarts) == ("ready", 1)
        await harness.close()

    run(scenario)


def test_an_engine_that_fails_on_everything_is_restarted():
    """Ten failed requests in a row without a success are the engine's fault."""

    async def scenario():
        config = Config(timeout_handling=NO_LIMITS, error_handling=ErrorHandling(recovery_delay=0.1))
        harness = await simulated(config, faults=[{"do": "raise", "on": {"prompt_contains": "p"}, "times": 10}])
        requests = [request_of(f"p {n}", request_id=f"r{n}", max_tokens=3) for n in range(5)]
        await answers(harness, requests)
        assert harness.supervisor.state.reason == "it failed on 10 requests one after the other"
        await harness.close()

    run(scenario)


def test_without_recovery_a_death_is_an_error_at_once():
    """enable_auto_recovery: false: engine_died, no restart."""

    async def scenario():
        config = Config(timeout_handling=NO_LIMITS, error_handling=ErrorHandling(enable_auto_recovery=False))
        harness = await simulated(config)
        request = request_of(max_tokens=100, ignore_eos=True)
        task = asyncio.create_task(harness.serve(request))
        await asyncio.sleep(0.1)
        harness.engine.inject(Fault(do="die"))
        await task
        assert request.sender.errors[0].message().startswith("engine_died: ")
        later = request_of(request_id="later")
        await harness.serve(later)
        assert "does not let it be restarted" in later.sender.errors[0].message()
        assert harness.supervisor.state.status == "dead"

    run(scenario)


def chunk(text, ids, reason=None, total=None, *, finished=False):
    return Chunk((Delta(0, text, tuple(ids), reason, total),), finished=finished)


def test_a_splice_takes_out_what_is_known():
    """Tokens by number, text by characters, across chunks that are cut anywhere; logprobs are summed."""
    splice = Splice([Known((1, 2, 3), 4, 0.5)])
    assert splice.apply(chunk("ab", [1, 2])) is None
    [delta] = splice.apply(chunk("cdef", [3, 4], total=0.25)).deltas
    assert (delta.text, delta.token_ids, delta.cumulative_logprob) == ("ef", (4,), 0.75)
    last = splice.apply(chunk("", [], "stop", finished=True))
    assert (last.finished, last.deltas[0].finish_reason) == (True, "stop")


@pytest.mark.parametrize("made", [chunk("ab", [1, 9]), chunk("ab", [1], "stop", finished=True)])
def test_a_splice_notices_another_answer(made):
    """A repeated answer that strays from the sent one, or ends before it, is an error and never a wrong text."""
    with pytest.raises(GenerationFailed, match="differs"):
        Splice([Known((1, 2, 3), 4)]).apply(made)
