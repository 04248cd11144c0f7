"""The commands around a server on this machine: serve, envoy, prepare, doctor, demo, bench."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from .terminal import EXIT_FAILED, EXIT_INTERRUPTED, UsageFault, err, out, reported, tell_text

if TYPE_CHECKING:
    from triton_lifecycle.launcher.envoy import Replica
    from triton_lifecycle.launcher.ports import Ports
    from triton_lifecycle.launcher.replicas import Fleet
    from triton_lifecycle.launcher.server import TritonServer

DEFAULT_MODEL = "smollm2"
Repository = Annotated[
    Path | None,
    typer.Option(help="Triton's model repository. Default: the project's `model_repository`.", show_default=False),
]


def register(app: typer.Typer) -> None:
    """Add these commands to the application."""
    app.command(epilog=_SERVE_EXAMPLES)(serve)
    app.command(epilog=_ENVOY_EXAMPLES)(envoy)
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

`lifecycle serve --model simulated --replicas 3`, which puts Envoy in front of three servers

**Exit codes:** 0 stopped in order; 1 it did not start, died, was ended at once, or cut requests that outlasted the exit
timeout; 2 wrong usage; 130 interrupted before it was ready."""

_ENVOY_EXAMPLES = """**Examples**

`lifecycle envoy --replica 10.0.0.1 --replica 10.0.0.2:8000:8001 --host 0.0.0.0 > envoy.yaml`

`lifecycle envoy --replica triton-headless --strategy least_request --model llama`, where each address that the name
stands for is a replica

**Exit codes:** 0 printed; 1 Envoy refuses it, or is not there to be asked; 2 wrong usage."""

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
    restarts: Annotated[
        int, typer.Option(help="How often within ten minutes a server that died is started again.", min=0)
    ] = 5,
    replicas: Annotated[
        int | None,
        typer.Option(
            help="Start so many servers and, on the HTTP and the gRPC port, Envoy in front of them. Default: "
            "`distributed.num_nodes` of the model where `distributed.enabled` is set, else one without Envoy.",
            min=1,
            show_default=False,
        ),
    ] = None,
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
        if (count := replicas or _replicas(repository, models)) > 1:
            ports = choose_ports(host, http_port, grpc_port, metrics_port)
            if log is not None:
                raise UsageFault("--log names one file, and each replica has its own: leave it out")
            fleet = _fleet(repository, models, count, host, ports, exit_timeout=exit_timeout, restarts=restarts)
            code = Foreground(fleet, _say, restarts=0).run(on_ready=_announce_fleet)
            raise typer.Exit(code if code in {0, EXIT_INTERRUPTED} else EXIT_FAILED)
        server = TritonServer(
            repository,
            models=models,
            ports=choose_ports(host, http_port, grpc_port, metrics_port),
            host=host,
            exit_timeout_s=exit_timeout,
            log_path=log.absolute() if log else None,
        )
        code = Foreground(server, _say, restarts=restarts).run(on_ready=_announce)
    raise typer.Exit(code if code in {0, EXIT_INTERRUPTED} else EXIT_FAILED)


