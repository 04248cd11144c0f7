"""Admission: the limits, the hints, the order, and the limit that follows the load."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triton_lifecycle.admission import Admission, Ask
from triton_lifecycle.admission.adaptive import Adaptive
from triton_lifecycle.admission.drain import Drain
from triton_lifecycle.admission.fair import MOST_TENANTS, FairShare
from triton_lifecycle.admission.order import HORIZON_S, MOST_CLASSES, AsAsked, ByShare, VirtualDeadline
from triton_lifecycle.config import Admission as Settings
from triton_lifecycle.errors import DeadlineUnreachable, Draining, QueueFull, TokenBudget


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def admission(slots: int = 1, most: int = 10_000, clock: Clock | None = None, **settings) -> Admission:
    return Admission(Settings(**settings), most=most, slots=slots, clock=clock or Clock())


# ---- limits


def test_nothing_is_limited_unless_it_is_set():
    """Without settings only the number of contexts bounds what is live, as with the official backend."""
    made = admission(most=500)
    permits = [made.admit(Ask(prompt_bytes=10**6, left=0.001)) for _ in range(500)]
    with pytest.raises(QueueFull, match="500 requests are live"):
        made.admit(Ask())
    for permit in permits:
        permit.release()
    assert (made.out, made.state()["sequences"], made.state()["prompt_tokens"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("settings", "accepted", "says"),
    [
        ({"max_live_requests": 7}, 7, "7 requests are live, and admission.max_live_requests is 7"),
        ({"max_waiting_requests": 2}, 6, "2 wait, and admission.max_waiting_requests is 2"),
        ({"max_waiting_requests": 0}, 4, "0 wait, and admission.max_waiting_requests is 0"),
        ({"max_waiting_requests": 2, "max_live_requests": 5}, 5, "admission.max_live_requests is 5"),
    ],
)
def test_a_refusal_names_the_limit_that_was_met(settings, accepted, says):
    """With its value and a hint; the engine runs four at once."""
    made = admission(slots=4, **settings)
    for _ in range(accepted):
        made.admit(Ask())
    with pytest.raises(QueueFull, match=says) as refusal:
        made.admit(Ask())
    assert refusal.value.retry_after is not None
    assert made.state()["refused"] == {"queue_full": 1}


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4000), st.booleans()), max_size=60),
    st.integers(1, 12),
    st.integers(0, 6),
    st.integers(1, 3000),
)
def test_no_limit_is_ever_exceeded(script, live, waiting, tokens):
    """Whatever comes and goes: sequences and known prompt tokens stay within every limit, and return to zero."""
    made = admission(slots=3, max_live_requests=live, max_waiting_requests=waiting, max_prompt_tokens=tokens)
    held = []
    for sequences, size, give_back in script:
        if give_back and held:
            held.pop(0).release(tokens=1, worked=1.0)
        with suppress(QueueFull, TokenBudget):
            held.append(made.admit(Ask(sequences=sequences, prompt_tokens=size)))
        state = made.state()
        assert state["sequences"] == sum(permit.ask.sequences for permit in held) <= min(live, 3 + waiting)
        assert state["prompt_tokens"] == sum(permit.tokens for permit in held) <= tokens
    for permit in held:
        permit.release()
    assert (made.out, made.state()["sequences"], made.state()["prompt_tokens"]) == (0, 0, 0)


def test_n_counts_as_n_and_what_never_fits_gets_no_hint():
    """Four sequences take four places; where there are only three, waiting does not help."""
    made = admission(max_live_requests=6)
    made.admit(Ask(sequences=4))
    with pytest.raises(QueueFull, match="n = 4 counts as 4") as refusal:
        made.admit(Ask(sequences=4))
    assert refusal.value.retry_after is not None
    small = admission(max_live_requests=3)
    small.admit(Ask())
    with pytest.raises(QueueFull) as refusal:
        small.admit(Ask(sequences=4))
    assert refusal.value.retry_after is None


def test_prompt_tokens_are_estimated_then_known():
    """Four bytes a token at first, then as observed; what is live is corrected as soon as it is tokenized."""
    made = admission(max_prompt_tokens=1000)
    first = made.admit(Ask(prompt_bytes=2000))
    assert first.tokens == 500
    first.tokenized(800)
    assert made.state()["prompt_tokens"] == 800
    with pytest.raises(
        TokenBudget, match=r"800 prompt tokens are live, this prompt has about 240, and admission.max_p"
    ):
        made.admit(Ask(prompt_bytes=600))
    first.release()
    assert made.state()["prompt_tokens"] == 0
    assert made.admit(Ask(prompt_bytes=250)).tokens == 100


def test_draining_refuses_all():
    """Once the server is stopping nothing is admitted."""
    made = admission()
    made.drain()
    with pytest.raises(Draining):
        made.admit(Ask())


def test_a_permit_is_given_back_once():
    """A second time is a fault of the code and said so."""
    permit = admission().admit(Ask())
    permit.release()
    with pytest.raises(RuntimeError, match="twice"):
        permit.release()


def test_a_decision_takes_less_than_two_milliseconds():
    """With ten thousand live, every option on, and whether it admits or refuses."""
    made = admission(
        slots=64,
        max_live_requests=10_000,
        max_waiting_requests=9936,
        max_prompt_tokens=10**9,
        refuse_unreachable=True,
        fair_share=False,
        earliest_deadline_first=True,
        adaptive=True,
    )
    took = []
    for _ in range(11_000):
        began = time.perf_counter()
        with suppress(QueueFull):
            made.admit(Ask(prompt_bytes=4000, left=100.0, max_tokens=100))
        took.append(time.perf_counter() - began)
    assert made.out == 10_000
    assert sorted(took)[int(0.99 * len(took))] < 0.002


# ---- hints


def serve(made: Admission, clock: Clock, seconds: float, count: int) -> None:
    """Let one slot serve ``count`` requests of so many seconds, with always one more waiting."""
    running = made.admit(Ask())
    for _ in range(count):
        waiting = made.admit(Ask())
        clock.now += seconds
        running.release(tokens=10, worked=seconds)
        running = waiting
    running.release()


def test_hints_follow_the_drain_and_spread_the_callers():
    """Ten refused at once are told to come back one after the other, at the pace at which places come free."""
    clock = Clock()
    made = admission(clock=clock, max_waiting_requests=2)
    serve(made, clock, 0.5, 10)
    for _ in range(3):
        made.admit(Ask())
    hints = []
    for _ in range(10):
        with pytest.raises(QueueFull) as refusal:
            made.admit(Ask())
        hints.append(refusal.value.retry_after)
    assert hints == pytest.approx([0.5 * (number + 1) for number in range(10)])


def test_idle_time_is_no_slowness():
    """The rate counts only while the engine is full."""
    clock = Clock()
    drain = Drain(1, clock)
    for _ in range(40):
        drain.admitted(2)
        clock.now += 0.5
        drain.released(1, tokens=10, worked=0.5)
        clock.now += 0.5
        drain.released(1, tokens=10, worked=0.5)
        clock.now += 100
    assert drain.rate() == pytest.approx(2.0, rel=0.05)


def test_an_engine_at_a_halt_drains_slowly():
    """The longer nothing is released, the later callers are told to come back."""
    clock = Clock()
    drain = Drain(1, clock)
    drain.admitted(100)
    for _ in range(20):
        clock.now += 0.5
        drain.released(1, tokens=10, worked=0.5)
    quick = drain.hint(1)
    clock.now += 60
    assert drain.hint(1) > 4 * quick


def test_who_will_not_be_back_in_time_takes_no_place():
    """A caller whose deadline comes before the hint is not counted among those that return."""
    clock = Clock()
    drain = Drain(1, clock)
    drain.admitted(100)
    for _ in range(20):
        clock.now += 1.0
        drain.released(1, tokens=10, worked=1.0)
    for _ in range(50):
        drain.hint(5, left=2.0)
    assert drain.hint(5) == pytest.approx(5.0, rel=0.1)


def test_promises_are_bounded():
    """A hundred thousand refusals leave at most ten thousand promises, and no hint beyond a minute."""
    drain = Drain(1, Clock())
    hints = [drain.hint(1) for _ in range(20_000)]
    assert len(drain._promised) <= 10_000
    assert max(hints) <= 60.0


# ---- deadlines


def test_a_deadline_that_cannot_be_met_is_refused_at_once():
    """By the prediction's lower bound, also while slots are free; with no opinion the request is admitted."""
    made = admission(slots=100, refuse_unreachable=True)
    made.admit(Ask(prompt_bytes=40, at_least=12.0))
    with pytest.raises(DeadlineUnreachable, match=r"about 12\.0 s, and its deadline is in 10\.0 s") as refusal:
        made.admit(Ask(prompt_bytes=40, left=10.0, at_least=12.0))
    assert refusal.value.retry_after == pytest.approx(2.0)
    made.admit(Ask(prompt_bytes=40, left=10.0, at_least=1.0))
    made.admit(Ask(prompt_bytes=40, left=10.0))


