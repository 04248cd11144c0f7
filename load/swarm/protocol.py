"""What Locust and its driver say to each other: JSON lines over one socket."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

Over = Literal["grpc", "generate_stream", "generate", "tritonclient"]
"""Triton's three ways to a model that answers more than once; and the first of them with tritonclient alone."""
OVER: Final[tuple[Over, ...]] = ("grpc", "generate_stream", "generate", "tritonclient")

Deed = Literal["ask", "cancels", "reads_slowly", "times_out", "sends_rubbish"]
"""What a caller does: asks in earnest, or one of four kinds of chaos."""
CHAOS: Final[tuple[Deed, ...]] = ("cancels", "reads_slowly", "times_out", "sends_rubbish")

UNEXPECTED: Final = "unexpected"
"""How the slug of a chaos request begins that ended otherwise than its deed must end."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First line: where requests go.

    Attributes:
        grpc: ``host:port``; empty if gRPC is not asked for.
        http: ``host:port``; likewise.
        model: which model.
        timeout: seconds for a request that sets no limit itself.
        attempts: how often a refused request is sent in all; 1 means never again.

    """

    grpc: str
    http: str
    model: str
    timeout: float
    attempts: int = 1


class Order(msgspec.Struct, frozen=True, tag=True):
    """Make one request.

    Attributes:
        id: names it on this socket.
        number: its place in the plan, which also decides chaos.
        due: when, on the monotonic clock; ``None`` for at once.

    """

    id: int
    number: int
    over: Over
    prompt: str
    output_tokens: int
    deed: Deed = "ask"
    timeout: float | None = None
    due: float | None = None


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for a request any more: leave it. Its outcome is not told."""

    id: int


class Outcome(msgspec.Struct, frozen=True, tag=True):
    """What came of a request. Times in milliseconds.

    Attributes:
        slug: how it failed; ``None`` when the whole answer came.
        message: the server's words about that.
        first: from sending to the first token.
        gaps: between one response and the next.
        total: from sending to the end.
        tokens: received.
        size: characters of text received.
        late: how much later than due it was sent.

    """

    id: int
    over: Over
    deed: Deed
    slug: str | None = None
    message: str = ""
    first: float | None = None
    gaps: list[float] = []
    total: float = 0.0
    tokens: int = 0
    size: int = 0
    late: float | None = None


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Once a second: how the driver itself is. The first one, with no lags, says that it is ready.

    Attributes:
        lags: by how many milliseconds its loop woke too late, each time that it looked.
        cpu: share of one core that it used.

    """

    lags: list[float]
    cpu: float


ToDriver = Hello | Order | Drop
FromDriver = Outcome | Beat
LINE_LIMIT: Final = 1 << 26
