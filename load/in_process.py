"""The whole pipeline and the simulated engine in this process, in real time, with as many callers as it can serve."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from load.loops import new_loop
from load.overhead.measure import percentile
from load.rounds import Round
from triton_lifecycle.engine import open_engine
from triton_lifecycle.simulation.call import SilentCall
from triton_lifecycle.triton import RawRequest

if TYPE_CHECKING:
    from triton_lifecycle.context import Contexts
    from triton_lifecycle.engine import Engine
    from triton_lifecycle.errors import LifecycleError
    from triton_lifecycle.pipeline import Pipeline

RATE = 23_000
"""Of the engine while its batch is full; where requests follow each other some steps are not, and 20,000 arrive."""
CALLERS = 64
SHORTEST, LONGEST = 50, 150
"""Tokens of an answer; they differ, so that requests do not begin in step."""
WARM_UP_S = 0.5

T = TypeVar("T")


class Caller(SilentCall):
    """Stands where a Triton request is: its values lie ready, and what is sent is only counted."""

    def __init__(self, number: int) -> None:
        self.id = f"r{number}"
        self.began = time.perf_counter()
        self.first: float | None = None
        self.error: LifecycleError | None = None
        self.tokens = 0

    def read(self) -> RawRequest:
        """Return the values."""
        prompt = f"the quick brown fox number {self.id}"
        self.tokens = wanted = random.randint(SHORTEST, LONGEST)  # noqa: S311 - any will do
        return RawRequest({"text_input": prompt, "stream": True}, {"max_tokens": wanted, "ignore_eos": True})

    def send(self, outputs: dict[str, list[Any]], *, final: bool) -> asyncio.Future[None]:
        """Note when the first token came."""
        if self.first is None:
            self.first = time.perf_counter() - self.began
        return super().send(outputs, final=final)

    def fail(self, error: LifecycleError) -> asyncio.Future[None]:
        """Note what went wrong."""
        self.error = error
        return super().fail(error)


def engine() -> Engine:
    """Return the simulated engine at the speed of these measurements; not started."""
    speed = {"tokens_per_s": RATE, "prefill_tokens_per_s": 500_000.0, "max_num_seqs": CALLERS}
    return open_engine("simulated", {**speed, "mean_output_tokens": None}, "")


async def measure(pipeline: Pipeline, contexts: Contexts, seconds: float) -> Round:
    """Serve for some seconds, after a warm-up.

    Raises:
        RuntimeError: a request failed; its error is named.

    """
    stop, counted, finished, firsts = False, False, 0, list[float]()

    async def caller(number: int) -> None:
        nonlocal finished
        while not stop:
            call = Caller(number)
            await pipeline.run(call)
            if call.error is not None or call.first is None:
                raise RuntimeError(f"a request failed: {call.error}")
            finished += call.tokens
            if counted:
                firsts.append(call.first)

    def made() -> int:
        return finished + sum(ctx.output.tokens for ctx in contexts.live())

    callers = [asyncio.create_task(caller(number)) for number in range(CALLERS)]
    await asyncio.sleep(WARM_UP_S)
    counted = True
    tokens, began, cpu = made(), time.perf_counter(), time.process_time()
    await asyncio.sleep(seconds)
    tokens, took, cpu = made() - tokens, time.perf_counter() - began, time.process_time() - cpu
    stop = True
    await asyncio.gather(*callers)
    return Round(tokens / took, percentile(firsts, 50), percentile(firsts, 99), cpu / tokens)


def on_servers_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run on a loop of the kind that serves."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(work)
