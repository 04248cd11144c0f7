"""Triton over HTTP, as lean as Python allows: a parser in C on a bare connection that is kept and used again."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import TYPE_CHECKING, cast

import httptools
import msgspec

from load.overhead.grpc_source import REQUEST_LIMIT_MS, sampling
from load.overhead.measure import BenchFailed, Prompt

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

_EVENT_END = b"\n\n"


class _Event(msgspec.Struct):
    text_output: str = ""
    error: str | None = None


_decode = msgspec.json.Decoder(_Event).decode


class HttpSource:
    """A model behind ``/generate_stream`` and ``/generate``; one connection for each concurrent request.

    Args:
        address: ``host:port``.
        model: the model's name.

    """

    def __init__(self, address: str, model: str) -> None:
        self._address = address
        self._model = model
        self._idle: list[_Connection] = []

    async def open(self) -> None:
        """See :class:`~load.overhead.measure.Source`."""

    async def close(self) -> None:
        """See :class:`~load.overhead.measure.Source`."""
        while self._idle:
            self._idle.pop().close()

    async def stream(self, prompt: Prompt, max_tokens: int, *, stream: bool) -> AsyncGenerator[str, None]:
        """See :class:`~load.overhead.measure.Source`."""
        connection = await self._take()
        connection.request(self._request(prompt.text, max_tokens, stream=stream))
        whole = False
        try:
            while (data := await connection.event()) is not None:
                event = _decode(data)
                if event.error is not None:
                    raise BenchFailed(f"the server refused a request: {event.error}")
                yield event.text_output
            whole = True
        except msgspec.DecodeError as error:
            raise BenchFailed(f"an answer over HTTP is not what /generate sends: {error}") from None
        finally:
            if whole and connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()

    async def _take(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        host, _, port = self._address.rpartition(":")
        try:
            _, connection = await asyncio.get_running_loop().create_connection(_Connection, host, int(port))
        except OSError as error:
            raise BenchFailed(f"nothing answers at {self._address}: {error}") from None
        return connection

    def _request(self, text: str, max_tokens: int, *, stream: bool) -> bytes:
        body = json.dumps(
            {
                "text_input": text,
                "stream": stream,
                "sampling_parameters": sampling(max_tokens),
                "parameters": {"timeout_ms": REQUEST_LIMIT_MS},
                **({} if stream else {"exclude_input_in_output": True}),
            }
        ).encode()
        route = "generate_stream" if stream else "generate"
        head = (
            f"POST /v2/models/{self._model}/{route} HTTP/1.1\r\nHost: {self._address}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class _Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._events: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._rest = b""
        self._is_stream = False
        self._whole = True
        self._keep = True
        self._lost: str | None = None
        self._parser = httptools.HttpResponseParser(self)

    @property
    def reusable(self) -> bool:
        """Whether another request may be sent."""
        return self._lost is None and self._whole and self._keep

    def request(self, data: bytes) -> None:
        """Send a request."""
        self._events.clear()
        self._rest, self._whole, self._is_stream = b"", False, False
        self._parser = httptools.HttpResponseParser(self)
        if self._transport is not None:
            self._transport.write(data)

    async def event(self) -> bytes | None:
        """Return the JSON of the next event, ``None`` after the last."""
        while not self._events:
            if self._whole:
                return None
            if self._lost is not None:
                raise BenchFailed(f"the server closed the connection before an answer was complete{self._lost}")
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._events.popleft()

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._lost = f": {error}"
            self.close()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        self._lost = self._lost or (f": {exc}" if exc else "")
        self._wake()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one header from the parser."""
        if name.lower() == b"content-type":
            self._is_stream = value.startswith(b"text/event-stream")

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body from the parser."""
        self._rest += body
        if self._is_stream:
            *events, self._rest = self._rest.split(_EVENT_END)
            self._events.extend(event[5:] for event in events if event.startswith(b"data:"))

    def on_message_complete(self) -> None:
        """Note the end of the answer."""
        if self._rest.strip():
            self._events.append(self._rest.removeprefix(b"data:"))
        self._whole = True
        self._keep = self._parser.should_keep_alive()  # afterwards the parser no longer knows

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
