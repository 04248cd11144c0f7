"""The simulated engine on an event loop: the clock of its steps, its faults, and those who wait for tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from random import Random
from typing import TYPE_CHECKING, Any

from triton_lifecycle.engine import (
    Chunk,
    EmbeddingRequest,
    EngineRequest,
    Limits,
    Load,
    Remainder,
    Sampling,
    too_long,
)
from triton_lifecycle.engine.simulated import sampling as sampling_rules
from triton_lifecycle.engine.simulated import settings as settings_rules
from triton_lifecycle.engine.simulated.faults import FaultPlan
from triton_lifecycle.engine.simulated.language import Language
from triton_lifecycle.engine.simulated.sampling import Values
from triton_lifecycle.engine.simulated.scheduler import Batch, Job, Scheduler
from triton_lifecycle.engine.simulated.sequence import Sequence
from triton_lifecycle.engine.simulated.text import Vocabulary
from triton_lifecycle.engine.splice import continues
from triton_lifecycle.errors import (
    EngineDied,
    EngineError,
    GenerationFailed,
    InvalidInput,
    Unsupported,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection

    from triton_lifecycle.engine.simulated.settings import Fault, SimulatedSettings

_DEFAULTS: Mapping[str, Any] = dict(Values.model_validate({}))
_TURN = 256
"""Tokens made at one go before their readers, and everybody else on the loop, get their turn; about 1 ms."""
_READERS = 8
"""Readers woken at one go, likewise: each has some 100 µs of work with what it takes, and all of them come before
anything else on the loop. vLLM hands out the results of a step in slices too."""
_BEHIND = 0.1
"""Seconds that the steps may lag behind the clock; what is more is lost, as if the engine were that much slower."""


_MANY = 999
"""Images in a prompt; vLLM's own default."""


class _Live:
    """A request that somebody reads."""

    def __init__(
        self, request: EngineRequest, sequences: list[Sequence], faults: list[Fault], prompt_tokens: int
    ) -> None:
        self.id = request.id
        self.prompt_tokens = prompt_tokens
        self.sequences = sequences
        self.jobs: list[Job] = []
        self.left = len(sequences)
        self.faults = faults
        self.made_before = request.made
        self.scheduled_at: float | None = None
        self.news = False
        self.error: EngineError | None = None
        self.waiter: asyncio.Future[None] | None = None

    def tell(self) -> None:
        """Wake the reader."""
        self.news = True
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def take(self) -> Chunk | None:
        """Return what is new; ``None`` if nothing is."""
        self.news = False
        deltas = tuple([delta for sequence in self.sequences if (delta := sequence.take()) is not None])
        if not deltas:
            return None
        return Chunk(
            deltas, not self.left, self.scheduled_at, self.jobs[0].cached, self.prompt_tokens, self.jobs[0].created
        )


