"""Events into a Redis stream: ``XADD namespace:events MAXLEN ~ n * id request:seq event {…}``.

A batch is one transaction, so Redis has all of it or nothing, also when its memory is full: no event overtakes one that
was refused. One stream for all requests keeps the order of each.
"""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from triton_lifecycle.errors import ConfigError
from triton_lifecycle.sinks.outbox import Entry


class RedisStream:
    """Implements :class:`~triton_lifecycle.sinks.outbox.Broker`.

    Args:
        url: ``redis://`` or ``rediss://``; may hold a password, so it is in no message.
        stream: the key.
        max_length: entries that are kept, about; the oldest go first.
        time_limit: seconds for connecting, and for each answer.

    """

    def __init__(self, url: str, stream: str, max_length: int, time_limit: float) -> None:
        self._stream = stream
        self._max_length = max_length
        # The outbox tries again by itself, and counts it.
        once = Retry(NoBackoff(), 0)
        try:
            self._client = Redis.from_url(
                url, socket_timeout=time_limit, socket_connect_timeout=time_limit, retry=once, max_connections=2
            )
        except ValueError as error:
            raise ConfigError(
                f"distributed.redis_url: not an address of Redis, such as redis://host:6379/0 ({type(error).__name__})"
            ) from None

    async def send(self, batch: list[Entry]) -> int:
        """Append the batch in one transaction; raises ``redis.RedisError`` when it is not known to be there."""
        async with self._client.pipeline(transaction=True) as pipeline:
            for entry in batch:
                fields: dict[Any, Any] = {"id": entry.id, "event": entry.body}
                pipeline.xadd(self._stream, fields, maxlen=self._max_length, approximate=True)
            await pipeline.execute()
        return 0

    async def close(self) -> None:
        """Close every connection; the next batch opens one."""
        await self._client.aclose()
