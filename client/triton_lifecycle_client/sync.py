"""`Client`: the same client for code without an event loop.

It drives :class:`AsyncClient` on one event loop in one background thread that all clients of the process share, rather
than tritonclient's blocking classes: so deadlines, retries and cancellation exist once, a client works from any
thread and inside a notebook, and gRPC, which wants one event loop a process, has one.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from concurrent.futures import CancelledError as FutureCancelled
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from triton_lifecycle.errors import Cancelled

from .client import DEFAULT_CONTROL_TIMEOUT_S, DEFAULT_MODEL, DEFAULT_TIMEOUT_S, AsyncClient

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Mapping
    from concurrent.futures import Future
    from types import TracebackType
    from typing import Self

    from typing_extensions import Unpack

    from .retry import RetryPolicy
    from .stream import Stream
    from .transport import Endpoint
    from .types import Chunk, Completion, Drain, Options, Protocol, ServerState, Status

T = TypeVar("T")
_CLOSE_S = 5.0
_SLICE_S = 0.25


class _Loop:
    """The shared event loop: runs while somebody holds it."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _current: ClassVar[_Loop | None] = None
    _holders: ClassVar[int] = 0

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="lifecycle-client", daemon=True)
        self._thread.start()

    @classmethod
    def hold(cls) -> _Loop:
        with cls._lock:
            if cls._current is None:
                cls._current = cls()
            cls._holders += 1
            return cls._current

    @classmethod
    def release(cls) -> None:
        with cls._lock:
            cls._holders -= 1
            if cls._holders or cls._current is None:
                return
            ended, cls._current = cls._current, None
        ended.loop.call_soon_threadsafe(ended.loop.stop)
        ended._thread.join(_CLOSE_S)  # noqa: SLF001 - its own class

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start work on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    @staticmethod
    def result(future: Future[T], limit_s: float | None = None) -> T:
        """Wait for submitted work; an interrupt here cancels it there."""
        end = math.inf if limit_s is None else time.monotonic() + limit_s
        try:
            # In slices: a Ctrl-C that arrives just before the main thread blocks is seen by Python only when it wakes.
            while not future.done() and (left := end - time.monotonic()) > 0:
                with suppress(TimeoutError, FutureCancelled):
                    future.exception(min(left, _SLICE_S))
            return future.result(0)
        except FutureCancelled:
            raise Cancelled("the request was cancelled") from None
        finally:
            future.cancel()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()


