"""The commands for recorded events: timeline, replay."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .terminal import EXIT_FAILED, UsageFault, err, out, print_json, reported

if TYPE_CHECKING:
    from triton_lifecycle.recording import Recording
    from triton_lifecycle.simulation.run import Plan

    from .replay.compare import Outcome, Report
    from .timeline.view import View
    from .types import Protocol

EXIT_DIFFERENT = 4
READY_S = 3.0
"""How long a server that is to be replayed to may take to say that it is ready."""

Url = Annotated[
    str | None,
    typer.Option(
        envvar="LIFECYCLE_URL",
        help="The server: `host:port`, or with `grpc://` or `http://` before it.",
        show_default=False,
        show_envvar=True,
    ),
]
Grpc = Annotated[
    bool | None, typer.Option("--grpc/--http", help="How to speak to the server. Default: gRPC.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Answer in JSON, errors too.")]
Source = Annotated[str, typer.Argument(metavar="FILE", help="What a recorder wrote: a file, a folder or a glob.")]

_TIMELINE = """**Examples**

`lifecycle timeline events.jsonl --slowest 20`

`lifecycle timeline 'recordings/*.jsonl*' --status timed_out --html page.html`

`lifecycle timeline events.jsonl --chrome trace.json`, then open it in Perfetto

`lifecycle timeline 7d5c…` asks the running server about one request

**Exit codes:** 0 done; 1 failed; 2 wrong usage, or nothing to read; 3 server unreachable; 130 interrupted."""

_REPLAY = """**Examples**

`lifecycle replay events.jsonl --url 127.0.0.1:8001 --speed 2`

`lifecycle replay events.jsonl --simulate --seed 7 --out again.jsonl`

`lifecycle replay events.jsonl --simulate --set admission.max_live_requests=4` shows what else would have been decided

**Exit codes:** 0 every request was decided as recorded; 4 some were not; 1 failed; 2 wrong usage, or nothing to read;
3 server unreachable; 130 interrupted."""


def register(app: typer.Typer) -> None:
    """Add these commands to the application."""
    app.command(epilog=_TIMELINE)(timeline)
    app.command(epilog=_REPLAY)(replay)


def timeline(
    source: Annotated[
        str, typer.Argument(metavar="FILE|ID", help="A recording (file, folder or glob), or a request's id.")
    ],
    *,
    status: Annotated[
        list[str] | None,
        typer.Option(help="Only requests that ended so: completed, failed, cancelled, timed_out, rejected, live."),
    ] = None,
    slug: Annotated[list[str] | None, typer.Option(help="Only requests that ended for this reason.")] = None,
    request_id: Annotated[
        list[str] | None, typer.Option("--id", help="Only requests whose id (the caller's or ours) begins so.")
    ] = None,
    slowest: Annotated[int | None, typer.Option(min=1, help="Only this many, those that took longest.")] = None,
    rows: Annotated[int, typer.Option(min=1, max=10_000, help="Requests that the terminal shows at most.")] = 50,
    chrome: Annotated[Path | None, typer.Option(help="Write a Chrome trace for Perfetto.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write one HTML page that needs nothing else.")] = None,
    url: Url = None,
    grpc: Grpc = None,
    model: Annotated[str, typer.Option("--model", "-m", help="The model to ask about an id.")] = "smollm2",
    as_json: AsJson = False,
) -> None:
    """Show where requests' time went."""
    with reported(as_json=as_json):
        from .timeline import chrome as chrome_trace  # noqa: PLC0415
        from .timeline import page, terminal, view  # noqa: PLC0415

        chosen = view.Filter(
            statuses=frozenset(status or ()),
            slugs=frozenset(slug or ()),
            ids=tuple(request_id or ()),
            slowest=slowest,
        )
        chosen.check()
        shown = chosen.apply(_view(source, url, model, grpc=grpc))
        _tell_gaps(shown, as_json=as_json)
        written = []
        if chrome is not None:
            chrome_trace.write(chrome, shown)
            written.append(chrome)
        if html is not None:
            page.write(html, shown)
            written.append(html)
        if as_json:
            print_json(view.document(shown))
            return
        for path in written:
            out.print(f"written: {path}", markup=False, soft_wrap=True)
        if not written:
            terminal.show(shown, rows)


