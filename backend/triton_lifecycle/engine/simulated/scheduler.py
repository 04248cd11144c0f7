"""The order of work, as vLLM has it: steps, slots, KV blocks, chunked prefill, preemption. Time is an argument."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING, Any, NamedTuple

from triton_lifecycle.engine.simulated.kv import KVPool

if TYPE_CHECKING:
    from triton_lifecycle.engine.simulated.sequence import Sequence
    from triton_lifecycle.engine.simulated.settings import SimulatedSettings


class Job:
    """A sequence on its way through the scheduler.

    Args:
        sequence: what makes the tokens.
        owner: whatever the caller wants to find again.
        priority: lower is sooner.
        order: of arrival; breaks ties of priority.
        arrived: when, on the clock given to :meth:`Scheduler.plan`.

    """

    def __init__(self, sequence: Sequence, owner: Any, priority: int, order: int, arrived: float) -> None:  # noqa: ANN401
        self.sequence = sequence
        self.tokens = sequence.tokens
        self.owner = owner
        self.key = (priority, order)
        self.arrived = arrived
        self.running = False
        self.gone = False
        self.cached: int | None = None
        """Prompt tokens found in the prefix cache when it first ran; ``None`` before."""
        self.created: int | None = None
        """Prompt tokens that it adds to the prefix cache, which keeps full blocks alone; ``None`` before it ran."""
        self.computed = 0
        """Tokens whose keys and values are in the cache."""
        self.capacity = 0
        """Tokens that the blocks it holds have room for."""
        self.chunk = 0
        self.hashes: list[int] = []
        self.shared = 0
        self.private = 0


class Batch(NamedTuple):
    """What one step computes."""

    jobs: list[Job]
    prefill: int
    """Tokens beyond the one that each job decodes."""
    admitted: list[Job]
    """Those that run for the first time, or again after a preemption."""


class Scheduler:
    """Who runs in the next step.

    Args:
        settings: sizes of everything.

    """

    def __init__(self, settings: SimulatedSettings) -> None:
        self._slots = settings.max_num_seqs
        self._budget = settings.max_num_batched_tokens
        self._block = settings.block_size
        self._cache = settings.prefix_cache
        self.pool = KVPool(settings.kv_blocks)
        self.running: list[Job] = []
        self.waiting: list[Job] = []
        self.preemptions = 0
        self.cache_queries = 0
        self.cache_hits = 0
        """Prompt tokens looked up in the prefix cache, and found there."""

    def add(self, job: Job) -> None:
        """Put a job into the queue, at the place that its priority and arrival give it."""
        insort(self.waiting, job, key=lambda j: j.key)

    def remove(self, job: Job) -> None:
        """Take a job out wherever it is and free its blocks at once; harmless when it is out already."""
        if job.gone:
            return
        job.gone = True
        if job.running:
            self.running.remove(job)
            self._release(job)
        else:
            del self.waiting[bisect_left(self.waiting, job.key, key=lambda j: j.key)]

    def plan(self, clock: float) -> Batch:
        """Choose the work of the step that begins now, and reserve its blocks."""
        preempted = self._make_room()
        left, prefill = self._budget, 0
        jobs, admitted = [], []
        for job in self.running:
            job.chunk = min(len(job.tokens) - job.computed, left)
            if job.chunk:
                left -= job.chunk
                prefill += job.chunk - 1
                jobs.append(job)
        while self.waiting and not preempted and left and len(self.running) < self._slots:
            job = self.waiting[0]
            if job.arrived > clock or not self._admit(job):
                break
            del self.waiting[0]
            job.running = True
            self.running.append(job)
            job.chunk = min(len(job.tokens) - job.computed, left)
            left -= job.chunk
            prefill += job.chunk - 1
            jobs.append(job)
            admitted.append(job)
        return Batch(jobs, prefill, admitted)

    def computed(self, job: Job) -> bool:
        """Note that the step computed the job's chunk; True if all its tokens are in, so that the next can be made."""
        job.computed += job.chunk
        if self._cache and job.computed >= (job.shared + 1) * self._block:
            full = job.computed // self._block
            self._hash(job, full)
            for key in job.hashes[job.shared : full]:
                self.pool.publish(key)
            job.private -= full - job.shared
            job.shared = full
        return job.computed == len(job.tokens)

    def _make_room(self) -> bool:
        """Give every running job room for its next token, the best first; preempt the worst where there is none."""
        preempted = False
        for job in sorted([j for j in self.running if j.computed >= j.capacity], key=lambda j: j.key):
            while job.running and not self.pool.reserve(1):
                self._preempt(max(self.running, key=lambda j: j.key))
                preempted = True
            if job.running:
                job.private += 1
                job.capacity += self._block
        return preempted

    def _preempt(self, job: Job) -> None:
        self.preemptions += 1
        self.running.remove(job)
        self._release(job)
        job.running = False
        job.computed = job.capacity = 0
        self.add(job)

    def _admit(self, job: Job) -> bool:
        total = len(job.tokens)
        hits = 0
        if self._cache:
            # The last token is always computed: its output is what the next one is made of.
            self._hash(job, (total - 1) // self._block)
            hits = self.pool.match(job.hashes[: (total - 1) // self._block])
        private = -(-total // self._block) - hits
        if not self.pool.admit(job.hashes[:hits], private):
            return False
        job.shared, job.private = hits, private
        job.capacity = (hits + private) * self._block
        job.computed = hits * self._block
        if job.cached is None:
            job.cached = job.computed
            self.cache_queries += total if self._cache else 0
            self.cache_hits += job.computed
            job.created = total // self._block * self._block - job.computed if self._cache else 0
        return True

    def _release(self, job: Job) -> None:
        self.pool.release(job.hashes[: job.shared], job.private)
        job.shared = job.private = 0

    def _hash(self, job: Job, blocks: int) -> None:
        """Extend the chain of hashes, one per full block, each over all tokens up to its end."""
        while len(job.hashes) < blocks:
            at = len(job.hashes) * self._block
            before = job.hashes[-1] if job.hashes else 0
            job.hashes.append(hash((before, *job.tokens[at : at + self._block])))
