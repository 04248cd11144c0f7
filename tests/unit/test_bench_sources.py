"""The benchmark's lean clients against small servers of the same protocols."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest
from load.overhead.grpc_source import GrpcSource
from load.overhead.http_source import HttpSource
from load.overhead.measure import BenchFailed, Prompt
from tritonclient.grpc import service_pb2, service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
PROMPT = Prompt("a prompt")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(**fields: str) -> bytes:
    return _chunk(b"data: " + json.dumps(fields).encode() + b"\n\n")


class _HttpServer:
    """Gives each request the same pieces, and notes requests and connections."""

    def __init__(self, pieces: Sequence[bytes], *, close: bool = False) -> None:
        self.pieces = pieces
        self.close = close
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.connections = 0
        self.open = 0

    @asynccontextmanager
    async def source(self) -> AsyncIterator[HttpSource]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        source = HttpSource(f"{host}:{port}", "model")
        try:
            yield source
        finally:
            await source.close()
            server.close()
            while self.open:  # noqa: ASYNC110 - let every handler see the end
                await asyncio.sleep(0.001)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].split()[0])
                self.requests.append((head.split()[1].decode(), json.loads(await reader.readexactly(length))))
                for piece in self.pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.001)
                if self.close:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            self.open -= 1


def _over_http(server: _HttpServer, times: int = 1, *, stream: bool = True) -> list[list[str]]:
    async def run() -> list[list[str]]:
        async with server.source() as source:
            return [[text async for text in source.stream(PROMPT, 7, stream=stream)] for _ in range(times)]

    return asyncio.run(run())


def test_http_stream_yields_each_event():
    """Each server-sent event is one response, wherever the network cuts the bytes."""
    body = HEAD + _event(text_output="Hel") + _event(text_output="lo ☀") + _chunk(b"") + b""
    pieces = [body[at : at + 7] for at in range(0, len(body), 7)]
    server = _HttpServer(pieces)
    assert _over_http(server) == [["Hel", "lo ☀"]]
    route, asked = server.requests[0]
    assert route == "/v2/models/model/generate_stream"
    assert asked["stream"] is True
    assert json.loads(asked["sampling_parameters"]) == {"max_tokens": 7, "ignore_eos": True, "temperature": 0}


def test_http_connection_is_used_again():
    """A connection whose answer was complete serves the next request."""
    server = _HttpServer([HEAD, _event(text_output="a"), _chunk(b"")])
    assert _over_http(server, times=3) == [["a"]] * 3
    assert server.connections == 1


def test_http_unary_answer_is_one_response():
    """A whole answer comes as one response, without the prompt."""
    body = json.dumps({"text_output": "whole"}).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    server = _HttpServer([head + body[:5], body[5:]])
    assert _over_http(server, stream=False) == [["whole"]]
    assert server.requests[0][0] == "/v2/models/model/generate"
    assert server.requests[0][1]["exclude_input_in_output"] is True


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([HEAD, _event(text_output="a"), _event(error="queue_full: no room"), _chunk(b"")], "queue_full: no room"),
        ([HEAD, _event(text_output="a")], "closed the connection"),
        ([HEAD, _chunk(b"data: nonsense\n\n"), _chunk(b"")], "not what /generate sends"),
        ([b"this is no HTTP at all\r\n\r\n"], "closed the connection"),
    ],
    ids=["error event", "cut off", "no JSON", "no HTTP"],
)
def test_http_faults_fail_the_measurement(pieces: list[bytes], words: str):
    """An error event, a cut stream and foreign bytes are told, never taken for an answer."""
    with pytest.raises(BenchFailed, match=words):
        _over_http(_HttpServer(pieces, close=True))


def test_http_without_a_server_says_so():
    """A port where nobody listens is named."""

    async def run() -> None:
        source = HttpSource("127.0.0.1:1", "model")
        async for _ in source.stream(PROMPT, 1, stream=True):
            pass

    with pytest.raises(BenchFailed, match=r"nothing answers at 127\.0\.0\.1:1"):
        asyncio.run(run())


class _Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Streams given texts, then perhaps an error."""

    def __init__(self, texts: list[str], error: str = "") -> None:
        self.texts = texts
        self.error = error
        self.requests: list[Any] = []

    async def ModelStreamInfer(self, request_iterator: AsyncIterator[Any], context: object):  # noqa: N802
        async for request in request_iterator:
            self.requests.append(request)
            for text in self.texts:
                answer = service_pb2.ModelStreamInferResponse()
                answer.infer_response.outputs.add(name="text_output", datatype="BYTES", shape=[1])
                answer.infer_response.raw_output_contents.append(
                    len(text.encode()).to_bytes(4, "little") + text.encode()
                )
                yield answer
            if self.error:
                yield service_pb2.ModelStreamInferResponse(error_message=self.error)


def _over_grpc(servicer: _Servicer) -> list[str]:
    async def run() -> list[str]:
        server = grpc.aio.server()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        source = GrpcSource(f"127.0.0.1:{port}", "model")
        await source.open()
        try:
            return [text async for text in source.stream(PROMPT, 7, stream=True)]
        finally:
            await source.close()
            await server.stop(None)

    return asyncio.run(run())


def test_grpc_stream_yields_each_response():
    """Each message is one response, in order; the request carries what the contract asks for."""
    servicer = _Servicer(["Hel", "lo ☀", ""])
    assert _over_grpc(servicer) == ["Hel", "lo ☀", ""]
    (request,) = servicer.requests
    sent = dict(zip((tensor.name for tensor in request.inputs), request.raw_input_contents, strict=True))
    assert sent["text_input"][4:] == b"a prompt"
    assert sent["stream"] == b"\1"
    assert json.loads(sent["sampling_parameters"][4:])["max_tokens"] == 7


def test_grpc_error_in_the_stream_fails_the_measurement():
    """An error message in the middle of a stream is told, never taken for its end."""
    with pytest.raises(BenchFailed, match="engine_died: gone"):
        _over_grpc(_Servicer(["a"], error="engine_died: gone"))


def test_grpc_without_a_server_says_so():
    """A stream that cannot be opened names its status."""

    async def run() -> None:
        source = GrpcSource("127.0.0.1:1", "model")
        await source.open()
        try:
            async for _ in source.stream(PROMPT, 1, stream=True):
                pass
        finally:
            await source.close()

    with pytest.raises(BenchFailed, match="UNAVAILABLE"):
        asyncio.run(run())
