"""A caller that has nothing but tritonclient: each request once, and an error is an error."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import grpc.aio  # type: ignore[import-untyped]
import numpy as np
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient

from triton_lifecycle_client.errors import ProtocolError, ServerUnreachable, translate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from load.swarm.deeds import Measured
    from load.swarm.protocol import Hello, Order


class Plain:
    """Asks over one channel, as a program does that was written for the official backend.

    Args:
        hello: where requests go.

    """

    def __init__(self, hello: Hello) -> None:
        self._hello = hello
        self._client: Any = None

    async def ask(self, order: Order, seen: Measured) -> None:
        """Stream one answer.

        Raises:
            LifecycleError: it was refused, or is not whole.

        """
        if self._client is None:
            self._client = InferenceServerClient(self._hello.grpc)
        call = self._client.stream_infer(
            _once(self._request(order)), stream_timeout=order.timeout or self._hello.timeout
        )
        ended = False
        try:
            async for result, error in call:
                if error is not None:
                    raise translate(error.message())
                texts, tokens, reasons = (
                    result.as_numpy(name) for name in ("text_output", "num_output_tokens", "finish_reason")
                )
                if texts is not None:
                    seen.take(tuple(text.decode() for text in texts), 0 if tokens is None else int(tokens.sum()))
                    ended = reasons is not None and reasons[0] != b"None"
        except grpc.aio.AioRpcError as error:
            raise ServerUnreachable(error.details() or error.code().name) from None
        finally:
            call.cancel()
        if not ended:
            raise ProtocolError("the answer ended without a finish reason")

    async def close(self) -> None:
        """Close the channel."""
        if self._client is not None:
            await self._client.close()

    def _request(self, order: Order) -> dict[str, Any]:
        sampling = {"max_tokens": order.output_tokens, "ignore_eos": True}
        inputs = [
            _tensor("text_input", "BYTES", order.prompt.encode()),
            _tensor("sampling_parameters", "BYTES", json.dumps(sampling).encode()),
            *(_tensor(name, "BOOL", True) for name in ("stream", "return_finish_reason", "return_num_output_tokens")),
        ]
        return {"model_name": self._hello.model, "inputs": inputs}


async def _once(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield request


def _tensor(name: str, kind: str, value: bytes | bool) -> Any:  # noqa: ANN401, FBT001
    made = InferInput(name, [1], kind)
    return made.set_data_from_numpy(np.array([value], dtype=np.bool_ if kind == "BOOL" else np.object_))
