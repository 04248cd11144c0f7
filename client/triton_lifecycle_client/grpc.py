"""Triton's gRPC front end, by tritonclient: one stream for each request, all on one channel.

One stream a request, so that leaving it cancels this request and no other. The client closes its side after the one
request, and the server closes its own after the last response: the end is exact without a marker.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

import grpc.aio  # type: ignore[import-untyped]
import numpy as np
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from triton_lifecycle.errors import Cancelled, TotalTimeout

from . import codec
from .errors import ServerUnreachable, WrongPort, translate
from .transport import cancelled_by_caller, states
from .types import Chunk, ControlRequest, GenerateRequest

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping

    from .transport import Endpoint

_OUTPUTS = ("text_output", "finish_reason", "num_output_tokens", "num_input_tokens", "token_ids")

_REASONS = {
    "refused": "connection refused",
    "resolving": "no such host",
    "unreachable": "network unreachable",
    "Timeout": "no answer in time",
    "timed out": "no answer in time",
}

_END_S = 2.0

# A server that comes back is found again within a second, not after gRPC's usual two minutes. A dead peer that
# leaves no trace (power, cable) is noticed by pings; Triton's own default takes more than one in five minutes without
# data for abuse and cuts the stream ("Too many pings"), which a request that queues for a minute does not deserve.
_CHANNEL = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 310_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Clients in one process must not share a connection behind the scenes: closing one would disturb the others.
    ("grpc.use_local_subchannel_pool", 1),
]


class GrpcTransport:
    """One channel to one server. Use it in the event loop in which its first request was made."""

    def __init__(self, where: Endpoint, headers: Mapping[str, str] | None = None) -> None:
        self._where = where
        self._headers = {name.lower(): value for name, value in (headers or {}).items()}
        self._lazy_client: Any = None
        self._closed = False

    async def exchange(self, request: GenerateRequest | ControlRequest, limit_s: float) -> AsyncGenerator[Chunk, None]:
        """See :class:`~triton_lifecycle_client.transport.Transport`."""
        headers = self._headers | request.trace_headers if isinstance(request, GenerateRequest) else self._headers
        call = self._client.stream_infer(_once(_infer(request)), stream_timeout=limit_s, headers=headers or None)
        complete: set[int] = set()
        try:
            async for result, error in call:
                if error is not None:
                    await _ended(call)
                    raise translate(error.message())
                chunk = codec.chunk({name: _values(result, name) for name in _OUTPUTS})
                if chunk is not None:
                    complete.update(index for index, reason in enumerate(chunk.finish_reasons) if reason)
                    try:
                        yield chunk
                    except GeneratorExit:
                        if len(complete) == len(chunk.texts):
                            await _ended(call)
                        raise
        except grpc.aio.AioRpcError as error:
            self._fail(error.code().name, error.details() or "", limit_s)
        except asyncio.CancelledError:
            if self._closed and not cancelled_by_caller():  # close() ended the call, nobody cancelled this task
                raise Cancelled("the client was closed while the request was under way") from None
            raise
        finally:
            call.cancel()

    async def is_ready(self, model: str, limit_s: float) -> bool:
        """See :class:`~triton_lifecycle_client.transport.Transport`."""
        ready: bool = await self._ask("is_server_ready", limit_s) and await self._ask(
            "is_model_ready", limit_s, model_name=model
        )
        return ready

    async def index(self, limit_s: float) -> dict[str, str]:
        """See :class:`~triton_lifecycle_client.transport.Transport`."""
        index = await self._ask("get_model_repository_index", limit_s)
        return states((entry.name, entry.state) for entry in index.models)

    async def unload(self, model: str, limit_s: float) -> None:
        """See :class:`~triton_lifecycle_client.transport.Transport`."""
        await self._ask("unload_model", limit_s, model_name=model)

    async def close(self) -> None:
        """See :class:`~triton_lifecycle_client.transport.Transport`."""
        self._closed = True
        if self._lazy_client is not None:
            await self._lazy_client.close()

    @property
    def _client(self) -> Any:  # noqa: ANN401 - tritonclient is untyped
        if self._closed:
            raise Cancelled("the client is closed")
        if self._lazy_client is None:
            self._lazy_client = InferenceServerClient(
                self._where.address, ssl=self._where.secure, channel_args=_CHANNEL
            )
        return self._lazy_client

    async def _ask(self, method: str, limit_s: float, **arguments: str) -> Any:  # noqa: ANN401
        try:
            return await getattr(self._client, method)(
                headers=self._headers or None, client_timeout=limit_s, **arguments
            )
        except InferenceServerException as error:
            self._fail((error.status() or "").removeprefix("StatusCode."), error.message() or "", limit_s)

    def _fail(self, status: str, details: str, limit_s: float) -> NoReturn:
        if status == "DEADLINE_EXCEEDED":
            raise TotalTimeout(f"no complete answer from {self._where} within {limit_s:.1f} s") from None
        if self._closed:
            raise Cancelled("the client was closed while the request was under way") from None
        if status == "UNIMPLEMENTED" or "Received http2 header" in details:
            raise WrongPort(f"what answers at {self._where} speaks gRPC, but is no Triton ({details})") from None
        if "RST_STREAM" in details:
            # A proxy's way to say that the server behind it has gone in the middle of an answer.
            raise ServerUnreachable(
                f"the answer from {self._where} was cut off ({details}); the server behind it has died"
            ) from None
        if status != "UNAVAILABLE":
            raise translate(details) from None
        if "failed to connect" not in details and "resolving" not in details:
            known = translate(details)
            if type(known).slug != "internal":
                raise known from None
            raise ServerUnreachable(
                f"{self._where} closed the connection before the answer was complete ({details}); "
                "the server is stopping or has died"
            ) from None
        reason = next((said for sign, said in _REASONS.items() if sign in details), None)
        if reason is not None:
            raise ServerUnreachable(
                f"nothing answers at {self._where} ({reason}); start the server with `lifecycle serve`, "
                "or name its address"
            ) from None
        raise WrongPort(
            f"what answers at {self._where} does not speak gRPC, or is just stopping; if it is Triton's HTTP port "
            "(8000 by default), speak HTTP to it or name the gRPC port (8001 by default)"
        ) from None


async def _ended(call: Any) -> None:  # noqa: ANN401 - tritonclient is untyped
    """Wait a moment for the server to close the stream after its last response.

    Cancelling a stream that the server is just ending makes Triton 2.51 lose track of the request now and then: its
    model never unloads again, or the server crashes (fixed upstream in 24.12, pull request 7840 of its server).
    """
    with suppress(TimeoutError, grpc.aio.AioRpcError):
        async with asyncio.timeout(_END_S):
            async for _ in call:
                pass


async def _once(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield request


def _infer(request: GenerateRequest | ControlRequest) -> dict[str, Any]:
    """Return the arguments of one inference as tritonclient takes them."""
    ours = codec.parameters(request)
    inference: dict[str, Any] = {
        "model_name": request.model,
        "inputs": [_input(name, value) for name, value in codec.tensors(request).items()],
        "parameters": ours,
    }
    if isinstance(request, GenerateRequest):
        inference["request_id"] = request.request_id
        # Triton keeps its own `timeout` and `priority` from the model, over gRPC only: they travel under other names.
        inference["timeout"] = codec.timeout_us(request)
        ours["timeout_ms"] = max(1, round(request.timeout * 1e3))
        if request.priority is not None:
            ours["request_priority"] = request.priority
    return inference


def _input(name: str, value: codec.Tensor) -> Any:  # noqa: ANN401
    if isinstance(value, tuple):
        tensor = InferInput(name, [len(value)], "INT64")
        return tensor.set_data_from_numpy(np.array(value, dtype=np.int64))
    if isinstance(value, bool):
        tensor = InferInput(name, [1], "BOOL")
        return tensor.set_data_from_numpy(np.array([value], dtype=np.bool_))
    tensor = InferInput(name, [1], "BYTES")
    return tensor.set_data_from_numpy(np.array([value.encode()], dtype=np.object_))


def _values(result: Any, name: str) -> list[Any]:  # noqa: ANN401
    tensor = result.as_numpy(name)
    if tensor is None:
        return []
    return [value.decode() if isinstance(value, bytes) else value for value in tensor.reshape(-1).tolist()]
