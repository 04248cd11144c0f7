"""The command: which parts, how long, and where the result goes."""

from __future__ import annotations

import enum
import http.client
import json
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from load.overhead import parts, report
from load.overhead.children import Child
from load.overhead.figures import BARE, GRPC, HTTP, SimulatedSetup
from load.overhead.grpc_source import sampling
from load.overhead.measure import BenchFailed, Prompt
from load.overhead.prompts import PromptMaker
from triton_lifecycle.launcher import UNBROKEN, LauncherError, project_root
from triton_lifecycle.launcher.installation import state_folder
from triton_lifecycle.launcher.server import TritonServer
from triton_lifecycle.launcher.weights import prepare_weights

if TYPE_CHECKING:
    from types import FrameType

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
MODEL = "smollm2"
SIMULATED = "simulated"
READY_S = 300.0


class Part(enum.StrEnum):
    """What to measure."""

    engine = "engine"
    cpu = "cpu"
    simulated = "simulated"
    all = "all"


class Bench:
    """One run of the benchmark; everything it starts ends with its block."""

    def __init__(self, plan: parts.Plan, clients: int, seed: int, console: Console) -> None:
        self.plan = plan
        self.findings = report.Findings(report.environment())
        self._clients = clients
        self._seed = seed
        self._console = console
        self._began = time.monotonic()

    def run(self, part: Part) -> None:
        """Measure; what was found so far stands in :attr:`findings` at any time."""
        if part is not Part.simulated:
            self._real(part)
        if part in {Part.simulated, Part.all}:
            self._simulated()

    def _real(self, part: Part) -> None:
        root, plan = project_root(), self.plan
        weights = prepare_weights(progress=self.say)
        prompts = PromptMaker(weights, parts.PROMPT_TOKENS, self._seed)
        with ExitStack() as stack:
            repository = root / "model_repository"
            if self.plan.stream_interval > 1:
                copy = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lifecycle-bench-")))
                parts.with_interval(repository / MODEL, copy, weights, self.plan.stream_interval)
                repository = copy
            server = self._server(stack, repository, MODEL)
            children = self._children(stack, server, MODEL)
            if part is not Part.cpu:
                self.say("loading bare vLLM")
                children[BARE] = self._child(stack, "bare", str(root / "model_repository" / MODEL / "1"))
            rig = parts.Rig(children, server, prompts, plan, self.say)
            parts.check_lengths(lambda prompt, tokens: _counted(server.http_url, MODEL, prompt, tokens), prompts)
            self.say("warming up")
            concurrency = max(plan.levels) if part is Part.engine else parts.CPU_CONCURRENCY
            rig.warm_up(concurrency)
            if part is not Part.cpu:
                rig.measure_engines(self.findings.cells)
            if part is not Part.engine:
                rig.measure_cpu(self.findings.works, self.findings.requests)
            self.say("stopping the servers")

    def _simulated(self) -> None:
        self.findings.simulated_setup = SimulatedSetup(parts.SIMULATED_RATE, parts.SIMULATED_STREAMS, self._clients)
        with ExitStack() as stack:
            repository = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lifecycle-bench-")))
            parts.simulated_repository(project_root() / "model_repository" / SIMULATED, repository)
            server = self._server(stack, repository, SIMULATED)
            unary = self._child(stack, "http", server.http_url, SIMULATED)
            clients = [self._child(stack, "grpc", server.grpc_url, SIMULATED) for _ in range(self._clients)]
            rig = parts.SimulatedRig(unary, clients, server=server, plan=self.plan, say=self.say)
            rig.measure(self.findings.simulated)

    def _server(self, stack: ExitStack, repository: Path, model: str) -> TritonServer:
        self.say(f"starting tritonserver with {model}")
        server = TritonServer(repository, models=[model])
        stack.enter_context(server).wait_ready(READY_S, self.say)
        self.findings.environment["triton"] = _get(server.http_url, "/v2")["version"]
        return server

    def _children(self, stack: ExitStack, server: TritonServer, model: str) -> dict[str, Child]:
        return {
            GRPC: self._child(stack, "grpc", server.grpc_url, model),
            HTTP: self._child(stack, "http", server.http_url, model),
        }

    def _child(self, stack: ExitStack, *arguments: str) -> Child:
        logs = state_folder() / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        child = stack.enter_context(Child(arguments, logs / f"bench-{arguments[0]}.log"))
        child.wait_ready(READY_S)
        return child

    def say(self, text: str) -> None:
        """Tell how far it is."""
        self._console.print(f"[{time.monotonic() - self._began:4.0f} s] {text}", markup=False, highlight=False)


