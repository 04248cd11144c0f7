"""The configuration: one frozen value, loaded once, every problem reported at once.

``request_lifecycle.yaml`` beside a model's ``config.pbtxt`` sets it. Without that file :data:`OFFICIAL` applies: the
official backend's contract, plus only what cannot change an answer (validation, true cancellation, bounded numbers).
Sections and keys of the promised file are kept as they are; those that this project adds are marked *added*.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from triton_lifecycle.errors import ConfigError

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
T = TypeVar("T")
Items = Annotated[tuple[T, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
"""A YAML list, kept as a tuple."""
Layer = Literal["metadata", "input", "execution", "kv_cache", "output"]
Keep = Literal["no", "hash", "text"]

STAGES = ("receive", "preprocess", "schedule", "execute", "postprocess", "respond")
"""The built-in stages in the order in which a request meets them."""


class Section(BaseModel):
    """Base of all sections: immutable, strict, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Handler(Section):
    """Added: a plug-in that is told of events."""

    use: str
    """``module:attribute``, or the name of an entry point in the group ``triton_lifecycle.handlers``."""
    events: Items[str] | None = None
    """Names of event types; all of them when absent."""


class Recorder(Section):
    """Added: events as lines of JSON in files of bounded size and number."""

    path: str
    """The file that is being written; older ones stand beside it with a number before the suffix."""
    max_bytes: Count = 64 * 2**20
    max_files: Count = 16
    compress: bool = True
    """Whether files that are full are compressed (gzip)."""
    tokens: bool = False
    """Whether to record each step's tokens and deadline moves too: many lines."""


class EventDriven(Section):
    """The event bus."""

    enabled: bool = True
    event_queue_size: Count = 10_000
    event_processing_timeout: Seconds = 10.0
    max_event_handlers: Count = 100
    handlers: Items[Handler] = ()
    """Added."""
    recorder: Recorder | None = None
    """Added."""


class ContextManagement(Section):
    """How many contexts are held, and for how long after their end."""

    enabled: bool = True
    max_contexts: Count = 10_000
    """Live requests at once; beyond that admission refuses."""
    context_cleanup_interval: Seconds = 60.0
    expired_context_timeout: Seconds = 3600.0
    """How long a finished request is known, unless ``layer_timeouts`` says otherwise for a layer."""
    enable_layered_storage: bool = True
    """Whether layers are stored one by one in the backend; else only summaries are kept, in memory."""
    storage_backend: Literal["memory", "redis", "etcd"] = "memory"
    max_finished: Count = 10_000
    """Added: finished requests that are kept in this process."""
    layer_timeouts: dict[Layer, Seconds] = {}
    """Added: seconds by layer."""
    keep_prompts: Keep = "no"
    """Added: whether the stored input layer holds the prompt, only its hash, or neither."""
    keep_outputs: Keep = "no"
    """Added: the same for the text of the output layer."""


class TimeoutHandling(Section):
    """The limits from which a request's one movable deadline is derived."""

    enabled: bool = True
    default_timeout: Seconds = 30.0
    min_timeout: Seconds = 5.0
    max_timeout: Seconds = 300.0
    safety_margin: Annotated[float, Field(ge=1)] = 1.5
    enable_intelligent_timeout: bool = True
    timeout_prediction_model: Literal["linear", "ml"] = "linear"
    first_token_timeout: Seconds | None = None
    """Added: longest wait for the first token; ``None`` leaves it to the total limit."""
    stall_timeout: Seconds | None = None
    """Added: longest gap between two tokens; ``None`` leaves it to the total limit."""

    @model_validator(mode="after")
    def _ordered(self) -> TimeoutHandling:
        if not self.min_timeout <= self.default_timeout <= self.max_timeout:
            raise ValueError(
                f"min_timeout ≤ default_timeout ≤ max_timeout must hold, but they are "
                f"{self.min_timeout:g}, {self.default_timeout:g}, {self.max_timeout:g}"
            )
        return self


class PerformanceOptimization(Section):
    """What may be traded for speed."""

    enabled: bool = True
    enable_async_processing: bool = True
    enable_batch_optimization: bool = True
    enable_resource_pooling: bool = True
    resource_pool_size: Count = 100


class ErrorHandling(Section):
    """Validation, capture and recovery."""

    enabled: bool = True
    enable_request_validation: bool = True
    enable_exception_capture: bool = True
    enable_auto_recovery: bool = True
    max_recovery_attempts: Annotated[int, Field(ge=0)] = 3
    recovery_delay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0


class Monitoring(Section):
    """Metrics, traces, logs."""

    enabled: bool = True
    metrics_enabled: bool = True
    tracing_enabled: bool = False
    logging_enabled: bool = True
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "text"] = "json"


