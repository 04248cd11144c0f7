"""The command: options in, a folder with results, tables and a page out."""

from __future__ import annotations

import enum
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from load.benchmark import gate, options, page, result, tables
from load.benchmark.options import Options
from load.benchmark.progress import Told
from load.benchmark.records import Folder, Run
from load.benchmark.run import Runner
from load.overhead.report import environment
from triton_lifecycle.errors import InvalidInput, LifecycleError
from triton_lifecycle.launcher import UNBROKEN, LauncherError
from triton_lifecycle.launcher.installation import state_folder

if TYPE_CHECKING:
    from types import FrameType

    from load.benchmark.gate import Rule

EXIT_FAILED, EXIT_USAGE, EXIT_BROKEN, EXIT_INTERRUPTED = 1, 2, 3, 130
app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Switch(enum.StrEnum):
    """On or off, as a word."""

    true = "true"
    false = "false"


_EPILOG = """**Examples**

`lifecycle bench --target vllm,ours,off --num-requests 600 --output-len 32` fills the failure table with three servers

`lifecycle bench --concurrency 10,50,100,200,500 --timeout 10,30,60,120` sweeps closed loops

`lifecycle bench --target ours,sglang=http://127.0.0.1:30000 --scenario high,extreme`

`lifecycle bench --resume .lifecycle/bench/1202-101500 --compare OTHER_FOLDER`

`lifecycle bench --scenario high --baseline result.json --fail-if "goodput<0.95" --fail-if "failed>0.001"`

**Exit codes:** 0 measured, 1 failed, 2 wrong usage, 3 a rule of `--fail-if` was broken, 130 interrupted."""


@app.command(epilog=_EPILOG)
def main(
    *,
    model: Annotated[
        str, typer.Option(help="The model's name; started servers take it from `model_repository`.")
    ] = "smollm2",
    num_requests: Annotated[int, typer.Option(help="Requests of each cell.")] = 200,
    concurrency: Annotated[
        str, typer.Option(help="Closed loops: so many callers at once; several with commas: `10,50,100,200,500`.")
    ] = "",
    input_len: Annotated[
        str, typer.Option(help="Tokens of a prompt: `32`, `uniform:16-256`, `lognormal:120,0.8`.")
    ] = "32",
    output_len: Annotated[str, typer.Option(help="Tokens of an answer, in the same form.")] = "64",
    timeout: Annotated[
        str, typer.Option(help="Seconds each caller allows; several with commas: `10,30,60,120`.")
    ] = "30",
    enable_event_driven: Annotated[
        Switch | None,
        typer.Option(help="The event bus of ours. Default: on, or as `--server-config` says.", show_default=False),
    ] = None,
    enable_intelligent_timeout: Annotated[
        Switch | None,
        typer.Option(
            help="Intelligent timeouts of ours, and refusing what cannot be in time. Default: on, or as "
            "`--server-config` says.",
            show_default=False,
        ),
    ] = None,
    scenario: Annotated[
        str, typer.Option(help="Open loops: normal, high, extreme, long, all; the default without `--concurrency`.")
    ] = "",
    target: Annotated[
        str,
        typer.Option(
            help="Who is measured, with commas: ours (gRPC), ours-http, off (ours without its configuration), "
            "off-http, vllm: started here unless `=ADDRESS` follows; sglang, lmdeploy, tensorrt-llm, openai (any "
            "server with /v1/completions), triton (official backend): always with `=http://HOST:PORT`."
        ),
    ] = "ours",
    seed: Annotated[int, typer.Option(help="Of prompts, lengths and arrivals.")] = 0,
    capacity: Annotated[
        float | None,
        typer.Option(help="Requests/s that are 1x. Default: measured on the first target.", show_default=False),
    ] = None,
    capacity_concurrency: Annotated[int, typer.Option(help="Callers at once while the capacity is measured.")] = 64,
    capacity_seconds: Annotated[float, typer.Option(help="How long it is measured.", min=0.5, max=600)] = 20.0,
    server_config: Annotated[
        Path | None, typer.Option(help="A `request_lifecycle.yaml` for ours.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the results. Default: a new one in .lifecycle/bench.", show_default=False),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Go on with the run in this folder, with its options; only make the report if it is whole."),
    ] = None,
    compare: Annotated[
        list[Path] | None, typer.Option(help="Folder of another run to compare with; several times.")
    ] = None,
    baseline: Annotated[Path | None, typer.Option(help="A `result.json` that `--fail-if` judges against.")] = None,
    fail_if: Annotated[
        list[str] | None, typer.Option(help="A rule such as `goodput<0.95` that ends with code 3; several times.")
    ] = None,
) -> None:
    """Measure what becomes of requests under load: ours, vLLM's own server, and others, with the same load.

    Without `--concurrency` the four scenarios are measured: normal 0.5x, high 0.9x, extreme 0.9x in bursts of 3x, long
    (normal, every tenth answer eight times longer), as multiples of the capacity, which is measured first. Ctrl-C ends
    what was started and keeps what was found; `--resume` goes on. `lifecycle bench overhead` is another benchmark:
    what the way through Triton costs.
    """
    progress = Console(stderr=True, width=None if sys.stderr.isatty() else UNBROKEN)
    try:
        wanted = Options(
            model=model,
            num_requests=num_requests,
            concurrency=options.whole("--concurrency", concurrency),
            input_len=input_len,
            output_len=output_len,
            timeout=options.numbers("--timeout", timeout),
            event_driven=_switched(enable_event_driven),
            intelligent_timeout=_switched(enable_intelligent_timeout),
            scenarios=options.scenarios(scenario),
            targets=options.targets(target),
            seed=seed,
            capacity=capacity,
            capacity_concurrency=capacity_concurrency,
            capacity_seconds=capacity_seconds,
            server_config=None if server_config is None else str(server_config.absolute()),
        ).checked()
        rules = [gate.parse(text) for text in fail_if or ()]
        gate.check(rules, baseline is not None)
        reference = None if baseline is None else result.read_json(baseline)
        others = [result.read(path) for path in compare or ()]
        folder, run = _folder(wanted, out, resume)
    except InvalidInput as error:
        raise typer.BadParameter(error.message) from None
    _take_signals()
    code = _measure(folder, run, progress)
    code = _report(folder, others, rules, reference, code=code, progress=progress)
    raise typer.Exit(code)