def replay(
    source: Source,
    *,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Run in this process in virtual time, not against a server.")
    ] = False,
    url: Url = None,
    grpc: Grpc = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="The model to ask. Default: the recorded one.", show_default=False),
    ] = None,
    speed: Annotated[float, typer.Option(min=0.001, max=1000, help="2 sends twice as fast as recorded.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of a simulation: the same seed gives the same events.")] = 0,
    config: Annotated[
        Path | None, typer.Option(help="Decide by this request_lifecycle.yaml. Default: as the recording tells.")
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change one key, as in admission.max_live_requests=4."),
    ] = None,
    engine: Annotated[
        Path | None,
        typer.Option(help="Simulate the engine by this model.json, not at the recorded pace.", show_default=False),
    ] = None,
    out_file: Annotated[Path | None, typer.Option("--out", help="Write the simulated events here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Ask recorded requests again and compare how they end."""
    with reported(as_json=as_json):
        from triton_lifecycle import recording  # noqa: PLC0415

        from .replay import compare  # noqa: PLC0415
        from .replay.plan import make_plan  # noqa: PLC0415

        _check_replay(simulate, url, model, speed, {"--config": config, "--set": change, "--engine": engine,
                                                     "--out": out_file, "--seed": seed or None})  # fmt: skip
        found = recording.read(source)
        if simulate:
            report = _simulated(found, make_plan(found, seed, config, change, engine), out_file)
        else:
            protocol: Protocol | None = None if grpc is None else "grpc" if grpc else "http"
            report = _sent(found, url, model, protocol, speed)
        if as_json:
            import msgspec  # noqa: PLC0415

            print_json({"agree": report.agree} | msgspec.to_builtins(report))
        else:
            for table in compare.tables(report):
                out.print(table)
            _verdict(report)
    if not report.requests:
        raise typer.Exit(EXIT_FAILED)
    if not report.agree:
        raise typer.Exit(EXIT_DIFFERENT)


def _view(source: str, url: str | None, model: str, *, grpc: bool | None) -> View:
    """Read a recording, or where there is none of this name, ask a server about a request of this id."""
    from triton_lifecycle import recording  # noqa: PLC0415

    from .timeline import view  # noqa: PLC0415

    looks_like_path = any(mark in source for mark in "/*?") or source.endswith((".jsonl", ".gz", ".json"))
    if looks_like_path or Path(source).exists():
        return view.of(recording.read(source), source)
    from .cli import connect  # noqa: PLC0415

    with connect(url, model, grpc=grpc) as client:
        return view.of_status(client.status(source))


def _tell_gaps(shown: View, *, as_json: bool) -> None:
    if not as_json:
        for note in shown.notes:
            err.print(f"note: {note}", style="dim", markup=False, soft_wrap=True)


def _check_replay(simulate: bool, url: str | None, model: str | None, speed: float, only: dict[str, Any]) -> None:  # noqa: FBT001
    if not simulate and (given := [name for name, value in only.items() if value]):
        raise UsageFault(f"{', '.join(given)}: only with --simulate; a server decides by its own configuration")
    if simulate and (url is not None or model is not None or speed != 1.0):
        raise UsageFault("--url, --model and --speed are for a server; --simulate asks none and takes no time")


def _simulated(found: Recording, plan: Plan, out_file: Path | None) -> Report:
    from rich.progress import Progress  # noqa: PLC0415

    from triton_lifecycle import recording  # noqa: PLC0415
    from triton_lifecycle.events import encode  # noqa: PLC0415
    from triton_lifecycle.simulation import run  # noqa: PLC0415

    from .replay.compare import Outcome, compare  # noqa: PLC0415

    whole = [story for story in found.stories if story.received is not None]
    with Progress(console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("simulating", total=len(whole))
        events = run.simulate(found.stories, plan, progress=lambda done: bar.update(task, completed=done))
    if out_file is not None:
        try:
            out_file.write_bytes(b"".join(encode(event) + b"\n" for event in events))
        except OSError as error:
            raise UsageFault(f"--out {out_file}: {error.strerror or error}") from None
    ended = {story.id for story in whole if story.ending is not None}
    outcomes: dict[str, Outcome] = {
        story.id: Outcome.of(story) for story in recording.stories(events) if story.id in ended
    }
    left_out = {
        "beginning missing": len(found.stories) - len(whole),
        "end missing": len(whole) - len(ended),
    }
    return compare(found.stories, outcomes, left_out, exact=True)


def _sent(found: Recording, url: str | None, model: str | None, protocol: Protocol | None, speed: float) -> Report:
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn  # noqa: PLC0415

    from triton_lifecycle.errors import InvalidInput  # noqa: PLC0415

    from .client import AsyncClient  # noqa: PLC0415
    from .replay import server  # noqa: PLC0415
    from .replay.compare import compare  # noqa: PLC0415
    from .retry import NO_RETRY  # noqa: PLC0415

    planned, left_out = server.arrivals(found.stories, speed)
    models = {arrival.story.model for arrival in planned}
    if model is None and len(models) > 1:
        raise UsageFault(f"the recording holds several models ({', '.join(sorted(models))}); name one with --model")
    asked = model or next(iter(models), "")

    async def run() -> dict[str, Outcome]:
        try:
            client = AsyncClient(url, model=asked, protocol=protocol, retry=NO_RETRY)
        except InvalidInput as error:
            raise UsageFault(error.message) from None
        columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
            task = bar.add_task("replaying", total=len(planned))
            async with client:
                await client.wait_ready(READY_S)
                return await server.send(client, planned, progress=lambda done: bar.update(task, completed=done))

    return compare(found.stories, asyncio.run(run()) if planned else {}, left_out, exact=False)


def _verdict(report: Report) -> None:
    for reason, count in report.left_out.items():
        out.print(f"left out: {count} ({reason})", style="dim", markup=False)
    if not report.requests:
        out.print("[bold red]nothing to compare[/]: no request of the recording has both its beginning and its end")
    elif report.agree:
        out.print(f"[bold green]agree[/]: all {report.requests} requests were decided as recorded")
    else:
        out.print(f"[bold yellow]differ[/]: {len(report.differences)} of {report.requests} requests")
