"""Triton's HTTP front end: ``/generate`` for one response, ``/generate_stream`` for many.

Made with aiohttp (which tritonclient brings), because tritonclient itself knows neither of these two routes.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

import aiohttp

from triton_lifecycle.errors import Cancelled, LifecycleError, TotalTimeout, UnknownRequest

from . import codec
from .errors import ProtocolError, ServerUnreachable, WrongPort, translate
from .transport import cancelled_by_caller, states
from .types import Chunk, ControlRequest, GenerateRequest

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping

    from .transport import Endpoint

_CONNECT_S = 5.0
_FAREWELL_S = 2.0
_OVERTAKEN_S = (0.05, 0.1, 0.2, 0.4)


class HttpTransport:
    """One connection pool to one server. Use it in the event loop in which its first request was made."""

    def __init__(
        self, where: Endpoint, headers: Mapping[str, str] | None = None, control_token: str | None = None
    ) -> None:
        self._control_token = control_token
        self._where = where
        self._base = f"{'https' if where.secure else 'http'}://{where.address}/v2"
        self._headers = dict(headers or {})
        self._lazy_session: aiohttp.ClientSession | None = None
        self._opening: set[asyncio.Future[aiohttp.ClientResponse]] = set()
        self._open: set[aiohttp.ClientResponse] = set()
        self._unanswered: dict[int, GenerateRequest] = {}
        """Requests under way that have brought nothing yet; by identity, since callers' ids may repeat."""
        self._farewells: set[asyncio.Task[None]] = set()
        self._closed = False

    async def exchange(self, request: GenerateRequest | ControlRequest, limit_s: float) -> AsyncGenerator[Chunk, None]:
        """See :class:`~triton_lifecycle_client.transport.Transport`."""
        stream = isinstance(request, GenerateRequest) and request.stream
        path = f"/models/{request.model}/{'generate_stream' if stream else 'generate'}"
        headers = None
        if isinstance(request, GenerateRequest):
            headers = request.trace_headers
            self._unanswered[id(request)] = request
        try:
            async with (
                self._request("POST", path, limit_s, codec.http_body(request), headers) as response,
                aclosing(_events(response)) as events,
            ):
                async for event in events:
                    self._unanswered.pop(id(request), None)
                    chunk = codec.http_chunk(event, http_status=response.status)
                    if chunk is not None:
                        yield chunk
        except (asyncio.CancelledError, GeneratorExit, TotalTimeout):
            # Closing the connection is noticed by Triton only when it next writes to it. Before the first response,
            # and for an answer in one piece always, that is too late to save the work: say it in words.
            if isinstance(request, GenerateRequest):
                self._say_cancel(request)
            raise
        finally:
            self._unanswered.pop(id(request), None)

    async def is_ready(self, model: str, limit_s: float) -> bool:
        """See :class:`~triton_lifecycle_client.transport.Transport`."""
        for path in ("/health/ready", f"/models/{model}/ready"):
            async with self._request("GET", path, limit_s) as response:
                if response.status != 200:
                    return False
                await response.read()
        # Triton's metrics port says 200 to everything: only the front end can also say who it is.
        async with self._request("GET", "", limit_s) as response:
            about = await response.read()
        if b'"extensions"' not in about:
            raise WrongPort(_NOT_TRITON.format(self._where.address))
        return True

    async def index(self, limit_s: float) -> dict[str, str]:
        """See :class:`~triton_lifecycle_client.transport.Transport`."""
        async with self._request("POST", "/repository/index", limit_s, b"{}") as response:
            index = codec.parse(await response.read())
        if not isinstance(index, list):
            raise ProtocolError(f"expected a list of models from the server, got {str(index)[:80]!r}")
        return states((str(entry["name"]), str(entry.get("state", ""))) for entry in index)

    async def unload(self, model: str, limit_s: float) -> None:
        """See :class:`~triton_lifecycle_client.transport.Transport`."""
        async with self._request("POST", f"/repository/models/{model}/unload", limit_s, b"{}") as response:
            if response.status != 200:
                codec.http_chunk(codec.parse(await response.read()), http_status=response.status)
                raise ProtocolError(f"the server answered {response.status} to an unload, and no error")

    async def close(self) -> None:
        """See :class:`~triton_lifecycle_client.transport.Transport`."""
        # Also those whose caller is only just being cancelled.
        for request in list(self._unanswered.values()):
            self._say_cancel(request)
        if self._farewells:
            await asyncio.wait(set(self._farewells), timeout=_FAREWELL_S)
        self._closed = True
        # Closing the session alone would leave those who wait for an answer waiting.
        for task in self._farewells | self._opening:
            task.cancel()
        for response in self._open:
            response.close()
        if self._lazy_session is not None:
            await self._lazy_session.close()

    def _say_cancel(self, request: GenerateRequest) -> None:
        """Order the server to cancel, in the background, so that whoever leaves need not wait; once a request."""
        if self._closed or self._unanswered.pop(id(request), None) is None:
            return
        task = asyncio.get_running_loop().create_task(self._cancel(request))
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)

    async def _cancel(self, request: GenerateRequest) -> None:
        order = ControlRequest(
            model=request.model, control="cancel", control_id=request.request_id, token=self._control_token
        )
        with suppress(LifecycleError):  # best effort: the server may be the reason why we leave
            for pause in _OVERTAKEN_S:
                try:
                    return await self._order(order)
                except UnknownRequest:
                    # The order may have overtaken the request, which was on another connection.
                    await asyncio.sleep(pause)
            await self._order(order)
        return None

    async def _order(self, order: ControlRequest) -> None:
        async with aclosing(self.exchange(order, _FAREWELL_S / 2)) as answers:
            async for _ in answers:
                pass

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        limit_s: float,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Open a request, close the connection on the way out, and translate the library's errors."""
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=_CONNECT_S)
        opening = asyncio.ensure_future(
            self._session.request(method, self._base + path, data=body, timeout=timeout, headers=headers)
        )
        self._opening.add(opening)
        try:
            async with await opening as response:
                self._open.add(response)
                try:
                    yield response
                finally:
                    self._open.discard(response)
        except asyncio.CancelledError:
            if self._closed and not cancelled_by_caller():  # close() ended the request, nobody cancelled this task
                raise Cancelled("the client was closed while the request was under way") from None
            raise
        except aiohttp.ClientError as error:
            self._fail(error)
        except TimeoutError:
            raise TotalTimeout(f"no complete answer from {self._where} within {limit_s:.1f} s") from None
        finally:
            self._opening.discard(opening)

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._closed:
            raise Cancelled("the client is closed")
        if self._lazy_session is None:
            self._lazy_session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                headers={"Content-Type": "application/json"} | self._headers,
            )
        return self._lazy_session

    def _fail(self, error: aiohttp.ClientError) -> NoReturn:
        if self._closed:
            raise Cancelled("the client was closed while the request was under way") from None
        if isinstance(error, aiohttp.ServerTimeoutError):
            what = f"{self._where} did not take the connection within {_CONNECT_S:.0f} s"
            raise ServerUnreachable(f"{what}; is the address right?") from None
        if str(self._where).startswith("https://") and _no_tls(error):
            raise ServerUnreachable(
                f"what answers at {self._where} does not speak TLS; Triton itself does not: name it with http://"
            ) from None
        if isinstance(error, aiohttp.ClientConnectorError):
            raise ServerUnreachable(
                f"nothing answers at {self._where} ({_reason(error.os_error)}); start the server with "
                "`lifecycle serve`, or name its address"
            ) from None
        if isinstance(error, aiohttp.ClientResponseError):
            raise WrongPort(
                f"what answers at {self._where} does not speak HTTP; if it is Triton's gRPC port (8001 by default), "
                "speak gRPC to it or name the HTTP port (8000 by default)"
            ) from None
        if isinstance(error, aiohttp.InvalidURL):
            raise ServerUnreachable(f"{self._where} is not an address") from None
        raise ServerUnreachable(
            f"{self._where} closed the connection before the answer was complete ({type(error).__name__}); "
            "the server is stopping or has died"
        ) from None


