"""The measurements, in their order. Each part adds to a list as it goes, so that an interruption loses nothing."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from load.models import copy_with
from load.overhead.figures import BARE, GRPC, HTTP, Cell, Work
from load.overhead.measure import BenchFailed, Order, Prompt, combine
from load.overhead.processes import ServingProcesses, settle

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from load.overhead.children import Child
    from load.overhead.prompts import PromptMaker
    from triton_lifecycle.launcher import Progress
    from triton_lifecycle.launcher.server import TritonServer

PROMPT_TOKENS = 32
OUTPUT_TOKENS = 64
CPU_CONCURRENCY = 64
SIMULATED_STREAMS = 64
SIMULATED_RATE = 50_000.0
SIMULATED_TOKENS = 2000
"""Long answers, so that streaming is measured; within the default time limit at a tenth of the rate."""


class Plan(msgspec.Struct, frozen=True):
    """How much is measured."""

    rounds: int
    levels: tuple[int, ...]
    """Numbers of concurrent requests of the engine part."""
    least_requests: int = 10
    waves: int = 2
    """Each concurrent stream makes so many requests one after the other."""
    simulated_waves: int = 3
    stream_interval: int = 1
    """vLLM answers every so many tokens, ours only; the bare engine goes on answering each."""

    def requests(self, concurrency: int) -> int:
        """Return how many requests make one measurement."""
        return max(self.least_requests, self.waves * concurrency)


QUICK = Plan(rounds=1, levels=(1, 4), least_requests=2, waves=1, simulated_waves=1)


@dataclass(frozen=True)
class Rig:
    """What the measurements of the real engine have at hand."""

    children: Mapping[str, Child]
    """By target."""
    server: TritonServer
    prompts: PromptMaker
    plan: Plan
    say: Progress

    def warm_up(self, concurrency: int) -> None:
        """Let every path run once before anything counts."""
        for child in self.children.values():
            child.ask(_order(self.prompts.make(concurrency), concurrency, max_tokens=8))

    def measure_engines(self, cells: list[Cell]) -> None:
        """Measure bare vLLM, ours over gRPC and ours over HTTP in turn."""
        rounds = self.plan.rounds
        for number in range(1, rounds + 1):
            for concurrency in self.plan.levels:
                for target in (BARE, GRPC, HTTP):
                    idle = self.server.processes() if target == BARE else self.children[BARE].processes()
                    share = settle(idle)
                    order = _order(self.prompts.make(self.plan.requests(concurrency)), concurrency)
                    sample = self.children[target].ask(order)
                    cells.append(Cell(target, concurrency, number, sample, share))
                    self.say(
                        f"round {number}/{rounds}, {concurrency:2d} concurrent, {target}: {sample.rate:.0f} tokens/s"
                    )

    def measure_cpu(self, works: list[Work], requests: list[Work]) -> None:
        """Measure the CPU time that tritonserver and the stub use for one streamed token, and for one request."""
        rounds = self.plan.rounds
        serving = ServingProcesses(self.server.pid)
        for number in range(1, rounds + 1):
            for target in (GRPC, HTTP):
                for found, tokens, what in ((works, OUTPUT_TOKENS, "token"), (requests, 1, "request of one token")):
                    prompts = self.prompts.make(self.plan.waves * CPU_CONCURRENCY)
                    before = serving.used()
                    sample = self.children[target].ask(_order(prompts, CPU_CONCURRENCY, tokens))
                    used = serving.used() - before
                    found.append(Work(target, number, sample, used))
                    cost = used.both / sample.tokens * 1e6
                    self.say(
                        f"round {number}/{rounds}, {CPU_CONCURRENCY} at a time, {target}: {cost:.0f} µs per {what}"
                    )


class SimulatedRig:
    """The measurement at the simulated engine's rate.

    Args:
        unary: asks for the answers to compare with.
        clients: share the streams.
        server: serves the simulated model.
        plan: how much.
        say: told how far it is.

    """

    def __init__(
        self, unary: Child, clients: Sequence[Child], *, server: TritonServer, plan: Plan, say: Progress
    ) -> None:
        self._unary = unary
        self._clients = clients
        self._server = server
        self._plan = plan
        self._say = say

    def measure(self, works: list[Work]) -> None:
        """Measure how many tokens arrive over gRPC.

        Every stream's text is compared with the unary answer to the same prompt: what counts has arrived complete and
        in order, or the measurement fails.
        """
        orders = self._orders()
        serving = ServingProcesses(self._server.pid)
        for number in range(1, self._plan.rounds + 1):
            before = serving.used()
            for client, order in zip(self._clients, orders, strict=True):
                client.send(order)
            sample = combine([client.receive(order) for client, order in zip(self._clients, orders, strict=True)])
            works.append(Work(GRPC, number, sample, serving.used() - before))
            self._say(f"round {number}/{self._plan.rounds}, simulated engine: {sample.rate:,.0f} tokens/s arrive")

    def _orders(self) -> list[Order]:
        prompts = [Prompt(f"Story number {number} of a long winter:") for number in range(SIMULATED_STREAMS)]
        asked = _order(prompts, SIMULATED_STREAMS, max_tokens=SIMULATED_TOKENS)
        answers = self._unary.ask(msgspec.structs.replace(asked, stream=False, keep_texts=True)).texts
        self._say(f"simulated engine: {len(answers)} unary answers to compare with")
        waves = self._plan.simulated_waves
        shares = [slice(index, None, len(self._clients)) for index in range(len(self._clients))]
        return [
            msgspec.structs.replace(
                asked, prompts=prompts[share] * waves, expected=answers[share] * waves, concurrency=len(prompts[share])
            )
            for share in shares
        ]


def simulated_repository(model: Path, target: Path) -> None:
    """Copy the simulated model into a repository of its own, set to the speed of this benchmark."""
    folder = target / model.name
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "1" / "model.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    for key in ("base_ms", "per_sequence_us"):
        settings.pop(key, None)
    block = settings.get("block_size", 16)
    settings |= {
        "tokens_per_s": SIMULATED_RATE,
        "prefill_tokens_per_s": 1e6,
        "max_num_seqs": SIMULATED_STREAMS,
        "kv_blocks": SIMULATED_STREAMS * -(-settings["max_model_len"] // block),
        "token_sigma": 0.0,
        "first_token_sigma": 0.0,
        "mean_output_tokens": None,
        "faults": [],
    }
    path.write_text(json.dumps(settings), encoding="utf-8")


def with_interval(model: Path, target: Path, weights: Path, tokens: int) -> None:
    """Copy the real model into a repository of its own, with vLLM answering only every so many tokens."""
    settings = json.loads((model / "1" / "model.json").read_text(encoding="utf-8"))
    copy_with(model, target / model.name, settings | {"model": str(weights), "stream_interval": tokens})


def check_lengths(ask: Callable[[Prompt, int], Mapping[str, int]], prompts: PromptMaker) -> None:
    """Let the server count once what later is taken for granted: the tokens of a prompt and of an answer.

    Raises:
        BenchFailed: it counts otherwise.

    """
    counts = ask(prompts.make(1)[0], OUTPUT_TOKENS)
    if (counts["num_input_tokens"], counts["num_output_tokens"]) != (PROMPT_TOKENS, OUTPUT_TOKENS):
        raise BenchFailed(f"expected {PROMPT_TOKENS} tokens in and {OUTPUT_TOKENS} out, but the server counts {counts}")


def _order(prompts: list[Prompt], concurrency: int, max_tokens: int = OUTPUT_TOKENS) -> Order:
    # A bound, not an expectation: a tenth of what the slowest known machine does, and the time to start.
    limit_s = 60.0 + len(prompts) * max_tokens / 5.0
    return Order(prompts, concurrency, max_tokens, limit_s)