class Client:
    """A client of one model on one server. Takes what :class:`AsyncClient` takes; may be used from any thread.

    Example:
        >>> with Client("127.0.0.1:8001", model="smollm2") as client:
        ...     for chunk in client.stream("The capital of France is", max_tokens=8):
        ...         print(chunk.text, end="")

    """

    def __init__(
        self,
        url: str | None = None,
        *,
        model: str = DEFAULT_MODEL,
        protocol: Protocol | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        control_timeout: float = DEFAULT_CONTROL_TIMEOUT_S,
        retry: RetryPolicy | None = None,
        headers: Mapping[str, str] | None = None,
        control_token: str | None = None,
    ) -> None:
        self._client = AsyncClient(
            url,
            model=model,
            protocol=protocol,
            timeout=timeout,
            control_timeout=control_timeout,
            retry=retry,
            headers=headers,
            control_token=control_token,
        )
        self._loop: _Loop | None = _Loop.hold()

    @property
    def endpoint(self) -> Endpoint:
        """Where requests go."""
        return self._client.endpoint

    @property
    def model(self) -> str:
        """The model asked unless a call names another."""
        return self._client.model

    def generate(self, prompt: str, **options: Unpack[Options]) -> Completion:
        """Return the model's whole answer; see :meth:`AsyncClient.generate`."""
        return self._call(self._client.generate(prompt, **options))

    def stream(self, prompt: str, **options: Unpack[Options]) -> SyncStream:
        """Return the answer as it comes; leaving the loop, in whatever way, cancels the request on the server."""
        return SyncStream(self._running, self._client.stream(prompt, **options))

    def status(self, request_id: str) -> Status:
        """Return what the server knows of a request; see :meth:`AsyncClient.status`."""
        return self._call(self._client.status(request_id))

    def cancel(self, request_id: str) -> bool:
        """Cancel a request from outside; return whether it was still live."""
        return self._call(self._client.cancel(request_id))

    def cancel_all(self) -> int:
        """Cancel every live request of the model, whoever waits for it; return how many there were."""
        return self._call(self._client.cancel_all())

    def state(self) -> ServerState:
        """Return what the server as a whole is doing."""
        return self._call(self._client.state())

    def check_ready(self) -> None:
        """Ask the model itself whether it would serve a request now; see :meth:`AsyncClient.check_ready`."""
        self._call(self._client.check_ready())

    def drain(self) -> Drain:
        """Have the model refuse new requests and limit those under way; see :meth:`AsyncClient.drain`."""
        return self._call(self._client.drain())

    def resume(self) -> Drain:
        """Have a model that drains take requests again; see :meth:`AsyncClient.resume`."""
        return self._call(self._client.resume())

    def drained(self, on_progress: Callable[[Drain], object] = lambda _: None) -> Drain:
        """Drain, and return when no request is left; see :meth:`AsyncClient.drained`."""
        return self._call(self._client.drained(on_progress))

    def unload(self, on_progress: Callable[[Drain], object] = lambda _: None) -> float:
        """Drain the model, then have Triton unload it; see :meth:`AsyncClient.unload`."""
        return self._call(self._client.unload(on_progress))

    def models(self) -> list[str]:
        """Return the names of the models that the server has ready."""
        return self._call(self._client.models())

    def is_ready(self) -> bool:
        """Return whether the server and the model take requests; ``False`` too when nothing answers."""
        return self._call(self._client.is_ready())

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Wait until the server and the model take requests; see :meth:`AsyncClient.wait_ready`."""
        self._call(self._client.wait_ready(timeout))

    def close(self) -> None:
        """Close the connections within a few seconds; requests under way end as cancelled."""
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        try:
            with suppress(TimeoutError):
                loop.result(loop.submit(self._client.aclose()), _CLOSE_S)
        finally:
            _Loop.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _running(self) -> _Loop:
        if self._loop is None:
            raise Cancelled("the client is closed")
        return self._loop

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            loop = self._running
        except Cancelled:
            work.close()
            raise
        return loop.result(loop.submit(work))


class SyncStream:
    """The chunks of one answer: an iterator, and a context manager that cancels on the way out.

    Leaving ``for`` early, by ``break`` or an error, cancels the request, whether the stream has a name or not.

    Attributes:
        request_id: good for ``status`` and ``cancel`` from the moment of the first chunk.

    """

    def __init__(self, loop: _Loop, stream: Stream) -> None:
        self.request_id = stream.request_id
        self._loop = loop
        self._stream = stream
        self._over = False
        self._step: asyncio.Task[Any] | None = None

    def __iter__(self) -> Generator[Chunk, None, None]:
        # An iterator of its own for each loop: only the loop holds it, so it is closed when the loop is left.
        try:
            while (chunk := next(self, None)) is not None:
                yield chunk
        finally:
            self.close()

    def __next__(self) -> Chunk:
        if self._over:
            raise StopIteration
        try:
            chunk = self._loop.result(self._loop.submit(self._next()))
        except BaseException:
            self.close()
            raise
        if chunk is None:
            self._over = True
            raise StopIteration
        return chunk

    @property
    def text(self) -> str:
        """Text of the first sequence so far."""
        return self._stream.text

    @property
    def completion(self) -> Completion:
        """The answer as a whole, once the iteration has come to its end."""
        return self._stream.completion

    def close(self) -> None:
        """Cancel the request unless it has ended. Does not wait for the server."""
        if self._over:
            return
        self._over = True
        self._loop.submit(self._close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._over and self._loop.loop.is_running():
            self.close()

    async def _next(self) -> Chunk | None:
        self._step = asyncio.current_task()
        return await anext(self._stream, None)

    async def _close(self) -> None:
        # The step is ended here and not by its future: Ctrl-C may come before the future has been returned.
        if self._step is not None and not self._step.done():
            self._step.cancel()
            await asyncio.wait([self._step])
        await self._stream.aclose()
