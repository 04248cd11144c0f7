"""The client of a model served by Triton with the lifecycle backend.

Names are imported when first used, so that ``lifecycle --help`` need not wait for gRPC; the error tree costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from triton_lifecycle.errors import (
    CallerLeft,
    Cancelled,
    DeadlineExceeded,
    DeadlineUnreachable,
    Draining,
    EngineDied,
    EngineError,
    EngineRestarting,
    FirstTokenTimeout,
    Forbidden,
    GenerationFailed,
    InvalidInput,
    LifecycleError,
    Overloaded,
    PromptTooLong,
    QueueFull,
    RequestError,
    StallTimeout,
    TokenBudget,
    TotalTimeout,
    UnknownAdapter,
    UnknownRequest,
    Unsupported,
)

if TYPE_CHECKING:
    from .client import AsyncClient
    from .errors import ModelNotFound, ProtocolError, ResumeFailed, ServerUnreachable, WrongPort
    from .retry import NO_RETRY, RetryPolicy
    from .stream import Stream
    from .sync import Client, SyncStream
    from .types import Chunk, Completion, Options, SamplingOptions, ServerState, Status

__all__ = [
    "NO_RETRY",
    "AsyncClient",
    "CallerLeft",
    "Cancelled",
    "Chunk",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "DeadlineUnreachable",
    "Draining",
    "EngineDied",
    "EngineError",
    "EngineRestarting",
    "FirstTokenTimeout",
    "Forbidden",
    "GenerationFailed",
    "InvalidInput",
    "LifecycleError",
    "ModelNotFound",
    "Options",
    "Overloaded",
    "PromptTooLong",
    "ProtocolError",
    "QueueFull",
    "RequestError",
    "ResumeFailed",
    "RetryPolicy",
    "SamplingOptions",
    "ServerState",
    "ServerUnreachable",
    "StallTimeout",
    "Status",
    "Stream",
    "SyncStream",
    "TokenBudget",
    "TotalTimeout",
    "UnknownAdapter",
    "UnknownRequest",
    "Unsupported",
    "WrongPort",
]

_HOMES = {
    ".client": ("AsyncClient",),
    ".errors": ("ModelNotFound", "ProtocolError", "ResumeFailed", "ServerUnreachable", "WrongPort"),
    ".retry": ("NO_RETRY", "RetryPolicy"),
    ".stream": ("Stream",),
    ".sync": ("Client", "SyncStream"),
    ".types": ("Chunk", "Completion", "Options", "SamplingOptions", "ServerState", "Status"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name], __name__), name)
