"""The engine seam: what the pipeline needs of whatever makes the tokens.

``vllm.py`` and ``simulated.py`` stand behind it and pass one contract suite (``tests/contract``).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from triton_lifecycle.errors import ConfigError, PromptTooLong


class Delta(msgspec.Struct, frozen=True, gc=False):
    """What one sequence of a request gained since the last chunk."""

    index: int
    """Which of the ``n`` sequences, from 0."""
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    """``None`` until the sequence has ended; then ``stop``, ``length``, …"""
    cumulative_logprob: float | None = None
    logprobs: Any = None
    """One mapping (token id → logprob record) per token of this delta; ``None`` when not asked for."""


class Chunk(msgspec.Struct, frozen=True):
    """One step's news about a request: merged deltas of its sequences since the last chunk was taken."""

    deltas: tuple[Delta, ...]
    finished: bool
    """True on the last chunk of the request, and only there."""
    scheduled_at: float | None = None
    """When the engine first ran the request, on the ``time.monotonic`` clock; known from the first chunk on."""
    cached_tokens: int | None = None
    """Prompt tokens that were found in the prefix cache."""
    prompt_tokens: int | None = None
    """How many tokens the engine took as the prompt, what images became included; ``None`` where it does not say."""
    created_tokens: int | None = None
    """Prompt tokens whose keys and values this request added to the prefix cache."""


class Sampling(msgspec.Struct, frozen=True):
    """Sampling parameters, parsed once and proved legal by the engine that will use them."""

    n: int
    max_tokens: int | None
    """Per sequence; ``None`` means up to the model's length."""
    native: Any
    """The engine's own object (vLLM's ``SamplingParams``)."""
    lora: Any = None
    """The engine's own object for the adapter to use (vLLM's ``LoRARequest``)."""
    structured: bool = False
    """Whether a schema, expression or grammar binds the text, which :meth:`Engine.prove` must have passed."""


class EngineRequest(msgspec.Struct, frozen=True):
    """What an engine is asked to do in one attempt."""

    id: str
    """Ours, ``<uuid>-<attempt>``; never the caller's, which may repeat."""
    token_ids: list[int]
    sampling: Sampling
    priority: int = 0
    """vLLM's order: lower is sooner."""
    images: tuple[Any, ...] = ()
    """``PIL.Image.Image`` in RGB, in the order of their places in the prompt; ``token_ids`` has one place for each."""
    made: int = 0
    """How many of the token ids, at their end, are the answer's own: an earlier attempt made them."""
    trace: Mapping[str, str] | None = None
    """W3C headers that name the span above the engine's own."""

    def after(self, made: Sequence[int], native: Any) -> EngineRequest:  # noqa: ANN401 - the engine's own
        """Return the request whose prompt goes on with the tokens ``made``, under other native parameters."""
        sampling = msgspec.structs.replace(self.sampling, native=native)
        ids = [*self.token_ids, *made]
        return msgspec.structs.replace(self, token_ids=ids, sampling=sampling, made=self.made + len(made))


class Remainder(msgspec.Struct, frozen=True):
    """How an answer goes on after some of its tokens."""

    request: EngineRequest
    """Its prompt is the old one and the first :attr:`kept` tokens of the answer."""
    kept: int
    """The tokens behind them come anew: the characters that they are part of were not complete."""


class EmbeddingRequest(msgspec.Struct, frozen=True):
    """Token ids that an engine is asked to turn into a vector."""

    id: str
    token_ids: list[int]
    dimensions: int | None = None
    priority: int = 0
    trace: Mapping[str, str] | None = None


class Load(msgspec.Struct, frozen=True):
    """How busy the engine is."""

    running: int
    waiting: int
    kv_usage: float
    """Share of the KV cache in use, 0…1."""
    requests: int
    """Requests the engine knows by id; 0 when idle."""
    preemptions: int = 0
    """Sequences that lost their KV blocks to another, so far; this and what follows may begin anew with a restart."""
    cache_queries: int = 0
    """Prompt tokens that were looked up in the prefix cache."""
    cache_hits: int = 0
    """Those of them that were found."""
    output_tokens: int = 0
    """Tokens that were made."""


class Limits(msgspec.Struct, frozen=True):
    """What the loaded model allows."""

    max_model_len: int
    """Prompt and output tokens together."""
    vocab_size: int
    tasks: frozenset[str] = frozenset({"generate"})
    """``generate``, ``embed``, and what else the engine names; only these two are served."""
    images: int = 0
    """How many a prompt may hold; 0 for a model that takes text alone."""
    max_num_seqs: int = 256
    """Sequences that run at once; further ones wait."""
    by_priority: bool = True
    """Whether what waits is taken by priority; else in the order of arrival."""


