"""One record per request: its id and five layers, held by one owner.

The coroutine that opened a :class:`Context` (``pipeline.py``) alone changes it and closes it. Anybody else who wants
something of the request calls :meth:`Context.interrupt`; the owner acts. :class:`Contexts` holds the live ones and,
bounded by number and age, the summaries of those that ended.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec

from triton_lifecycle.bus import Publisher
from triton_lifecycle.chat import Conversation
from triton_lifecycle.embedding import Embedding
from triton_lifecycle.engine import Chunk, Sampling
from triton_lifecycle.errors import LifecycleError, UnknownRequest
from triton_lifecycle.events import ENDINGS, Event, Received, StageDone
from triton_lifecycle.timeouts.deadline import Deadline
from triton_lifecycle.timeouts.limits import Limits

Clock = Callable[[], float]


class Wants(msgspec.Struct, frozen=True):
    """Which optional outputs the caller asked for."""

    finish_reason: bool = False
    cumulative_logprob: bool = False
    logprobs: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False


class Metadata(msgspec.Struct, frozen=True):
    """Layer 1: who asks, and how the request is to be treated."""

    caller_id: str
    stream: bool
    priority: int = 0
    timeout: float | None = None
    """Seconds the caller allows for the whole request; ``None`` when it set no bound."""
    tenant: str = ""
    traceparent: str = ""


class Input(msgspec.Struct, frozen=True):
    """Layer 2: what is asked."""

    source: str | Conversation | Embedding
    """A prompt to be continued, a conversation to be answered, or what is to be embedded."""
    parameters: dict[str, Any]
    """Sampling parameters as the caller gave them, before they were typed."""
    wants: Wants
    exclude_prompt: bool
    """Whether a unary answer leaves out the prompt before the text."""


class Execution(msgspec.Struct):
    """Layer 3: where the request is and what it used."""

    stage: str = "open"
    attempts: int = 0
    sampling: Sampling | None = None
    prompt: str = ""
    """The prompt as text: as it came, or as the chat template wrote it."""
    prompt_token_ids: list[int] | None = None
    limits: dict[str, float] = {}
    times: dict[str, float] = {}
    """Clock time of each milestone: received, admitted, scheduled, first_token, finished."""


class KVCache(msgspec.Struct):
    """Layer 4: what the engine reports of its cache for this request."""

    cached_tokens: int | None = None


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
        "_publisher",
        "_seq",
        "call",
        "deadline",
        "execution",
        "held",
        "id",
        "input",
        "interruption",
        "kv",
        "last_response",
        "metadata",
        "model",
        "output",
        "sealed",
        "task",
        "wall",
    )

    def __init__(self, call: Any, model: str, publisher: Publisher, clock: Clock) -> None:  # noqa: ANN401 - see triton.py
        self.id = uuid.uuid4().hex
        self.call = call
        self.model = model
        self.metadata = Metadata(caller_id="", stream=False)
        self.input: Input | None = None
        self.execution = Execution()
        self.kv = KVCache()
        self.output = Output()
        self.held = ExitStack()
        """What is given back when the request ends, whatever the end."""
        self.deadline: Deadline | None = None
        self.last_response: dict[str, list[Any]] | None = None
        """The final response, put down by ``respond`` and sent once the request is closed."""
        self.interruption: LifecycleError | None = None
        self.sealed = False
        self.task: asyncio.Task[Any] | None = None
        self.wall = time.time()
        self._publisher = publisher
        self._clock = clock
        self._seq = 0

    @property
    def attempt_id(self) -> str:
        """The engine's id for the present attempt."""
        return f"{self.id}-{self.execution.attempts}"

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
        """Let time run out by these limits from now on, until the request ends."""
        self.execution.limits = limits.named()
        self.deadline = Deadline(limits, self.interrupt)
        self.held.callback(self.deadline.close)

    def mark(self, milestone: str, at: float | None = None) -> float:
        """Write down when a milestone was reached; the first time counts."""
        return self.execution.times.setdefault(milestone, self._clock() if at is None else at)

    def absorb(self, chunk: Chunk) -> int:
        """Add a chunk to the output and KV layers; return how many tokens it brought."""
        if chunk.cached_tokens is not None:
            self.kv.cached_tokens = chunk.cached_tokens
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
        self.interruption = error
        if self.task is not None:
            self.task.cancel()
        return True

    def seal(self) -> None:
        """From here on the request ends as it stands; interruptions come too late."""
        self.sealed = True

    def summary(self, status: str = "live", slug: str | None = None) -> Summary:
        """Return what is worth keeping of the request as it is now."""
        received = self.execution.times.get("received", 0.0)
        reasons = [sequence.finish_reason for sequence in self.output.sequences]
        return Summary(
            id=self.id,
            caller_id=self.metadata.caller_id,
            model=self.model,
            status=status,
            stage=self.execution.stage,
            slug=slug,
            received_at=self.wall,
            times_ms={name: round((at - received) * 1e3, 3) for name, at in self.execution.times.items()},
            prompt_tokens=None if self.execution.prompt_token_ids is None else len(self.execution.prompt_token_ids),
            cached_tokens=self.kv.cached_tokens,
            output_tokens=self.output.tokens,
            attempts=self.execution.attempts,
            finish_reason=",".join(reason or "-" for reason in reasons) if any(reasons) else None,
        )