class Distributed(Section):
    """Several replicas."""

    enabled: bool = False
    num_nodes: Count = 1
    event_bus_backend: Literal["local", "redis", "kafka"] = "local"
    context_sync_interval: Seconds = 1.0
    """How often the state of live requests is written to the store, for other replicas to see."""
    load_balancing_strategy: Literal["round_robin", "least_request", "random", "ring_hash"] = "round_robin"
    redis_url: str = "redis://127.0.0.1:6379/0"
    """Added: for ``storage_backend`` and ``event_bus_backend``."""
    etcd_url: str = "http://127.0.0.1:2379"
    """Added."""
    kafka_servers: str = "127.0.0.1:9092"
    """Added: host:port, several with commas."""
    namespace: str = "lifecycle"
    """Added: the prefix of every key, stream and topic, shared by the replicas that belong together."""
    events_max_length: Count = 1_000_000
    """Added: events kept in the Redis stream, about."""


class Admission(Section):
    """Added: what may be live at once. ``None`` means bounded by ``context_management.max_contexts`` alone."""

    max_live_requests: Count | None = None


class RequestLimits(Section):
    """Added: how large a request's values may be; what goes beyond is refused at the edge."""

    max_prompt_bytes: Count = 4 * 2**20
    """Of the prompt, or of all messages and tools together, in UTF-8."""
    max_parameters_bytes: Count = 2**20
    """Of ``sampling_parameters``, or of a text among the request's parameters: schemas and grammars travel there."""
    max_sequences: Count = 128
    """``n``."""
    max_list_items: Count = 1024
    """``stop``, ``stop_token_ids``, ``bad_words``, ``logit_bias`` and the like."""
    structured_output_timeout: Seconds = 2.0
    """How long a schema, expression or grammar may take to compile on trial; vLLM itself gives up after 5 s."""


class Cancellation(Section):
    """Added: how callers that left are noticed: a question costs about 130 µs of CPU."""

    poll_interval: Seconds = 0.05
    max_polls_per_second: Count = 200


class Shutdown(Section):
    """Added: how long running work may go on once the server stops or the model is unloaded."""

    drain_timeout: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 20.0


class Pipeline(Section):
    """Added: the stages a request passes, by name or ``module:attribute``."""

    stages: Items[str] = STAGES

    @model_validator(mode="after")
    def _complete(self) -> Pipeline:
        for must in ("receive", "execute", "respond"):
            if self.stages.count(must) != 1 and not any(":" in name for name in self.stages):
                raise ValueError(f"stages must name {must!r} exactly once (or replace it by a module:attribute)")
        return self


class Config(Section):
    """All sections. Equal values mean equal behaviour."""

    event_driven: EventDriven = EventDriven()
    context_management: ContextManagement = ContextManagement()
    timeout_handling: TimeoutHandling = TimeoutHandling()
    performance_optimization: PerformanceOptimization = PerformanceOptimization()
    error_handling: ErrorHandling = ErrorHandling()
    monitoring: Monitoring = Monitoring()
    distributed: Distributed = Distributed()
    admission: Admission = Admission()
    request_limits: RequestLimits = RequestLimits()
    cancellation: Cancellation = Cancellation()
    shutdown: Shutdown = Shutdown()
    pipeline: Pipeline = Pipeline()

    def not_yet(self) -> list[str]:
        """Return the settings of this value that the present release reads but does not act on."""
        contexts, new = self.context_management, ContextManagement()
        asked = {
            "event_driven.handlers": bool(self.event_driven.handlers),
            "event_driven.recorder": self.event_driven.recorder is not None,
            **{
                f"context_management.{name}": getattr(contexts, name) != getattr(new, name)
                for name in ("enable_layered_storage", "max_finished", "layer_timeouts", "keep_prompts", "keep_outputs")
            },
            "context_management.storage_backend": self.context_management.storage_backend != "memory",
            "timeout_handling.enable_intelligent_timeout": self.timeout_handling.enabled
            and self.timeout_handling.enable_intelligent_timeout,
            "error_handling.enable_auto_recovery": self.error_handling.enabled
            and self.error_handling.enable_auto_recovery,
            "monitoring.metrics_enabled": self.monitoring.enabled and self.monitoring.metrics_enabled,
            "monitoring.tracing_enabled": self.monitoring.enabled and self.monitoring.tracing_enabled,
            "distributed.enabled": self.distributed.enabled,
        }
        return [path for path, on in asked.items() if on]


OFFICIAL = Config(timeout_handling=TimeoutHandling(enabled=False))
"""What applies without a ``request_lifecycle.yaml``: no limit that the official backend does not have."""


def load(path: Path) -> Config:
    """Read ``request_lifecycle.yaml``; a missing file means :data:`OFFICIAL`.

    Raises:
        ConfigError: the file is not YAML, or values are wrong; the message lists every problem with its path.

    """
    if not path.exists():
        return OFFICIAL
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if document is None:
        return Config()
    if not isinstance(document, dict) or set(document) != {"request_lifecycle"}:
        raise ConfigError(f"{path}: expected one top-level key 'request_lifecycle'")
    try:
        sections = document["request_lifecycle"]
        return Config.model_validate({} if sections is None else sections)
    except ValidationError as error:
        lines = [
            f"  {'.'.join(map(str, e['loc'])) or '(top)'}: {e['msg']} (found {_short(e['input'])})"
            for e in error.errors()
        ]
        raise ConfigError(f"{path}: {len(lines)} problem(s):\n" + "\n".join(lines)) from None


def _short(value: object, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
