"""One record per request: its id and five layers, held by one owner.

The coroutine that opened a :class:`Context` (``pipeline.py``) alone changes it and closes it. Anybody else who wants
something of the request calls :meth:`Context.interrupt`; the owner acts. :class:`Contexts` holds the live ones, bounded
by number, and hands what is to be kept of the ended ones to a store.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from triton_lifecycle.admission import Permit
from triton_lifecycle.admission.pace import Pace
from triton_lifecycle.bus import Publisher
from triton_lifecycle.chat import Conversation
from triton_lifecycle.embedding import Embedding
from triton_lifecycle.engine import Chunk, Sampling
from triton_lifecycle.errors import LifecycleError, QueueFull, UnknownRequest
from triton_lifecycle.events import ENDINGS, Event, Received, Slow, StageDone
from triton_lifecycle.store.memory import MemoryStore
from triton_lifecycle.store.records import SUMMARY, Records, Summary, read_summary
from triton_lifecycle.timeouts.deadline import Deadline
from triton_lifecycle.timeouts.limits import Limits
from triton_lifecycle.tracing.w3c import TraceContext

Clock = Callable[[], float]
LONG_KEY = 1024
"""Bytes."""
_encode = msgspec.msgpack.Encoder().encode


class Wants(msgspec.Struct, frozen=True):
    """Which optional outputs the caller asked for."""

    finish_reason: bool = False
    cumulative_logprob: bool = False
    logprobs: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    token_ids: bool = False


class Metadata(msgspec.Struct, frozen=True):
    """Layer 1: who asks, and how the request is to be treated."""

    caller_id: str
    stream: bool
    priority: int = 0
    timeout: float | None = None
    """Seconds the caller allows for the whole request; ``None`` when it set no bound."""
    tenant: str = ""
    traceparent: str = ""
    tracestate: str = ""
    partial: bool = False
    """Whether the caller takes what there is when time runs out, in the place of an error (unary answers only)."""


class Input(msgspec.Struct, frozen=True, weakref=True):
    """Layer 2: what is asked. Live requests that ask the same hold one object: put another there to change it."""

    source: str | Conversation | Embedding
    """A prompt to be continued, a conversation to be answered, or what is to be embedded."""
    parameters: Mapping[str, Any]
    """Sampling parameters as the caller gave them, before they were typed; cannot be changed."""
    wants: Wants
    exclude_prompt: bool
    """Whether a unary answer leaves out the prompt before the text."""
    images: tuple[str, ...] = ()
    """As they came: base64 texts, measured but not yet decoded."""
    continued: tuple[int, ...] = ()
    """Tokens of the answer that the caller has already: it goes on behind them."""


class Execution(msgspec.Struct):
    """Layer 3: where the request is and what it used."""

    stage: str = "open"
    attempts: int = 0
    sampling: Sampling | None = None
    prompt: str = ""
    """The prompt as text: as it came, or as the chat template wrote it."""
    prompt_tokens: int | None = None
    """How many tokens the prompt has for the engine, what images became included."""
    limits: dict[str, float] = {}
    slow: bool = False
    """Whether it takes longer than was predicted for nineteen in twenty."""
    times: dict[str, float] = {}
    """Clock time of each milestone: received, admitted, scheduled, first_token, finished."""


class KVCache(msgspec.Struct):
    """Layer 4: what the engine reports of its cache for this request."""

    cached_tokens: int | None = None
    """Prompt tokens found there: work shared with requests before."""
    created_tokens: int | None = None
    """Prompt tokens added to it."""


class Sequence(msgspec.Struct):
    """What one of the ``n`` sequences has produced so far."""

    text: list[str] = []
    token_ids: list[int] = []
    finish_reason: str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[Any] | None = None


class Output(msgspec.Struct):
    """Layer 5: what was produced."""

    sequences: list[Sequence] = []
    tokens: int = 0
    """Tokens taken from the engine, over all sequences."""


class Context:
    """A live request. See the module's docstring for who may do what."""

    __slots__ = (
        "_clock",
        "_input",
        "_inputs",
        "_publisher",
        "_seq",
        "call",
        "deadline",
        "execution",
        "held",
        "id",
        "images",
        "interrupted_at",
        "interruption",
        "kv",
        "last_response",
        "metadata",
        "model",
        "output",
        "permit",
        "sealed",
        "task",
        "trace",
        "unsent",
        "wall",
    )

    def __init__(
        self,
        call: Any,  # noqa: ANN401 - see triton.py
        model: str,
        publisher: Publisher,
        clock: Clock,
        inputs: Inputs,
        *,
        identity: tuple[str, float],
    ) -> None:
        self.id, self.wall = identity
        self.call = call
        self.model = model
        self.metadata = Metadata(caller_id="", stream=False)
        self.images: tuple[Any, ...] = ()
        """The input's images, decoded; in memory only, and part of no layer."""
        self._input: Input | None = None
        self._inputs = inputs
        self.execution = Execution()
        self.kv = KVCache()
        self.output = Output()
        self.held = ExitStack()
        """What is given back when the request ends, whatever the end."""
        self.deadline: Deadline | None = None
        self.permit: Permit | None = None
        self.last_response: dict[str, list[Any]] | None = None
        """The final response, put down by ``respond`` and sent once the request is closed."""
        self.unsent: deque[asyncio.Future[None]] | None = None
        """Responses on their way, where the owner does not wait for each."""
        self.interruption: LifecycleError | None = None
        self.interrupted_at: float | None = None
        """When, on the server's clock."""
        self.sealed = False
        self.trace: TraceContext | None = None
        """Where its span stands, if requests are traced."""
        self.task: asyncio.Task[Any] | None = None
        self._publisher = publisher
        self._clock = clock
        self._seq = 0

    @property
    def input(self) -> Input | None:
        """Layer 2, once it is known. What is put here is shared with other live requests that ask the same."""
        return self._input

    @input.setter  # noqa: A003 - the layer's name
    def input(self, asked: Input) -> None:
        self._input = self._inputs.share(asked)

    @property
    def attempt_id(self) -> str:
        """The engine's id for the present attempt."""
        return f"{self.id}-{self.execution.attempts}"

    @property
    def trace_headers(self) -> dict[str, str]:
        """What tells the engine where its own span belongs: below the request's, or else below the caller's."""
        if self.trace is not None:
            return self.trace.headers()
        given = {"traceparent": self.metadata.traceparent, "tracestate": self.metadata.tracestate}
        return {name: value for name, value in given.items() if value}

    def now(self) -> float:
        """Return the server's monotonic clock, in seconds."""
        return self._clock()

    def wants(self, event_type: type[Event]) -> bool:
        """Whether an event of this type would reach anybody."""
        return self._publisher.wants(event_type)

    def publish(self, event_type: type[Event], *, at: float | None = None, **fields: Any) -> None:  # noqa: ANN401
        """Publish one event of this request; numbers are given only to events that somebody sees."""
        if self._publisher.wants(event_type):
            event = event_type(request_id=self.id, seq=self._seq, at=self._clock() if at is None else at, **fields)
            self._seq += 1
            self._publisher.publish(event)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Be in a stage, and tell how long it took once it let the request pass."""
        self.execution.stage = name
        began = self._clock()
        yield
        self.publish(StageDone, stage=name, seconds=self._clock() - began)

    def start_deadline(self, limits: Limits) -> None:
        """Let time run out by these limits, counted from when the request was received, until it ends."""
        self.execution.limits = limits.named()
        began = self.execution.times.get("received")
        self.deadline = Deadline(limits, self.interrupt, self._tell_slow, clock=self._clock, began=began)
        self.held.callback(self.deadline.close)

    def adjust_deadline(self, limits: Limits, silence: Callable[[], float]) -> None:
        """Replace the limits by others, which count from the beginning too."""
        self.execution.limits = limits.named()
        if self.deadline is not None:
            self.deadline.adjust(limits, silence)

    def _tell_slow(self, after: float, tokens: int) -> None:
        self.execution.slow = True
        self.publish(Slow, after=after, tokens=tokens)

    def mark(self, milestone: str, at: float | None = None) -> float:
        """Write down when a milestone was reached; the first time counts."""
        return self.execution.times.setdefault(milestone, self._clock() if at is None else at)

    def absorb(self, chunk: Chunk) -> int:
        """Add a chunk to the output and KV layers; return how many tokens it brought."""
        if chunk.cached_tokens is not None:
            self.kv.cached_tokens = chunk.cached_tokens
        if chunk.prompt_tokens is not None and not self.output.tokens:
            self.execution.prompt_tokens = chunk.prompt_tokens
        if chunk.created_tokens is not None:
            self.kv.created_tokens = chunk.created_tokens
        gained = 0
        for delta in chunk.deltas:
            while len(self.output.sequences) <= delta.index:
                self.output.sequences.append(Sequence())
            sequence = self.output.sequences[delta.index]
            sequence.text.append(delta.text)
            sequence.token_ids.extend(delta.token_ids)
            sequence.finish_reason = delta.finish_reason
            sequence.cumulative_logprob = delta.cumulative_logprob
            if delta.logprobs is not None:
                sequence.logprobs = (sequence.logprobs or []) + list(delta.logprobs)
            gained += len(delta.token_ids)
        self.output.tokens += gained
        return gained

    def interrupt(self, error: LifecycleError) -> bool:
        """Ask the owner to end the request with ``error``; the first asker wins. Event-loop thread only.

        Returns:
            Whether the request will end with this error; false when it has ended or another interruption came first.

        """
        if self.sealed or self.interruption is not None:
            return False
        self.interruption, self.interrupted_at = error, self._clock()
        if self.task is not None:
            self.task.cancel()
        return True

    def seal(self) -> None:
        """From here on the request ends as it stands; interruptions come too late."""
        self.sealed = True


def fresh_identity() -> tuple[str, float]:
    """Return an id that no other request has, and the calendar's time in Unix seconds."""
    return secrets.token_hex(16), time.time()