def test_without_a_prediction_the_queue_itself_tells():
    """One slot, 0.5 s each: behind nine others a deadline of four seconds is too early, one of six is not."""
    clock = Clock()
    made = admission(clock=clock, refuse_unreachable=True)
    serve(made, clock, 0.5, 20)
    for _ in range(9):
        made.admit(Ask(max_tokens=10))
    with pytest.raises(DeadlineUnreachable):
        made.admit(Ask(max_tokens=10, left=4.0))
    made.admit(Ask(max_tokens=10, left=6.0))


def test_who_comes_first_by_deadline_waits_for_no_later_one():
    """Under earliest deadline first the prediction counts only those before it."""
    clock = Clock()
    made = admission(clock=clock, refuse_unreachable=True, earliest_deadline_first=True)
    serve(made, clock, 0.5, 20)
    for _ in range(9):
        made.admit(Ask(max_tokens=10, left=30.0))
    made.admit(Ask(max_tokens=10, left=4.0))


def test_a_wrong_prediction_is_found_out():
    """On an idle engine, and by the queue also while slots are free, nothing is refused for its deadline."""
    clock = Clock()
    made = admission(slots=2, clock=clock, refuse_unreachable=True)
    made.admit(Ask(left=1.0, at_least=1e6)).release(tokens=1, worked=100.0)
    made.admit(Ask(left=1.0))
    with pytest.raises(DeadlineUnreachable):
        made.admit(Ask(left=1.0, at_least=1e6))
    made.admit(Ask(left=1.0))


