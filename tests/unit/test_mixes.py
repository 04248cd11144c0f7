"""Plans of a load: what is asked and when is a function of the seed."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from load.mixes import WORDS, Fixed, Lognormal, Mix, Recorded, Uniform, arrivals, lengths, shape, share

from triton_lifecycle.errors import InvalidInput

RECORDING = Path(__file__).parents[1] / "fixtures" / "real_run.jsonl.gz"
LENGTHS = st.one_of(
    st.integers(1, 300).map(Fixed),
    st.tuples(st.integers(1, 100), st.integers(0, 200)).map(lambda pair: Uniform(pair[0], sum(pair))),
    st.tuples(st.floats(1, 100), st.floats(0, 2)).map(lambda pair: Lognormal(*pair, high=500)),
)
SHAPES = st.sampled_from(
    ["steady", "soak", "spike", "spike:7", "steps:0.25,0.5,1", "bursts", "bursts:3", "bursts:2,0.5"]
)


@given(LENGTHS, LENGTHS, st.integers(), st.integers(0, 10_000))
def test_the_same_seed_asks_the_same(prompt, answer, seed, number):
    """A request is a function of seed and number; it is as long as its plan says, and another number asks otherwise."""
    ask = Mix(prompt, answer, seed).ask(number)
    assert ask == Mix(prompt, answer, seed).ask(number)
    assert len(ask.prompt.split()) == ask.input_tokens >= 1
    assert ask.output_tokens >= 1
    if ask.input_tokens >= 12:
        assert ask.prompt != Mix(prompt, answer, seed).ask(number + 1).prompt
        assert ask.prompt != Mix(prompt, answer, seed + 1).ask(number).prompt


def test_another_process_makes_the_same_plan():
    """No hash of a string, which differs from process to process, decides anything."""
    program = (
        "from itertools import islice; from load.mixes import *; "
        "m = Mix(lengths('lognormal:40,1'), lengths('uniform:4-90'), 11, prefix=5); "
        "print(list(zip(arrivals(shape('bursts', 30), 5, 11), islice(m, 40))))"
    )
    made = {subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout for _ in range(2)}
    assert len(made) == 1


@given(st.integers(2, 200), st.integers(0, 250))
def test_a_prefix_is_shared_and_something_differs(size, prefix):
    """All prompts begin alike for as many words as were asked for, and at least one word is their own."""
    first, second = (Mix(Fixed(size), Fixed(1), 3, prefix=prefix).ask(number).prompt.split() for number in (0, 1))
    same = min(prefix, size - 1)
    assert first[:same] == second[:same]
    assert len(first) == len(second) == size


def test_every_tenth_is_eight_times_longer():
    """Long answers come at fixed places of the plan."""
    plan = Mix(Fixed(8), Fixed(16), long_every=10)
    assert [ask.output_tokens for ask in itertools.islice(plan, 20)] == ([16] * 9 + [128]) * 2


def test_lengths_follow_their_distribution():
    """Uniform lengths reach both bounds; lognormal ones have the median that was asked for and stay below their cap."""
    uniform = [ask.input_tokens for ask in itertools.islice(Mix(lengths("uniform:3-9"), Fixed(1)), 500)]
    assert (min(uniform), max(uniform)) == (3, 9)
    skewed = [ask.output_tokens for ask in itertools.islice(Mix(Fixed(1), lengths("lognormal:100,0.8,900")), 3000)]
    assert 92 < statistics.median(skewed) < 108
    assert max(skewed) <= 900
    assert statistics.fmean(skewed) > 115


@given(SHAPES, st.floats(1, 200), st.floats(0.1, 30), st.integers(), st.booleans())
def test_arrivals_rise_stay_within_the_run_and_repeat(text, seconds, rate, seed, even):
    """Moments come in order, none after the end, and the same seed gives the same ones."""
    phases = shape(text, seconds)
    assert sum(phase.seconds for phase in phases) == pytest.approx(seconds)
    times = list(arrivals(phases, rate, seed, even=even))
    assert times == sorted(times)
    assert all(0 <= at <= seconds * (1 + 1e-9) for at in times)
    assert times == list(arrivals(phases, rate, seed, even=even))
    if even:
        mean = sum(phase.seconds * phase.level for phase in phases)
        assert len(times) == pytest.approx(rate * mean, abs=1.01)


def test_poisson_arrivals_are_poisson():
    """Gaps have the mean and the deviation of an exponential; a phase of no load has no arrivals."""
    times = list(arrivals(shape("steady", 1000), 5.0, seed=2))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.07)
    quiet = list(arrivals(shape("steps:1,0,1", 300), 5.0, seed=2))
    assert not any(100 <= at < 200 for at in quiet)
    assert len(quiet) == pytest.approx(1000, rel=0.1)


@pytest.mark.parametrize(("text", "mean", "peak"), [("bursts:3", 1.0, 3), ("bursts:3,0.9", 0.9, 3), ("bursts:5", 1, 5)])
def test_bursts_have_their_peak_and_their_mean(text, mean, peak):
    """The load between bursts makes up for them, in runs of any length."""
    for seconds in (3.0, 60.0, 61.7):
        phases = shape(text, seconds)
        assert sum(phase.seconds * phase.level for phase in phases) == pytest.approx(mean * seconds)
        assert max(phase.level for phase in phases) == peak


@given(st.integers(1, 7), st.integers(0, 50))
def test_processes_share_one_plan(count, size):
    """Every item falls to exactly one of the processes that take turns."""
    parts = [list(share(range(size), index, count)) for index in range(count)]
    assert sorted(itertools.chain(*parts)) == list(range(size))


def test_a_recording_is_asked_again():
    """Lengths, limits and moments are those recorded; after the last request it begins anew, later; speed divides."""
    plan = Recorded.read(RECORDING, seed=4)
    size = len(plan.at)
    assert size > 20
    asked = list(itertools.islice(plan, size * 2))
    assert (
        [ask.output_tokens for ask in asked[:size]]
        == list(plan.output_tokens)
        == [ask.output_tokens for ask in asked[size:]]
    )
    assert asked[0].timeout == 60.0
    assert asked[0].prompt != asked[size].prompt
    times = list(itertools.islice(plan.arrivals(), size * 2))
    assert times[:size] == list(plan.at)
    assert times == sorted(times)
    assert times[size] > times[size - 1]
    assert list(itertools.islice(plan.arrivals(speed=2.0), size)) == [at / 2 for at in plan.at]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-4",
        "1.5",
        "x",
        "uniform:",
        "uniform:9-3",
        "uniform:0-3",
        "lognormal:1",
        "lognormal:0,1",
        "lognormal:9,1,3",
        "lognormal:nan,1",
        "lognormal:9,nan",
        "lognormal:1,1,1,1",
        "lognormal:inf,1",
        "99999999",
    ],
)
def test_a_length_that_is_none_is_refused(text):
    """The message shows the forms there are."""
    with pytest.raises(InvalidInput, match="uniform:LOW-HIGH"):
        lengths(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "flat",
        "steps",
        "steps:",
        "steps:a",
        "steps:-1",
        "spike:1,2",
        "bursts:9",
        "bursts:1,2,3",
        "soak:1",
        "steps:nan",
    ],
)
def test_a_shape_that_is_none_is_refused(text):
    """The message shows the forms there are; a burst that alone exceeds the mean is one of these."""
    with pytest.raises(InvalidInput, match=r"bursts:PEAK\[,MEAN\]"):
        shape(text, 60.0)
    with pytest.raises(InvalidInput, match="above 0"):
        shape("steady", 0.0)


def test_words_are_distinct():
    """No word is twice in the list."""
    assert len(set(WORDS)) == len(WORDS) > 80