class Inputs:
    """The inputs of live requests: equal ones are one object, which goes with the last request that holds it."""

    def __init__(self) -> None:
        self._shared: WeakValueDictionary[tuple[str, bytes], Input] = WeakValueDictionary()

    def __len__(self) -> int:
        """Return how many different inputs live requests hold."""
        return len(self._shared)

    def share(self, asked: Input) -> Input:
        """Return the input that is equal to ``asked`` and held already, or ``asked`` itself, its parameters sealed."""
        if asked.images:
            # Megabytes to compare, of which hardly two are equal.
            return asked
        parameters = dict(asked.parameters)
        text = asked.source if isinstance(asked.source, str) else ""
        try:
            # Encoded, since True and 1 and 1.0 are equal and yet not the same.
            rest = _encode(msgspec.structs.replace(asked, source="" if text else asked.source, parameters=parameters))
        except TypeError:
            # A plug-in has put something in that only it knows.
            return asked
        # A text is its own key, and of what is long otherwise there is the hash: nothing is held twice.
        key = (text, rest if len(rest) <= LONG_KEY else hashlib.blake2b(rest).digest())
        held = self._shared.get(key)
        if held is None:
            held = msgspec.structs.replace(asked, parameters=MappingProxyType(parameters))
            self._shared[key] = held
        return held