def envoy(
    *,
    replica: Annotated[
        list[str],
        typer.Option(
            metavar="HOST[:HTTP[:GRPC]]",
            help="Where a server listens (ports 8000 and 8001 unless given); several times.",
        ),
    ],
    strategy: Annotated[
        str | None,
        typer.Option(
            help="round_robin, least_request, random or ring_hash. Default: the model's "
            "`distributed.load_balancing_strategy`.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="The model whose readiness counts. Default: the server's.", show_default=False
        ),
    ] = None,
    model_repository: Repository = None,
    host: Annotated[str, typer.Option(help="Address on which Envoy listens.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="Envoy's HTTP port.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="Envoy's gRPC port.")] = 8001,
    admin_port: Annotated[int, typer.Option(help="Envoy's admin port, always on the loopback.")] = 9901,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Have Envoy itself judge it first.")] = True,
) -> None:
    """Print the configuration of an Envoy in front of servers that run elsewhere."""
    from tempfile import NamedTemporaryFile  # noqa: PLC0415

    from triton_lifecycle.launcher import balancer, project_root  # noqa: PLC0415
    from triton_lifecycle.launcher import envoy as configuration  # noqa: PLC0415
    from triton_lifecycle.launcher.replicas import settings_of  # noqa: PLC0415

    with reported():
        repository = model_repository or project_root() / "model_repository"
        chosen = strategy or (settings_of(repository, [model]).load_balancing_strategy if model else "round_robin")
        if chosen not in configuration.STRATEGIES:
            raise UsageFault(f"--strategy wants one of {', '.join(configuration.STRATEGIES)}, got {chosen!r}")
        text = configuration.as_yaml(
            [_replica(given) for given in replica],
            configuration.Front(host, http_port, grpc_port, admin_port),
            configuration.Policy(strategy=cast("configuration.Strategy", chosen), model=model),
        )
        if check:
            with NamedTemporaryFile("w", suffix=".yaml") as file:
                file.write(text)
                file.flush()
                balancer.validate(Path(file.name))
        sys.stdout.write(text)


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
    """Measure what becomes of requests under load, ours against others; `bench overhead`: what the way costs."""
    from triton_lifecycle.launcher import project_root  # noqa: PLC0415

    arguments = list(context.args)
    overhead = arguments[:1] == ["overhead"]
    sys.path.insert(0, str(project_root()))
    try:
        benchmark = importlib.import_module("load.overhead.cli" if overhead else "load.benchmark.cli")
    except ModuleNotFoundError as error:
        tell_text(f"the benchmark is not here ({error.name} is missing): run it in a checkout of the project")
        raise typer.Exit(EXIT_FAILED) from None
    if overhead:
        benchmark.app(arguments[1:], prog_name="lifecycle bench overhead")
    benchmark.app(arguments, prog_name="lifecycle bench")


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


def _replicas(repository: Path, models: list[str] | None) -> int:
    """Return how many servers the configuration asks for."""
    from triton_lifecycle.launcher.replicas import settings_of  # noqa: PLC0415

    settings = settings_of(repository, models) if repository.is_dir() else None
    return settings.num_nodes if settings is not None and settings.enabled else 1


def _fleet(
    repository: Path,
    models: list[str] | None,
    count: int,
    host: str,
    ports: Ports,
    *,
    exit_timeout: float,
    restarts: int,
) -> Fleet:
    from triton_lifecycle.launcher.envoy import Front, Policy  # noqa: PLC0415
    from triton_lifecycle.launcher.ports import free_ports  # noqa: PLC0415
    from triton_lifecycle.launcher.replicas import make_fleet, settings_of  # noqa: PLC0415

    settings = settings_of(repository, models)
    if not settings.enabled:
        _say("distributed.enabled is off: each replica knows its own requests only (status and cancel by id)")
    taken = (ports.http, ports.grpc, ports.metrics)
    admin, *metrics = free_ports("127.0.0.1", count, besides=taken)
    only = models[0] if models is not None and len(models) == 1 else None
    return make_fleet(
        repository,
        count,
        models=models,
        front=Front(host, ports.http, ports.grpc, admin),
        policy=Policy(strategy=settings.load_balancing_strategy, model=only),
        metrics_ports=[ports.metrics, *metrics],
        exit_timeout_s=exit_timeout,
        restarts=restarts,
        say=_say,
    )


def _replica(text: str) -> Replica:
    from triton_lifecycle.launcher.envoy import Replica  # noqa: PLC0415

    host, *ports = text.split(":")
    if not host or len(ports) > 2 or not all(port.isdecimal() and 0 < int(port) < 65536 for port in ports):
        raise UsageFault(f"--replica wants HOST, HOST:HTTP or HOST:HTTP:GRPC, got {text!r}")
    return Replica(host, *map(int, ports))


def _announce_fleet(fleet: Fleet) -> None:
    front = fleet.balancer.front
    out.print(
        f"[bold green]ready[/]  gRPC {front.host}:{front.grpc} · HTTP {front.host}:{front.http} · "
        f"{len(fleet.members)} replicas, {fleet.balancer.policy.strategy} · Envoy http://127.0.0.1:{front.admin}",
        soft_wrap=True,
    )
    for member in fleet.members:
        server = member.server
        out.print(
            f"{member.name}  gRPC {server.grpc_url} · HTTP {server.http_url} · metrics {server.metrics_url} · "
            f"log {server.log_path}",
            markup=False,
            soft_wrap=True,
        )
    out.print("Ctrl-C lets running requests finish and stops all of it.")


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