def _switched(switch: Switch | None) -> bool | None:
    return None if switch is None else switch is Switch.true


def _take_signals() -> None:
    # A shell that starts this in the background has it ignore SIGINT; and asyncio takes a Ctrl-C only by this handler.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def as_interrupt(_number: int, _frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGINT)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, as_interrupt)


def _folder(wanted: Options, out: Path | None, resume: Path | None) -> tuple[Folder, Run]:
    if resume is not None:
        if out is not None:
            raise InvalidInput("--out and --resume name two folders; the results go where the run is")
        folder = Folder(resume)
        return folder, folder.run()
    folder = Folder(out or state_folder() / "bench" / time.strftime("%m%d-%H%M%S"))
    if folder.begun:
        raise InvalidInput(
            f"--out {folder.path} holds a run already; go on with it by --resume, or name another folder"
        )
    given = wanted.capacity
    run = Run(
        options=wanted,
        environment=environment(),
        command=shlex.join(["lifecycle", "bench", *sys.argv[_arguments_begin() :]]),
        capacity=given,
        capacity_of="" if given is None else "given",
    )
    folder.write_run(run)
    return folder, run


def _arguments_begin() -> int:
    return 2 if sys.argv[1:2] == ["bench"] else 1


def _measure(folder: Folder, run: Run, progress: Console) -> int:
    told = Told(progress)
    try:
        with told:
            told.say(f"results go to {folder.path}")
            Runner(folder, run, told).measure()
    except KeyboardInterrupt:
        told.say(f"interrupted; what was started has ended. Go on with: lifecycle bench --resume {folder.path}")
        return EXIT_INTERRUPTED
    except InvalidInput as error:
        progress.print(f"bench: {error.message}", style="red", markup=False, highlight=False)
        return EXIT_USAGE
    except (LifecycleError, LauncherError, OSError) as error:
        progress.print(f"bench: {error}", style="red", markup=False, highlight=False)
        return EXIT_FAILED
    return 0


def _report(
    folder: Folder,
    others: list[result.Result],
    rules: list[Rule],
    reference: result.Document | None,
    *,
    code: int,
    progress: Console,
) -> int:
    found = result.read(folder.path)
    document = result.document(found)
    judgements: list[gate.Judgement] = []
    if rules and code == 0:
        try:
            judgements = gate.judge(rules, document, reference)
        except InvalidInput as error:
            progress.print(f"bench: {error.message}", style="red", markup=False, highlight=False)
            code = EXIT_USAGE
    folder.write(result.RESULT_FILE, result.as_json(document))
    folder.write(result.TABLE_FILE, result.as_csv(found))
    path = folder.write(result.PAGE_FILE, page.render(found, others, judgements).encode())
    tables.show(found, others, judgements, Console(width=None if sys.stdout.isatty() else 200))
    progress.print(f"report: {path}", markup=False, highlight=False, soft_wrap=True)
    return EXIT_BROKEN if code == 0 and any(item.broken for item in judgements) else code
