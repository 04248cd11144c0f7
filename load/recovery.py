"""Kill the real engine under streams, again and again: does any caller notice more than a pause?

``python -m load.recovery --kills 20`` starts the real server, takes prompts whose greedy answer is clear (at every
token the second choice is at least 0.2 nats behind, since a tie in bfloat16 may fall either way in another batch),
streams them 32 at a time, kills vLLM's engine process while they run, and compares each answer with the undisturbed
one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Callable
from typing import Final

import httpx
import msgspec
import psutil

from triton_lifecycle.launcher import project_root
from triton_lifecycle.launcher.server import TritonServer
from triton_lifecycle_client import AsyncClient, LifecycleError

MODEL: Final = "smollm2"
TOKENS: Final = 96
GAP_NATS: Final = 0.2
STREAMS: Final = 32
LONG_PAUSE_S: Final = 5.0
RESTART_LIMIT_S: Final = 180.0
CANDIDATES: Final = [
    ", ".join(str(step * number) for number in range(start, start + 12)) + ","
    for step in (1, 10)
    for start in range(1, 36 if step == 1 else 12)
]
"""Counting on is what a small model is sure of."""


class Outcome(msgspec.Struct):
    """What became of one run."""

    kills: int = 0
    answers: int = 0
    failed: int = 0
    different: int = 0
    paused: int = 0
    """Answers that went on after a death."""
    longest_pause_s: float = 0.0
    restart_s: list[float] = []
    problems: list[str] = []

    @property
    def good(self) -> bool:
        """Whether no caller noticed more than a pause."""
        return self.answers > 0 and not self.failed and not self.different


async def clear_prompts(server: TritonServer, wanted: int) -> list[str]:
    """Return prompts whose greedy answer is clear by :data:`GAP_NATS` throughout."""
    sampling = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 2}
    asked = {"sampling_parameters": json.dumps(sampling), "return_logprobs": True}
    async with httpx.AsyncClient(base_url=f"http://{server.http_url}", timeout=300) as client:

        async def is_clear(prompt: str) -> bool:
            reply = await client.post(f"/v2/models/{MODEL}/generate", json={"text_input": prompt, **asked})
            reply.raise_for_status()
            return _gap(json.loads(reply.json()["logprobs"])) >= GAP_NATS

        clear = await asyncio.gather(*map(is_clear, CANDIDATES))
    found = [prompt for prompt, good in zip(CANDIDATES, clear, strict=True) if good]
    if len(found) < wanted:
        raise RuntimeError(f"only {len(found)} of {len(CANDIDATES)} prompts have a clear answer")
    return found[:wanted]


def _gap(records: list[dict[str, dict[str, float]]]) -> float:
    """Return the smallest lead that a chosen token has on the next."""
    gaps = []
    for record in records:
        first, second = sorted((entry["logprob"] for entry in record.values()), reverse=True)[:2]
        gaps.append(first - second)
    return min(gaps)


async def run(server: TritonServer, prompts: list[str], kills: int, tell: Callable[[str], None]) -> Outcome:
    """Kill the engine ``kills`` times under one stream for each prompt; streams begin anew as they end."""
    outcome = Outcome()
    async with AsyncClient(server.grpc_url, model=MODEL, timeout=600) as client:
        wanted = {prompt: await _text(client, prompt, "", outcome, set()) for prompt in prompts}
        outcome = Outcome()
        over = asyncio.Event()
        begun: set[str] = set()  # whose answers have had text since the last death

        async def caller(number: int, prompt: str) -> None:
            for turn in itertools.count():
                if over.is_set():
                    return
                name = f"caller {number}, turn {turn}"
                try:
                    text = await _text(client, prompt, name, outcome, begun)
                except LifecycleError as error:
                    outcome.failed += 1
                    outcome.problems.append(await _told(client, name, error))
                    continue
                outcome.answers += 1
                if text != wanted[prompt]:
                    outcome.different += 1
                    outcome.problems.append(f"{prompt!r}: {text!r} instead of {wanted[prompt]!r}")

        callers = [asyncio.create_task(caller(number, prompt)) for number, prompt in enumerate(prompts)]
        try:
            await _kill(client, server, kills, outcome, begun=begun, all_of=len(prompts), tell=tell)
        finally:
            over.set()
            await asyncio.wait(callers, timeout=180)
            for task in callers:
                task.cancel()
    return outcome


async def _told(client: AsyncClient, name: str, error: LifecycleError) -> str:
    """Return an error with what the server knows of the request."""
    try:
        known = await client.status(name)
    except LifecycleError as unknown:
        return f"{name}: {error.wire()} ({unknown.wire()})"
    times = ", ".join(f"{point} {ms / 1e3:.1f} s" for point, ms in known.times_ms.items())
    return f"{name}: {error.wire()} (attempts {known.attempts}; {times}; limits {known.limits})"


async def _text(client: AsyncClient, prompt: str, name: str, outcome: Outcome, begun: set[str]) -> str:
    """Stream one answer; it is in ``begun`` from its first text to its end, or to the engine's next death."""
    text, last = "", None
    begun.discard(prompt)
    async with client.stream(prompt, request_id=name, temperature=0.0, max_tokens=TOKENS, ignore_eos=True) as stream:
        async for chunk in stream:
            now = time.monotonic()
            if last is not None and now - last > LONG_PAUSE_S:
                outcome.paused += 1
                outcome.longest_pause_s = max(outcome.longest_pause_s, now - last)
            last = now
            text += chunk.text
            begun.add(prompt)
    return text


