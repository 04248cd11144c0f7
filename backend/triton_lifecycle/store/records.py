"""What is stored of a request: five layers, each a JSON object, and the summary that is put together from them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from triton_lifecycle.chat import Conversation
from triton_lifecycle.config import Keep
from triton_lifecycle.store import LAYERS, Entry

if TYPE_CHECKING:
    from triton_lifecycle.context import Context

SUMMARY: Final = "summary"
"""The one layer that is kept when ``enable_layered_storage`` is off."""

MAX_TEXT_BYTES: Final = 64 * 1024
"""Of a layer's texts together; what is longer is kept in part, with the hash of the whole."""
MAX_PARAMETERS_BYTES: Final = 16 * 1024


class MetadataLayer(msgspec.Struct, frozen=True, gc=False):
    """Who asked, how it is treated, and how far it came."""

    id: str
    caller_id: str
    model: str
    node: str
    """The replica that serves it."""
    status: str
    """``live``, or how it ended."""
    slug: str | None
    stream: bool
    priority: int
    timeout: float | None
    tenant: str
    received_at: float
    """Unix seconds."""
    updated_at: float
    """Unix seconds of this record."""
    times_ms: dict[str, float]
    """Milestones, in ms since it was received."""


class InputLayer(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What was asked. Texts are in it only when the configuration keeps them."""

    kind: str
    """``prompt``, ``messages`` or ``embedding``."""
    prompt_tokens: int | None = None
    parameters: dict[str, Any] = {}
    """Sampling parameters as given: numbers and switches; texts and lists only together with the prompt."""
    prompt: str | None = None
    prompt_hash: str | None = None
    """SHA-256 of the prompt in UTF-8."""
    truncated: bool = False
    """Whether ``prompt`` is only its beginning."""


class ExecutionLayer(msgspec.Struct, frozen=True, gc=False):
    """Where it is or was."""

    stage: str
    attempts: int
    limits: dict[str, float]
    """Seconds by limit."""
    generated_tokens: int


class KVCacheLayer(msgspec.Struct, frozen=True, gc=False):
    """What the engine reported of its cache. vLLM reports tokens, and no blocks by request."""

    cached_tokens: int | None
    """Prompt tokens found in the cache: work shared with requests before."""
    created_tokens: int | None
    """Prompt tokens added to it."""


class OutputLayer(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What was made, one item a sequence."""

    tokens: int
    finish_reasons: list[str | None] = []
    cumulative_logprobs: list[float | None] = []
    texts: list[str] | None = None
    hashes: list[str] | None = None
    truncated: bool = False


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What ``status`` answers. What stood in a layer whose time is over has its default."""

    id: str
    caller_id: str = ""
    model: str = ""
    node: str = ""
    status: str = "unknown"
    stage: str = ""
    slug: str | None = None
    stream: bool = False
    priority: int = 0
    timeout: float | None = None
    tenant: str = ""
    received_at: float = 0.0
    updated_at: float = 0.0
    times_ms: dict[str, float] = {}
    kind: str = ""
    prompt_tokens: int | None = None
    parameters: dict[str, Any] = {}
    limits: dict[str, float] = {}
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
    """Whether ``prompt`` or ``outputs`` hold only beginnings."""


_KINDS: Final = {
    "metadata": MetadataLayer,
    "input": InputLayer,
    "execution": ExecutionLayer,
    "kv_cache": KVCacheLayer,
    "output": OutputLayer,
}
_encode = msgspec.json.Encoder().encode
_decoders: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    **{name: msgspec.json.Decoder(kind) for name, kind in _KINDS.items()},
    SUMMARY: msgspec.json.Decoder(Summary),
}


class Records:
    """Turns contexts into what is stored of them.

    Args:
        node: this replica's name.
        layered: whether there are five layers, or only a summary without texts.
        keep_prompts: what is kept of prompts.
        keep_outputs: what is kept of the texts that were made.

    """

    def __init__(
        self, node: str = "", *, layered: bool = True, keep_prompts: Keep = "no", keep_outputs: Keep = "no"
    ) -> None:
        self.node = node
        self._layered = layered
        self._keep_prompts = keep_prompts if layered else "no"
        self._keep_outputs = keep_outputs if layered else "no"

    def ended(self, ctx: Context, status: str, slug: str | None) -> Entry:
        """Return all layers of a request that has ended."""
        found = {name: self._layer(ctx, name, status, slug) for name in LAYERS}
        true = {name: layer for name, layer in found.items() if layer is not None}
        if self._layered:
            layers = {name: _encode(layer) for name, layer in true.items()}
        else:
            layers = {SUMMARY: _encode(combine(ctx.id, true))}
        return Entry(ctx.id, layers, ctx.metadata.caller_id, ctx.now())

    def live(self, ctx: Context, names: Mapping[str, Any]) -> Entry:
        """Return some layers of a live request, those that are true already."""
        found = {name: self._layer(ctx, name, "live", None) for name in names}
        layers = {name: _encode(layer) for name, layer in found.items() if layer is not None}
        return Entry(ctx.id, layers, ctx.metadata.caller_id, ctx.now())

    def summary(self, ctx: Context) -> Summary:
        """Return what is to be told of a live request."""
        found = {name: self._layer(ctx, name, "live", None) for name in LAYERS}
        return combine(ctx.id, {name: layer for name, layer in found.items() if layer is not None})

    def _layer(self, ctx: Context, name: str, status: str, slug: str | None) -> Any:  # noqa: ANN401 - one of five
        match name:
            case "metadata":
                return self._metadata(ctx, status, slug)
            case "input":
                return self._input(ctx, live=status == "live")
            case "execution":
                execution = ctx.execution
                return ExecutionLayer(execution.stage, execution.attempts, execution.limits, ctx.output.tokens)
            case "kv_cache":
                kv = ctx.kv
                reported = kv.cached_tokens is not None or kv.created_tokens is not None
                return KVCacheLayer(kv.cached_tokens, kv.created_tokens) if reported else None
            case _:
                return self._output(ctx, live=status == "live") if ctx.output.sequences else None

    def _metadata(self, ctx: Context, status: str, slug: str | None) -> MetadataLayer:
        metadata, times = ctx.metadata, ctx.execution.times
        received = times.get("received", 0.0)
        return MetadataLayer(
            id=ctx.id,
            caller_id=metadata.caller_id,
            model=ctx.model,
            node=self.node,
            status=status,
            slug=slug,
            stream=metadata.stream,
            priority=metadata.priority,
            timeout=metadata.timeout,
            tenant=metadata.tenant,
            received_at=ctx.wall,
            updated_at=time.time(),
            times_ms={name: round((at - received) * 1e3, 3) for name, at in times.items()},
        )

    def _input(self, ctx: Context, *, live: bool) -> InputLayer | None:
        asked = ctx.input
        if asked is None:
            return None
        source = asked.source
        kind = "prompt" if isinstance(source, str) else "messages" if isinstance(source, Conversation) else "embedding"
        plain = {name: value for name, value in asked.parameters.items() if isinstance(value, bool | int | float)}
        layer = InputLayer(kind, ctx.execution.prompt_tokens, plain)
        if live or self._keep_prompts == "no":
            return layer
        text = ctx.execution.prompt or (source if isinstance(source, str) else _encode(source).decode())
        if self._keep_prompts == "hash":
            return msgspec.structs.replace(layer, prompt_hash=digest(text))
        kept = beginning(text, MAX_TEXT_BYTES)
        cut = len(kept) < len(text)
        whole = dict(asked.parameters)
        return msgspec.structs.replace(
            layer,
            parameters=whole if len(_encode(whole)) <= MAX_PARAMETERS_BYTES else plain,
            prompt=kept,
            prompt_hash=digest(text) if cut else None,
            truncated=cut,
        )

    def _output(self, ctx: Context, *, live: bool) -> OutputLayer:
        made = ctx.output.sequences
        layer = OutputLayer(
            ctx.output.tokens,
            [sequence.finish_reason for sequence in made],
            [sequence.cumulative_logprob for sequence in made],
        )
        if live or self._keep_outputs == "no":
            return layer
        texts = ["".join(sequence.text) for sequence in made]
        if self._keep_outputs == "hash":
            return msgspec.structs.replace(layer, hashes=[digest(text) for text in texts])
        kept = [beginning(text, MAX_TEXT_BYTES // len(texts)) for text in texts]
        cut = kept != texts
        return msgspec.structs.replace(
            layer, texts=kept, hashes=[digest(text) for text in texts] if cut else None, truncated=cut
        )


def versions(ctx: Context) -> dict[str, Hashable]:
    """Return for each layer of a live request something cheap that differs whenever the layer does."""
    execution, tokens = ctx.execution, ctx.output.tokens
    return {
        "metadata": (ctx.metadata, len(execution.times)),
        "input": (ctx.input is None, execution.prompt_tokens),
        "execution": (execution.stage, execution.attempts, tokens),
        "kv_cache": (ctx.kv.cached_tokens, ctx.kv.created_tokens),
        "output": tokens,
    }


def read_summary(request_id: str, layers: Mapping[str, bytes]) -> Summary | None:
    """Put a summary together from what a store holds; ``None`` when it holds nothing."""
    known = {name: _decoders[name].decode(value) for name, value in layers.items() if name in _decoders}
    if SUMMARY in known:
        whole: Summary = known[SUMMARY]
        return whole
    return combine(request_id, known) if known else None


def combine(request_id: str, layers: Mapping[str, Any]) -> Summary:
    """Put a summary together from layers."""
    fields: dict[str, Any] = {"id": request_id}
    if (metadata := layers.get("metadata")) is not None:
        fields |= msgspec.structs.asdict(metadata)
    if (asked := layers.get("input")) is not None:
        fields |= msgspec.structs.asdict(asked)
    if (execution := layers.get("execution")) is not None:
        fields |= {"stage": execution.stage, "attempts": execution.attempts, "limits": execution.limits}
        fields["output_tokens"] = execution.generated_tokens
    if (kv := layers.get("kv_cache")) is not None:
        fields |= msgspec.structs.asdict(kv)
    if (output := layers.get("output")) is not None:
        fields |= {"output_tokens": output.tokens, "outputs": output.texts, "output_hashes": output.hashes}
        fields["truncated"] = output.truncated or fields.get("truncated", False)
        if any(output.finish_reasons):
            fields["finish_reason"] = ",".join(reason or "-" for reason in output.finish_reasons)
    return Summary(**fields)


def digest(text: str) -> str:
    """Return the SHA-256 of a text in UTF-8, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def beginning(text: str, most: int) -> str:
    """Return as much of a text as has at most ``most`` bytes in UTF-8."""
    if len(text) * 4 <= most:
        return text
    return text.encode("utf-8", "surrogatepass")[:most].decode("utf-8", "ignore")
