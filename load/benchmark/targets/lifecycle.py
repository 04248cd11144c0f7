"""Ours, asked through our own client with its own retry policy."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

from triton_lifecycle.errors import LifecycleError
from triton_lifecycle_client import AsyncClient, RetryPolicy

if TYPE_CHECKING:
    from load.benchmark.asking import Heard
    from load.benchmark.plan import Planned

_HEARD: ContextVar[Heard] = ContextVar("heard")
"""The request that the running task asks."""


class HeardRetries(RetryPolicy, frozen=True, kw_only=True):
    """The client's policy, unchanged, which also tells how attempts ended."""

    def pause(self, error: LifecycleError, attempt: int) -> float | None:
        """See :class:`~triton_lifecycle_client.RetryPolicy`."""
        _HEARD.get().failed(error)
        return RetryPolicy.pause(self, error, attempt)


class LifecycleTarget:
    """Our backend behind Triton, over gRPC or HTTP.

    Args:
        url: as the client takes it.
        model: its name.
        metrics_url: Triton's metrics page.

    """

    def __init__(self, url: str, model: str, metrics_url: str | None = None) -> None:
        self.metrics_url = metrics_url
        self._client = AsyncClient(url, model=model, retry=HeardRetries())

    async def wait_ready(self, limit_s: float) -> None:
        """See :class:`~load.benchmark.asking.Target`."""
        await self._client.wait_ready(limit_s)

    async def ask(self, planned: Planned, limit_s: float, tenant: str, heard: Heard) -> None:
        """See :class:`~load.benchmark.asking.Target`."""
        _HEARD.set(heard)
        tokens = 0
        stream = self._client.stream(
            planned.ask.prompt,
            max_tokens=planned.ask.output_tokens,
            ignore_eos=True,
            temperature=0.0,
            timeout=limit_s,
            tenant=tenant,
        )
        try:
            async with stream:
                async for chunk in stream:
                    tokens += chunk.output_tokens
                    if chunk.output_tokens:
                        heard.chunk()
                        heard.counted(tokens)
        finally:
            # What the client has sent, which is not what its policy allowed: the deadline may forbid it.
            heard.attempts = stream.attempts

    async def close(self) -> None:
        """See :class:`~load.benchmark.asking.Target`."""
        await self._client.aclose()
