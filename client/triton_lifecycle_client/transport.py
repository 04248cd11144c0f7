"""What a transport does, and the choice of one by address."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, cast, get_args
from typing import Protocol as Shape

import msgspec

from triton_lifecycle.errors import InvalidInput

from .types import Chunk, ControlRequest, GenerateRequest, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Mapping

DEFAULT_ADDRESS: dict[Protocol, str] = {"grpc": "127.0.0.1:8001", "http": "127.0.0.1:8000"}
URL_VARIABLE = "LIFECYCLE_URL"


class Endpoint(msgspec.Struct, frozen=True):
    """Where the server is and how to speak to it.

    Attributes:
        address: ``host:port``, for HTTP with a path if the server lies behind one.

    """

    protocol: Protocol
    address: str
    secure: bool = False

    def __str__(self) -> str:
        return f"{self.protocol}{'s' if self.secure else ''}://{self.address}"


def endpoint(url: str | None = None, protocol: str | None = None) -> Endpoint:
    """Work out the endpoint: ``host:port`` or ``grpc://``, ``grpcs://``, ``http://``, ``https://`` before it.

    Without ``url``, the environment's LIFECYCLE_URL counts, then Triton's default port on this machine. Without
    ``protocol``, the scheme decides, then gRPC.

    Raises:
        InvalidInput: the two contradict each other or the address is malformed.

    """
    known = get_args(Protocol)
    if protocol is not None and protocol not in known:
        raise InvalidInput(f"protocol must be one of {', '.join(known)}, got {protocol!r}")
    given = url or os.environ.get(URL_VARIABLE) or ""
    scheme, _, rest = given.rpartition("://")
    if scheme and scheme.removesuffix("s") not in known:
        raise InvalidInput(f"the server's address must begin with grpc://, http:// or nothing, got {given!r}")
    named = cast("Protocol | None", scheme.removesuffix("s") or None)
    if named and protocol and named != protocol:
        raise InvalidInput(
            f"the server's address {given!r} says {named}, but {protocol} was asked for; drop one of them"
        )
    chosen = cast("Protocol", protocol or named or "grpc")
    address = rest.rstrip("/") or DEFAULT_ADDRESS[chosen]
    host, colon, port = address.partition("/")[0].rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidInput(f"the server's address must be host:port, got {given!r}")
    return Endpoint(chosen, address, secure=scheme.endswith("s"))


class Transport(Shape):
    """The way to one server. Every method raises only errors of our tree and returns within a limit."""

    def exchange(self, request: GenerateRequest | ControlRequest, limit_s: float) -> AsyncGenerator[Chunk, None]:
        """Send a request and return what comes back, as it comes.

        Closing the generator before its end, or cancelling the task in it, ends the work on the server. Takes
        ``limit_s`` at most, then raises TotalTimeout.
        """
        ...

    async def is_ready(self, model: str, limit_s: float) -> bool:
        """Return whether the server, and this model on it, take requests."""
        ...

    async def index(self, limit_s: float) -> dict[str, str]:
        """Return Triton's word for the state of each model in its repository; ``READY`` ones take requests."""
        ...

    async def unload(self, model: str, limit_s: float) -> None:
        """Have Triton unload a model; returns when it has begun to."""
        ...

    async def close(self) -> None:
        """End everything within a few seconds; requests still under way are cancelled."""
        ...


def states(versions: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the state of each model from those of its versions: ``READY`` if one of them is, else the last one's."""
    found: dict[str, str] = {}
    for name, state in versions:
        if found.get(name) != "READY":
            found[name] = state
    return found


def cancelled_by_caller() -> bool:
    """Tell a cancelled task from a call that was ended from below: both show as the same exception."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def open_transport(
    where: Endpoint, headers: Mapping[str, str] | None = None, control_token: str | None = None
) -> Transport:
    """Return the transport for an endpoint; imports only the library that it needs."""
    if where.protocol == "grpc":
        from .grpc import GrpcTransport  # noqa: PLC0415 - half a second that HTTP users need not pay

        return GrpcTransport(where, headers)
    from .http import HttpTransport  # noqa: PLC0415

    return HttpTransport(where, headers, control_token)