class Engine(Protocol):
    """An engine. All methods run on the event loop and never block it.

    Errors: :class:`~triton_lifecycle.errors.RequestError` for what the caller did wrong,
    :class:`~triton_lifecycle.errors.GenerationFailed` when the engine failed on one request and lives,
    :class:`~triton_lifecycle.errors.EngineDied` when it is gone.
    """

    @property
    def limits(self) -> Limits:
        """The loaded model's limits; valid after :meth:`start`."""
        ...

    @property
    def sampling_fields(self) -> Mapping[str, Any]:
        """Name → type of every sampling parameter that this engine accepts."""
        ...

    async def start(self) -> None:
        """Load the model and become ready. Raises ``ConfigError`` when it cannot."""
        ...

    async def stop(self) -> None:
        """End everything that :meth:`start` began; safe to call twice, and after death."""
        ...

    def sampling(self, values: Mapping[str, Any]) -> Sampling:
        """Build sampling parameters from typed values; raises ``InvalidInput`` naming the field."""
        ...

    async def prove(self, sampling: Sampling, limit: float) -> None:
        """Check what binds the text, off the loop, within ``limit`` seconds; raises ``InvalidInput`` saying why not."""
        ...

    async def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        """Write a conversation out by the model's chat template, ready for the assistant's answer.

        A message's ``content`` is a text, or, where it holds images, a list of parts: ``{"type": "text", "text": …}``
        and ``{"type": "image"}``, for which the model's own place for an image is written.

        Raises:
            Unsupported: the model has no chat template, or that has no place for an image.
            InvalidInput: the template refuses the conversation.

        """
        ...

    async def tokenize(self, prompt: str, *, special: bool = True, room: int = 1, images: int = 0) -> list[int]:
        """Return the prompt's token ids, off the loop when it is long.

        Args:
            prompt: the text.
            special: whether to add the tokens that open a prompt; a chat template writes them itself.
            room: how many tokens must fit behind them; 0 for an embedding.
            images: how many the prompt must have a place for, in models that want one written.

        Raises:
            PromptTooLong: they do not fit.
            InvalidInput: it has not one place for each image.

        """
        ...

    async def embed(self, request: EmbeddingRequest) -> list[float]:
        """Return the vector; a cancel takes the request off the engine."""
        ...

    def generate(self, request: EngineRequest) -> AsyncGenerator[Chunk, None]:
        """Yield chunks until one is ``finished``. Closing the generator early aborts the request in the engine."""
        ...

    async def restart(self) -> None:
        """End what is left of the engine and load it again; sampling, rendering and tokenizing go on meanwhile.

        Raises:
            ConfigError: it cannot be loaded.

        """
        ...

    def remainder(self, request: EngineRequest, made: Sequence[int]) -> Remainder | None:
        """Return the request for what follows the tokens ``made``, or ``None`` where that would not be exact.

        Exact means: what a continued answer says has the same probability as without the interruption, and at
        temperature 0 the same tokens. It is not for what depends on the answer's past in another way than through its
        tokens: several sequences, seeds, stop strings, penalties on output, grammars.
        """
        ...

    def repeatable(self, sampling: Sampling) -> bool:
        """Whether a second run makes the same tokens: at temperature 0, and with a seed."""
        ...

    def load(self) -> Load:
        """Return the load as last reported."""
        ...

    @property
    def alive(self) -> bool:
        """False from the moment the engine's process is known to be gone."""
        ...


def too_long(found: int, limit: int, room: int = 1, *, at_least: bool = False, images: bool = False) -> PromptTooLong:
    """Return the error for a prompt of ``found`` tokens (or more) where a model takes ``limit``."""
    if not room:
        return PromptTooLong(f"embedding_request.input: {found} tokens; the model takes at most {limit}")
    count = f"at least {found}" if at_least else str(found)
    seen = ", its images included" if images else ""
    return PromptTooLong(
        f"text_input: the prompt has {count} tokens{seen}; the model takes {limit} together with the output, "
        f"so at most {limit - room}"
    )


def open_engine(name: str, settings: dict[str, Any], directory: str) -> Engine:
    """Choose the engine by name: ``vllm`` or ``simulated``.

    Args:
        name: which engine.
        settings: the content of the model's ``model.json``.
        directory: the model version's directory, against which relative paths are looked up first.

    """
    if name == "vllm":
        from triton_lifecycle.engine.vllm import VLLMEngine

        return VLLMEngine(settings, directory)
    if name == "simulated":
        from triton_lifecycle.engine.simulated import SimulatedEngine

        return SimulatedEngine.from_settings(settings)
    raise ConfigError(f"engine {name!r} is unknown; the parameter LIFECYCLE_ENGINE takes 'vllm' or 'simulated'")