class SimulatedEngine:
    """Stands behind the same protocol as vLLM; all its time is the running loop's.

    Args:
        settings: checked settings.

    """

    sampling_fields: Mapping[str, Any] = sampling_rules.FIELDS

    def __init__(self, settings: SimulatedSettings) -> None:
        self._settings = settings
        self._per_step, self._per_sequence = settings.step_cost
        self._vocabulary = Vocabulary(settings.vocab_size)
        self._language = Language(self._vocabulary, settings.seed, settings.mean_output_tokens)
        self._faults = FaultPlan(settings.faults, settings.seed)
        self._alive = False
        self._driver: asyncio.Task[None] | None = None
        self._reset()

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> SimulatedEngine:
        """Build from the content of ``model.json``; raises ``ConfigError`` listing every problem."""
        return cls(settings_rules.parse(settings))

    @property
    def limits(self) -> Limits:
        """The model's limits."""
        return Limits(
            max_model_len=self._settings.max_model_len,
            vocab_size=self._settings.vocab_size,
            images=_MANY if self._settings.image_tokens else 0,
            max_num_seqs=self._settings.max_num_seqs,
        )

    @property
    def alive(self) -> bool:
        """True between :meth:`start` and :meth:`stop` or death."""
        return self._alive

    @property
    def preemptions(self) -> int:
        """How often a sequence lost its KV blocks to another since the start."""
        return self._scheduler.preemptions

    async def start(self) -> None:
        """Become ready after ``startup_s``; does nothing when already running."""
        if self._alive:
            return
        await self.stop()
        await asyncio.sleep(self._settings.startup_s)
        self._reset()
        self._alive = True
        self._driver = asyncio.create_task(self._drive(), name="simulated-engine")
        self._driver.add_done_callback(self._driver_ended)

    async def stop(self) -> None:
        """End every request and the driving task."""
        self._die("was stopped")
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.cancel()
            await asyncio.wait({driver})

    def sampling(self, values: Mapping[str, Any]) -> Sampling:
        """Check sampling parameters; raises ``InvalidInput`` naming each wrong field."""
        return sampling_rules.parse(
            values, vocab_size=self._settings.vocab_size, max_logprobs=self._settings.max_logprobs
        )

    async def prove(self, sampling: Sampling, limit: float) -> None:
        """Nothing binds a simulated text."""

    async def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        """Write one line for each tool and turn, and open the assistant's."""
        lines = [f"tool {tool.get('function', tool).get('name', '')}" for tool in tools or ()]
        lines += [f"{turn['role']} : {_text(turn['content'])}" for turn in messages]
        return "\n".join([*lines, "assistant :"])

    async def embed(self, request: EmbeddingRequest) -> list[float]:  # noqa: ARG002 - it has none
        """Refuse: it has no vectors."""
        raise Unsupported("embedding_request: the simulated engine makes no embeddings")

    async def tokenize(
        self,
        prompt: str,
        *,
        special: bool = True,  # noqa: ARG002 - it has none
        room: int = 1,  # noqa: ARG002 - it has no embeddings
        images: int = 0,  # noqa: ARG002 - they need no place
    ) -> list[int]:
        """Return the prompt's tokens; raises ``PromptTooLong`` when no output token would fit behind them."""
        tokens = await self._vocabulary.encode(prompt)
        self._check_prompt(tokens)
        return tokens

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Chunk, None]:
        """Yield what is new until the request is finished; closing the generator aborts it at once."""
        live = self._submit(request)
        try:
            while True:
                if not live.news:
                    live.waiter = asyncio.get_running_loop().create_future()
                    await live.waiter
                    live.waiter = None
                if (chunk := live.take()) is not None:
                    live.news = live.error is not None  # the tokens made before a fault come before it
                    yield chunk
                    if chunk.finished:
                        return
                elif live.error is not None:
                    raise live.error
        finally:
            self._drop(live)
            # Its jobs hold it too, and an error that was raised here holds this frame.
            live.jobs.clear()
            live.error = None

    async def restart(self) -> None:
        """End every request and begin anew; takes ``startup_s``."""
        await self.stop()
        await self.start()

    def remainder(self, request: EngineRequest, made: Collection[int]) -> Remainder | None:
        """Return what follows the tokens ``made``, where vLLM's rules call that exact."""
        values: Values = request.sampling.native
        if not continues(dict(values), _DEFAULTS):
            return None
        return Remainder(request.after(list(made), _shortened(values, len(made))), kept=len(made))

    def repeatable(self, sampling: Sampling) -> bool:
        """Return whether the same tokens would come again."""
        values: Values = sampling.native
        return values.greedy or values.seed is not None

    def load(self) -> Load:
        """Return the load of this moment; sequences run and wait, requests may hold several."""
        scheduler = self._scheduler
        return Load(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_usage=scheduler.pool.usage,
            requests=len(self._requests),
            preemptions=scheduler.preemptions,
            cache_queries=scheduler.cache_queries,
            cache_hits=scheduler.cache_hits,
            output_tokens=self._made,
        )

    def inject(self, fault: Fault) -> None:
        """Let a fault strike: the requests that meet its conditions from now on, or at once if it has none."""
        if not fault.on.anything:
            self._faults.add(fault)
        elif fault.do == "raise":
            for live in list(self._requests.values()):
                self._fail(live, GenerationFailed("the simulated engine failed on this request as it was told to"))
        else:
            self._strike_engine(fault, asyncio.get_running_loop().time())

    def clear_faults(self) -> None:
        """Let no request submitted from now on be struck."""
        self._faults.clear()

    def _reset(self) -> None:
        self._scheduler = Scheduler(self._settings)
        self._requests: dict[str, _Live] = {}
        self._random = Random(self._settings.seed)  # noqa: S311 - a simulation
        self._arrivals = 0
        self._made = 0
        self._wake = asyncio.Event()
        self._stalled_until = float("-inf")
        self._slow_until = float("-inf")
        self._slow_factor = 1.0

    # ---- requests

    def _submit(self, request: EngineRequest) -> _Live:
        if not self._alive:
            raise EngineDied("the simulated engine is not running")
        if request.id in self._requests:
            raise GenerationFailed(f"the request id {request.id!r} is in the engine already")
        prompt = [*self._seen(request.images), *request.token_ids]
        self._check_prompt(prompt)
        values = request.sampling.native
        longest = self._settings.max_model_len
        sequences = [Sequence(self._language, prompt, values, i, longest) for i in range(values.n)]
        faults = self._faults.strike(lambda: self._vocabulary.text(request.token_ids))
        live = _Live(request, sequences, faults, len(prompt))
        now = asyncio.get_running_loop().time()
        for sequence in sequences:
            job = Job(sequence, live, request.priority, self._arrivals, now)
            self._arrivals += 1
            live.jobs.append(job)
            self._scheduler.add(job)
        self._requests[request.id] = live
        self._wake.set()
        return live

    def _seen(self, images: tuple[Any, ...]) -> list[int]:
        """Return the tokens that stand for the images, before the prompt's own: alike for alike pictures."""
        if images and not self._settings.image_tokens:
            raise Unsupported("image: this simulated engine takes no images (image_tokens is 0)")
        tokens = []
        for image in images:
            view = Random(image.tobytes())  # noqa: S311 - a simulation
            tokens += [view.randrange(1, len(self._vocabulary)) for _ in range(self._settings.image_tokens)]
        return tokens

    def _check_prompt(self, tokens: list[int]) -> None:
        longest, vocabulary = self._settings.max_model_len, self._settings.vocab_size
        if not tokens:
            raise InvalidInput("text_input: the prompt is empty; at least one token is needed")
        if len(tokens) >= longest:
            raise too_long(len(tokens), longest)
        if min(tokens) < 0 or max(tokens) >= vocabulary:
            raise InvalidInput(f"text_input: the prompt has token ids outside the vocabulary (0 … {vocabulary - 1})")

    def _drop(self, live: _Live) -> None:
        """Forget a request, whatever its state."""
        if self._requests.get(live.id) is live:
            del self._requests[live.id]
            for job in live.jobs:
                self._scheduler.remove(job)

    def _fail(self, live: _Live, error: EngineError) -> None:
        self._drop(live)
        live.error = error
        live.tell()

    def _die(self, why: str) -> None:
        self._alive = False
        for live in list(self._requests.values()):
            self._fail(live, EngineDied(f"the simulated engine {why}"))

    # ---- faults

    def _strike(self, live: _Live, now: float) -> bool:
        """Let the faults strike that are due for this request; True if it is no longer to be worked on."""
        made = live.made_before + sum(sequence.made for sequence in live.sequences)
        while live.faults and made >= (live.faults[0].on.token or 0):
            fault = live.faults.pop(0)
            if fault.do == "raise":
                self._fail(live, GenerationFailed(f"the simulated engine failed on this request after {made} tokens"))
                return True
            self._strike_engine(fault, now)
            if not self._alive:
                return True
        return False

    def _strike_engine(self, fault: Fault, now: float) -> None:
        if fault.do == "die":
            self._die("died, as it was told to")
            if self._driver is not None:
                self._driver.cancel()
        elif fault.do == "stall":
            self._stalled_until = max(self._stalled_until, now) + (fault.for_s or 0)
        else:
            self._slow_until = now + (fault.for_s or 0)
            self._slow_factor = fault.factor or 1.0

    # ---- steps

    async def _drive(self) -> None:
        """Run step after step; each begins when the one before has ended, on a clock that may lag behind the loop's."""
        loop = asyncio.get_running_loop()
        clock = woken = loop.time()
        lag = self._settings.max_lag_ms / 1e3
        made = 0
        while self._alive:
            if not self._requests:
                self._wake.clear()
                await self._wake.wait()
                clock = woken = loop.time()
            clock = await self._sit_out_stall(max(clock, loop.time() - _BEHIND))
            batch = self._scheduler.plan(clock)
            if not batch.jobs:  # whoever waits came after this step's time
                await asyncio.sleep(0)
                clock = loop.time()
                continue
            for job in batch.admitted:
                if job.owner.scheduled_at is None:
                    job.owner.scheduled_at = clock
            end = clock + self._duration(batch, clock)
            if end > loop.time():
                # A first token is never held back for the sake of fewer wake-ups.
                await self._reach(end if batch.admitted or batch.prefill else max(end, woken + lag))
                woken, made = loop.time(), 0
            clock = await self._sit_out_stall(end)
            made = await self._finish(batch, clock, made)

    def _duration(self, batch: Batch, clock: float) -> float:
        """Return how long a step takes."""
        settings = self._settings
        steps = self._per_step + self._per_sequence * len(batch.jobs)
        if settings.token_sigma:
            steps *= self._spread(settings.token_sigma)
        prefill = batch.prefill / settings.prefill_tokens_per_s
        if prefill and settings.first_token_sigma:
            prefill *= self._spread(settings.first_token_sigma)
        return (steps + prefill) * (self._slow_factor if clock < self._slow_until else 1.0)

    def _spread(self, sigma: float) -> float:
        return self._random.lognormvariate(-sigma * sigma / 2, sigma)

    async def _finish(self, batch: Batch, now: float, made: int) -> int:
        """Make the tokens of a step that has ended; count them on from ``made``, the tokens since the last turn."""
        scheduler = self._scheduler
        woken = 0
        for job in batch.jobs:
            if made >= _TURN or woken >= _READERS:
                await asyncio.sleep(0)
                made = woken = 0
            if job.gone or not scheduler.computed(job):
                continue
            live: _Live = job.owner
            if live.faults and self._strike(live, now):
                continue
            made += 1
            self._made += 1
            if job.sequence.advance():
                scheduler.remove(job)
                live.left -= 1
                if not live.left:
                    del self._requests[live.id]
            if not live.news:
                live.tell()
                woken += 1
        return made

    async def _sit_out_stall(self, clock: float) -> float:
        """Wait while the engine is stalled; return the clock afterwards."""
        while self._stalled_until > clock:
            clock = self._stalled_until
            await self._reach(clock)
        return clock

    @staticmethod
    async def _reach(target: float) -> None:
        """Sleep until the loop's clock shows ``target``."""
        loop = asyncio.get_running_loop()
        while (left := target - loop.time()) > 0:  # noqa: ASYNC110 - time is what is waited for
            await asyncio.sleep(left)

    def _driver_ended(self, driver: asyncio.Task[None]) -> None:
        if not driver.cancelled() and (fault := driver.exception()) is not None:
            self._die(f"died of a fault of its own: {fault!r}")


def _shortened(values: Values, made: int) -> Values:
    """Return the sampling parameters for an answer of which some tokens are made."""
    most = values.max_tokens
    return values.model_copy(
        update={"max_tokens": None if most is None else most - made, "min_tokens": max(0, values.min_tokens - made)}
    )


def _text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
