"""A recorded request in the place of Triton's."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from triton_lifecycle.errors import LifecycleError
from triton_lifecycle.simulation.trace import Trace
from triton_lifecycle.triton import Call, RawRequest


class SilentCall(Call):
    """A call whose answers go nowhere; each is taken at once. Whoever derives from it says what is asked."""

    __slots__ = ()

    def send(self, outputs: dict[str, list[Any]], *, final: bool) -> asyncio.Future[None]:  # noqa: ARG002
        """Take a response."""
        return _done()

    def fail(self, error: LifecycleError) -> asyncio.Future[None]:  # noqa: ARG002
        """Take an error."""
        return _done()

    def end(self) -> asyncio.Future[None]:
        """Take the end."""
        return _done()


class RecordedCall(SilentCall):
    """What a recorded request asked for, with words of the same size; the recorded pace holds what sending cost."""

    __slots__ = ("_trace",)

    def __init__(self, trace: Trace) -> None:
        self.id = trace.received.caller_id
        self._trace = trace

    def read(self) -> RawRequest:
        """Return tensors and parameters that are understood as the recorded ones were."""
        verdict = self._trace.verdict
        if verdict is not None and verdict[0] == "receive":
            raise verdict[1]
        asked = self._trace.story.prepared
        words = "x" * max(1, self._trace.prompt_bytes)
        if asked is None:
            return RawRequest({"text_input": words}, {})
        parameters: dict[str, Any] = {"request_priority": asked.priority, "tenant": asked.tenant}
        if asked.timeout is not None:
            parameters["timeout"] = asked.timeout * 1e6
        if asked.kind == "embedding":
            source = words if asked.prompt_bytes else [1] * self._trace.prompt_tokens
            document = msgspec.json.encode({"input": source}).decode()
            return RawRequest({"embedding_request": document, "stream": asked.stream}, parameters)
        sampling = {"n": asked.sequences, "max_tokens": asked.max_tokens, "temperature": 1.0}
        tensors = {"stream": asked.stream, "sampling_parameters": msgspec.json.encode(sampling).decode()}
        if asked.kind == "messages":
            parameters["messages"] = msgspec.json.encode([{"role": "user", "content": words}]).decode()
        else:
            tensors["text_input"] = words
        return RawRequest(tensors, parameters)


def _done() -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.set_result(None)
    return future
