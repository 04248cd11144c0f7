"""The configuration as one frozen value: sections, keys, defaults and ranges. Loading it is ``loading.py``'s work.

``request_lifecycle.yaml`` beside a model's ``config.pbtxt`` sets it. Without that file :data:`OFFICIAL` applies: the
official backend's contract, plus only what cannot change an answer (validation, true cancellation, bounded numbers).
Sections and keys of the promised file are kept as they are; those that this project adds are marked *added*. The text
under each key is what ``lifecycle config schema`` tells an editor.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from triton_lifecycle.config.urls import EtcdUrl, OtlpUrl, RedisUrl, Token, servers

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Delay = Annotated[float, Field(ge=0, allow_inf_nan=False)]
T = TypeVar("T")
Items = Annotated[tuple[T, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
"""A YAML list, kept as a tuple."""
Layer = Literal["metadata", "input", "execution", "kv_cache", "output"]
Keep = Literal["no", "hash", "text"]

STAGES = ("receive", "preprocess", "schedule", "execute", "postprocess", "respond")
"""The built-in stages in the order in which a request meets them."""


class Section(BaseModel):
    """Base of all sections: immutable, strict, unknown keys refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, hide_input_in_errors=True
    )


class Handler(Section):
    """Added: a plug-in that is told of events."""

    use: str
    """``module:attribute``, or the name of an entry point in the group ``triton_lifecycle.handlers``."""
    events: Items[str] | None = None
    """Names of event types; all of them when absent, those of each token too."""
    settings: dict[str, Any] = {}
    """Handed as keyword arguments to a plug-in that is a class, when it is constructed."""


class Recorder(Section):
    """Added: events as lines of JSON in files of bounded size and number."""

    path: str
    """The file that is being written; older ones stand beside it with a number before the suffix."""
    max_bytes: Count = 64 * 2**20
    """Size at which a file is full and the next one begins."""
    max_files: Count = 16
    """Files kept; the oldest goes first."""
    compress: bool = True
    """Whether files that are full are compressed (gzip)."""
    tokens: bool = False
    """Whether to record each step's tokens and deadline moves too: many lines."""


class EventDriven(Section):
    """The event bus."""

    enabled: bool = True
    """Whether events are published at all; off, nobody can subscribe, and publishing costs one call."""
    event_queue_size: Count = 10_000
    """Events that may wait for one asynchronous handler; further ones are dropped and counted."""
    event_processing_timeout: Seconds = 10.0
    """Seconds an asynchronous handler may take for one event."""
    max_event_handlers: Count = 100
    """Handlers that may be subscribed at once."""
    handlers: Items[Handler] = ()
    """Added: plug-ins that are told of events."""
    recorder: Recorder | None = None
    """Added: writes events to files; absent, none are written."""


