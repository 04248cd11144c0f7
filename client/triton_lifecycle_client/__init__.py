"""The client of a model served by Triton with the lifecycle backend.

Names are imported when first used, so that ``lifecycle --help`` need not wait for gRPC.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .client import AsyncClient
    from .errors import ModelNotFound, ProtocolError, ServerUnreachable, WrongPort
    from .retry import NO_RETRY, RetryPolicy
    from .stream import Stream
    from .sync import Client, SyncStream
    from .types import Chunk, Completion, Options, SamplingOptions, ServerState, Status

__all__ = [
    "NO_RETRY",
    "AsyncClient",
    "Chunk",
    "Client",
    "Completion",
    "ModelNotFound",
    "Options",
    "ProtocolError",
    "RetryPolicy",
    "SamplingOptions",
    "ServerState",
    "ServerUnreachable",
    "Status",
    "Stream",
    "SyncStream",
    "WrongPort",
]

_HOMES = {
    "client": ("AsyncClient",),
    "errors": ("ModelNotFound", "ProtocolError", "ServerUnreachable", "WrongPort"),
    "retry": ("NO_RETRY", "RetryPolicy"),
    "stream": ("Stream",),
    "sync": ("Client", "SyncStream"),
    "types": ("Chunk", "Completion", "Options", "SamplingOptions", "ServerState", "Status"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
