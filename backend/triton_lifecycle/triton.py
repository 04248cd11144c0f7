"""The Triton seam: the only place that touches Triton's requests, responses and senders.

Both ``send`` and ``is_cancelled`` are blocking round trips to the server process (about 105 µs and 50 µs), so they run
on threads of their own: a few :class:`Lanes` for answers and one :class:`~triton_lifecycle.watch.Watch` for callers
that left. The event loop only hands work over and is told when it is done.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from triton_lifecycle.errors import InvalidInput, LifecycleError
from triton_lifecycle.sampling import parse_object
from triton_lifecycle.schema import INPUT_BY_NAME, OUTPUT_BY_NAME, Tensor
from triton_lifecycle.threads import named

log = logging.getLogger(__name__)

MAX_ID: Final = 256
"""Characters of a caller's id: it is kept for a while after the request's end."""

MAX_PARAMETERS: Final = 16 * 2**20
"""Characters of a request's parameters as JSON, before anything in them is looked at."""

LANE: Final = "send-lane"
"""How the threads are named that send answers."""

MAX_ELEMENTS: Final = 2**20
"""Of one input; as numbers of Python they would take 32 MiB."""

BUSY: Final = 8
"""Sends that wait on every lane before one more begins: not quite a millisecond of them. More lanes merge less."""

_NUMPY_TYPES: dict[str, Any] = {
    "TYPE_STRING": np.object_,
    "TYPE_BOOL": np.bool_,
    "TYPE_FP32": np.float32,
    "TYPE_UINT32": np.uint32,
    "TYPE_INT64": np.int64,
}


class RawRequest(msgspec.Struct, frozen=True):
    """A request as it came, in plain Python values; nothing in it has been judged beyond its type."""

    tensors: dict[str, Any]
    """By input name; single-element tensors as their element, others as lists."""
    parameters: dict[str, Any]


class Lane(Protocol):
    """Where a call's blocking work is done, in the order in which it was handed over."""

    def submit(self, job: Callable[[], None]) -> asyncio.Future[None]:
        """Do the job; the future tells when it is done, or its error. Event-loop thread only."""
        ...


