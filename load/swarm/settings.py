"""What a run is to do: Locust's own options plus ours, read once into a frozen value."""

from __future__ import annotations

import math
from random import Random
from typing import TYPE_CHECKING, Any, Final

import msgspec

from load.mixes import Mix, Phase, Recorded, arrivals, lengths, shape
from load.swarm.protocol import OVER, Hello, Over
from triton_lifecycle.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FOREVER_S: Final = 7 * 24 * 3600.0
"""How long a run without --run-time may go on."""
PROCESSES: Final = ("poisson", "even", "recorded")


class Settings(msgspec.Struct, frozen=True):
    """A run.

    Attributes:
        hello: where requests go.
        over: front ends with their weights.
        chaos: share of users, or of arrivals, that misbehave.
        mix: what is asked.
        rate: arrivals per second at level 1; 0 for a closed loop.
        process: how arrivals are spaced.
        speed: of a recording.
        shape: how the load goes.
        run_time: seconds; ``None`` until somebody stops it.
        users: at level 1, in a closed loop.
        spawn_rate: users per second.
        seed: of everything.
        think: seconds between a user's requests.
        max_in_flight: of an open loop, in each process.
        drain: seconds that are given at the end to what is under way.
        max_lag_ms: by how much the tool may be late.
        report: file for the JSON report; empty for none.

    """

    hello: Hello
    over: dict[Over, float]
    chaos: float
    mix: Mix | Recorded
    rate: float
    process: str
    speed: float
    shape: str
    run_time: float | None
    users: int
    spawn_rate: float
    seed: int
    think: float
    max_in_flight: int
    drain: float
    max_lag_ms: float
    report: str

    @classmethod
    def read(cls, options: Any) -> Settings:  # noqa: ANN401 - argparse's
        """Check what was given on the command line or in the web page.

        Raises:
            InvalidInput: with every problem there is, a line each.

        """
        problems: list[str] = []

        def take(name: str, convert: Callable[[Any], Any], rule: str, test: Callable[[Any], bool] | None = None) -> Any:  # noqa: ANN401
            value = getattr(options, name)
            try:
                found = convert(value)
                if test is None or test(found):
                    return found
                problems.append(f"--{name.replace('_', '-')} {value!r}: must be {rule}")
            except InvalidInput as error:
                problems.append(f"--{name.replace('_', '-')}: {error.message}")
            except (TypeError, ValueError):
                problems.append(f"--{name.replace('_', '-')} {value!r}: must be {rule}")
            return None

        positive, natural = (lambda x: math.isfinite(x) and x > 0), (lambda x: math.isfinite(x) and x >= 0)
        over = take("over", front_ends, "front ends with weights, such as grpc:2,generate_stream,generate")
        seed = take("seed", int, "a whole number")
        timeout = take("request_timeout", float, "seconds above 0", positive)
        attempts = take("attempts", int, "a whole number from 1", lambda x: x >= 1)
        recording = str(options.recording or "")
        mix: Any = None
        if recording:
            mix = take("recording", lambda path: Recorded.read(path, seed or 0), "a recording")
        else:
            prompt, answer = (take(name, lengths, "a length") for name in ("prompt_tokens", "answer_tokens"))
            prefix = take("prefix_tokens", int, "a whole number from 0", natural)
            mix = None if problems else Mix(prompt, answer, seed, prefix)
        run_time = options.run_time or None
        take("shape", lambda text: shape(text, float(run_time or 60)), "a shape")
        if run_time is None and options.shape != "steady":
            problems.append(f"--shape {options.shape}: needs --run-time, which it is spread over")
        process = take("arrivals", str, "one of " + ", ".join(PROCESSES), lambda x: x in PROCESSES)
        if process == "recorded" and not recording:
            problems.append("--arrivals recorded: needs --recording FILE")
        if process == "recorded" and options.shape != "steady":
            problems.append("--arrivals recorded: has a course of its own, and takes no --shape")
        numbers = {
            name: take(name, convert, rule, test)
            for name, convert, rule, test in (
                ("chaos", float, "a share from 0 to 1", lambda x: 0 <= x <= 1),
                ("arrival_rate", float, "arrivals per second, or 0 for a closed loop", natural),
                ("speed", float, "a number above 0", positive),
                ("think", float, "seconds from 0", natural),
                ("max_in_flight", int, "a whole number from 1", lambda x: x >= 1),
                ("drain", float, "seconds from 0", natural),
                ("max_lag_ms", float, "milliseconds above 0", positive),
            )
        }
        if problems:
            raise InvalidInput("\n  ".join(["this load cannot be made:", *problems]))
        return cls(
            hello=Hello(str(options.grpc_url), str(options.http_url), str(options.model), timeout, attempts),
            over=over,
            chaos=numbers["chaos"],
            mix=mix,
            rate=numbers["arrival_rate"] or (1.0 if process == "recorded" else 0.0),
            process=process,
            speed=numbers["speed"],
            shape=options.shape,
            run_time=None if run_time is None else float(run_time),
            users=int(options.num_users or 1),
            spawn_rate=float(options.spawn_rate or 1),
            seed=seed,
            think=numbers["think"],
            max_in_flight=numbers["max_in_flight"],
            drain=numbers["drain"],
            max_lag_ms=numbers["max_lag_ms"],
            report=str(options.report or ""),
        )

    @property
    def open_loop(self) -> bool:
        """Whether requests arrive by themselves, whatever became of those before."""
        return self.rate > 0

    @property
    def phases(self) -> list[Phase]:
        """How the load goes, from beginning to end."""
        return shape(self.shape, self.run_time or FOREVER_S)

    def users_at(self, elapsed: float) -> int:
        """Return how many users there are to be so many seconds after the beginning; at least one."""
        begin = 0.0
        level = 1.0
        for phase in self.phases:
            level = phase.level
            begin += phase.seconds
            if elapsed < begin:
                break
        return max(1, round(self.users * level))

    def times(self) -> Iterator[float]:
        """Return when requests arrive in an open loop, in seconds from the beginning."""
        if self.process == "recorded" and isinstance(self.mix, Recorded):
            end = self.run_time or FOREVER_S
            return _until(self.mix.arrivals(self.speed), end)
        return arrivals(self.phases, self.rate, self.seed, even=self.process == "even")

    def over_of(self, number: int) -> Over:
        """Return which front end a request goes to whose user does not say."""
        random = Random(f"{self.seed}/over/{number}")  # noqa: S311 - repeatable, not secret
        return random.choices(list(self.over), weights=list(self.over.values()))[0]


def _until(times: Iterator[float], end: float) -> Iterator[float]:
    for at in times:
        if at >= end:
            return
        yield at


def front_ends(text: str) -> dict[Over, float]:
    """Read front ends with weights, such as ``grpc:2,generate``.

    Raises:
        ValueError: the part that is not one.

    """
    found: dict[Over, float] = {}
    for part in str(text).split(","):
        name, _, weight = part.strip().partition(":")
        known = next((over for over in OVER if over == name), None)
        value = float(weight or 1)
        if known is None or not math.isfinite(value) or value <= 0:
            raise ValueError(part)
        found[known] = value
    return found
