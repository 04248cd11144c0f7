"""What goes into a request and what comes out, as frozen values without any knowledge of a transport."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Protocol = Literal["grpc", "http"]
Parameter = int | float | bool | str
"""What a Triton request parameter can be."""


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The common fields of vLLM's SamplingParams; whatever else it has goes into ``extra``.

    A field left at ``None`` is not sent, so that the server's default holds. Values are judged by the server alone.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    extra: dict[str, Any] = {}

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that were set, ``extra`` merged in and winning."""
        named = {name: getattr(self, name) for name in self.__struct_fields__ if name != "extra"}
        return {name: value for name, value in named.items() if value is not None} | self.extra


class Options(TypedDict, total=False):
    """Keyword options of ``generate`` and ``stream``; all may be left out.

    ``timeout`` is in seconds and covers the whole request, retries included; it is sent to the server and enforced
    here too. ``sampling`` takes any further field of vLLM's SamplingParams by name.
    ``parameters`` are further Triton request parameters.
    """

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    n: int
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    sampling: Mapping[str, Any]
    timeout: float
    priority: int
    tenant: str
    traceparent: str
    tracestate: str
    request_id: str
    model: str
    parameters: Mapping[str, Parameter]


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request, ready for a transport.

    Attributes:
        timeout: seconds the server may take in all.
        return_token_ids: whether the server is to tell the tokens of a stream, to go on from if it breaks.
        continued: tokens of the answer that are there already; the server goes on behind them.

    """

    model: str
    prompt: str
    request_id: str
    timeout: float
    stream: bool = True
    sampling: SamplingOptions = SamplingOptions()
    priority: int | None = None
    tenant: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    parameters: dict[str, Parameter] = {}
    return_token_ids: bool = False
    continued: tuple[int, ...] = ()

    @property
    def trace_headers(self) -> dict[str, str]:
        """What names the caller's span, as headers for Triton itself and what lies before it."""
        given = {"traceparent": self.traceparent, "tracestate": self.tracestate}
        return {name: value for name, value in given.items() if value}


Control = Literal["status", "cancel", "cancel_all", "state", "ready", "drain", "resume"]


class ControlRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A question about, or an order to, the server's own records instead of a prompt."""

    model: str
    control: Control
    control_id: str | None = None
    token: str | None = None
    timeout: float = 5.0


class Chunk(msgspec.Struct, frozen=True):
    """What one response brought. Every tuple has one element per sequence (``n`` > 1), empty if the server sent none.

    Attributes:
        texts: new text (streaming) or the whole text.
        finish_reasons: ``None`` until a sequence has ended.
        token_counts: output tokens in this response.
        prompt_tokens: tokens of the prompt.
        token_ids: the tokens of the one sequence in this response; empty where the server does not tell them.

    """

    texts: tuple[str, ...] = ()
    finish_reasons: tuple[str | None, ...] = ()
    token_counts: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    token_ids: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """Text of the first sequence."""
        return self.texts[0] if self.texts else ""

    @property
    def finish_reason(self) -> str | None:
        """End of the first sequence: ``stop``, ``length``, …; ``None`` until it ends."""
        return self.finish_reasons[0] if self.finish_reasons else None

    @property
    def output_tokens(self) -> int:
        """Output tokens in this response, over all sequences."""
        return sum(self.token_counts)


class Completion(msgspec.Struct, frozen=True):
    """A whole answer.

    Attributes:
        request_id: the caller's id, good for ``status``.
        first_chunk_s: seconds from the call to the first response, retries included.
        total_s: seconds from the call to the end.
        attempts: how often the request was sent.

    """

    request_id: str
    model: str
    texts: tuple[str, ...]
    finish_reasons: tuple[str | None, ...]
    prompt_tokens: int | None
    output_tokens: int
    first_chunk_s: float
    total_s: float
    attempts: int

    @property
    def text(self) -> str:
        """Text of the first sequence."""
        return self.texts[0] if self.texts else ""

    @property
    def finish_reason(self) -> str | None:
        """Why the first sequence ended."""
        return self.finish_reasons[0] if self.finish_reasons else None


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What the server knows of a request, live or ended.

    Attributes:
        status: ``live``, how it ended, or ``lost`` when the replica that served it is gone.
        times_ms: milliseconds since ``received`` by point of life; a point not reached is absent.
        received_at: Unix seconds.
        updated_at: Unix seconds of this record.
        node: the replica that serves or served it.
        cached_tokens: prompt tokens found in the engine's prefix cache; ``created_tokens`` were added to it.
        prompt: only where the server keeps it, as ``outputs``; else perhaps their hashes (SHA-256).
        truncated: whether these texts are only beginnings.

    """

    id: str
    caller_id: str
    model: str
    status: str
    stage: str
    received_at: float
    updated_at: float = 0.0
    node: str = ""
    priority: int = 0
    timeout: float | None = None
    tenant: str = ""
    kind: str = ""
    limits: dict[str, float] = {}
    times_ms: dict[str, float] = {}
    slug: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    created_tokens: int | None = None
    output_tokens: int = 0
    attempts: int = 0
    finish_reason: str | None = None
    prompt: str | None = None
    prompt_hash: str | None = None
    outputs: list[str] | None = None
    output_hashes: list[str] | None = None
    truncated: bool = False


class ServerState(msgspec.Struct, frozen=True, kw_only=True):
    """What the server is doing as a whole, of one model: counts are since its start, the others are of now.

    Attributes:
        live: requests that have not ended.
        engine: whether it is ``ready``, its restarts, and its load.
        counts: requests received, and ended by how they ended.
        admission: what admission counts, its limits, and what it refused.
        draining: whether new requests are refused because the model drains: it is being unloaded, or was told to.
        loop: how late the backend's event loop is.
        handlers: events by handler: handled, failed, dropped, and waiting.
        accounts: what is held, and the last self-check's finds.
        sinks: events by sink: sent, lost, and waiting.
        store: the shared store, if there is one.
        tracing: spans sent and lost, if tracing is on.
        prediction: how good predictions have been, if they are made.

    """

    live: int
    engine: dict[str, float | bool | str | None] = {}
    counts: dict[str, int] = {}
    admission: dict[str, Any] = {}
    draining: bool = False
    loop: dict[str, Any] = {}
    handlers: Any = None
    accounts: dict[str, Any] = {}
    sinks: dict[str, Any] = {}
    store: Any = None
    tracing: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None


class Readiness(msgspec.Struct, frozen=True):
    """The answer to whether the model takes requests."""

    ready: bool


class Cancellation(msgspec.Struct, frozen=True):
    """The answer to a cancel order; not ``cancelled`` when the request had already ended."""

    cancelled: bool
    id: str | None = None


class Sweep(msgspec.Struct, frozen=True):
    """The answer to an order to cancel everything: how many requests were live."""

    cancelled: int


class Drain(msgspec.Struct, frozen=True):
    """Whether a model drains.

    Attributes:
        draining: whether it refuses new requests.
        live: requests that have not ended.
        limit: seconds from the order on after which those that are left end with ``draining``.

    """

    draining: bool
    live: int
    limit: float
