"""The commands around a server on this machine: serve, prepare, doctor, demo, bench."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .terminal import EXIT_FAILED, EXIT_INTERRUPTED, err, out, reported, tell_text

if TYPE_CHECKING:
    from triton_lifecycle.launcher.ports import Ports
    from triton_lifecycle.launcher.server import TritonServer

DEFAULT_MODEL = "smollm2"
Repository = Annotated[
    Path | None,
    typer.Option(help="Triton's model repository. Default: the project's `model_repository`.", show_default=False),
]


def register(app: typer.Typer) -> None:
    """Add these commands to the application."""
    app.command(epilog=_SERVE_EXAMPLES)(serve)
    app.command(epilog="**Exit codes:** 0 ready, 1 failed, 2 wrong usage, 130 interrupted.")(prepare)
    app.command(
        epilog="**Exit codes:** 0 nothing fails (warnings may), 1 something does, 2 wrong usage, 130 interrupted."
    )(doctor)
    app.command(epilog=_DEMO_CODES)(demo)
    app.command(
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    )(bench)


_SERVE_EXAMPLES = """**Examples**

`lifecycle serve`

`lifecycle serve --model simulated --http-port 9000 --grpc-port 9001 --metrics-port 9002`

`lifecycle serve --model-repository ~/models --log server.log`

**Exit codes:** 0 stopped in order; 1 it did not start, died, was ended at once, or cut requests that outlasted the exit
timeout; 2 wrong usage; 130 interrupted before it was ready."""

_DEMO_CODES = """**Exit codes:** 0 all went as it should; 1 something failed; 2 wrong usage, or a request that the model
cannot serve; 3 the server did not answer or refused; 130 interrupted."""


def serve(
    *,
    model_repository: Repository = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            help="Load this model; several times. Default: smollm2 of the project's repository, all of another.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int | None, typer.Option(help="Default: 8000, or a free one.", show_default=False)] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Default: 8001, or a free one.", show_default=False)] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Default: 8002, or a free one.", show_default=False)] = None,
    exit_timeout: Annotated[float, typer.Option(help="Seconds that running requests get at the end.", min=1)] = 30.0,
    log: Annotated[Path | None, typer.Option(help="File for the server's log.", show_default=False)] = None,
) -> None:
    """Run the server in the foreground. Ctrl-C lets running requests end, a second one does not."""
    from triton_lifecycle.launcher import project_root  # noqa: PLC0415
    from triton_lifecycle.launcher.foreground import Foreground  # noqa: PLC0415
    from triton_lifecycle.launcher.server import TritonServer  # noqa: PLC0415

    with reported():
        ours = project_root() / "model_repository"
        repository = model_repository or ours
        models = model or ([DEFAULT_MODEL] if repository.absolute() == ours else None)
        if repository.absolute() == ours and DEFAULT_MODEL in (models or ()):
            _prepare()
        server = TritonServer(
            repository,
            models=models,
            ports=choose_ports(host, http_port, grpc_port, metrics_port),
            host=host,
            exit_timeout_s=exit_timeout,
            log_path=log.absolute() if log else None,
        )
        code = Foreground(server, _say).run(on_ready=lambda: _announce(server))
    raise typer.Exit(code if code in {0, EXIT_INTERRUPTED} else EXIT_FAILED)


def prepare(
    *,
    target: Annotated[
        Path | None, typer.Option(help="Folder to fill. Default: `model_repository/smollm2/1/weights`.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every file's checksum again.")] = False,
) -> None:
    """Make the weights of the built-in model ready; a second time it takes no time."""
    with reported():
        folder = _prepare(target, verify=verify)
        out.print(f"weights are ready in {folder}", markup=False, soft_wrap=True)


def doctor(*, as_json: Annotated[bool, typer.Option("--json", help="Report in JSON.")] = False) -> None:
    """Check this machine for everything the server needs, and say what to do about each fault."""
    from triton_lifecycle.launcher import doctor as checks  # noqa: PLC0415

    with reported(as_json=as_json):
        code = checks.main(json=as_json)
    raise typer.Exit(code)


def demo(
    *,
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "The capital of France is",
    max_tokens: Annotated[int, typer.Option(help="Most tokens to make.", min=1)] = 24,
    model: Annotated[str, typer.Option("--model", "-m", help="The model to load.")] = DEFAULT_MODEL,
    model_repository: Repository = None,
) -> None:
    """Start a real server, stream an answer over gRPC and over HTTP, show where the time went, clean up."""
    from triton_lifecycle.launcher import project_root  # noqa: PLC0415

    from . import demo as show  # noqa: PLC0415

    with reported():
        repository = model_repository or project_root() / "model_repository"
        if model == DEFAULT_MODEL and model_repository is None:
            _prepare()
        good = show.run(repository, model, prompt, max_tokens, say=_say)
    raise typer.Exit(0 if good else EXIT_FAILED)


def bench(context: typer.Context) -> None:
    """Measure ours against the bare engine; `lifecycle bench --help` shows the benchmark's own options."""
    from triton_lifecycle.launcher import project_root  # noqa: PLC0415

    sys.path.insert(0, str(project_root()))
    try:
        benchmark = importlib.import_module("load.overhead.cli")
    except ModuleNotFoundError as error:
        tell_text(f"the benchmark is not here ({error.name} is missing): run it in a checkout of the project")
        raise typer.Exit(EXIT_FAILED) from None
    benchmark.app(list(context.args), prog_name="lifecycle bench")


def choose_ports(host: str, http: int | None, grpc: int | None, metrics: int | None) -> Ports:
    """Return the ports as given; for one not given, Triton's own if it is free, else, told, another free one."""
    from triton_lifecycle.launcher.ports import Ports, is_free, user_of  # noqa: PLC0415

    usual, spare = Ports(), Ports.free(host)

    def pick(given: int | None, standard: int, other: int) -> int:
        if given is not None or is_free(host, standard):
            return standard if given is None else given
        _say(f"port {standard} is taken by {user_of(standard)}; using {other}")
        return other

    return Ports(
        pick(http, usual.http, spare.http),
        pick(grpc, usual.grpc, spare.grpc),
        pick(metrics, usual.metrics, spare.metrics),
    )


def _prepare(target: Path | None = None, *, verify: bool = False) -> Path:
    from triton_lifecycle.launcher.weights import prepare_weights  # noqa: PLC0415

    return prepare_weights(target, progress=_say, verify=verify)


def _announce(server: TritonServer) -> None:
    model = (server.models or ["MODEL"])[0]
    urls = f"gRPC {server.grpc_url} · HTTP {server.http_url} · metrics {server.metrics_url}"
    out.print(f"[bold green]ready[/]  {urls}", soft_wrap=True)
    out.print(f"log    {server.log_path}", markup=False, soft_wrap=True)
    url = "" if server.grpc_url.endswith(":8001") else f" --url {server.grpc_url}"
    named = "" if model == DEFAULT_MODEL else f" --model {model}"
    out.print(f'try    lifecycle generate "The capital of France is"{named}{url}', markup=False, soft_wrap=True)
    out.print("Ctrl-C lets running requests finish and stops the server.")


def _say(line: str) -> None:
    err.print(line, markup=False, style="dim", soft_wrap=True)
