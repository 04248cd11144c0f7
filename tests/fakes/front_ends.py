"""Stand-ins for Triton's HTTP and gRPC front ends on loopback ports, with a model that a test scripts.

They mimic what the client depends on: the routes, texts and codes that were measured on the real server. Like there,
an HTTP caller that leaves is noticed only when the next response is written.
"""

# ruff: noqa: N802 - the names and types of http.server and of generated code

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

MODEL = "m"


@dataclass
class Ask:
    """A request as the model sees it."""

    inputs: dict[str, Any]
    parameters: dict[str, Any]
    id: str
    left: threading.Event = field(default_factory=threading.Event)
    """Set when the front end notices that the caller is gone."""

    @property
    def prompt(self) -> str:
        """The text input."""
        return str(self.inputs["text_input"])


@dataclass
class Say:
    """One response."""

    text: str = ""
    finish: str = "None"
    tokens: int = 1
    ids: tuple[int, ...] = ()

    def outputs(self) -> dict[str, Any]:
        """Return the output tensors by name, as scalars, or as lists where there are several elements."""
        found: dict[str, Any] = {
            "text_output": self.text,
            "finish_reason": self.finish,
            "num_output_tokens": self.tokens,
            "num_input_tokens": 3,
        }
        return found | ({"token_ids": self.ids[0] if len(self.ids) == 1 else list(self.ids)} if self.ids else {})


@dataclass
class Fail:
    """An error as the last response."""

    message: str


class Drop:
    """The connection breaks."""


class End:
    """An empty response that only marks the end."""


Model = Callable[[Ask], Iterator[Say | Fail | Drop | End]]


@dataclass
class FrontEnds:
    """Two running front ends of one model."""

    http: str = ""
    grpc: str = ""
    asked: list[Ask] = field(default_factory=list)
    model: Model = lambda ask: iter([Say("ok", "stop")])
    state: str = "READY"
    refuses_unload: str = ""

    def unload(self) -> str:
        """Begin to unload the model, or return why not; it is gone when somebody has looked."""
        if not self.refuses_unload:
            self.state = "UNLOADING"
        return self.refuses_unload

    def look(self) -> str:
        """Return the model's state."""
        seen = self.state
        self.state = "UNAVAILABLE" if seen == "UNLOADING" else seen
        return seen

    def url(self, protocol: str) -> str:
        """Return the address for a protocol."""
        return self.grpc if protocol == "grpc" else self.http

    @property
    def prompts(self) -> list[Ask]:
        """What was asked, without control requests."""
        return [ask for ask in self.asked if "control" not in ask.parameters]

    @property
    def cancels(self) -> list[str]:
        """The ids that were ordered to be cancelled."""
        return [ask.parameters["control_id"] for ask in self.asked if ask.parameters.get("control") == "cancel"]


@contextmanager
def front_ends(model: Model | None = None) -> Iterator[FrontEnds]:
    """Run both front ends until the block is left."""
    fakes = FrontEnds()
    if model is not None:
        fakes.model = model
    web = ThreadingHTTPServer(("127.0.0.1", 0), type("Web", (_Web,), {"fakes": fakes}))
    web.daemon_threads = True
    web_thread = threading.Thread(target=web.serve_forever, args=(0.02,), daemon=True)
    web_thread.start()
    pool = ThreadPoolExecutor(8)
    rpc = grpc.server(pool)
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Rpc(fakes), rpc)
    fakes.http = f"127.0.0.1:{web.server_port}"
    fakes.grpc = f"127.0.0.1:{rpc.add_insecure_port('127.0.0.1:0')}"
    rpc.start()
    try:
        yield fakes
    finally:
        rpc.stop(0).wait(5)
        pool.shutdown(wait=False)
        web.shutdown()
        web.server_close()
        web_thread.join(60)


