"""Where events go beyond this process: a recorder on disk, Redis Streams, Kafka. Chosen by the configuration.

A sink takes events in line, at the cost of one append; the rest happens in a thread or task of its own. What it cannot
pass on it counts. Nothing of it reaches a request.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Protocol

from triton_lifecycle.config import Config
from triton_lifecycle.errors import ConfigError
from triton_lifecycle.events import TYPES, DeadlineMoved, Event, Progress

PER_TOKEN: Final = (Progress, DeadlineMoved)
QUIET: Final = tuple(event_type for event_type in TYPES if event_type not in PER_TOKEN)
"""Every type but those of which there is one for each step of the engine."""
FLUSH_S: Final = 3.0
"""What a sink may take at the end to pass on what waits; the rest is lost and counted."""


class Sink(Protocol):
    """Takes events out of the process."""

    name: str
    types: tuple[type[Event], ...]

    def take(self, event: Event) -> None:
        """Take over an event; never blocks. Event-loop thread only."""
        ...

    def counts(self) -> dict[str, int]:
        """Return what became of the events: taken = sent + lost + backlog."""
        ...

    async def aclose(self) -> None:
        """Pass on what waits, within :data:`FLUSH_S`, and let go of everything."""
        ...


def wanted(config: Config) -> bool:
    """Whether the configuration asks for any sink."""
    return config.event_driven.recorder is not None or _backend(config) != "local"


def open_sinks(config: Config, directory: Path) -> list[Sink]:
    """Make the sinks that the configuration asks for; ``local`` is none.

    Args:
        config: the configuration.
        directory: the folder against which the recorder's path is looked up.

    Raises:
        ConfigError: the recorder's file cannot be written, an address is malformed, or a client is not installed. A
            broker that is down is no error: it is tried again for as long as the process lives.

    """
    sinks: list[Sink] = []
    events, distributed = config.event_driven, config.distributed
    size, limit = events.event_queue_size, events.event_processing_timeout
    types = TYPES if distributed.events_include_tokens else QUIET
    if _backend(config) == "redis":
        from triton_lifecycle.sinks.outbox import Outbox

        try:
            from triton_lifecycle.sinks.redis import RedisStream
        except ImportError as error:
            raise _missing("redis", error) from error

        stream = RedisStream(
            distributed.redis_url.reveal(), f"{distributed.namespace}:events", distributed.events_max_length, limit
        )
        sinks.append(Outbox("redis", stream, types, size=size, time_limit=limit))
    elif _backend(config) == "kafka":
        from triton_lifecycle.sinks.outbox import Outbox

        try:
            from triton_lifecycle.sinks.kafka import KafkaTopic
        except ImportError as error:
            raise _missing("kafka", error) from error

        topic = KafkaTopic(distributed.kafka_servers, f"{distributed.namespace}.events", limit)
        sinks.append(Outbox("kafka", topic, types, size=size, time_limit=limit))
    if events.recorder is not None:
        from triton_lifecycle.sinks.jsonl import Recorder

        types = TYPES if events.recorder.tokens else QUIET
        sinks.append(Recorder(events.recorder, directory, types, size=size))
    return sinks


def _backend(config: Config) -> str:
    return config.distributed.event_bus_backend if config.distributed.enabled else "local"


def _missing(extra: str, error: ImportError) -> ConfigError:
    return ConfigError(
        f"distributed.event_bus_backend: {extra!r} needs a client that is not installed ({error}); "
        f"pip install 'triton-lifecycle[{extra}]'"
    )
