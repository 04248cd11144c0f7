"""What every command needs of a terminal: where text goes, how faults are told, and the exit codes."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from triton_lifecycle.errors import InvalidInput, LifecycleError, Overloaded, RequestError
from triton_lifecycle.launcher import UNBROKEN, LauncherError

if TYPE_CHECKING:
    from collections.abc import Iterator

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141

ASK_CODES = """**Exit codes:** 0 done; 1 failed on the server; 2 wrong usage, or a request that cannot be served as it
stands (an unknown model or id too); 3 server unreachable, overloaded or stopping; 130 interrupted; 141 the reader of
the output left."""
"""For the help of every command that sends requests."""

out = Console(highlight=False, width=None if sys.stdout.isatty() else UNBROKEN)
err = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else UNBROKEN)


class UsageFault(InvalidInput):
    """The command line itself is wrong; nothing was sent."""


@contextmanager
def reported(*, as_json: bool = False) -> Iterator[None]:
    """Turn errors into a line on stderr, or with ``as_json`` an object on stdout, and the right exit code."""
    try:
        yield
    except LifecycleError as error:
        tell(error, as_json=as_json)
        raise typer.Exit(exit_code(error)) from None
    except LauncherError as error:
        tell_text(str(error), as_json=as_json)
        raise typer.Exit(EXIT_FAILED) from None
    except KeyboardInterrupt:
        err.print("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        # The reader (`| head`) has seen enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_PIPE_CLOSED) from None


def exit_code(error: LifecycleError) -> int:
    """Return the exit code that stands for an error."""
    from .errors import ServerUnreachable  # noqa: PLC0415 - keeps `--help` quick

    if isinstance(error, RequestError):
        return EXIT_USAGE
    return EXIT_UNREACHABLE if isinstance(error, (ServerUnreachable, Overloaded)) else EXIT_FAILED


def tell(error: LifecycleError, *, as_json: bool = False) -> None:
    """Show an error of the tree."""
    from .errors import described  # noqa: PLC0415

    if as_json:
        print_json({"error": described(error)})
    else:
        err.print(f"[bold red]{error.slug}[/]: ", end="")
        err.print(error.wire().removeprefix(f"{error.slug}: "), markup=False, soft_wrap=True)


def tell_text(message: str, *, as_json: bool = False) -> None:
    """Show a fault of the set-up, which has no slug."""
    if as_json:
        print_json({"error": {"slug": "setup", "message": message, "retryable": False, "retry_after": None}})
    else:
        err.print("[bold red]error[/]: ", end="")
        err.print(message, markup=False, soft_wrap=True)


def print_json(document: object) -> None:
    """Write one JSON document in one line on stdout."""
    write(json.dumps(document, ensure_ascii=False) + "\n")


def write(text: str) -> None:
    """Write text of the model on stdout, at once and untouched."""
    sys.stdout.write(text)
    sys.stdout.flush()


def printable(text: str) -> str:
    """Return the text without what would move a terminal's cursor or change its colours."""
    return "".join(char if char.isprintable() else "�" for char in text)