class _Web(BaseHTTPRequestHandler):
    fakes: FrontEnds
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Keep quiet."""

    def do_GET(self) -> None:
        known = {"/v2/health/ready", f"/v2/models/{MODEL}/ready"}
        if self.path == "/v2":
            self._answer(200, {"name": "triton", "extensions": []})
        else:
            self._answer(200 if self.path in known else 400, None)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v2/repository/index":
            self._answer(200, [{"name": MODEL, "state": self.fakes.look()}, {"name": "broken"}])
            return
        if self.path == f"/v2/repository/models/{MODEL}/unload":
            why = self.fakes.unload()
            self._answer(400, {"error": why}) if why else self._answer(200, None)
            return
        *_, model, route = self.path.split("/")
        if model != MODEL:
            self._answer(404, {"error": f"Request for unknown model: '{model}' is not found"})
            return
        parameters = body.pop("parameters", {})
        ask = Ask(body, parameters, body.pop("id", ""))
        self.fakes.asked.append(ask)
        try:
            self._stream(ask) if route == "generate_stream" else self._whole(ask)
        except OSError:
            ask.left.set()
            self.close_connection = True

    def _whole(self, ask: Ask) -> None:
        for said in self.fakes.model(ask):
            if isinstance(said, Drop):
                self.close_connection = True
                return
            if isinstance(said, Fail):
                self._answer(400, {"error": said.message})
            elif isinstance(said, Say):
                self._answer(200, said.outputs())

    def _stream(self, ask: Ask) -> None:
        begun = False
        for said in self.fakes.model(ask):
            if isinstance(said, Drop):
                self.close_connection = True
                return
            if not begun:
                self.send_response(400 if isinstance(said, Fail) else 200)
                self.send_header("Content-Type", "text/event-stream; charset=utf-8")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                begun = True
            outputs = {"error": said.message} if isinstance(said, Fail) else {"model_name": MODEL}
            data = (
                b"data: "
                + json.dumps(outputs | (said.outputs() if isinstance(said, Say) else {}), ensure_ascii=False).encode()
            )
            # Cut in two, so that most often a character is cut as well.
            for part in (data[: len(data) // 2], data[len(data) // 2 :] + b"\n\n"):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        self.wfile.write(b"0\r\n\r\n")

    def _answer(self, status: int, document: object) -> None:
        data = b"" if document is None else json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Rpc(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    def __init__(self, fakes: FrontEnds) -> None:
        self._fakes = fakes

    def ServerReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerReadyResponse(ready=True)

    def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=request.name == MODEL)

    def RepositoryIndex(self, request: Any, context: Any) -> Any:
        index = service_pb2.RepositoryIndexResponse()
        index.models.add(name=MODEL, state=self._fakes.look())
        index.models.add(name="broken", state="UNAVAILABLE")
        return index

    def RepositoryModelUnload(self, request: Any, context: Any) -> Any:
        if why := self._fakes.unload():
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)
        return service_pb2.RepositoryModelUnloadResponse()

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:
        for request in requests:
            if request.model_name != MODEL:
                yield service_pb2.ModelStreamInferResponse(
                    error_message=f"Request for unknown model: '{request.model_name}' is not found"
                )
                continue
            ask = Ask(_inputs(request), _parameters(request), request.id)
            context.add_callback(ask.left.set)
            self._fakes.asked.append(ask)
            for said in self._fakes.model(ask):
                if isinstance(said, Drop):
                    context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
                yield _response(said)


def _inputs(request: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        match tensor.datatype:
            case "BOOL":
                values[tensor.name] = bool(raw[0])
            case "INT64":
                values[tensor.name] = np.frombuffer(raw, np.int64).tolist()
            case _:
                values[tensor.name] = raw[4:].decode()
    return values


def _parameters(request: Any) -> dict[str, Any]:
    kept = {name: value for name, value in request.parameters.items() if name != "priority"}
    return {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in kept.items()}


def _response(said: Say | Fail | End) -> Any:
    if isinstance(said, Fail):
        return service_pb2.ModelStreamInferResponse(error_message=said.message)
    response = service_pb2.ModelInferResponse(model_name=MODEL)
    for name, value in said.outputs().items() if isinstance(said, Say) else ():
        if isinstance(value, str):
            raw = value.encode()
            response.outputs.add(name=name, datatype="BYTES", shape=[1])
            response.raw_output_contents.append(struct.pack("<I", len(raw)) + raw)
            continue
        datatype, dtype = ("INT64", np.int64) if name == "token_ids" else ("UINT32", np.uint32)
        values = np.atleast_1d(np.array(value, dtype=dtype))
        response.outputs.add(name=name, datatype=datatype, shape=[len(values)])
        response.raw_output_contents.append(values.tobytes())
    return service_pb2.ModelStreamInferResponse(infer_response=response)
