"""An answer that broke off elsewhere goes on behind the tokens that its caller has; in virtual time."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from tests.fakes import pb_utils
from tests.fakes.harness import Harness, ScriptedEngine, Step, text_of
from triton_lifecycle.config import Admission, Config, TimeoutHandling
from triton_lifecycle.continuation import BYTES_PER_TOKEN
from triton_lifecycle.engine import Remainder
from triton_lifecycle.engine.simulated import Fault, SimulatedEngine
from triton_lifecycle.events import Prepared
from triton_lifecycle.simulation.virtual_time import run
from triton_lifecycle.triton import MAX_ELEMENTS

NO_LIMITS = TimeoutHandling(enabled=False)
WHOLE = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.0}


def asking(continued=(), *, stream=True, tensors=(), **sampling):
    """Return a request for the tokens, which goes on behind those given."""
    inputs = {
        "text_input": "p",
        "stream": stream,
        "exclude_input_in_output": True,
        "sampling_parameters": json.dumps(WHOLE | sampling),
        "return_finish_reason": True,
        "return_logprobs": True,
        "return_num_input_tokens": True,
    }
    if continued:
        inputs["continue_token_ids"] = list(continued)
    return pb_utils.InferenceRequest(inputs | dict(tensors), {"return_token_ids": True}, "r")


def heard(request):
    """Return the text, the tokens and the logprobs that a caller has in the end."""
    assert request.sender.errors == []
    said = [response.tensors for response, _ in request.sender.sent if response is not None]
    return (
        request.sender.text(),
        [token for outputs in said for token in outputs.get("token_ids", ())],
        [record for outputs in said for record in json.loads(outputs["logprobs"][0]) or ()],
    )


def on_simulated(scenario, **settings):
    """Run a scenario with a harness around a simulated engine."""

    async def whole():
        engine = SimulatedEngine.from_settings({"startup_s": 0.2, "mean_output_tokens": None, **settings})
        await engine.start()
        try:
            await scenario(Harness(Config(timeout_handling=NO_LIMITS), engine, startup=0.2))
        finally:
            await engine.stop()

    run(whole)


async def answer_of(harness, request):
    await harness.serve(request)
    return heard(request)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("made", [1, 23, 59])
def test_both_parts_are_the_undisturbed_answer(made, stream):
    """Text, tokens and logprobs; the given tokens count as prompt, and as part of max_tokens and min_tokens."""

    async def scenario(harness):
        text, ids, logprobs = await answer_of(harness, asking(logprobs=1, min_tokens=50))
        assert len(ids) == 60
        request = asking(ids[:made], stream=stream, logprobs=1, min_tokens=50)
        rest = await answer_of(harness, request)
        assert rest == (text[-len(rest[0]) :], ids[made:], logprobs[made:])
        first = next(response.tensors for response, _ in request.sender.sent if response is not None)
        plain = asking()
        await harness.serve(plain)
        length = plain.sender.sent[0][0].tensors["num_input_tokens"][0]
        assert first["num_input_tokens"] == [length + made]

    on_simulated(scenario)


def test_it_costs_a_prefill_and_no_steps():
    """With 50 of 60 tokens given the rest takes little more than a sixth of the time."""

    async def scenario(harness):
        took = []
        ids = []
        for given in (0, 50):
            began = asyncio.get_running_loop().time()
            _, made, _ = await answer_of(harness, asking(ids[:given]))
            took.append(asyncio.get_running_loop().time() - began)
            ids = ids or made
        assert took[1] < took[0] / 4

    on_simulated(scenario, base_ms=20.0)


@pytest.mark.parametrize("kills", [1, 3])
@pytest.mark.parametrize("extra", [{}, {"logprobs": 1}, {"temperature": 0.7}])
def test_the_engine_may_die_under_a_continued_answer(kills, extra):
    """What was given is given again: nothing is lost or repeated."""

    async def scenario(harness):
        _, ids, _ = await answer_of(harness, asking(**extra))
        request = asking(ids[:10], **extra)
        task = asyncio.create_task(harness.serve(request))
        for _ in range(kills):
            await asyncio.sleep(0.47)
            harness.engine.inject(Fault(do="die"))
        await task
        text, rest, _ = heard(request)
        assert harness.supervisor.state.restarts == kills
        assert len(rest) == 50
        if extra.get("temperature") != 0.7:
            undisturbed = asking(ids[:10], **extra)
            await harness.serve(undisturbed)
            assert (text, rest) == heard(undisturbed)[:2]

    on_simulated(scenario, base_ms=20.0)


class Withholding(ScriptedEngine):
    """Its tokens 1 and 2 make one character, which it does not go on within: as vLLM does."""

    def __init__(self, *, repeatable=True):
        super().__init__()
        self._repeatable = repeatable

    def remainder(self, request, made):
        kept = 1 if len(made) == 2 else len(made)
        return Remainder(request.after(made[:kept], request.sampling.native), kept)

    def repeatable(self, sampling):
        return self._repeatable


SCRIPT = [Step("token", 0.1), Step("token", 0.1, 2), Step("token", 0.1)]


@pytest.mark.parametrize("dies", [None, 0, 1])
def test_a_token_within_a_character_brings_its_text_and_is_not_told_again(dies):
    """Also when the engine dies before the character, and after it."""

    async def scenario():
        harness = Harness(Config(timeout_handling=NO_LIMITS), Withholding())
        script = list(SCRIPT)
        if dies is not None:
            script.insert(1 + dies, Step("die", times=1))
        harness.engine.scripts["p"] = script
        request = pb_utils.InferenceRequest(
            {"text_input": "p", "stream": True, "continue_token_ids": [0, 1]}, {"return_token_ids": True}, "r"
        )
        await harness.serve(request)
        assert request.sender.errors == []
        said = [response.tensors for response, _ in request.sender.sent if response is not None]
        assert [token for outputs in said for token in outputs.get("token_ids", ())] == [2, 3]
        assert request.sender.text() == text_of(SCRIPT)[len(text_of(SCRIPT[:1])) :]

    run(scenario)


def test_a_random_token_within_a_character_cannot_be_made_anew():
    """It might be another one, and the caller's tokens would not be those of its text."""

    async def scenario():
        harness = Harness(Config(timeout_handling=NO_LIMITS), Withholding(repeatable=False))
        harness.engine.scripts["p"] = SCRIPT
        tensors = {"text_input": "p", "stream": True, "continue_token_ids": [0, 1]}
        request = pb_utils.InferenceRequest(tensors, {}, "r")
        await harness.serve(request)
        assert request.sender.errors[0].message().startswith("unsupported: continue_token_ids: this answer cannot")

    run(scenario)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (asking([-1]), r"invalid_input: continue_token_ids: -1 is not in the vocabulary \(0 … 1023\)"),
        (asking([5, 1024]), r"invalid_input: continue_token_ids: 1024 is not in the vocabulary"),
        (asking([2**62]), r"invalid_input: continue_token_ids: 4611686018427387904 is not in the vocabulary"),
        (asking([5] * 60), r"invalid_input: continue_token_ids: 60 tokens are given and max_tokens, .* is 60"),
        (asking([5] * 300, max_tokens=None), r"prompt_too_long: text_input: the prompt has 30\d tokens"),
        (asking([5] * (MAX_ELEMENTS + 1)), r"invalid_input: continue_token_ids: at most 1048576 elements"),
        (
            asking([5], n=2, temperature=0.5),
            r"unsupported: continue_token_ids: this answer cannot be continued",
        ),
        (asking([5], stop=["x"]), r"unsupported: continue_token_ids"),
        (asking([5], presence_penalty=1.0), r"unsupported: continue_token_ids"),
        (asking([5], temperature=1.0, seed=3), r"unsupported: continue_token_ids"),
        (
            asking([5], tensors={"embedding_request": '{"input": "x"}', "text_input": ""}),
            r"invalid_input: continue_token_ids: they go with text_input or messages",
        ),
    ],
)
def test_what_cannot_be_continued_is_refused(request_, says):
    """Tokens that are none, too many, or of an answer that depends on more: before the engine sees them."""

    async def scenario(harness):
        await harness.serve(request_)
        [error] = request_.sender.errors
        assert re.match(says, error.message()), error.message()
        assert harness.engine.load().requests == 0

    on_simulated(scenario, vocab_size=1024, max_model_len=256)


