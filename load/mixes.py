"""What to ask and when: seeded prompts, lengths and arrivals, the same for every load tool.

A plan is a function of its seed: request 17 is the same words, lengths and moment in every run, on every machine, and
in whichever process it is made. So several load processes share one plan by taking turns (:func:`share`), and two runs
differ in what is measured and in nothing else.

    mix = Mix(lengths("lognormal:120,0.8"), lengths("uniform:16-256"), seed=7)
    times = arrivals(shape("bursts:3", 60.0), rate=4.0, seed=7)
    for at, ask in zip(times, mix): ...

Nothing here waits, prints, or imports a load tool.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Final, TypeVar

import msgspec

from triton_lifecycle import recording
from triton_lifecycle.errors import InvalidInput
from triton_lifecycle.story import Story

T = TypeVar("T")

MAX_TOKENS: Final = 1_000_000
BYTES_PER_TOKEN: Final = 4.0
"""Of English; taken where a recording tells a prompt's bytes but not its tokens."""
RAMP_LEVELS: Final = 10
BURST_S: Final = 2.0
BURST_SHARE: Final = 0.2
"""Of its period a burst takes this much."""
SPIKE_SHARE: Final = 0.1
"""Of the run a spike takes this much; so does a soak's ramp."""

_WORDS: Final = (
    "time people way words water day part place work years world house school state family night home story life"
    " city group number system question power money idea body name line head side land road form air field sun tree"
    " river book light voice food car door war face music girl boy table paper letter game bird fire"
    " good new first long great little old right big high small large young early important public same able strong"
    " red white black green clear hard open true free full short easy ready simple"
)
WORDS: Final = tuple(_WORDS.split())
"""Common words, each one token of the usual vocabularies, with a blank before it or without."""


class Fixed(msgspec.Struct, frozen=True):
    """Always so many tokens."""

    tokens: int

    def draw(self, _: Random) -> int:
        """Return a length."""
        return self.tokens


class Uniform(msgspec.Struct, frozen=True):
    """Each length from ``low`` to ``high`` alike, both included."""

    low: int
    high: int

    def draw(self, random: Random) -> int:
        """Return a length."""
        return random.randint(self.low, self.high)


class Lognormal(msgspec.Struct, frozen=True):
    """Mostly short, a few very long, as real traffic is.

    Attributes:
        median: tokens; half of all are shorter.
        sigma: standard deviation of the logarithm; 1 means that one in six is longer than 2.7 medians.
        high: no length is above this.

    """

    median: float
    sigma: float
    high: int

    def draw(self, random: Random) -> int:
        """Return a length."""
        return max(1, min(self.high, round(random.lognormvariate(math.log(self.median), self.sigma))))


Lengths = Fixed | Uniform | Lognormal


def lengths(text: str) -> Lengths:
    """Read how long something is: ``64``, ``uniform:16-256``, or ``lognormal:MEDIAN,SIGMA[,HIGH]``.

    Raises:
        InvalidInput: it is none of these.

    """
    kind, colon, rest = text.strip().partition(":")
    try:
        if not colon:
            return Fixed(_tokens(kind))
        if kind == "uniform":
            low, high = (_tokens(part) for part in rest.split("-"))
            if low <= high:
                return Uniform(low, high)
        if kind == "lognormal":
            median, sigma, *high_text = (float(part) for part in rest.split(","))
            high = _tokens(str(int(high_text[0]))) if high_text else min(MAX_TOKENS, math.ceil(median * 20))
            if 1 <= median <= high and 0 <= sigma <= 5 and len(high_text) <= 1:
                return Lognormal(median, sigma, high)
    except (ValueError, OverflowError):
        pass
    raise InvalidInput(
        f"length {text!r}: give tokens (64), uniform:LOW-HIGH (uniform:16-256) or lognormal:MEDIAN,SIGMA[,HIGH] "
        f"(lognormal:120,0.8), all within 1…{MAX_TOKENS:,}"
    )


