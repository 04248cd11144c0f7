"""Contexts in Redis: one key a layer, so that each expires by itself; a batch is one round trip."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from triton_lifecycle.errors import ConfigError, StoreError
from triton_lifecycle.store import LAYERS, OPERATION_LIMIT_S, Entry

try:
    from redis import RedisError
    from redis.asyncio import BlockingConnectionPool, Redis
    from redis.asyncio.client import Pipeline
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
except ImportError:
    raise ConfigError(
        "context_management.storage_backend 'redis' needs the package redis: pip install 'triton-lifecycle[redis]'"
    ) from None

CONNECTIONS = 8
"""At once; what comes beyond waits for one."""


class RedisStore:
    """A Redis server of version 5 or later.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``; see redis-py's ``from_url``.
        namespace: the prefix of every key.
        ttls: seconds by layer.

    """

    def __init__(self, url: str, namespace: str, ttls: Mapping[str, float]) -> None:
        # An address that hides its password when shown is still the whole text underneath.
        self.name = f"redis at {urlsplit(url).hostname or urlsplit(url).path}"
        self._prefix = f"{namespace}:"
        self._ttls = ttls
        self._longest = max(ttls.values())
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=CONNECTIONS,
                timeout=OPERATION_LIMIT_S,
                socket_timeout=OPERATION_LIMIT_S,
                socket_connect_timeout=OPERATION_LIMIT_S,
                # The mirror tries again, at its own pace.
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            # The error's own words may quote the password.
            raise ConfigError(
                f"distributed.redis_url: not an address of Redis, such as redis://host:6379/0 ({type(error).__name__})"
            ) from None
        self._redis = Redis(connection_pool=pool)

    async def write(self, entries: Sequence[Entry]) -> None:
        """Put down layers; Redis lets them expire."""
        pipeline = self._redis.pipeline(transaction=False)
        for entry in entries:
            for layer, value, left in entry.living(self._ttls):
                _set(pipeline, self._key(entry.id, layer), value, left)
            if entry.caller_id and entry.age < self._longest:
                _set(pipeline, self._caller(entry.caller_id), entry.id, self._longest - entry.age)
        await self._run(pipeline)

    async def read(self, request_id: str) -> Mapping[str, bytes]:
        """Return the layers that are there of a request."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.mget([self._key(request_id, layer) for layer in LAYERS])
        values = (await self._run(pipeline))[0]
        return {layer: value for layer, value in zip(LAYERS, values, strict=True) if value is not None}

    async def resolve(self, caller_id: str) -> str | None:
        """Return our id of the request that last used the caller's id."""
        return await self._text(self._caller(caller_id))

    async def set_marks(self, marks: Mapping[str, str], ttl: float) -> None:
        """Put down small texts by name."""
        pipeline = self._redis.pipeline(transaction=False)
        for name, text in marks.items():
            _set(pipeline, f"{self._prefix}mark:{name}", text, ttl)
        await self._run(pipeline)

    async def mark(self, name: str) -> str | None:
        """Return the text put down under a name, while it lives."""
        return await self._text(f"{self._prefix}mark:{name}")

    async def aclose(self) -> None:
        """Close the connections."""
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()

    def _key(self, request_id: str, layer: str) -> str:
        return f"{self._prefix}context:{request_id}:{layer}"

    def _caller(self, caller_id: str) -> str:
        return f"{self._prefix}caller:{caller_id}"

    async def _text(self, key: str) -> str | None:
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.get(key)
        value = (await self._run(pipeline))[0]
        return None if value is None else value.decode()

    async def _run(self, pipeline: Pipeline) -> list[Any]:
        try:
            async with asyncio.timeout(OPERATION_LIMIT_S):
                return await pipeline.execute()
        except (RedisError, OSError, TimeoutError) as error:
            raise StoreError(f"{self.name} does not answer ({type(error).__name__})") from error


def _set(pipeline: Pipeline, key: str, value: bytes | str, ttl: float) -> None:
    pipeline.set(key, value, px=max(1, round(ttl * 1e3)))
