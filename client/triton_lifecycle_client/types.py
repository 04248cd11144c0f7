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
    request_id: str
    model: str
    parameters: Mapping[str, Parameter]


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request, ready for a transport.

    Attributes:
        timeout: seconds the server may take in all.

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
    parameters: dict[str, Parameter] = {}


class ControlRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A question about, or an order to, the server's own records instead of a prompt."""

    model: str
    control: Literal["status", "cancel", "state"]
    control_id: str | None = None
    timeout: float = 5.0


class Chunk(msgspec.Struct, frozen=True):
    """What one response brought. Every tuple has one element per sequence (``n`` > 1), empty if the server sent none.

    Attributes:
        texts: new text (streaming) or the whole text.
        finish_reasons: ``None`` until a sequence has ended.
        token_counts: output tokens in this response.
        prompt_tokens: tokens of the prompt.

    """

    texts: tuple[str, ...] = ()
    finish_reasons: tuple[str | None, ...] = ()
    token_counts: tuple[int, ...] = ()
    prompt_tokens: int | None = None

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
        times_ms: milliseconds since ``received`` by point of life; a point not reached is absent.
        received_at: Unix seconds.

    """

    id: str
    caller_id: str
    model: str
    status: str
    stage: str
    received_at: float
    times_ms: dict[str, float] = {}
    slug: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    attempts: int = 0
    finish_reason: str | None = None


class ServerState(msgspec.Struct, frozen=True, kw_only=True):
    """What the server is doing as a whole: ``counts`` are since its start, the others are of now."""

    live: int
    engine: dict[str, float | bool | None] = {}
    counts: dict[str, int] = {}


class Cancellation(msgspec.Struct, frozen=True):
    """The answer to a cancel order; not ``cancelled`` when the request had already ended."""

    cancelled: bool
    id: str | None = None