async def _kill(
    client: AsyncClient,
    server: TritonServer,
    kills: int,
    outcome: Outcome,
    *,
    begun: set[str],
    all_of: int,
    tell: Callable[[str], None],
) -> None:
    chance = random.Random(1)  # noqa: S311 - when to strike
    for number in range(1, kills + 1):
        # In turn: as soon as every stream has text, at any time (prompts being read too), and after some seconds of
        # work. Never twice without a token between: nobody could tell who killed then, and requests would be tried
        # one by one.
        if number % 3 != 2:
            async with asyncio.timeout(RESTART_LIMIT_S):
                while len(begun) < all_of:  # noqa: ASYNC110 - a load tool's poll
                    await asyncio.sleep(0.01)
        if number % 3 != 1:
            await asyncio.sleep(chance.uniform(1.0, 4.0 if number % 3 else 8.0))
        begun.clear()
        engine(server).kill()
        began = time.monotonic()
        while int((await client.state()).engine["restarts"] or 0) < number:
            if time.monotonic() - began > RESTART_LIMIT_S:
                raise TimeoutError(f"the engine is not back after {RESTART_LIMIT_S:.0f} s")
            await asyncio.sleep(0.2)
        outcome.kills = number
        outcome.restart_s.append(time.monotonic() - began)
        tell(f"kill {number}/{kills}: back after {outcome.restart_s[-1]:.1f} s; {outcome.answers} answers so far")


def engine_processes(server: TritonServer) -> list[psutil.Process]:
    """Return vLLM's processes."""
    below = psutil.Process(server.pid).children(recursive=True)
    return [process for process in below if process.name().startswith("VLLM")]


def engine(server: TritonServer) -> psutil.Process:
    """Return vLLM's engine process, under which its workers are."""
    return next(process for process in engine_processes(server) if "Engine" in process.name())


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    options = parser.parse_args(arguments)
    server = TritonServer(project_root() / "model_repository", models=(MODEL,))
    try:
        server.start()
        server.wait_ready(300)
        prompts = asyncio.run(clear_prompts(server, options.streams))
        outcome = asyncio.run(
            run(server, prompts, options.kills, lambda line: print(line, file=sys.stderr, flush=True))
        )
    finally:
        server.stop()
    if options.json:
        print(msgspec.json.encode(outcome).decode())
    else:
        _print(outcome)
    return 0 if outcome.good else 1


def _print(outcome: Outcome) -> None:
    restarts = sorted(outcome.restart_s)
    for name, value in (
        ("kills of the engine", outcome.kills),
        ("answers", outcome.answers),
        ("failed", outcome.failed),
        ("different from the undisturbed answer", outcome.different),
        (f"pauses over {LONG_PAUSE_S:g} s that callers saw", outcome.paused),
        ("longest pause, s", f"{outcome.longest_pause_s:.1f}"),
        ("restart, s: median, longest", f"{restarts[len(restarts) // 2]:.1f}, {restarts[-1]:.1f}" if restarts else "-"),
    ):
        print(f"{name:42} {value}")
    for problem in outcome.problems[:10]:
        print(f"  {problem}")


if __name__ == "__main__":
    sys.exit(main())
