"""Locust's users: three that ask in earnest, four that nobody wants, and one that stands for all arrivals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

import gevent
from locust import User

from load.swarm import campaign
from load.swarm.protocol import CHAOS

if TYPE_CHECKING:
    from load.swarm.protocol import Deed, Over
    from load.swarm.settings import Settings

IDLE_S: Final = 0.2
FINE: Final = 10_000
"""Weights are whole numbers for Locust."""


class Caller(User):  # type: ignore[misc]
    """A user of a closed loop: asks, waits for the end, thinks, asks again."""

    abstract = True
    over: ClassVar[Over | None] = None
    deed: ClassVar[Deed] = "ask"

    def wait_time(self) -> float:
        """Return how long this user thinks, in seconds."""
        mine: campaign.Campaign | None = self.environment.campaign
        return IDLE_S if mine is None else mine.settings.think

    def turn(self) -> None:
        """Make one request; at the end of a run none."""
        mine: campaign.Campaign | None = self.environment.campaign
        if mine is None or mine.closing:
            gevent.sleep(IDLE_S)
        else:
            mine.ask(self.over, self.deed)

    tasks: ClassVar[list[Any]] = [turn]


class GrpcStream(Caller):
    """Streams over gRPC."""

    over = "grpc"


class GenerateStream(Caller):
    """Streams over HTTP (server-sent events)."""

    over = "generate_stream"


class Generate(Caller):
    """Takes the whole answer in one piece over HTTP."""

    over = "generate"


class TritonclientStream(Caller):
    """Streams over gRPC with nothing but tritonclient."""

    over = "tritonclient"


class Cancels(Caller):
    """Leaves in the middle, or cancels by id."""

    deed = "cancels"


class ReadsSlowly(Caller):
    """Does not take its tokens as fast as they come."""

    deed = "reads_slowly"


class TimesOut(Caller):
    """Allows far less time than its answer takes."""

    deed = "times_out"


class SendsRubbish(Caller):
    """Sends what no server can serve."""

    deed = "sends_rubbish"


class Arrivals(User):  # type: ignore[misc]
    """All the callers of an open loop; there is one of it in each process, whatever -u says."""

    weight = 1

    def run_plan(self) -> None:
        """Let the requests come, once; then wait for the end."""
        mine: campaign.Campaign | None = self.environment.campaign
        if mine is not None:
            chaos = mine.settings.chaos
            mine.schedule(lambda random: campaign.arrival(random, chaos))
        while True:
            gevent.sleep(IDLE_S)

    tasks: ClassVar[list[Any]] = [run_plan]


CALLERS: Final[tuple[type[Caller], ...]] = (
    GrpcStream, GenerateStream, Generate, TritonclientStream, Cancels, ReadsSlowly, TimesOut, SendsRubbish,
)  # fmt: skip


def chosen(settings: Settings, named: list[str]) -> list[type[Any]]:
    """Return the user classes of a run, with their weights set.

    Args:
        settings: of the run.
        named: classes that the command line names; they take equal shares then, and the settings' are not looked at.

    """
    if settings.open_loop:
        return [Arrivals]
    if named and (found := [caller for caller in CALLERS if caller.__name__ in named]):
        for caller in found:
            caller.weight = 1
        return list(found)
    whole = sum(settings.over.values())
    users: list[type[Any]] = []
    for caller in CALLERS:
        if caller.deed == "ask":
            part = settings.over.get(caller.over or "grpc", 0.0) / whole * (1 - settings.chaos)
        else:
            part = settings.chaos / len(CHAOS)
        caller.weight = round(part * FINE)
        if caller.weight:
            users.append(caller)
    return users