class ContextManagement(Section):
    """How many contexts are held, and for how long after their end."""

    enabled: bool = True
    """Whether finished requests are kept; off, a request is forgotten with its end. Live ones are always known."""
    max_contexts: Count = 10_000
    """Live requests at once; beyond that admission refuses."""
    context_cleanup_interval: Seconds = 60.0
    """Seconds between two looks for what is kept beyond its time."""
    expired_context_timeout: Seconds = 3600.0
    """How long a finished request is known, unless ``layer_timeouts`` says otherwise for a layer."""
    enable_layered_storage: bool = True
    """Whether layers are stored one by one in the backend; else only summaries are kept, in memory."""
    storage_backend: Literal["memory", "redis", "etcd"] = "memory"
    """Where finished requests are kept."""
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
    """Whether the limits of this section apply; off, only the caller's own timeout counts."""
    default_timeout: Seconds = 30.0
    """Limit in seconds of a request whose caller set none."""
    min_timeout: Seconds = 5.0
    """The shortest limit that a prediction may set."""
    max_timeout: Seconds = 300.0
    """The longest limit, also for callers that ask for more."""
    safety_margin: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.5
    """Factor between a predicted time and the limit made of it."""
    enable_intelligent_timeout: bool = True
    """Whether limits follow predictions."""
    timeout_prediction_model: Literal["linear", "ml"] = "linear"
    """What predicts a request's time."""
    load_factor: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Added: how much longer limits become with the share of requests that wait (1: up to twice as long)."""
    state_path: Annotated[str, Field(min_length=1)] | None = None
    """Added: the file, seen from the model's folder, in which what the predictor saw outlives a restart; ``None`` keeps
    it in memory alone."""
    first_token_timeout: Seconds | None = None
    """Added: longest wait for the first token; ``None`` lets it follow predictions, or leaves it to the total limit."""
    stall_timeout: Seconds | None = None
    """Added: longest gap between two tokens; ``None`` lets it follow predictions, or leaves it to the total limit."""

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
    """Off switches all of this section off."""
    enable_async_processing: bool = True
    """Whether answers are sent, and long texts parsed, on threads; off, on the event loop itself: a little sooner with
    a few streams, a brake with many."""
    enable_batch_optimization: bool = True
    """Whether what the engine makes while a response is being sent goes out in one response; off, each engine step is a
    response of its own, as from the official backend."""
    enable_resource_pooling: bool = True
    """Whether requests share a pool of threads for their answers; off, one thread sends all."""
    resource_pool_size: Count = 100
    """Threads in that pool at most; it grows only when sends wait on every one."""

    @property
    def asynchronous(self) -> bool:
        """Whether threads do the blocking work."""
        return self.enabled and self.enable_async_processing

    @property
    def merging(self) -> bool:
        """Whether one response may hold several engine steps."""
        return self.enabled and self.enable_batch_optimization

    @property
    def pool_size(self) -> int:
        """Threads that may send answers."""
        return self.resource_pool_size if self.enabled and self.enable_resource_pooling else 1


class ErrorHandling(Section):
    """Validation, capture and recovery."""

    enabled: bool = True
    """Off switches validation, capture and recovery off."""
    enable_request_validation: bool = True
    """Whether a value that helps nobody is refused; off, unknown sampling parameters are left out and a prompt may hold
    NUL. What could hurt other requests is refused all the same."""
    enable_exception_capture: bool = True
    """Whether an unexpected exception ends with its request and one line in the log; off, it also leaves the request's
    task, for a debugger or the event loop's handler to see. The caller is answered all the same."""
    enable_auto_recovery: bool = True
    """Whether an engine that failed is restarted and its requests go on."""
    max_recovery_attempts: Annotated[int, Field(ge=0)] = 3
    """Further attempts that one request gets."""
    recovery_delay: Delay = 1.0
    """Seconds before a further attempt."""
    engine_stall_timeout: Seconds = 120.0
    """Added: an engine that has work and makes no token at all for so long is restarted."""

    @property
    def validates(self) -> bool:
        """Whether a value that helps nobody is refused."""
        return self.enabled and self.enable_request_validation

    @property
    def captures(self) -> bool:
        """Whether an unexpected exception goes no further than its request."""
        return self.enabled and self.enable_exception_capture


class Monitoring(Section):
    """Metrics, traces, logs."""

    enabled: bool = True
    """Off switches metrics, traces, logs and the self-check off."""
    metrics_enabled: bool = True
    """Whether this backend's own metrics are on Triton's metrics page; without a file they are not. The official ones
    follow ``REPORT_CUSTOM_METRICS`` alone."""
    tracing_enabled: bool = False
    """Whether each request is a span, with one below it for each stage, sent to a collector by OTLP."""
    tracing_endpoint: OtlpUrl | None = None
    """Added: the collector; ``None`` leaves it to OTEL_EXPORTER_OTLP_ENDPOINT, or the standard port on this machine."""
    tracing_protocol: Literal["grpc", "http"] | None = None
    """Added: how it is spoken to; ``None`` leaves it to OTEL_EXPORTER_OTLP_PROTOCOL, or is gRPC."""
    tracing_sample_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """Added: the share of traces kept that begin here, 0…1; a caller's own decision is followed. ``None`` leaves it to
    OTEL_TRACES_SAMPLER, or keeps all."""
    logging_enabled: bool = True
    """Whether this backend logs."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe level that is logged."""
    log_format: Literal["json", "text"] = "json"
    """One JSON object per line, or plain text."""
    log_to: Literal["stderr", "triton"] = "stderr"
    """Added: standard error, or Triton's own logger, which puts its mark before and knows of ``--log-file``."""
    leak_check_interval: Delay = 30.0
    """Added: seconds between two self-checks for leaks, made only while no request is live; 0 makes none."""

    @property
    def traces(self) -> bool:
        """Whether requests are traced."""
        return self.enabled and self.tracing_enabled


