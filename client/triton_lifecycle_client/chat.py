"""A conversation in the terminal; the backend writes it out by the model's own chat template."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from triton_lifecycle.errors import LifecycleError, PromptTooLong

from .terminal import UsageFault, err, tell, write

if TYPE_CHECKING:
    from collections.abc import Callable

    from .sync import Client
    from .types import Options

Message = dict[str, str]

_HELP = "Ctrl-C stops an answer · /reset forgets the conversation · /exit or Ctrl-D leaves"


class Conversation:
    """The turns so far.

    Args:
        system: what the model is told before all else.

    """

    def __init__(self, system: str | None = None) -> None:
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self._turns: list[Message] = []

    def ask(self, text: str) -> list[Message]:
        """Add a turn of the user and return all that the answer follows."""
        self._turns.append({"role": "user", "content": text})
        return self._opening + self._turns

    def answered(self, text: str) -> None:
        """Add the assistant's turn; without any text, take the question back."""
        if text:
            self._turns.append({"role": "assistant", "content": text})
        else:
            self._turns.pop()

    def reset(self) -> None:
        """Forget all turns."""
        self._turns.clear()

    def __len__(self) -> int:
        return len(self._turns)


def run(
    client: Client,
    conversation: Conversation,
    options: Options,
    *,
    read: Callable[[str], str] = input,
    interactive: bool | None = None,
) -> None:
    """Talk until the user leaves.

    With a person at the keyboard, the fault of an answer is shown and the conversation goes on. Piped, nobody is there
    to decide: the first fault ends it, as the questions that follow may build upon the answer.

    Raises:
        LifecycleError: an answer failed, or a command is unknown, and the input is piped.

    """
    interactive = sys.stdin.isatty() if interactive is None else interactive
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401, PLC0415 - gives input() its history and line editing
        err.print(f"[dim]{client.model} at {client.endpoint}. {_HELP}[/]")
    while (line := _next_line(read, interactive=interactive)) not in {None, "/exit", "/quit"}:
        try:
            _take(str(line), client, conversation, options)
        except KeyboardInterrupt:
            if not interactive:
                raise
            err.print("[dim]stopped[/]")
        except LifecycleError as error:
            if not interactive:
                raise
            tell(error)
            if isinstance(error, PromptTooLong):
                err.print("[dim]the conversation has become too long for the model: /reset begins anew[/]")


def _next_line(read: Callable[[str], str], *, interactive: bool) -> str | None:
    """Return what the user says next, ``None`` at the end."""
    while True:
        try:
            return read("› " if interactive else "").strip()  # noqa: RUF001 - a prompt sign, not a bracket
        except EOFError:
            if interactive:
                write("\n")
            return None
        except UnicodeDecodeError as error:
            raise UsageFault(f"standard input is not UTF-8 text (byte {error.start}); convert it first") from None
        except KeyboardInterrupt:
            if not interactive:
                raise
            err.print(f"\n[dim]{_HELP}[/]")


def _take(line: str, client: Client, conversation: Conversation, options: Options) -> None:
    """Do what a line asks for."""
    if line == "/reset":
        conversation.reset()
        err.print("[dim]forgotten[/]")
    elif line == "/help":
        err.print(f"[dim]{_HELP}[/]")
    elif line.startswith("/"):
        raise UsageFault(f"unknown command {line.split(maxsplit=1)[0]}. {_HELP} · /help shows this")
    elif line:
        _answer(line, client, conversation, options)


def _answer(line: str, client: Client, conversation: Conversation, options: Options) -> None:
    """Show one answer as it comes; however it ends, the conversation keeps as much of it as there was."""
    asked: Options = {
        **options,
        "sampling": {**options.get("sampling", {}), "messages": conversation.ask(line)},
    }
    with client.stream("", **asked) as stream:
        try:
            for chunk in stream:
                write(chunk.text)
        except BaseException:
            if stream.text:
                write("\n")
            raise
        else:
            write("\n")
        finally:
            conversation.answered(stream.text)
