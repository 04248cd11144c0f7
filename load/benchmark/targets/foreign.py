"""Servers that are not ours, asked with the same deadline and the same retries: our client's policy.

What they answer becomes the same errors: 429 and 503 are refusals, whose ``Retry-After`` is honoured as our server's
hint is; a connection that is refused or breaks is a server that cannot be reached.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from triton_lifecycle.errors import LifecycleError
from triton_lifecycle_client import RetryPolicy
from triton_lifecycle_client.errors import ProtocolError, ServerUnreachable, translate

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from load.benchmark.asking import Heard
    from load.benchmark.plan import Planned

_POLL_S: Final = 0.25
_CONNECT_S: Final = 5.0
_DONE: Final = b"[DONE]"
"""How OpenAI's servers say that no event follows."""


class _HttpTarget:
    """What both have in common: one pool of connections, and the retries."""

    path = ""
    ready = ""

    def __init__(self, url: str, model: str, metrics_url: str | None) -> None:
        self.metrics_url = metrics_url
        self.model = model
        self._url = url
        self._retry = RetryPolicy()
        self._lazy: aiohttp.ClientSession | None = None

    async def wait_ready(self, limit_s: float) -> None:
        """See :class:`~load.benchmark.asking.Target`."""
        until, reason = time.monotonic() + limit_s, "no answer"
        while time.monotonic() < until:
            try:
                async with self._session.get(
                    self._url + self.ready.format(model=self.model), timeout=aiohttp.ClientTimeout(_CONNECT_S)
                ) as response:
                    if response.status == 200:
                        await self.learn(await response.read())
                        return
                    reason = f"status {response.status}"
            except (aiohttp.ClientError, TimeoutError) as error:
                reason = str(error) or type(error).__name__
            await asyncio.sleep(_POLL_S)
        raise ServerUnreachable(f"{self._url}{self.ready} is not ready after {limit_s:g} s: {reason}")

    async def learn(self, body: bytes) -> None:
        """Take what the server says of itself when it is ready."""

    async def ask(self, planned: Planned, limit_s: float, tenant: str, heard: Heard) -> None:  # noqa: ARG002
        """See :class:`~load.benchmark.asking.Target`."""
        until = time.monotonic() + limit_s
        while True:
            heard.attempt()
            try:
                return await self.attempt(planned, heard)
            except LifecycleError as error:
                heard.failed(error)
                pause = self._retry.pause(error, heard.attempts) if heard.first is None else None
                if pause is None or pause >= until - time.monotonic():
                    raise
            await asyncio.sleep(pause)

    async def attempt(self, planned: Planned, heard: Heard) -> None:
        """Send the request once."""
        raise NotImplementedError

    async def close(self) -> None:
        """See :class:`~load.benchmark.asking.Target`."""
        if self._lazy is not None:
            await self._lazy.close()

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._lazy is None:
            # The caller's deadline is kept around the whole request; only a connection has a limit of its own.
            self._lazy = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            )
        return self._lazy

    async def _events(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Send and yield each event's JSON."""
        path = self.path.format(model=self.model)
        try:
            async with self._session.post(self._url + path, json=body) as response:
                if response.status >= 400:
                    raise _refusal(response, await response.text())
                async for line in response.content:
                    data = line.removeprefix(b"data:").strip()
                    if data == _DONE:
                        return
                    if line.startswith(b"data:"):
                        yield _event(data)
        except aiohttp.ClientError as error:
            raise ServerUnreachable(f"{self._url}: {error or type(error).__name__}") from None
        except TimeoutError:
            raise ServerUnreachable(f"{self._url} did not take the connection within {_CONNECT_S:g} s") from None


class OpenAiTarget(_HttpTarget):
    """A server with ``/v1/completions``: vLLM, SGLang, LMDeploy, TensorRT-LLM."""

    path = "/v1/completions"
    ready = "/v1/models"

    def __init__(self, url: str, model: str) -> None:
        super().__init__(url.removesuffix("/v1"), model, url.removesuffix("/v1") + "/metrics")

    async def learn(self, body: bytes) -> None:
        """Ask for the model that it serves, where it has none of the name given."""
        try:
            names = [str(model["id"]) for model in json.loads(body)["data"]]
        except (ValueError, KeyError, TypeError):
            raise ProtocolError(f"{self._url}{self.ready} does not list models as OpenAI's does") from None
        if names and self.model not in names:
            self.model = names[0]

    async def attempt(self, planned: Planned, heard: Heard) -> None:
        """Send the request once."""
        body = {
            "model": self.model,
            "prompt": planned.ask.prompt,
            "max_tokens": planned.ask.output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        finished = False
        async with aclosing(self._events(body)) as events:
            async for event in events:
                if usage := event.get("usage"):
                    heard.counted(int(usage["completion_tokens"]))
                for choice in event.get("choices") or ():
                    finished = finished or bool(choice.get("finish_reason"))
                    if choice.get("text"):
                        heard.chunk()
        if not finished:
            raise ProtocolError("the answer ended without a finish reason")


class TritonTarget(_HttpTarget):
    """A Triton with the official vLLM backend (or whatever keeps its contract), over ``generate_stream``.

    It need not count tokens; then chunks are counted.
    """

    path = "/v2/models/{model}/generate_stream"
    ready = "/v2/models/{model}/ready"

    async def attempt(self, planned: Planned, heard: Heard) -> None:
        """Send the request once."""
        sampling = {"max_tokens": planned.ask.output_tokens, "ignore_eos": True, "temperature": 0.0}
        body = {
            "text_input": planned.ask.prompt,
            "stream": True,
            "exclude_input_in_output": True,
            "sampling_parameters": json.dumps(sampling),
        }
        async with aclosing(self._events(body)) as events:
            async for event in events:
                if event.get("text_output"):
                    heard.chunk()
        if not heard.chunks:
            raise ProtocolError("the answer holds nothing")


def _event(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise ProtocolError(f"expected JSON in an event, got {data[:80]!r}")
    if "error" in event or event.get("object") == "error":
        error = event.get("error", event)
        raise translate(str(error.get("message", error) if isinstance(error, dict) else error))
    return event


def _refusal(response: aiohttp.ClientResponse, text: str) -> LifecycleError:
    error = translate(text[:500], http_status=response.status)
    hint = response.headers.get("Retry-After", "")
    try:
        error.retry_after = max(0.0, float(hint)) if hint else error.retry_after
    except ValueError:  # a date: no server of this kind sends one
        return error
    return error