class Distributed(Section):
    """Several replicas."""

    enabled: bool = False
    """Whether this replica shares contexts and events with others."""
    num_nodes: Count = 1
    """Replicas that belong together: `lifecycle serve` starts so many behind Envoy unless `--replicas` differs."""
    event_bus_backend: Literal["local", "redis", "kafka"] = "local"
    """Where events go beside this process."""
    context_sync_interval: Seconds = 1.0
    """How often the state of live requests is written to the store, for other replicas to see."""
    load_balancing_strategy: Literal["round_robin", "least_request", "random", "ring_hash"] = "round_robin"
    """How Envoy spreads requests over the replicas; `lifecycle envoy` prints its configuration."""
    redis_url: RedisUrl = RedisUrl("redis://127.0.0.1:6379/0")
    """Added: for ``storage_backend`` and ``event_bus_backend``. Also set by ``LIFECYCLE_REDIS_URL``."""
    etcd_url: EtcdUrl = EtcdUrl("http://127.0.0.1:2379")
    """Added: for ``storage_backend``. Also set by ``LIFECYCLE_ETCD_URL``."""
    kafka_servers: Annotated[str, AfterValidator(servers)] = "127.0.0.1:9092"
    """Added: host:port, several with commas. Also set by ``LIFECYCLE_KAFKA_SERVERS``."""
    namespace: str = "lifecycle"
    """Added: the prefix of every key, stream and topic, shared by the replicas that belong together."""
    node_name: Annotated[str, Field(max_length=128)] = ""
    """Added: this replica's name in what it stores; host name and process id when empty. No two may share one."""
    events_max_length: Count = 1_000_000
    """Added: events kept in the Redis stream, about."""
    events_include_tokens: bool = False
    """Added: whether each step's tokens and deadline moves are sent too: many events."""


class Admission(Section):
    """Added: what may be live at once; a request for ``n`` answers counts ``n`` times.

    ``None`` means no limit of its own; ``context_management.max_contexts`` bounds all.
    """

    max_live_requests: Count | None = None
    """Requests that may be live at once; the next is refused with ``queue_full``."""
    max_waiting_requests: Annotated[int, Field(ge=0)] | None = None
    """Requests that may wait beyond those that the engine runs at once."""
    max_prompt_tokens: Count | None = None
    """Tokens of all live prompts together; estimated before a prompt is tokenized."""
    refuse_unreachable: bool = False
    """Whether a request whose predicted end lies behind its deadline is refused at once."""
    earliest_deadline_first: bool = False
    """Whether the engine takes requests by deadline; needs its ``scheduling_policy: priority``."""
    ageing: Seconds = 10.0
    """Under earliest deadline first: seconds of waiting that outweigh one class of priority."""
    fair_share: bool = False
    """Whether tenants share the engine evenly, in the place of deadlines; needs the same policy."""
    adaptive: bool = False
    """Whether repeated timeouts lower the number of live requests until they cease."""


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
    max_images: Count = 16
    """Images of one request."""
    max_image_bytes: Count = 32 * 2**20
    """Of all images of a request together, as files."""
    max_image_pixels: Count = 64_000_000
    """Of all images of a request together: unpacked, each takes three bytes."""
    structured_output_timeout: Seconds = 2.0
    """How long a schema, expression or grammar may take to compile on trial; vLLM itself gives up after 5 s."""


class Security(Section):
    """Added: who may do what."""

    control_token: Token | None = None
    """What control requests (status, cancel, state) must bring as ``control_token``; ``None`` lets everybody ask. 16
    characters or more. Also set by ``LIFECYCLE_CONTROL_TOKEN``, which is the better place."""


class Cancellation(Section):
    """Added: how callers that left are noticed: a question costs about 130 µs of CPU."""

    poll_interval: Seconds = 0.05
    """Seconds between two questions about one live request."""
    max_polls_per_second: Count = 200
    """Questions over all live requests; with many of them the interval grows instead."""


class Shutdown(Section):
    """Added: how long running work may go on once the server stops or the model is unloaded."""

    drain_timeout: Delay = 20.0
    """Seconds that running requests get; then they end with ``draining``."""


class Stage(Section):
    """Added: a stage that is more than a name."""

    use: str
    """A built-in name, ``module:attribute``, or the name of an entry point in the group ``triton_lifecycle.stages``."""
    settings: dict[str, Any] = {}
    """Handed as keyword arguments to a plug-in that is a class, when it is constructed."""
    role: Literal["execute"] | None = None
    """``execute`` when the plug-in stands in the place of that stage."""


class Pipeline(Section):
    """Added: the stages a request passes. ``stages/order.py`` judges the list when the model is loaded."""

    stages: Items[str | Stage] = STAGES
    """In the order in which a request meets them."""
    plugin_timeout: Seconds = 10.0
    """How long a plug-in stage may take for one request, or behind the engine for one chunk of it."""


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
    security: Security = Security()
    cancellation: Cancellation = Cancellation()
    shutdown: Shutdown = Shutdown()
    pipeline: Pipeline = Pipeline()


OFFICIAL = Config(timeout_handling=TimeoutHandling(enabled=False), monitoring=Monitoring(metrics_enabled=False))
"""What applies without a ``request_lifecycle.yaml``: no limit and no metric that the official backend does not have."""