@pytest.mark.parametrize("given", ["yes", 1, None])
def test_the_switch_is_true_or_false(given):
    """Anything else is refused by name."""

    async def scenario(harness):
        request = pb_utils.InferenceRequest({"text_input": "p"}, {"return_token_ids": given}, "r")
        await harness.serve(request)
        assert request.sender.errors[0].message().startswith("invalid_input: return_token_ids: expected true or false")

    on_simulated(scenario)


def test_tokens_come_only_when_asked_for_and_of_one_sequence():
    """As they were before for everybody else."""

    async def scenario(harness):
        plain = pb_utils.InferenceRequest({"text_input": "p"}, {"max_tokens": 4}, "r")
        several = asking(n=2, temperature=0.5)
        for request in (plain, several):
            await harness.serve(request)
            assert request.sender.errors == []
            assert not any("token_ids" in response.tensors for response, _ in request.sender.sent if response)

    on_simulated(scenario)


def test_given_tokens_count_in_admission_and_prediction():
    """As so much more to read and so much less to make: no way around the limit on prompt tokens."""

    async def scenario(harness):
        request = asking([5] * 40)
        await harness.serve(request)
        [prepared] = [event for event in harness.events if isinstance(event, Prepared)]
        assert (prepared.prompt_bytes, prepared.max_tokens) == (1 + 40 * BYTES_PER_TOKEN, 20)
        narrow = Harness(
            Config(timeout_handling=NO_LIMITS, admission=Admission(max_prompt_tokens=30)), harness.engine, startup=0.2
        )
        other = asking()
        running = asyncio.create_task(narrow.serve(other))
        await asyncio.sleep(0.01)
        refused = asking([5] * 40)
        await narrow.serve(refused)
        await running
        assert refused.sender.errors[0].message().startswith("token_budget: ")

    on_simulated(scenario)
