"""Simulation: a recorded run is decided again as it was, any number of times; a change shows what it would change."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.fakes.recordings import CONFIG, WALL, busy_run, without_tokens, write
from triton_lifecycle import events as ev
from triton_lifecycle.config import Admission, Config, TimeoutHandling
from triton_lifecycle.engine.simulated import SimulatedSettings
from triton_lifecycle.recording import read, stories
from triton_lifecycle.simulation.run import Plan, infer, simulate
from triton_lifecycle.story import Story

REAL_RUN = Path(__file__).parents[1] / "fixtures" / "real_run.jsonl.gz"


def lines(events: list[ev.Event]) -> list[bytes]:
    return [ev.encode(event) for event in events]


def decisions(given: list[Story]) -> dict[str, object]:
    return {story.id: story.decision for story in given}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "no tokens"])
def test_a_busy_run_is_decided_again_as_it_was(seed: int, *, tokens: bool):
    """Permits, refusals, deadlines, cancels, faults, token counts and reasons: all alike; two runs to the byte."""
    events = busy_run(seed)
    recorded = stories(events if tokens else without_tokens(events))
    first, second = (simulate(recorded, Plan(seed=5)) for _ in range(2))
    assert lines(first) == lines(second)
    assert decisions(stories(first)) == decisions(recorded)
    assert len({(story.status, story.slug) for story in recorded}) >= 7


def test_limits_that_followed_predictions_are_kept():
    """A run whose limits came from predictions is decided again by the limits that each request had."""
    timeouts = TimeoutHandling(default_timeout=6.0, min_timeout=0.5, max_timeout=60.0, safety_margin=1.0)
    recorded = stories(busy_run(2, config=CONFIG.model_copy(update={"timeout_handling": timeouts})))
    limits = {tuple(story.admitted.limits.items()) for story in recorded if story.admitted is not None}
    assert len(limits) > 20, "they were to differ"
    assert decisions(stories(simulate(recorded, Plan()))) == decisions(recorded)


def test_a_recording_of_a_real_run_is_decided_again_as_it_was_twice():
    """The real tritonserver with the real vLLM, over both protocols, with every kind of end: the same decisions."""
    recorded = [story for story in read(REAL_RUN).stories if story.received is not None]
    ends = Counter((story.status, story.slug) for story in recorded)
    assert {slug for _, slug in ends} >= {
        None, "caller_left", "cancelled", "total_timeout", "invalid_input", "prompt_too_long", "queue_full",
    }  # fmt: skip
    first, second = (simulate(read(REAL_RUN).stories, Plan(seed=1)) for _ in range(2))
    assert lines(first) == lines(second)
    assert decisions(stories(first)) == decisions(recorded)


def test_a_simulation_can_be_simulated():
    """What a simulation writes is a recording like any other: it is decided the same once more."""
    first = simulate(stories(busy_run(1)), Plan(seed=5))
    again = simulate(stories(first), Plan(seed=6))
    assert decisions(stories(again)) == decisions(stories(first))


def test_ids_and_times_are_the_recorded_ones():
    """The simulated events carry the recorded ids, callers, calendar and clock."""
    recorded = stories(busy_run(1, 40))
    for before, after in zip(recorded, stories(simulate(recorded, Plan())), strict=True):
        assert before.received == after.received
        assert after.end == pytest.approx(before.end, abs=1e-6)
        assert before.prepared is None or (after.prepared is not None and _asked(before) == _asked(after))


def _asked(story: Story) -> tuple[object, ...]:
    p = story.prepared
    assert p is not None
    return (
        p.kind,
        p.prompt_bytes,
        p.stream,
        p.priority,
        p.tenant,
        p.timeout and round(p.timeout, 9),
        p.sequences,
        p.max_tokens,
    )


def test_the_seed_settles_what_was_not_recorded():
    """Where a change lets run what had been refused, the seed decides how it goes: another seed, another run."""
    recorded = stories(busy_run(2))
    changed = Plan(seed=1, config=Config(admission=Admission(max_live_requests=100)))
    assert lines(simulate(recorded, changed)) == lines(simulate(recorded, changed))
    other = Plan(seed=2, config=changed.config)
    assert lines(simulate(recorded, changed)) != lines(simulate(recorded, other))


def test_what_if_fewer_were_admitted():
    """With room for four, more are refused for it, and never more than four are admitted at once."""
    recorded = stories(busy_run(3))
    config = infer(recorded).model_copy(update={"admission": Admission(max_live_requests=4)})
    events = simulate(recorded, Plan(config=config))
    refused = [event for event in events if isinstance(event, ev.Rejected) and event.slug == "queue_full"]
    assert len(refused) > sum(story.slug == "queue_full" for story in recorded)
    live = most = 0
    admitted = set()
    for event in events:
        if isinstance(event, ev.Admitted):
            admitted.add(event.request_id)
            live += 1
        elif type(event) in ev.ENDINGS and event.request_id in admitted:
            live -= 1
        most = max(most, live)
    assert most == 4


def test_what_if_the_limits_were_others():
    """Shorter limits end what had completed; without limits nothing runs out of time but by its caller's own."""
    recorded = stories(busy_run(4))
    short = Config(timeout_handling=TimeoutHandling(min_timeout=0.1, default_timeout=0.5))
    none = Config(timeout_handling=TimeoutHandling(enabled=False))
    before = sum(story.status == "timed_out" for story in recorded)
    after = stories(simulate(recorded, Plan(config=short, changed=True)))
    assert sum(story.status == "timed_out" for story in after) > before
    free = stories(simulate(recorded, Plan(config=none, changed=True)))
    late = [story for story in free if story.status == "timed_out"]
    assert all(story.prepared is not None and story.prepared.timeout for story in late)


