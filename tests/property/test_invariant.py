"""The invariant of DESIGN.md, under any script of outputs, faults, cancels and deadlines."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import pb_utils
from tests.fakes.harness import Harness, Step, text_of
from triton_lifecycle import events
from triton_lifecycle.config import Admission, Config, ErrorHandling, TimeoutHandling
from triton_lifecycle.context import Context
from triton_lifecycle.errors import Cancelled
from triton_lifecycle.simulation.virtual_time import run

times = st.sampled_from([0.0, 0.001, 0.1, 0.5, 1.0, 2.0, 5.0, 11.0])
steps = st.builds(
    Step,
    do=st.sampled_from(["token"] * 8 + ["raise", "die", "bug", "vanish"]),
    after=times,
    tokens=st.integers(1, 3),
    times=st.sampled_from([1, 2, 1_000_000]),
)
requests = st.fixed_dictionaries(
    {
        "arrives": times,
        "script": st.lists(steps, min_size=1, max_size=8),
        "stream": st.booleans(),
        "cancel_at": st.none() | times,
        "cancel_twice": st.booleans(),
        "timeout_ms": st.none() | st.sampled_from([1, 100, 500, 1000, 4000]),
        "parameters": st.sampled_from([{}, {"max_tokens": 4}, {"max_tokenz": 4}, {"max_tokens": "many"}]),
        "text": st.sampled_from(["a prompt"] * 6 + ["", "\0"]),
    }
)


@settings(max_examples=max(2000, settings().max_examples))
@given(
    scripts=st.lists(requests, min_size=1, max_size=4),
    send_delay=st.sampled_from([0.0, 0.01, 0.7]),
    limits=st.sampled_from(
        [{}, {"first_token_timeout": 1.0}, {"stall_timeout": 1.0}, {"first_token_timeout": 0.5, "stall_timeout": 3.0}]
    ),
    max_live=st.sampled_from([1, 2, 10]),
    recovery=st.fixed_dictionaries(
        {"enable_auto_recovery": st.booleans(), "max_recovery_attempts": st.sampled_from([0, 1, 3])}
    ),
    continuable=st.booleans(),
)
def test_every_request_ends_exactly_once_and_leaves_nothing(
    scripts, send_delay, limits, max_live, recovery, continuable
):
    """Numbered events from Received to one ending, one FINAL, permit back, engine and live count at zero."""
    config = Config(
        timeout_handling=TimeoutHandling(default_timeout=8.0, min_timeout=0.001, **limits),
        admission=Admission(max_live_requests=max_live),
        error_handling=ErrorHandling(**recovery),
    )
    run(_scenario, scripts, config, send_delay, continuable)


async def _scenario(scripts, config, send_delay, continuable):
    harness = Harness(config, send_delay=send_delay)
    harness.engine.continuable = continuable
    served = []
    for number, script in enumerate(scripts):
        prompt = script["text"] + str(number) if script["text"] == "a prompt" else script["text"]
        harness.engine.scripts[prompt] = script["script"]
        parameters = dict(script["parameters"])
        if script["timeout_ms"] is not None:
            parameters["timeout_ms"] = script["timeout_ms"]
        request = pb_utils.InferenceRequest(
            {"text_input": prompt, "stream": script["stream"]}, parameters, request_id=f"r{number}"
        )
        served.append((request, script, asyncio.create_task(_one(harness, request, script))))
    accepted = await asyncio.gather(*[task for _, _, task in served])
    await asyncio.sleep(30)
    await harness.supervisor.stop()

    for request, _, _ in served:
        assert request.sender.finals == 1
        assert request.sender.sent[-1][1], "nothing follows FINAL"
        assert len(request.sender.errors) <= 1
    assert len(harness.contexts) == 0
    assert harness.admission.out == 0
    assert harness.engine.known == {}
    assert harness.engine.most <= config.admission.max_live_requests
    counts = harness.contexts.counts
    assert counts["received"] == len(scripts) == sum(counts.values()) - counts["received"]
    by_request = defaultdict(list)
    for event in harness.events:
        by_request[event.request_id].append(event)
    assert len(by_request) == len(scripts)
    for number, (request, script, _) in enumerate(served):
        own = by_request[harness.contexts.find(f"r{number}").id]
        assert [event.seq for event in own] == list(range(len(own)))
        assert isinstance(own[0], events.Received)
        assert [type(event) in events.ENDINGS for event in own] == [False] * (len(own) - 1) + [True]
        _answer_is_what_the_ending_says(request, script, own[-1])
        _attempts_are_within_bounds(own, config.error_handling)
        assert accepted[number] == isinstance(own[-1], events.Cancelled), "a cancel that was told so counts, and once"


async def _one(harness, request, script):
    """Serve one request as scripted; return how many of its cancels were told that they would count."""
    accepted = []
    await asyncio.sleep(script["arrives"])
    task = asyncio.create_task(harness.serve(request))
    if script["cancel_at"] is not None:
        await asyncio.sleep(script["cancel_at"])
        for _ in range(1 + script["cancel_twice"]):
            found = harness.contexts.find(request.request_id())
            accepted.append(isinstance(found, Context) and found.interrupt(Cancelled("scripted")))
    await task
    return sum(accepted)


def _answer_is_what_the_ending_says(request, script, ending):
    whole = text_of(script["script"])
    if isinstance(ending, events.Finished):
        assert request.sender.errors == []
        text = request.sender.text()
        assert text == whole if script["stream"] else text.endswith(whole)
    else:
        assert request.sender.errors[0].message().startswith(f"{ending.slug}: ")
        if script["stream"]:
            assert whole.startswith(request.sender.text()), "what was streamed before the error is a true prefix"
        else:
            assert request.sender.text() == "", "a unary caller never gets a part as if it were the whole"


def _attempts_are_within_bounds(own, settings):
    """Without recovery there is one attempt; with it, no more in a row that bring nothing than are allowed."""
    if not settings.enable_auto_recovery:
        assert not any(isinstance(event, events.Retrying) for event in own)
        return
    fruitless = 0
    for event in own:
        if isinstance(event, events.Progress):
            fruitless = 0
        fruitless += isinstance(event, events.Retrying)
        assert fruitless <= settings.max_recovery_attempts + 1
