"""`AsyncClient`: requests to a model behind Triton, with deadlines, safe retries, and cancellation by leaving."""

from __future__ import annotations

import asyncio
import math
import os
import time
import uuid
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from triton_lifecycle.errors import InvalidInput, LifecycleError, TotalTimeout

from . import codec
from .errors import ModelNotFound, ResumeFailed, ServerUnreachable, WrongPort
from .resume import Course
from .retry import RetryPolicy
from .spans import span_of
from .stream import Stream, Tally
from .transport import Endpoint, Transport, endpoint, open_transport
from .types import (
    Cancellation,
    Chunk,
    Completion,
    Control,
    ControlRequest,
    Drain,
    GenerateRequest,
    Options,
    Protocol,
    Readiness,
    SamplingOptions,
    ServerState,
    Status,
    Sweep,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping
    from types import TracebackType
    from typing import Self

    from typing_extensions import Unpack

T = TypeVar("T")

DEFAULT_MODEL = "smollm2"
DEFAULT_TIMEOUT_S = 300.0
DEFAULT_CONTROL_TIMEOUT_S = 20.0
"""They take milliseconds; but a machine whose cores are all taken may let a client wait for seconds."""
TOKEN_VARIABLE = "LIFECYCLE_CONTROL_TOKEN"  # noqa: S105 - its name, not its value
_POLL_S = 0.2
_DRAIN_MARGIN_S = 10.0
"""Beyond the drain's limit, for what was told to end to have ended."""
_UNLOAD_LIMIT_S = 600.0
_GRACE_S = 1.0
"""How long after the server's own limit the client waits for the server's word on it before it gives up itself."""


class AsyncClient:
    """A client of one model on one server, for use inside one event loop.

    Args:
        url: ``host:port``, with ``grpc://`` or ``http://`` before it if you like; by default the environment's
            LIFECYCLE_URL, then Triton's standard port on this machine.
        model: the model asked unless a call names another.
        protocol: ``"grpc"`` (default) or ``"http"``.
        timeout: seconds for a whole request unless a call says otherwise.
        control_timeout: seconds for each question about a request, the server or its models.
        retry: when a request that has brought nothing yet is sent again; and a stream that broke goes on where it was.
        headers: sent with every request, over gRPC as metadata.
        control_token: what the server wants of control requests; by default the environment's LIFECYCLE_CONTROL_TOKEN.

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
        self.endpoint: Endpoint = endpoint(url, protocol)
        self.model = model
        self._timeout = _seconds("timeout", timeout)
        self._control_timeout = _seconds("control_timeout", control_timeout)
        self._retry = retry or RetryPolicy()
        self._control_token = control_token or os.environ.get(TOKEN_VARIABLE) or None
        self._transport: Transport = open_transport(self.endpoint, headers, self._control_token)

    async def generate(self, prompt: str, **options: Unpack[Options]) -> Completion:
        """Return the model's whole answer. Cancelling the task that waits here cancels the work on the server.

        Raises:
            LifecycleError: the class, or its ``slug``, says how the request ended.

        """
        stream = self._open(self._build(prompt, stream=False, options=options))
        async with stream:
            async for _ in stream:
                pass
        return stream.completion

    def stream(self, prompt: str, **options: Unpack[Options]) -> Stream:
        """Return the answer as it comes. Leaving the loop, in whatever way, cancels the request on the server."""
        return self._open(self._build(prompt, stream=True, options=options))

    async def status(self, request_id: str) -> Status:
        """Return what the server knows of a request, by the caller's id or the server's own.

        Raises:
            UnknownRequest: it knows nothing of it, or no more.

        """
        return await self._control("status", request_id, Status)

    async def cancel(self, request_id: str) -> bool:
        """Cancel a request from outside; return whether it was still live.

        Raises:
            UnknownRequest: the server does not know it.

        """
        return (await self._control("cancel", request_id, Cancellation)).cancelled

    async def cancel_all(self) -> int:
        """Cancel every live request of the model, whoever waits for it; return how many there were."""
        return (await self._control("cancel_all", None, Sweep)).cancelled

    async def state(self) -> ServerState:
        """Return what the server as a whole is doing."""
        return await self._control("state", None, ServerState)

    async def check_ready(self) -> None:
        """Ask the model itself whether it would serve a request now: its engine, its event loop, whether it drains.

        Triton's own readiness knows of none of them (before the hook for it came).

        Raises:
            LifecycleError: it would not; the message says why.

        """
        await self._control("ready", None, Readiness)

    async def drain(self) -> Drain:
        """Have the model refuse new requests and limit those under way; returns at once, and may be called again."""
        return await self._control("drain", None, Drain)

    async def resume(self) -> Drain:
        """Have a model that drains take requests again.

        Raises:
            Draining: it is being unloaded.

        """
        return await self._control("resume", None, Drain)

    async def drained(self, on_progress: Callable[[Drain], object] = lambda _: None) -> Drain:
        """Drain, and return when no request is left: after the drain's limit and a moment at most.

        Args:
            on_progress: is told now and then what is left.

        Raises:
            TotalTimeout: requests are left behind the limit, which only the server's fault can cause.

        """
        began = time.monotonic()
        while (found := await self.drain()).live:
            on_progress(found)
            if time.monotonic() - began > found.limit + _DRAIN_MARGIN_S:
                raise TotalTimeout(f"{found.live} requests are left {_DRAIN_MARGIN_S:g} s behind the drain's limit")
            await asyncio.sleep(_POLL_S)
        return found

    async def unload(self, on_progress: Callable[[Drain], object] = lambda _: None) -> float:
        """Drain the model, then have Triton unload it; return the seconds until its process had ended.

        Triton alone waits for running requests as long as they take. If Triton refuses, the model takes requests again.

        Args:
            on_progress: is told now and then which requests are left.

        Raises:
            LifecycleError: Triton does not unload models (``--model-control-mode=explicit`` lets it), or does not
                answer.

        """
        began = time.monotonic()
        try:
            await self.drained(on_progress)
            await self._transport.unload(self.model, self._control_timeout)
        except BaseException:
            with suppress(LifecycleError):
                await self.resume()
            raise
        while (await self._transport.index(self._control_timeout)).get(self.model) in ("READY", "UNLOADING"):
            if time.monotonic() - began > _UNLOAD_LIMIT_S:
                raise TotalTimeout(f"model {self.model!r} is not unloaded after {_UNLOAD_LIMIT_S:g} s")
            await asyncio.sleep(_POLL_S)
        return time.monotonic() - began

    async def models(self) -> list[str]:
        """Return the names of the models that the server has ready."""
        index = await self._transport.index(self._control_timeout)
        return sorted(name for name, state in index.items() if state == "READY")

    async def is_ready(self) -> bool:
        """Return whether the server and the model take requests; ``False`` too when nothing answers."""
        try:
            return await self._transport.is_ready(self.model, self._control_timeout)
        except LifecycleError:
            return False

    async def wait_ready(self, timeout: float = 60.0) -> None:  # noqa: ASYNC109 - the error tells what was waited for
        """Wait until the server and the model take requests.

        Raises:
            ServerUnreachable: they did not within ``timeout`` seconds.
            WrongPort: something else answers at the address.

        """
        until = time.monotonic() + _seconds("timeout", timeout)
        reason = f"the server answers, but model {self.model!r} is not ready"
        while (left := until - time.monotonic()) > 0:
            try:
                if await self._transport.is_ready(self.model, min(left, self._control_timeout)):
                    return
            except WrongPort:
                raise
            except LifecycleError as error:
                reason = error.message
            await asyncio.sleep(min(left, _POLL_S))
        raise ServerUnreachable(f"not ready after {timeout:g} s: {reason}")

    async def aclose(self) -> None:
        """Close the connections within a few seconds; requests under way end as cancelled."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _build(self, prompt: str, *, stream: bool, options: Options) -> GenerateRequest:
        if not isinstance(prompt, str):
            raise InvalidInput(f"prompt must be a string, got {type(prompt).__name__}")
        given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        if unknown := sorted(given.keys() - _OPTION_NAMES):
            raise InvalidInput(
                f"unknown option {unknown[0]!r}; further fields of vLLM's SamplingParams go into sampling={{...}}"
            )
        sampling = {name: given[name] for name in _SAMPLING_NAMES & given.keys()}
        for name in ("stop", "stop_token_ids"):
            if name in sampling and not isinstance(sampling[name], str):
                sampling[name] = tuple(sampling[name])
        parameters = dict(given.get("parameters", {}))
        return GenerateRequest(
            model=given.get("model", self.model),
            prompt=prompt,
            request_id=given.get("request_id") or uuid.uuid4().hex,
            timeout=_limit(given.get("timeout"), parameters.pop("timeout_ms", None), self._timeout),
            stream=stream,
            sampling=SamplingOptions(**sampling, extra=dict(given.get("sampling", {}))),
            priority=given.get("priority"),
            tenant=given.get("tenant"),
            traceparent=given.get("traceparent"),
            tracestate=given.get("tracestate"),
            parameters=parameters,
            return_token_ids=stream and self._retry.attempts > 1,
        )

    def _open(self, request: GenerateRequest) -> Stream:
        tally = Tally()
        return Stream(request, tally, self._attempts(request, tally))

    async def _attempts(self, request: GenerateRequest, tally: Tally) -> AsyncGenerator[Chunk, None]:
        """Send the request, and again where that is safe and the deadline allows it: each text comes once."""
        tally.started = time.monotonic()
        with span_of(request, tally) as sent:
            async with aclosing(self._tries(sent, tally)) as answers:
                async for chunk in answers:
                    yield chunk

    async def _tries(self, request: GenerateRequest, tally: Tally) -> AsyncGenerator[Chunk, None]:
        course = Course(request, self._retry)
        attempt = request
        while True:
            tally.attempts += 1
            try:
                async with aclosing(self._transport.exchange(attempt, attempt.timeout + _GRACE_S)) as answers:
                    async for chunk in answers:
                        if (new := course.received.new(chunk)) is not None:
                            yield new
                course.received.finish()
            except ResumeFailed:
                raise
            except LifecycleError as error:
                pause = course.pause(error, tally.attempts)
                left = request.timeout - (time.monotonic() - tally.started)
                if pause is None or pause >= left:
                    raise await self._explained(error, request.model) from None
                attempt = course.next(error, left - pause)
                await asyncio.sleep(pause)
            else:
                return

    async def _control(self, control: Control, request_id: str | None, kind: type[T]) -> T:
        request = ControlRequest(
            model=self.model,
            control=control,
            control_id=request_id,
            token=self._control_token,
            timeout=self._control_timeout,
        )
        answer: Chunk | None = None
        try:
            async with aclosing(self._transport.exchange(request, self._control_timeout)) as answers:
                async for chunk in answers:
                    answer = answer or chunk
        except LifecycleError as error:
            raise await self._explained(error, self.model) from None
        return codec.document(answer, kind)

    async def _explained(self, error: LifecycleError, model: str) -> LifecycleError:
        """Add to "no such model" which ones there are."""
        if not isinstance(error, ModelNotFound):
            return error
        try:
            names = ", ".join(await self.models()) or "none"
        except LifecycleError:
            return error
        return ModelNotFound(f"{self.endpoint} has no model {model!r} ready; it has: {names}")


def _limit(seconds: float | None, milliseconds: Any, default: float) -> float:  # noqa: ANN401 - as the caller gave it
    """Return the shorter of both ways to give a request's timeout; as on the server, 0 ms means none."""
    given = [] if seconds is None else [_seconds("timeout", seconds)]
    if milliseconds is not None and (milliseconds != 0 or isinstance(milliseconds, bool)):
        try:
            given.append(_seconds("timeout_ms", milliseconds) / 1e3)
        except InvalidInput:
            raise InvalidInput(f"parameter 'timeout_ms' must be milliseconds above 0, got {milliseconds!r}") from None
    return min(given, default=default)


def _seconds(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise InvalidInput(f"{name} must be a number of seconds above 0, got {value!r}")
    return float(value)


_OPTION_NAMES = frozenset(Options.__annotations__)
_SAMPLING_NAMES = _OPTION_NAMES & (frozenset(SamplingOptions.__struct_fields__) - {"extra"})
