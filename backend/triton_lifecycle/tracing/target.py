"""Which collector: the configuration first, then OpenTelemetry's own environment variables, then the standard port."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Any, Final, Literal, cast
from urllib.parse import urlsplit

import msgspec

from triton_lifecycle.config import Monitoring
from triton_lifecycle.config.urls import masked
from triton_lifecycle.errors import ConfigError

Protocol = Literal["grpc", "http"]
STANDARD: Final[dict[Protocol, str]] = {"grpc": "http://127.0.0.1:4317", "http": "http://127.0.0.1:4318"}
PATH: Final = "/v1/traces"
_PROTOCOL: Final = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"


class Target(msgspec.Struct, frozen=True):
    """A collector's address."""

    protocol: Protocol
    url: str

    @property
    def shown(self) -> str:
        """The address without a password."""
        return masked(self.url)


def target(settings: Monitoring, environ: Mapping[str, str] = os.environ) -> Target:
    """Return where spans are sent.

    Raises:
        ConfigError: the environment asks for a protocol that is not spoken here.

    """
    protocol = settings.tracing_protocol or _protocol(environ)
    if settings.tracing_endpoint is not None:
        return Target(protocol, _complete(settings.tracing_endpoint.reveal(), protocol))
    if url := environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        return Target(protocol, url)
    base = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or STANDARD[protocol]
    return Target(protocol, base.rstrip("/") + PATH if protocol == "http" else base)


def tell_engine(
    settings: Monitoring, engine: dict[str, Any], environ: MutableMapping[str, str] = os.environ
) -> dict[str, Any]:
    """Return vLLM's arguments, with the collector where tracing is on and they do not name one of their own."""
    if not settings.traces or engine.get("otlp_traces_endpoint"):
        return engine
    where = target(settings, environ)
    # vLLM reads the protocol from the environment alone.
    environ[_PROTOCOL] = "http/protobuf" if where.protocol == "http" else "grpc"
    return engine | {"otlp_traces_endpoint": where.url}


def _protocol(environ: Mapping[str, str]) -> Protocol:
    for name in (_PROTOCOL, "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if given := environ.get(name):
            known = {"grpc": "grpc", "http/protobuf": "http", "http": "http"}
            if given not in known:
                raise ConfigError(f"{name}: expected grpc or http/protobuf, found {given!r}")
            return cast("Protocol", known[given])
    return "grpc"


def _complete(url: str, protocol: Protocol) -> str:
    return url.rstrip("/") + PATH if protocol == "http" and urlsplit(url).path in {"", "/"} else url