def test_the_simulated_engine_may_keep_its_own_pace():
    """With settings of an engine the recorded pace is left aside; the seed alone makes the run, and repeats it."""
    recorded = stories(busy_run(5, 60))
    plan = Plan(seed=3, engine=SimulatedSettings(max_num_seqs=2, token_sigma=0.5))
    first = simulate(recorded, plan)
    assert lines(first) == lines(simulate(recorded, plan))
    assert len(stories(first)) == len(recorded)


def test_the_configuration_is_read_off_the_decisions():
    """The number of live requests and the limits that the recorded server had are found again."""
    found = infer(stories(busy_run(0)))
    assert found.admission.max_live_requests == CONFIG.admission.max_live_requests
    assert found.timeout_handling.first_token_timeout == CONFIG.timeout_handling.first_token_timeout
    assert found.timeout_handling.default_timeout == CONFIG.timeout_handling.default_timeout


def test_a_recording_that_begins_in_the_middle(tmp_path: Path):
    """Requests from before hold their permits; those from within are decided as they were."""
    events = busy_run(6)
    cut = events[len(events) // 2 :]
    recorded = stories(cut)
    whole = {story.id: story.decision for story in recorded if story.received is not None}
    assert len(whole) < len(recorded)
    assert decisions(stories(simulate(recorded, Plan()))) == whole


def test_a_recording_that_ends_in_the_middle():
    """Requests that were live when it stopped are ended there; the others are decided as they were."""
    events = busy_run(6)
    recorded = stories(events[: len(events) // 2])
    after = decisions(stories(simulate(recorded, Plan())))
    ended = {story.id: story.decision for story in recorded if story.ending is not None}
    assert len(ended) < len(recorded) == len(after)
    assert {name: decision for name, decision in after.items() if name in ended} == ended


def test_a_late_timer_does_not_change_what_it_let_through():
    """Tokens that came after the limit but before the busy machine's timer fired are made again."""

    def story(name: str, begin: float, ending: ev.Event, at: float) -> list[ev.Event]:
        return [
            ev.Received(name, 0, begin, name, "m", WALL + begin),
            ev.StageDone(name, 1, begin, "receive", 0.0),
            ev.Prepared(name, 2, begin, "prompt", 12, True, 0, "", None, 1, 8),
            ev.StageDone(name, 3, begin, "preprocess", 0.0),
            ev.Admitted(name, 4, begin, 0, {"total": 1.0, "stall": 0.4}),
            ev.Scheduled(name, 5, begin, 1, 5, 0),
            ev.FirstToken(name, 6, begin + 0.3),
            ev.Progress(name, 7, begin + 0.3, 1, 1),
            ev.Progress(name, 8, begin + 0.71, 1, 2),
            ev.Progress(name, 9, begin + at, 1, 3),
            ending,
        ]

    events = [
        *story("late", 10.0, ev.TimedOut("late", 10, 11.05, "total_timeout", "", 3), 1.04),
        *story("lucky", 20.0, ev.Finished("lucky", 10, 21.03, "stop", 3), 1.02),
        *story("stuck", 30.0, ev.TimedOut("stuck", 10, 31.35, "stall_timeout", "", 3), 0.9),
    ]
    recorded = stories(events)
    assert decisions(stories(simulate(recorded, Plan()))) == decisions(recorded)


def test_ends_that_only_another_release_knows():
    """An unknown reason is brought along as it is, whatever kind of end it was."""
    base = [
        ev.Received("a", 0, 10.0, "a", "m", WALL),
        ev.StageDone("a", 1, 10.1, "receive", 0.1),
        ev.StageDone("a", 2, 10.2, "preprocess", 0.1),
    ]
    for ending in (
        ev.Rejected("a", 3, 10.3, "token_budget", "full"),
        ev.Rejected("a", 3, 10.3, "of_tomorrow", "no"),
        ev.Failed("a", 3, 10.3, "of_tomorrow", "no", 0),
        ev.Cancelled("a", 3, 10.3, "of_tomorrow", 0),
        ev.TimedOut("a", 3, 10.3, "of_tomorrow", "late", 0),
    ):
        recorded = stories([*base, ending])
        (after,) = stories(simulate(recorded, Plan()))
        assert (after.status, after.slug) == (recorded[0].status, recorded[0].slug), ending


def test_nothing_to_simulate(tmp_path: Path):
    """A recording without any beginning gives no events."""
    (story,) = read(write(tmp_path / "e.jsonl", [ev.Finished("a", 9, 1.0, "stop", 1)])).stories
    assert simulate([story], Plan()) == []