def _no_tls(error: aiohttp.ClientError) -> bool:
    """Return whether somebody took the connection, and left when it was to be encrypted."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return isinstance(error.os_error, ssl.SSLError | ConnectionResetError | BrokenPipeError)
    return isinstance(error, aiohttp.ClientSSLError | aiohttp.ServerDisconnectedError)


def _reason(error: OSError) -> str:
    return (
        os.strerror(error.errno)
        if error.errno and error.errno > 0
        else error.strerror or str(error) or type(error).__name__
    )


async def _events(response: aiohttp.ClientResponse) -> AsyncGenerator[Any, None]:
    """Yield the JSON values of an answer: of its events, or its whole body."""
    if response.status in {404, 405} and response.content_type != "application/json":
        raise WrongPort(_NOT_TRITON.format(response.url.authority))
    if response.content_type == "text/event-stream":
        decoder = codec.EventStream()
        async for data in response.content.iter_any():
            for event in decoder.feed(data):
                yield event
        for event in decoder.finish():
            yield event
        return
    body = await response.read()
    if response.status == 405:
        raise WrongPort(_NOT_TRITON.format(response.url.authority))
    if response.status >= 400 and not body.lstrip().startswith(b"{"):
        raise translate(body.decode(errors="replace")[:300], http_status=response.status)
    yield codec.parse(body)


_NOT_TRITON = (
    "{} speaks HTTP but does not know the generate routes; it may be Triton's metrics port (8002 by default) or "
    "another program: name Triton's HTTP port (8000 by default)"
)
