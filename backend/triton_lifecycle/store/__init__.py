"""The store: where finished and shared contexts lie, layer by layer, each layer with its own time to live.

``memory``, ``redis`` and ``etcd`` stand behind one protocol and pass one contract suite
(``tests/contract/test_store_contract.py``). What is written is made in ``records.py``, when it is written is decided in
``mirror.py``, and how a question is answered from several stores is in ``archive.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from triton_lifecycle.config import Config

LAYERS: Final = ("metadata", "input", "execution", "kv_cache", "output")

OPERATION_LIMIT_S: Final = 2.0
"""What one operation on a store may take before the store counts as down."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """What is written of one request: whole layers, each in place of what was there of it."""

    id: str
    layers: dict[str, bytes]
    """Encoded, by layer's name."""
    caller_id: str = ""
    """When given, the caller's id leads to this request from now on."""
    at: float = 0.0
    """When it became true, on the monotonic clock of the process that made it."""
    age: float = 0.0
    """Seconds that its layers have lived already."""

    def living(self, ttls: Mapping[str, float]) -> Iterator[tuple[str, bytes, float]]:
        """Yield the layers whose time is not over, with the seconds that are left to each."""
        for layer, value in self.layers.items():
            left = ttls[layer] - self.age
            if left > 0:
                yield layer, value, left


class Store(Protocol):
    """A store. Every method takes at most about :data:`OPERATION_LIMIT_S`.

    Errors: :class:`~triton_lifecycle.errors.StoreError` when it is down or refuses; what was asked may be done or not
    then, and asking again does no harm.
    """

    name: str
    """For people: the kind and the address, without any secret."""

    async def write(self, entries: Sequence[Entry]) -> None:
        """Put down layers; they expire by themselves."""
        ...

    async def read(self, request_id: str) -> Mapping[str, bytes]:
        """Return the layers that are there of a request; none when it is not known."""
        ...

    async def resolve(self, caller_id: str) -> str | None:
        """Return our id of the request that last used the caller's id."""
        ...

    async def set_marks(self, marks: Mapping[str, str], ttl: float) -> None:
        """Put down small texts by name, for ``ttl`` seconds."""
        ...

    async def mark(self, name: str) -> str | None:
        """Return the text put down under a name, while it lives."""
        ...

    async def aclose(self) -> None:
        """Let go of connections; safe to call twice."""
        ...


def layer_ttls(config: Config) -> dict[str, float]:
    """Return how long each layer of an ended request is kept, in seconds."""
    section = config.context_management
    return {layer: section.layer_timeouts.get(layer, section.expired_context_timeout) for layer in LAYERS}


def open_store(config: Config) -> Store | None:
    """Return the store beside this process that the configuration names; ``None`` when there is none.

    Raises:
        ConfigError: its client library is missing, or its address cannot be read.

    """
    section = config.context_management
    if not section.enabled or not section.enable_layered_storage or section.storage_backend == "memory":
        return None
    if section.storage_backend == "redis":
        from triton_lifecycle.store.redis import RedisStore  # noqa: PLC0415

        return RedisStore(config.distributed.redis_url.reveal(), config.distributed.namespace, layer_ttls(config))
    from triton_lifecycle.store.etcd import EtcdStore  # noqa: PLC0415

    return EtcdStore(config.distributed.etcd_url.reveal(), config.distributed.namespace, layer_ttls(config))
