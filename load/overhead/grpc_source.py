"""Triton over gRPC, as lean as Python allows: tritonclient's messages on a bare ``grpc.aio`` channel.

One stream a request on one channel, as our client does it. tritonclient's own ``stream_infer`` costs several times as
much CPU a response, which at high rates would measure the client.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import grpc.aio  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2, service_pb2_grpc

from load.overhead.measure import BenchFailed, Prompt

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

REQUEST_LIMIT_MS = 300_000


class GrpcSource:
    """A model behind one channel.

    Args:
        address: ``host:port``.
        model: the model's name.

    """

    def __init__(self, address: str, model: str) -> None:
        self._address = address
        self._model = model
        self._channel: Any = None
        self._stub: Any = None

    async def open(self) -> None:
        """See :class:`~load.overhead.measure.Source`."""
        options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.aio.insecure_channel(self._address, options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def close(self) -> None:
        """See :class:`~load.overhead.measure.Source`."""
        if self._channel is not None:
            await self._channel.close()

    async def stream(self, prompt: Prompt, max_tokens: int, *, stream: bool) -> AsyncGenerator[str, None]:
        """See :class:`~load.overhead.measure.Source`."""
        call = self._stub.ModelStreamInfer()
        try:
            await call.write(self._request(prompt.text, max_tokens, stream=stream))
            await call.done_writing()
            while (message := await call.read()) is not grpc.aio.EOF:
                if message.error_message:
                    raise BenchFailed(f"the server refused a request: {message.error_message}")
                response = message.infer_response
                for output, content in zip(response.outputs, response.raw_output_contents, strict=True):
                    if output.name == "text_output":
                        yield content[4:].decode()  # one element: its length in four bytes, then its bytes
            if await call.code() is not grpc.StatusCode.OK:
                raise BenchFailed(f"a gRPC stream ended with {await call.code()}: {await call.details()}")
        except grpc.aio.AioRpcError as error:
            raise BenchFailed(f"a gRPC stream failed: {error.code()}: {error.details()}") from None
        finally:
            call.cancel()

    def _request(self, text: str, max_tokens: int, *, stream: bool) -> Any:  # noqa: ANN401 - generated code
        request = service_pb2.ModelInferRequest(model_name=self._model)
        request.parameters["timeout_ms"].int64_param = REQUEST_LIMIT_MS
        for name, datatype, content in (
            ("text_input", "BYTES", _element(text)),
            ("stream", "BOOL", b"\1" if stream else b"\0"),
            ("sampling_parameters", "BYTES", _element(sampling(max_tokens))),
        ):
            request.inputs.add(name=name, datatype=datatype, shape=[1])
            request.raw_input_contents.append(content)
        return request


def sampling(max_tokens: int) -> str:
    """Return the sampling parameters of every request, as JSON."""
    return json.dumps({"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0})


def _element(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(4, "little") + data