def test_an_answer_that_was_cut_short_spoils_no_prediction():
    """A request that had one token after ten seconds counts for one token."""
    drain = Drain(1, Clock())
    drain.admitted(100)
    for _ in range(20):
        drain.released(1, tokens=100, worked=1.0)
    drain.released(1, tokens=1, worked=10.0)
    assert drain.expected(0, 100) < 2.0


# ---- order


def test_the_callers_priority_goes_to_the_engine_as_it_is():
    """Unless another order is chosen."""
    assert admission().admit(Ask(priority=-123456)).place == -123456


def drain_queue(order, arrivals: list[tuple[float, int, float | None]], clock: Clock, service: float) -> list[float]:
    """Serve one at a time, the lowest place first; return how long each waited."""
    start = clock.now
    queue: list[tuple[int, int]] = []
    waited = [0.0] * len(arrivals)
    coming = list(range(len(arrivals)))
    while coming or queue:
        while coming and start + arrivals[coming[0]][0] <= clock.now:
            number = coming.pop(0)
            now, clock.now = clock.now, start + arrivals[number][0]
            queue.append((order.place(arrivals[number][1], arrivals[number][2], "", 1.0), number))
            clock.now = now
        if not queue:
            clock.now = start + arrivals[coming[0]][0]
            continue
        place, number = min(queue)
        queue.remove((place, number))
        waited[number] = clock.now - start - arrivals[number][0]
        clock.now += service
    return waited


def test_low_priority_is_served_in_the_end():
    """Under an endless overload of the highest class the lowest waits up to its bound, and else starves."""
    ageing, overload = 1.0, 1.05
    arrivals: list[tuple[float, int, float | None]] = [(0.1 * number / overload, -10, 1.0) for number in range(1500)]
    arrivals.insert(1, (0.0, 10, None))
    clock = Clock()
    waited = drain_queue(VirtualDeadline(ageing, clock), arrivals, clock, 0.1)[1]
    assert 60 < waited <= overload * (HORIZON_S + 2 * MOST_CLASSES * ageing) + 0.2
    clock = Clock()
    assert drain_queue(AsAsked(), arrivals, clock, 0.1)[1] > 149, "only when nobody else is there"


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(-50, 50), st.none() | st.floats(0.01, 500)), min_size=2))
def test_nobody_is_overtaken_for_ever(arrivals):
    """Whatever arrives more than the bound after a request has a later place."""
    clock = Clock()
    order = VirtualDeadline(2.0, clock)
    bound = HORIZON_S + 2 * MOST_CLASSES * 2.0
    begin = clock.now
    first_at, priority, left = arrivals[0]
    clock.now = begin + first_at
    place = order.place(priority, left, "", 1.0)
    for at, priority, left in arrivals[1:]:
        clock.now = begin + first_at + bound + 0.002 + at
        assert order.place(priority, left, "", 1.0) > place


def test_the_earlier_deadline_goes_first_and_a_class_counts_as_seconds():
    """Among equals the deadline decides; a class better makes up for ageing seconds of it, and no more."""
    order = VirtualDeadline(5.0, Clock())
    assert order.place(0, 1.0, "", 1.0) < order.place(0, 2.0, "", 1.0) < order.place(0, None, "", 1.0)
    assert order.place(-1, 5.0, "", 1.0) < order.place(0, 1.0, "", 1.0) < order.place(-1, 7.0, "", 1.0)