def _tokens(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MAX_TOKENS:
        raise ValueError(text)
    return value


class Ask(msgspec.Struct, frozen=True):
    """One request of a plan.

    Attributes:
        number: its place in the plan, from 0.
        prompt: words; different for every number (as far as so few words can be).
        input_tokens: how many tokens the prompt has: one a word.
        output_tokens: how many tokens the answer is to have.
        timeout: seconds its caller allows; ``None`` where the plan does not say.

    """

    number: int
    prompt: str
    input_tokens: int
    output_tokens: int
    timeout: float | None = None


class Mix(msgspec.Struct, frozen=True):
    """Requests by number, without end.

    Args:
        input: lengths of prompts.
        output: lengths of answers.
        seed: another seed, other requests.
        prefix: so many tokens at a prompt's beginning are the same in all (a shared system prompt); they are part of
            the prompt's length, and at least one word behind them differs.
        long_every: every so manieth answer is ``long_times`` longer; 0 for none.
        long_times: how much longer.

    """

    input: Lengths
    output: Lengths
    seed: int = 0
    prefix: int = 0
    long_every: int = 0
    long_times: float = 8.0

    def ask(self, number: int) -> Ask:
        """Return one request; the same for the same number."""
        random = _random(self.seed, "ask", number)
        size, answer = self.input.draw(random), self.output.draw(random)
        if self.long_every and number % self.long_every == self.long_every - 1:
            answer = round(answer * self.long_times)
        return Ask(number, words(size, self.seed, number, self.prefix), size, answer)

    def __iter__(self) -> Iterator[Ask]:
        return map(self.ask, itertools.count())


def words(count: int, seed: int, number: int, prefix: int = 0) -> str:
    """Return a prompt of so many words; ``prefix`` of them are the same for every number."""
    same = max(0, min(prefix, count - 1))
    shared = _random(seed, "prefix", 0).choices(WORDS, k=same)
    return " ".join([*shared, *_random(seed, "words", number).choices(WORDS, k=count - same)])


class Recorded(msgspec.Struct, frozen=True):
    """The requests of a recording in their order, again and again: their lengths, limits and moments, not their words.

    Words are never recorded; prompts of the same length are made instead.

    Attributes:
        at: seconds from the first arrival, by request.
        input_tokens: by request.
        output_tokens: by request.
        timeouts: by request.
        seed: of the words.

    """

    at: tuple[float, ...]
    input_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    timeouts: tuple[float | None, ...]
    seed: int = 0

    @classmethod
    def read(cls, source: str | Path, seed: int = 0) -> Recorded:
        """Read what a recorder wrote (``event_driven.recorder``): a file, a folder or a glob.

        Requests that were never understood, or whose beginning is missing, are left out: nothing tells how long they
        were.

        Raises:
            InvalidInput: there is no such recording, or no whole request in it.

        """
        found = [
            (story.received.at, _prompt_tokens(story), _answer_tokens(story), story.prepared.timeout)
            for story in recording.read(source).stories
            if story.received is not None and story.prepared is not None
        ]
        if not found:
            raise InvalidInput(f"{source}: holds no request that begins and is understood within it")
        found.sort(key=lambda item: item[0])
        at, prompts, answers, timeouts = zip(*found, strict=True)
        return cls(tuple(time - at[0] for time in at), prompts, answers, timeouts, seed)

    def ask(self, number: int) -> Ask:
        """Return one request; the same for the same number."""
        place = number % len(self.at)
        size = self.input_tokens[place]
        return Ask(number, words(size, self.seed, number), size, self.output_tokens[place], self.timeouts[place])

    def __iter__(self) -> Iterator[Ask]:
        return map(self.ask, itertools.count())

    def arrivals(self, speed: float = 1.0) -> Iterator[float]:
        """Yield when each request arrives, in seconds, without end; ``speed`` 2 is twice as fast.

        A new round begins one mean gap after the last request of the round before.
        """
        round_s = self.at[-1] + self.at[-1] / max(1, len(self.at) - 1) or 1.0
        for number in itertools.count():
            begin = number * round_s
            yield from ((begin + at) / speed for at in self.at)


def _prompt_tokens(story: Story) -> int:
    if story.scheduled is not None:
        return max(1, story.scheduled.prompt_tokens)
    return max(1, round((story.prepared.prompt_bytes if story.prepared else 0) / BYTES_PER_TOKEN))


def _answer_tokens(story: Story) -> int:
    """Return how long an answer was, or was to be where it did not come to its end."""
    asked = story.prepared.max_tokens if story.prepared else None
    made = story.output_tokens
    return max(1, made if story.status == "completed" or asked is None else asked)


class Phase(msgspec.Struct, frozen=True):
    """A stretch of a run.

    Attributes:
        seconds: how long.
        level: the load, as a multiple of the run's rate or of its number of users.

    """

    seconds: float
    level: float


def shape(text: str, seconds: float) -> list[Phase]:
    """Read how the load goes over ``seconds``.

    ``steady``; ``steps:0.25,0.5,1`` (one after the other, equally long); ``spike:4`` (once, in the middle, four times
    the load for a tenth of the run); ``bursts:3`` (three times the load for 2 s in every 10 s, less in between, so that
    the mean stays 1; ``bursts:3,0.9`` has mean 0.9); ``soak`` (up in ten steps in the first tenth, then steady).

    Raises:
        InvalidInput: it is none of these.

    """
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidInput(f"a shape lasts a number of seconds above 0, got {seconds!r}")
    kind, _, rest = text.strip().partition(":")
    try:
        numbers = [float(part) for part in rest.split(",")] if rest else []
    except ValueError:
        numbers = [-1.0]
    if all(math.isfinite(number) and number >= 0 for number in numbers):
        phases = _phases(kind, numbers, seconds)
        if phases is not None:
            return phases
    raise InvalidInput(
        f"shape {text!r}: give steady, soak, steps:0.25,0.5,1 (multiples of the load), spike:4, or bursts:PEAK[,MEAN] "
        f"with a mean of at least {BURST_SHARE:g} peaks (bursts:3)"
    )


def _phases(kind: str, numbers: Sequence[float], seconds: float) -> list[Phase] | None:
    match kind, numbers:
        case "steady", []:
            return [Phase(seconds, 1.0)]
        case "soak", []:
            ramp = seconds * SPIKE_SHARE
            up = [Phase(ramp / RAMP_LEVELS, (step + 1) / RAMP_LEVELS) for step in range(RAMP_LEVELS)]
            return [*up, Phase(seconds - ramp, 1.0)]
        case "steps", [_, *_]:
            return [Phase(seconds / len(numbers), level) for level in numbers]
        case "spike", [] | [_]:
            rest = seconds * (1 - SPIKE_SHARE) / 2
            return [Phase(rest, 1.0), Phase(seconds * SPIKE_SHARE, (*numbers, 4.0)[0]), Phase(rest, 1.0)]
        case "bursts", [] | [_] | [_, _]:
            peak, mean = ([*numbers, 3.0] if not numbers else [*numbers])[0], numbers[1] if numbers[1:] else 1.0
            return _bursts(peak, mean, seconds)
    return None


def _bursts(peak: float, mean: float, seconds: float) -> list[Phase] | None:
    between = (mean - peak * BURST_SHARE) / (1 - BURST_SHARE)
    if between < -1e-9:
        return None
    # A whole number of periods, so that the mean is what was asked for.
    periods = max(1, round(seconds * BURST_SHARE / BURST_S))
    period = seconds / periods
    one = [Phase(period * (1 - BURST_SHARE), max(0.0, between)), Phase(period * BURST_SHARE, peak)]
    return one * periods


def arrivals(phases: Iterable[Phase], rate: float, seed: int = 0, *, even: bool = False) -> Iterator[float]:
    """Yield when requests arrive, in seconds from the beginning, until the phases end.

    Args:
        phases: how the load goes.
        rate: requests per second at level 1.
        seed: another seed, other moments.
        even: evenly spaced instead of Poisson (where every moment is as likely as any other).

    """
    random = _random(seed, "arrivals", 0)
    begin = 0.0
    left = 0.0 if even else random.expovariate(1.0)  # mean gaps until the next arrival
    for phase in phases:
        density = rate * phase.level
        held = phase.seconds * density
        spent = left
        while spent < held:
            yield begin + spent / density
            spent += 1.0 if even else random.expovariate(1.0)
        left = spent - held
        begin += phase.seconds


def share(items: Iterable[T], index: int, count: int) -> Iterator[T]:
    """Return the items that fall to one of ``count`` processes, which take turns; ``index`` is from 0."""
    return itertools.islice(items, index, None, count)


def _random(seed: int, what: str, number: int) -> Random:
    """Return the dice for one thing; strings are hashed alike everywhere."""
    return Random(f"{seed}/{what}/{number}")  # noqa: S311 - repeatable, not secret