class Contexts:
    """The live requests, and the way of the ended ones into the store of this process.

    Args:
        max_live: requests live at once; what comes beyond is refused.
        ended: where ended requests go.
        records: makes what is stored of them.
        clock: monotonic seconds.
        identity: gives each request its id and its calendar time.

    """

    def __init__(
        self,
        *,
        max_live: int = 10_000,
        ended: MemoryStore | None = None,
        records: Records | None = None,
        clock: Clock = time.monotonic,
        identity: Callable[[], tuple[str, float]] = fresh_identity,
    ) -> None:
        self.max_live = max_live
        self.records = records or Records(layered=False)
        self.ended = MemoryStore({SUMMARY: 3600.0}, max_requests=10_000, clock=clock) if ended is None else ended
        self.on_end: Callable[[], None] | None = None
        """Told of each end by whoever writes ended requests to another store; until then they wait here for it."""
        self._clock = clock
        self._identity = identity
        self._live: dict[str, Context] = {}
        self._inputs = Inputs()
        self._pace = Pace(clock)
        self.counts: Counter[str] = Counter({"received": 0, **dict.fromkeys(ENDINGS.values(), 0)})
        self.deadline_moves: Counter[str] = Counter()
        """How often the deadlines of ended requests had moved, by what moved them."""

    def __len__(self) -> int:
        """Return how many requests are live."""
        return len(self._live)

    def live(self) -> list[Context]:
        """Return the live requests, oldest first."""
        return list(self._live.values())

    def open(self, call: Any, model: str, publisher: Publisher) -> Context:  # noqa: ANN401 - see triton.py
        """Make a request live and publish that it was received. The caller asks :meth:`refusal` next."""
        ctx = Context(call, model, publisher, self._clock, self._inputs, identity=self._identity())
        ctx.metadata = Metadata(caller_id=call.id, stream=False)
        self._live[ctx.id] = ctx
        if call.id:
            self.ended.claim(call.id, ctx.id)
        self.counts["received"] += 1
        ctx.publish(Received, at=ctx.mark("received"), caller_id=call.id, model=model, wall=ctx.wall)
        return ctx

    def refusal(self) -> QueueFull | None:
        """Return why the request that was just opened may not stay; ``None`` when it may."""
        if len(self._live) <= self.max_live:
            return None
        return QueueFull(
            f"{self.max_live} requests are live, and no more are held (context_management.max_contexts)",
            retry_after=self._pace.retry_after,
        )

    def close(self, ctx: Context, event_type: type[Event], **fields: Any) -> None:  # noqa: ANN401 - the event's fields
        """End a request: exactly once, with exactly one ending event."""
        if self._live.pop(ctx.id, None) is None:
            raise RuntimeError(f"request {ctx.id} was closed twice")
        ctx.seal()
        self._pace.tick()
        status = ENDINGS[event_type]
        self.counts[status] += 1
        if ctx.deadline is not None:
            self.deadline_moves.update(ctx.deadline.moves)
        entry = self.records.ended(ctx, "finished" if status == "completed" else status, fields.get("slug"))
        self.ended.put(entry, pinned=self.on_end is not None)
        if self.on_end is not None:
            self.on_end()
        ctx.publish(event_type, at=ctx.execution.times.get("finished"), **fields)

    def find_live(self, request_id: str) -> Context | None:
        """Return a live request, by our id or the caller's latest use of its own."""
        return self._live.get(request_id) or self._live.get(self.ended.claimant(request_id) or "")

    def find(self, request_id: str) -> Context | Summary:
        """Return a live request or the summary of an ended one that is kept in this process.

        Raises:
            UnknownRequest: no such request is live or kept here.

        """
        if (ctx := self.find_live(request_id)) is not None:
            return ctx
        for key in (request_id, self.ended.claimant(request_id)):
            if key and (found := read_summary(key, self.ended.get(key))) is not None:
                return found
        raise UnknownRequest(f"no request with id {request_id!r} is live or kept here")
