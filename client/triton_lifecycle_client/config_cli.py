"""The commands around ``request_lifecycle.yaml``: check, show, schema. They ask no server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .terminal import EXIT_FAILED, UsageFault, out, print_json, reported, write

if TYPE_CHECKING:
    from triton_lifecycle.config import Loaded
    from triton_lifecycle.config.show import Entry

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Check and show the configuration of a model, `request_lifecycle.yaml`, and the environment's part in it.",
)

AsJson = Annotated[bool, typer.Option("--json", help="Answer in JSON, problems too.")]
_CODES = "**Exit codes:** 0 all is well; 1 problems; 2 wrong usage, or there is no such file or folder."


@app.command(
    epilog=f"""**Examples**

`lifecycle config check model_repository/smollm2`

`LIFECYCLE__SHUTDOWN__DRAIN_TIMEOUT=5 lifecycle config check request_lifecycle.yaml --json`

{_CODES}"""
)
def check(
    path: Annotated[Path, typer.Argument(help="A configuration file, or the folder of a model.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Find everything that is wrong, at once."""
    with reported(as_json=as_json):
        loaded = _load(path, as_json=as_json)
        if as_json:
            file = None if loaded.file is None else str(loaded.file)
            print_json({"ok": True, "file": file, "problems": []})
            return
        origins = [origin.kind for origin in loaded.origins.values()]
        said = f"{origins.count('file')} keys set by the file, {origins.count('environment')} by the environment"
        out.print("[bold green]ok[/]", _named(loaded), f"({said})", soft_wrap=True)
        if plugged := _plugged(loaded):
            note = f"note: not imported here, but when the model is loaded: {', '.join(plugged)}"
            out.print(note, style="dim", markup=False, soft_wrap=True)


@app.command(
    epilog=f"""**Examples**

`lifecycle config show model_repository/smollm2 --changed`

`lifecycle config show --yaml > request_lifecycle.yaml`

{_CODES}"""
)
def show(
    path: Annotated[
        Path | None,
        typer.Argument(help="A configuration file, or the folder of a model. Without one: the official defaults."),
    ] = None,
    *,
    as_json: AsJson = False,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="Write a file that says the same.")] = False,
    changed: Annotated[bool, typer.Option("--changed", help="Leave out what nobody has set.")] = False,
) -> None:
    """Show every value that is in force, and where it came from. Passwords are not shown."""
    from triton_lifecycle.config import show as views  # noqa: PLC0415 - keeps `--help` quick

    with reported(as_json=as_json):
        if as_json and as_yaml:
            raise UsageFault("give --json or --yaml, not both")
        loaded = _load(path, as_json=as_json)
        entries = [e for e in views.entries(loaded) if not changed or e.origin.kind != "default"]
        if as_json:
            file = None if loaded.file is None else str(loaded.file)
            print_json({"file": file, "values": [entry.as_json() for entry in entries]})
        elif as_yaml:
            write(f"# {_named(loaded)}\n{views.as_yaml(entries)}")
        else:
            _table(loaded, entries)


@app.command()
def schema() -> None:
    """Write the JSON Schema of `request_lifecycle.yaml`, for editors: keys, types, ranges, meanings."""
    from triton_lifecycle.config.show import json_schema  # noqa: PLC0415

    with reported():
        write(json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n")


def _load(path: Path | None, *, as_json: bool) -> Loaded:
    from triton_lifecycle.config import FILE_NAME, InvalidConfig, read  # noqa: PLC0415

    if path is not None and path.is_dir():
        if not (path / "config.pbtxt").exists() and not (path / FILE_NAME).exists():
            raise UsageFault(f"{path} is no model's folder: it has neither config.pbtxt nor {FILE_NAME}")
        path /= FILE_NAME
    elif path is not None and not path.exists():
        raise UsageFault(f"{path} does not exist; give a {FILE_NAME} or the folder of a model")
    try:
        return read(path)
    except InvalidConfig as error:
        if not as_json:
            raise
        print_json({"ok": False, "problems": [problem.as_json() for problem in error.problems]})
        raise typer.Exit(EXIT_FAILED) from None


def _plugged(loaded: Loaded) -> list[str]:
    """Return the places of the stages and handlers that are code of the user's."""
    config = loaded.config
    return [each.use for each in (*config.pipeline.stages, *config.event_driven.handlers) if not isinstance(each, str)]


def _named(loaded: Loaded) -> str:
    return "no file: the official defaults apply" if loaded.file is None else str(loaded.file)


def _table(loaded: Loaded, entries: list[Entry]) -> None:
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    from triton_lifecycle.config.show import scalar  # noqa: PLC0415

    table = Table(title=_named(loaded), box=None, title_justify="left", pad_edge=False)
    for heading in ("key", "value", "from"):
        table.add_column(heading, overflow="fold")
    for entry in entries:
        table.add_row(entry.name, Text(scalar(entry.value)), _short(loaded, entry))
    out.print(table)


def _short(loaded: Loaded, entry: Entry) -> str:
    """Say where without repeating the file's folder on every line."""
    if entry.origin.kind == "file" and loaded.file is not None:
        return f"{loaded.file.name}:{entry.origin.spot.line}"
    return str(entry.origin)