def test_tenants_share_evenly_whatever_they_send():
    """One sends a hundred at once, two others come later with ten each: they are served in turn, not behind it."""
    fair = FairShare()
    queue = [(fair.start("greedy", 100.0), 0, "greedy") for _ in range(100)]
    served = []
    for turn in range(120):
        if turn == 10:
            for tenant in ("a", "b"):
                queue += [(fair.start(tenant, 100.0), 1, tenant) for _ in range(10)]
        best = min(queue)
        queue.remove(best)
        fair.served(best[0])
        served.append(best[2])
    assert [served[10:40].count(tenant) for tenant in ("greedy", "a", "b")] == pytest.approx([10, 10, 10], abs=1)


def test_a_tenant_that_was_idle_saves_nothing_up():
    """It starts where the others are; and one request of twice the cost counts twice."""
    fair = FairShare()
    for _ in range(50):
        fair.served(fair.start("busy", 10.0))
    assert fair.start("idle", 10.0) == 490
    assert [fair.start("large", 20.0), fair.start("large", 20.0)] == [490, 510]


def test_the_number_of_tenants_is_bounded():
    """The idle are forgotten; beyond the bound the busy share one place."""
    fair = FairShare()
    for number in range(5 * MOST_TENANTS):
        fair.start(f"t{number}", 10.0)
    assert fair.tenants <= MOST_TENANTS + 1
    fair.served(10_000_000.0)
    fair.start("new", 1.0)
    assert fair.tenants == 1


def test_priority_under_fair_share_moves_no_one_elses_time():
    """A tenant that always asks for the best class gains its class and no more."""
    order = ByShare()
    places = []
    for _ in range(20):
        places.append(order.place(-10, None, "best", 100.0))
        order.served(places[-1], -10)
    assert places == [-10_000 + 100 * number for number in range(20)]
    assert order.place(0, None, "other", 100.0) == 1900


def test_fair_share_leaves_room_for_the_others():
    """A tenant alone takes at most four fifths of the places; another finds room at once."""
    made = admission(slots=10, max_waiting_requests=90, fair_share=True)
    for _ in range(80):
        made.admit(Ask(tenant="greedy"))
    with pytest.raises(QueueFull, match=r"tenant 'greedy' has 80 of 80 .*\(20 of 100\) is for others") as refusal:
        made.admit(Ask(tenant="greedy"))
    assert refusal.value.retry_after is not None
    for _ in range(10):
        made.admit(Ask(tenant="small"))


# ---- the limit that follows the load


def rounds(adaptive: Adaptive, clock: Clock, ends: int, live: int, timeouts: float, seconds: float = 5.0):
    """End so many requests that were admitted so many seconds ago; an even share of them by timeout."""
    moves = []
    for number in range(ends):
        clock.now += 0.1
        timed_out = int((number + 1) * timeouts) > int(number * timeouts)
        moved = adaptive.ended(min(live, adaptive.limit), clock.now - seconds, timed_out=timed_out)
        moves += [] if moved is None else [moved]
    return moves


def test_repeated_timeouts_shrink_the_load_and_it_grows_back():
    """Cut by 0.7 at once, at most once per round; one step at a time back up to where it was."""
    clock = Clock()
    adaptive = Adaptive(100, 4, clock)
    moves = rounds(adaptive, clock, 600, 100, timeouts=0.5, seconds=1.0)
    assert moves[0] == (100, 70)
    assert adaptive.limit <= 35
    low = adaptive.limit
    moves = rounds(adaptive, clock, 4000, 100, timeouts=0.0)
    assert moves[0] == (low, low + 4)
    assert adaptive.limit == 100


def test_a_few_timeouts_are_no_overload():
    """One of a round, a share below a tenth, or callers that allow less than a second: nothing moves."""
    clock = Clock()
    adaptive = Adaptive(100, 4, clock)
    assert rounds(adaptive, clock, 500, 100, timeouts=0.05) == []
    assert rounds(adaptive, clock, 500, 100, timeouts=1.0, seconds=0.5) == []


def test_what_was_admitted_under_the_old_limit_counts_once():
    """After a cut, the timeouts of those that were there before it cut no more."""
    clock = Clock()
    adaptive = Adaptive(100, 4, clock)
    moves = rounds(adaptive, clock, 100, 100, timeouts=1.0, seconds=30.0)
    assert moves == [(100, 70)]
    assert rounds(adaptive, clock, 250, 100, timeouts=1.0, seconds=30.0) == []


def test_the_limit_is_cut_from_what_was_live():
    """A limit far above the load falls below it at the first cut; it never falls below one."""
    clock = Clock()
    adaptive = Adaptive(10_000, 4, clock)
    assert rounds(adaptive, clock, 40, 40, timeouts=1.0)[0] == (10_000, 28)
    for _ in range(100):
        rounds(adaptive, clock, 40, 40, timeouts=1.0, seconds=1.0)
    assert adaptive.limit == 1
