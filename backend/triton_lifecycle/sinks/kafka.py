"""Events into a Kafka topic, ``namespace.events``: keyed by the request, by an idempotent producer.

librdkafka does its network work in threads of its own, outside Python's lock; only waiting for a batch takes a thread
of ours. After a failure the producer is thrown away with all it holds: nothing old can come behind the retry.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Producer

from triton_lifecycle.sinks.outbox import Entry

_NEVER: Final = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG_SIZE, KafkaError.INVALID_RECORD})
"""What the broker will say of the same message every time."""

_quiet = logging.getLogger(f"{__name__}.client")
_quiet.disabled = True  # librdkafka repeats itself while a broker is down; the outbox says it once


class KafkaTopic:
    """Implements :class:`~triton_lifecycle.sinks.outbox.Broker`.

    Args:
        servers: ``host:port``, several with commas.
        topic: the topic's name; the broker makes it, or whoever runs the broker.
        time_limit: seconds within which a batch must be confirmed.

    """

    def __init__(self, servers: str, topic: str, time_limit: float) -> None:
        self._topic = topic
        self._time_limit = time_limit
        self._settings = {
            "bootstrap.servers": servers,
            "enable.idempotence": True,
            "message.timeout.ms": 0,  # never by itself: a message that gave up alone would be overtaken
            "socket.connection.setup.timeout.ms": int(max(1.0, time_limit) * 1000),
            "reconnect.backoff.max.ms": 1000,
        }
        self._producer: Producer | None = None

    async def send(self, batch: list[Entry]) -> int:
        """Produce the batch and wait until all of it is confirmed; return how many the broker will never take.

        Raises:
            KafkaException: part of it was not confirmed in time, or failed.

        """
        return await asyncio.to_thread(self._send, batch)

    async def close(self) -> None:
        """Throw the producer away, with what it still holds."""
        await asyncio.to_thread(self._discard)

    def _send(self, batch: list[Entry]) -> int:
        if self._producer is None:
            self._producer = Producer(self._settings, logger=_quiet)
        producer, told, refused = self._producer, list[Any](), 0
        for entry in batch:
            try:
                producer.produce(
                    self._topic,
                    value=entry.body,
                    key=entry.key,
                    headers={"id": entry.id},
                    on_delivery=lambda error, _: told.append(error),
                )
            except KafkaException as error:
                if error.args[0].code() not in _NEVER:
                    raise
                refused += 1
        left = producer.flush(self._time_limit)
        if left:
            raise TimeoutError(f"{left} of {len(batch)} events were not confirmed within {self._time_limit:g} s")
        failures = [failure for failure in told if failure is not None]
        for failure in failures:
            if failure.code() not in _NEVER:
                raise KafkaException(failure)
        return refused + len(failures)

    def _discard(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge()
            producer.flush(0)
