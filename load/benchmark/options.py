"""What is to be measured, read once from the command line into values that cannot be wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from load.mixes import lengths
from triton_lifecycle import config
from triton_lifecycle.errors import ConfigError, InvalidInput

SCENARIOS: Final = ("normal", "high", "extreme", "long")
CLOSED: Final = "closed"
"""The name of what ``--concurrency`` measures: so many callers, each asks again when it has its answer."""
STARTED: Final = ("ours", "ours-http", "off", "off-http", "vllm")
"""Targets for which a server is started when none is named."""
OPENAI: Final = ("vllm", "sglang", "lmdeploy", "tensorrt-llm", "openai")
TARGETS: Final = tuple(dict.fromkeys((*STARTED, *OPENAI, "triton")))
TOP: Final = "request_lifecycle"
"""The one key at the top of a configuration."""
MAX_REQUESTS: Final = 1_000_000
MAX_CONCURRENCY: Final = 10_000
MAX_TIMEOUT_S: Final = 3600.0


class TargetSpec(msgspec.Struct, frozen=True):
    """Who is asked.

    Attributes:
        kind: one of :data:`TARGETS`; also the name in tables.
        url: where it listens; ``None``: this tool starts it.

    """

    kind: str
    url: str | None = None


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run.

    Attributes:
        num_requests: of each cell.
        event_driven: whether ours has its event bus; ``None``: as ``server_config`` says, or on.
        intelligent_timeout: the same of intelligent timeouts.
        concurrency: closed loops, a cell for each number of callers.
        scenarios: open loops, a cell for each.
        timeout: seconds each caller allows, a cell for each.
        capacity: requests/s that count as 1x; ``None``: measured on the first target.
        tenants: requests fall to so many callers in turn; between them fairness is judged.
        server_config: path of a ``request_lifecycle.yaml`` for ours instead of the benchmark's own.

    """

    model: str = "smollm2"
    num_requests: int = 200
    concurrency: tuple[int, ...] = ()
    input_len: str = "32"
    output_len: str = "64"
    timeout: tuple[float, ...] = (30.0,)
    event_driven: bool | None = None
    intelligent_timeout: bool | None = None
    scenarios: tuple[str, ...] = ()
    targets: tuple[TargetSpec, ...] = (TargetSpec("ours"),)
    seed: int = 0
    capacity: float | None = None
    capacity_concurrency: int = 64
    capacity_seconds: float = 20.0
    tenants: int = 8
    server_config: str | None = None

    def checked(self) -> Options:
        """Return these options, with ``--scenario all`` where nothing was chosen.

        Raises:
            InvalidInput: a value is out of its range; the message names the option.

        """
        _within("--num-requests", [self.num_requests], 1, MAX_REQUESTS)
        _within("--concurrency", self.concurrency, 1, MAX_CONCURRENCY)
        _within("--capacity-concurrency", [self.capacity_concurrency], 1, MAX_CONCURRENCY)
        _within("--timeout", self.timeout, 0.05, MAX_TIMEOUT_S)
        _within("--tenants", [self.tenants], 1, 1000)
        if self.capacity is not None:
            _within("--capacity", [self.capacity], 0.001, 1e6)
        for name, text in (("--input-len", self.input_len), ("--output-len", self.output_len)):
            try:
                lengths(text)
            except InvalidInput as error:
                raise InvalidInput(f"{name}: {error.message}") from None
        if self.server_config is not None:
            configuration(self.server_config)
        if not self.targets or not self.timeout:
            raise InvalidInput("--target and --timeout need at least one value each")
        for name, values in (("--target", [spec.kind for spec in self.targets]), ("--timeout", self.timeout)):
            if len(set(values)) != len(values):
                raise InvalidInput(f"{name}: names the same twice; results are told apart by it")
        if not self.scenarios and not self.concurrency:
            return msgspec.structs.replace(self, scenarios=SCENARIOS)
        return self


def configuration(path: str) -> dict[str, Any]:
    """Return the sections of a ``request_lifecycle.yaml``.

    Raises:
        InvalidInput: it is none; the message lists every problem with its place.

    """
    file = Path(path)
    if not file.is_file():
        raise InvalidInput(f"--server-config: there is no file {path}")
    try:
        config.load(file, {})
    except ConfigError as error:
        raise InvalidInput(f"--server-config: {error.message}") from None
    document = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    return {name: section or {} for name, section in (document.get(TOP) or {}).items()}


def _within(
    name: str, values: list[int] | list[float] | tuple[int, ...] | tuple[float, ...], low: float, high: float
) -> None:
    for value in values:
        if not (math.isfinite(value) and low <= value <= high):
            raise InvalidInput(f"{name}: expected {low:g}…{high:,.10g}, found {value:g}")


def numbers(name: str, text: str) -> tuple[float, ...]:
    """Read ``10,50,100``; raises ``InvalidInput``."""
    try:
        return tuple(float(part) for part in text.split(",")) if text.strip() else ()
    except ValueError:
        raise InvalidInput(
            f"{name}: expected numbers with commas between them such as 10,50,100, found {text!r}"
        ) from None


def whole(name: str, text: str) -> tuple[int, ...]:
    """Read ``10,50,100`` without fractions; raises ``InvalidInput``."""
    found = numbers(name, text)
    if any(not value.is_integer() for value in found):
        raise InvalidInput(f"{name}: expected whole numbers, found {text!r}")
    return tuple(int(value) for value in found)


def scenarios(text: str) -> tuple[str, ...]:
    """Read ``normal,high`` or ``all``; raises ``InvalidInput``."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(","))) if text.strip() else ()
    if "all" in names:
        return SCENARIOS
    for name in names:
        if name not in SCENARIOS:
            raise InvalidInput(f"--scenario: expected {', '.join(SCENARIOS)} or all, found {name!r}")
    return names


def targets(text: str) -> tuple[TargetSpec, ...]:
    """Read ``ours,vllm`` or ``ours=grpc://host:8001,sglang=http://host:30000``; raises ``InvalidInput``."""
    return tuple(_target(part.strip()) for part in text.split(",") if part.strip())


def _target(text: str) -> TargetSpec:
    kind, _, url = text.partition("=")
    if kind not in TARGETS:
        raise InvalidInput(
            f"--target: unknown {kind!r}; expected {', '.join(TARGETS)}, with =ADDRESS behind it for a running server"
        )
    if not url and kind not in STARTED:
        raise InvalidInput(f"--target: {kind} is not started here; name a running one: {kind}=http://HOST:PORT")
    if url and (kind in OPENAI or kind == "triton") and not url.startswith(("http://", "https://")):
        raise InvalidInput(f"--target: {kind} is asked over HTTP; expected {kind}=http://HOST:PORT, found {url!r}")
    return TargetSpec(kind, url.rstrip("/") or None)