class Call:
    """One Triton request: what the caller gave, and the way back to it.

    Args:
        request: ``pb_utils.InferenceRequest`` of a decoupled model.
        pb: the module ``triton_python_backend_utils``.
        lane: where this call's answers are sent from.

    """

    __slots__ = ("_final", "_id_given", "_lane", "_lock", "_pb", "_request", "_sender", "id")

    def __init__(self, request: Any, pb: Any, lane: Lane) -> None:  # noqa: ANN401 - exist only inside Triton
        self._id_given = _id(request)
        self.id: str = self._id_given if len(self._id_given) <= MAX_ID else ""
        self._request: Any = request
        self._pb = pb
        self._lane = lane
        self._sender: Any = request.get_response_sender()
        # After FINAL the server frees what is_cancelled() looks at: the two must never overlap.
        self._lock = threading.Lock()
        self._final = False

    def read(self) -> RawRequest:
        """Return the request's values.

        Raises:
            InvalidInput: a tensor has the wrong number of elements or holds bytes that are not UTF-8, or the request
                parameters hold what cannot be carried further.

        """
        if len(self._id_given) > MAX_ID:
            raise InvalidInput(f"id: at most {MAX_ID} characters, found {len(self._id_given)}")
        tensors = {}
        for tensor in self._request.inputs():
            declared = INPUT_BY_NAME.get(tensor.name())
            if declared is not None:
                tensors[declared.name] = _value(declared, tensor.as_numpy())
        return RawRequest(tensors, self._parameters())

    def control(self) -> dict[str, Any] | None:
        """Return the parameters if this is a control request, else ``None``."""
        try:
            if '"control"' not in self._parameters_text():
                return None
            parameters = self._parameters()
        except InvalidInput:
            # read() says so to the caller.
            return None
        return parameters if "control" in parameters else None

    def send(self, outputs: dict[str, list[Any]], *, final: bool) -> asyncio.Future[None]:
        """Send one response.

        Args:
            outputs: values by output name, one element per sequence.
            final: whether this is the last response; nothing may be sent after it.

        """
        return self._lane.submit(lambda: self._send(lambda: self._build(outputs), final=final))

    def fail(self, error: LifecycleError) -> asyncio.Future[None]:
        """Send an error as the last response."""
        return self._lane.submit(lambda: self._send(lambda: self._error(error), final=True))

    def end(self) -> asyncio.Future[None]:
        """Mark the end without another response."""
        return self._lane.submit(lambda: self._send(None, final=True))

    def is_cancelled(self) -> bool:
        """Ask Triton whether the caller left. Blocks; not for the event loop."""
        with self._lock:
            return not self._final and bool(self._request.is_cancelled())

    def _parameters(self) -> dict[str, Any]:
        text = self._parameters_text() or "{}"
        if len(text) > MAX_PARAMETERS:
            raise InvalidInput(f"parameters: at most {MAX_PARAMETERS} characters in all, found {len(text)}")
        parameters = parse_object("parameters", text)
        # Over gRPC Triton takes the timeout out of the parameters and keeps it in the request itself.
        if timeout := self._request.timeout():
            parameters.setdefault("timeout", timeout)
        return parameters | self._span()

    def _span(self) -> dict[str, str]:
        """Return Triton's own span for this request, where Triton traces with OpenTelemetry: ours belongs below it."""
        trace = getattr(self._request, "trace", None)
        text = None if trace is None else trace().get_context()
        if not text:
            return {}
        try:
            told = parse_object("trace", text)
        except InvalidInput:
            # Not the caller's doing.
            return {}
        return {name: told[name] for name in ("traceparent", "tracestate") if isinstance(told.get(name), str)}

    def _parameters_text(self) -> str:
        try:
            return str(self._request.parameters())
        except UnicodeDecodeError as error:
            raise InvalidInput(f"parameters: not valid UTF-8 at byte {error.start}") from None

    def _build(self, outputs: dict[str, list[Any]]) -> Any:  # noqa: ANN401
        tensors = [
            self._pb.Tensor(name, np.array(values, dtype=_NUMPY_TYPES[OUTPUT_BY_NAME[name].data_type]))
            for name, values in outputs.items()
        ]
        return self._pb.InferenceResponse(output_tensors=tensors)

    def _error(self, error: LifecycleError) -> Any:  # noqa: ANN401
        code = getattr(self._pb.TritonError, error.code, self._pb.TritonError.INTERNAL)
        return self._pb.InferenceResponse(
            output_tensors=[], error=self._pb.TritonError(error.wire().encode(errors="replace").decode(), code)
        )

    def _send(self, build: Callable[[], Any] | None, *, final: bool) -> None:
        if not final:
            self._sender.send(None if build is None else build())
            return
        with self._lock:
            if self._final:
                raise RuntimeError(f"request {self.id!r} was ended twice")
            self._final = True
            sender, self._sender = self._sender, None
            # Triton's objects must not outlive the stub's shared memory, or its exit crashes; nor should a request's
            # input stay in shared memory until a garbage collection.
            self._request = None
            self._send_last(sender, build)

    def _send_last(self, sender: Any, build: Callable[[], Any] | None) -> None:  # noqa: ANN401
        """Whatever fails here, the request ends: first as it should, else with an error, else without a word."""
        flag = self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if build is None:
            sender.send(flags=flag)
            return
        try:
            sender.send(build(), flags=flag)
        except Exception:
            with suppress(Exception):
                try:
                    sender.send(self._error(LifecycleError(_UNSENDABLE)), flags=flag)
                except Exception:  # noqa: BLE001
                    sender.send(flags=flag)
            raise


_UNSENDABLE = "the last response could not be built or sent; the server's log has the details"


