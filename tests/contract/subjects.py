"""The engines under contract, each with the loop it runs on and the same few sizes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import psutil

from triton_lifecycle.engine.simulated import SimulatedEngine
from triton_lifecycle.simulation import virtual_time

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from triton_lifecycle.engine import Engine

    Body = Callable[[Engine], Awaitable[None]]

MAX_MODEL_LEN = 256
"""Small, since this CPU takes 25 ms for each token of a prompt."""
SLOTS = 4
"""Sequences that run at once."""
BLOCK = 32
"""Tokens in a block of the KV cache; the smallest that vLLM takes on a CPU."""
LIMIT = 60.0
"""Seconds, of whichever time the engine lives in, that one test may take."""
WEIGHTS = Path(__file__).parents[2] / "model_repository" / "smollm2" / "1" / "weights"


class Subject(Protocol):
    """Something that runs a test's body on an engine, and proves that nothing of it is left in the engine."""

    def run(self, body: Body) -> None:
        """Run the body."""
        ...


class Simulated:
    """A fresh simulated engine for each test, in virtual time."""

    settings = {  # noqa: RUF012 - read only
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": SLOTS,
        "max_num_batched_tokens": 64,
        "block_size": BLOCK,
        "kv_blocks": 512,
        "mean_output_tokens": 400.0,
    }

    def __init__(self, **settings: object) -> None:
        self._settings = self.settings | settings

    def run(self, body: Body) -> None:
        """Run the body between start and stop."""

        async def whole() -> None:
            engine = SimulatedEngine.from_settings(self._settings)
            await engine.start()
            try:
                async with asyncio.timeout(LIMIT):
                    await body(engine)
                await idle(engine)
            finally:
                await engine.stop()

        virtual_time.run(whole)


class Real:
    """One vLLM for all tests, in real time, on a loop that lives as long; with SmolLM2 unless told otherwise."""

    def __init__(self, model: Path = WEIGHTS, **settings: object) -> None:
        if not model.exists():
            raise FileNotFoundError(f"{model} is missing; prepare the model with 'make setup'")
        os.environ.update(
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_NO_USAGE_STATS="1",
            VLLM_LOGGING_LEVEL="ERROR",
            HF_HUB_OFFLINE="1",
            PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        )
        from triton_lifecycle.engine.vllm import VLLMEngine

        self._before = set(psutil.Process().children(recursive=True))
        self._runner = asyncio.Runner()
        self.engine = VLLMEngine(
            {
                "model": str(model),
                "dtype": "bfloat16",
                "max_model_len": MAX_MODEL_LEN,
                "max_num_seqs": SLOTS,
                "max_num_batched_tokens": 64,
                "block_size": BLOCK,
                "enforce_eager": True,
                "scheduling_policy": "priority",
                **settings,
            },
            str(model.parent),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vLLM's and torch's own
            self._runner.run(self.engine.start())

    def run(self, body: Body) -> None:
        """Run the body, then wait until the engine is idle."""

        async def whole() -> None:
            async with asyncio.timeout(LIMIT):
                await body(self.engine)
            await idle(self.engine)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._runner.run(whole())

    def close(self) -> None:
        """Stop vLLM; its processes must be gone soon."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._runner.run(self.engine.stop())
            self._runner.close()
            # What vLLM leaves to the collector complains there, and would do so in the middle of somebody else's test.
            del self.engine
            gc.collect()
        _, alive = psutil.wait_procs(self.children(), timeout=15)
        assert not alive, f"vLLM left processes: {alive}"

    def children(self) -> list[psutil.Process]:
        """Return the processes that the engine started, apart from Python's own resource tracker."""
        started = set(psutil.Process().children(recursive=True)) - self._before
        return [process for process in started if not _is_tracker(process)]


def _is_tracker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # a zombie, too, has no command line any more
        return "resource_tracker" in " ".join(process.cmdline())
    return False


async def eventually(condition: Callable[[], bool], within: float = 30.0) -> None:
    """Wait until something holds; fail when it does not in time."""
    loop = asyncio.get_running_loop()
    limit = loop.time() + within
    while not condition():
        assert loop.time() < limit, f"not within {within} s"
        await asyncio.sleep(0.002)


async def idle(engine: Engine) -> None:
    """Wait until the engine knows no request."""
    await eventually(lambda: not engine.alive or engine.load().requests == 0)
