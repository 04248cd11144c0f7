"""Record a trace from the real engine: ``python -m load.traces.record load/traces/smollm2.csv``.

A tritonserver with vLLM and SmolLM2 runs under load steps: so many callers at once, each sending one streamed request
after the other, prompts of 16 to 256 tokens that no prefix cache knows, answers of at most 16 to 128 tokens. What the
predictor in the server saw of each request is the trace.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import yaml

from load import traces
from load.overhead.prompts import PromptMaker
from triton_lifecycle.launcher import project_root
from triton_lifecycle.launcher.server import TritonServer
from triton_lifecycle.timeouts.predictor import state
from triton_lifecycle_client import AsyncClient

MODEL: Final = "smollm2"
STEPS: Final = (2, 8, 1, 16, 4, 32, 12, 24, 8, 16, 4, 32)
PROMPTS: Final = (16, 32, 64, 128, 256)
ANSWERS: Final = (16, 32, 64, 128)


def repository(folder: Path, kept: Path) -> Path:
    """Return a model repository with SmolLM2 that writes what its predictor sees to ``kept``."""
    copied = folder / "models" / MODEL
    source = project_root() / "model_repository" / MODEL
    shutil.copytree(source, copied, symlinks=True, ignore=shutil.ignore_patterns("weights", "__pycache__"))
    (copied / "1" / "weights").symlink_to((source / "1" / "weights").resolve())
    settings = {"request_lifecycle": {"timeout_handling": {"state_path": str(kept)}}}
    (copied / "request_lifecycle.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    return copied.parent


async def load(url: str, prompts: dict[int, PromptMaker], step_s: float) -> int:
    """Send requests, step after step, each of so many seconds; return how many."""
    chance = random.Random(1)  # noqa: S311 - repeatable, not secret
    sent = 0
    async with AsyncClient(url, model=MODEL, timeout=120) as client:

        async def caller(until: float) -> None:
            nonlocal sent
            while time.monotonic() < until:
                [prompt] = prompts[chance.choice(PROMPTS)].make(1)
                answer = client.stream(
                    prompt.text,
                    temperature=1.0,
                    max_tokens=chance.choice(ANSWERS),
                    ignore_eos=chance.random() < 0.5,
                )
                async for _ in answer:
                    pass
                sent += 1

        for callers in STEPS:
            until = time.monotonic() + step_s
            await asyncio.gather(*[caller(until) for _ in range(callers)])
            print(f"{callers:3} callers: {sent} requests so far", file=sys.stderr, flush=True)
    return sent


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="the trace to write")
    parser.add_argument("--step-seconds", type=float, default=30.0, help="of each load step")
    options = parser.parse_args(arguments)
    weights = project_root() / "model_repository" / MODEL / "1" / "weights"
    prompts = {length: PromptMaker(weights, length, seed=length) for length in PROMPTS}
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "seen.json"
        server = TritonServer(repository(Path(folder), kept), models=(MODEL,))
        try:
            server.start()
            server.wait_ready(300)
            sent = asyncio.run(load(server.grpc_url, prompts, options.step_seconds))
        finally:
            server.stop()
        seen = list(state.load(kept))
    traces.write(options.path, seen)
    print(f"{options.path}: {len(seen)} requests of {sent}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