def _id(request: Any) -> str:  # noqa: ANN401
    try:
        return str(request.request_id())
    except UnicodeDecodeError:
        # Only a label, and nobody could ask for it.
        return ""


def _value(declared: Tensor, array: np.ndarray[Any, Any]) -> Any:  # noqa: ANN401
    flat = array.reshape(-1)
    if len(flat) > MAX_ELEMENTS:
        raise InvalidInput(f"{declared.name}: at most {MAX_ELEMENTS} elements, found {len(flat)}")
    if declared.data_type == "TYPE_STRING":
        values = [_text(declared.name, element) for element in flat]
    else:
        values = flat.tolist()
    if declared.dims == (1,):
        if len(values) != 1:
            raise InvalidInput(f"{declared.name}: expected exactly one element, found {len(values)}")
        return values[0]
    return values


def _text(name: str, element: bytes | str) -> str:
    if isinstance(element, str):
        return element
    try:
        return element.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{name}: not valid UTF-8 at byte {error.start}") from None


class Lanes:
    """A pool of threads that send answers; a call stays on its lane, so its responses keep their order.

    Results come back to the loop in one wake-up for all that are done by then.

    Args:
        loop: where calls are served.
        most: threads at most; one more begins only when all are busy.

    """

    def __init__(self, loop: asyncio.AbstractEventLoop, most: int) -> None:
        self._loop = loop
        self._most = most
        self._lanes = [_ThreadLane(loop, f"{LANE}-0")]
        self._next = 0

    def pick(self) -> Lane:
        """Return the lane for the next call: in turn, unless all are busy and there may be one more."""
        if len(self._lanes) < self._most and all(lane.backlog >= BUSY for lane in self._lanes):
            self._lanes.append(_ThreadLane(self._loop, f"{LANE}-{len(self._lanes)}"))
        self._next = (self._next + 1) % len(self._lanes)
        return self._lanes[self._next]

    def __len__(self) -> int:
        """Return how many threads there are."""
        return len(self._lanes)

    @property
    def backlog(self) -> int:
        """Jobs that wait or are being done."""
        return sum(lane.backlog for lane in self._lanes)

    def close(self) -> None:
        """Finish what was handed over, then end the threads (each waits at most 5 s)."""
        for lane in self._lanes:
            lane.close()


class InlineLanes:
    """No threads: each answer is sent at once, on the event loop, which waits meanwhile."""

    backlog = 0

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def pick(self) -> Lane:
        """Return the one lane."""
        return self

    def submit(self, job: Callable[[], None]) -> asyncio.Future[None]:
        """Do the job now; the future is done."""
        future: asyncio.Future[None] = self._loop.create_future()
        try:
            job()
        except Exception as error:  # noqa: BLE001 - belongs to the future
            future.set_exception(error)
        else:
            future.set_result(None)
        return future

    def close(self) -> None:
        """Nothing is left to be done."""


class _ThreadLane:
    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._loop = loop
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], asyncio.Future[None]] | None] = queue.SimpleQueue()
        self._done: deque[tuple[asyncio.Future[None], Exception | None]] = deque()
        self._woken = False
        self._taken = 0
        self._finished = 0
        self._thread = threading.Thread(target=named(LANE, self._run), name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self._loop.create_future()
        self._taken += 1
        self._jobs.put((job, future))
        return future

    @property
    def backlog(self) -> int:
        """Jobs that wait or are being done."""
        return self._taken - self._finished

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            error: Exception | None = None
            try:
                job()
            except Exception as raised:  # noqa: BLE001 - belongs to the future, not to the lane
                error = raised
            self._finished += 1
            self._done.append((future, error))
            if not self._woken:
                self._woken = True
                try:
                    self._loop.call_soon_threadsafe(self._settle)
                except RuntimeError:
                    # The loop has closed: nobody waits any more.
                    return

    def _settle(self) -> None:
        # Cleared first: a result that arrives from here on wakes the loop again.
        self._woken = False
        while self._done:
            future, error = self._done.popleft()
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