class Summary(msgspec.Struct, frozen=True):
    """What remains of a request after its end, and what ``status`` answers."""

    id: str
    caller_id: str
    model: str
    status: str
    stage: str
    slug: str | None
    received_at: float
    times_ms: dict[str, float]
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int
    attempts: int
    finish_reason: str | None


class Contexts:
    """The live requests, and the summaries of those that ended.

    Args:
        max_kept: summaries kept at most; the oldest goes first.
        keep_seconds: how long a summary is kept.
        clock: monotonic seconds.

    """

    def __init__(self, *, max_kept: int = 10_000, keep_seconds: float = 3600.0, clock: Clock = time.monotonic) -> None:
        self._max_kept = max_kept
        self._keep_seconds = keep_seconds
        self._clock = clock
        self._live: dict[str, Context] = {}
        self._ended: OrderedDict[str, tuple[float, Summary]] = OrderedDict()
        self._by_caller: dict[str, str] = {}
        self.counts: Counter[str] = Counter({"received": 0, **dict.fromkeys(ENDINGS.values(), 0)})

    def __len__(self) -> int:
        """Return how many requests are live."""
        return len(self._live)

    def live(self) -> list[Context]:
        """Return the live requests, oldest first."""
        return list(self._live.values())

    def open(self, call: Any, model: str, publisher: Publisher) -> Context:  # noqa: ANN401 - see triton.py
        """Make a request live and publish that it was received."""
        ctx = Context(call, model, publisher, self._clock)
        ctx.metadata = Metadata(caller_id=call.id, stream=False)
        self._live[ctx.id] = ctx
        if call.id:
            self._by_caller[call.id] = ctx.id
        self.counts["received"] += 1
        ctx.publish(Received, at=ctx.mark("received"), caller_id=call.id, model=model, wall=ctx.wall)
        return ctx

    def close(self, ctx: Context, event_type: type[Event], **fields: Any) -> None:  # noqa: ANN401 - the event's fields
        """End a request: exactly once, with exactly one ending event."""
        if self._live.pop(ctx.id, None) is None:
            raise RuntimeError(f"request {ctx.id} was closed twice")
        ctx.seal()
        status = ENDINGS[event_type]
        self.counts[status] += 1
        self._keep(ctx.summary("finished" if status == "completed" else status, fields.get("slug")))
        ctx.publish(event_type, at=ctx.execution.times.get("finished"), **fields)

    def find(self, request_id: str) -> Context | Summary:
        """Return a live request or the summary of an ended one, by our id or the caller's latest use of its own.

        Raises:
            UnknownRequest: no such request is live or kept.

        """
        self.expire()
        for key in (request_id, self._by_caller.get(request_id, "")):
            if key in self._live:
                return self._live[key]
            if key in self._ended:
                return self._ended[key][1]
        raise UnknownRequest(f"no request with id {request_id!r} is live or kept here")

    def expire(self) -> int:
        """Forget summaries older than their time to live; return how many."""
        limit = self._clock() - self._keep_seconds
        expired = 0
        while self._ended:
            ended_at, _ = next(iter(self._ended.values()))
            if ended_at > limit:
                break
            self._forget_oldest()
            expired += 1
        return expired

    @property
    def kept(self) -> int:
        """Return how many summaries are kept."""
        return len(self._ended)

    def _keep(self, summary: Summary) -> None:
        self._ended[summary.id] = (self._clock(), summary)
        while len(self._ended) > self._max_kept:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        ours, (_, summary) = self._ended.popitem(last=False)
        if self._by_caller.get(summary.caller_id) == ours:
            del self._by_caller[summary.caller_id]