@app.command(epilog="Exit codes: 0 measured, 1 failed, 2 wrong usage, 130 interrupted.")
def main(
    *,
    part: Annotated[Part, typer.Option(help="What to measure.")] = Part.all,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds A B C A B C …")] = 3,
    concurrency: Annotated[str, typer.Option(help="Numbers of concurrent requests, with commas.")] = "1,8,32",
    clients: Annotated[int, typer.Option(min=1, max=16, help="Client processes of the simulated part.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here too.", dir_okay=False)] = None,
    stream_interval: Annotated[
        int, typer.Option(min=1, help="Tokens per response (vLLM's stream_interval), not for the simulated part.")
    ] = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="One short round: shows that it works, measures badly.")
    ] = False,
) -> None:
    """Measure what the way through Triton costs, in about ten minutes on two cores.

    The engine part compares bare AsyncLLM with ours over gRPC and HTTP, the cpu part counts the serving processes' CPU
    time per token, the simulated part offers 50,000 tokens/s. Ctrl-C ends it and prints what was found so far.
    """
    plan = (
        parts.QUICK
        if quick
        else parts.Plan(rounds=rounds, levels=_levels(concurrency), stream_interval=stream_interval)
    )
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder {json_file.absolute().parent} does not exist", param_hint="--json")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    progress = Console(stderr=True, width=None if sys.stderr.isatty() else UNBROKEN)
    bench = Bench(plan, clients, seed, progress)
    code = 0
    try:
        bench.run(part)
    except (BenchFailed, LauncherError) as error:
        progress.print(f"bench: {error}", style="red", markup=False, highlight=False)
        code = 1
    except KeyboardInterrupt:
        progress.print("bench: interrupted; everything it started has ended")
        code = 130
    report.show(bench.findings, Console(width=None if sys.stdout.isatty() else UNBROKEN))
    if json_file is not None:
        json_file.write_bytes(report.as_json(bench.findings))
    raise typer.Exit(code)


def _levels(text: str) -> tuple[int, ...]:
    try:
        levels = tuple(int(part) for part in text.split(","))
    except ValueError:
        levels = ()
    if not levels or min(levels) < 1:
        raise typer.BadParameter(f"expected numbers such as 1,8,32, found {text!r}", param_hint="--concurrency")
    return levels


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _counted(address: str, model: str, prompt: Prompt, max_tokens: int) -> dict[str, int]:
    """Ask for one whole answer and return how many tokens the server counts in and out."""
    asked: dict[str, Any] = {"text_input": prompt.text, "sampling_parameters": sampling(max_tokens)}
    asked |= {"return_num_input_tokens": True, "return_num_output_tokens": True}
    answer = _get(address, f"/v2/models/{model}/generate", asked)
    return {name: answer[name] for name in ("num_input_tokens", "num_output_tokens")}


def _get(address: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    # Straight to the server: urllib would honour a proxy from the environment.
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None)
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise BenchFailed(f"{address}{path} does not answer as it should: {error}") from None
    finally:
        connection.close()
    if "error" in answer:
        raise BenchFailed(f"the server refused a request: {answer['error']}")
    return answer
