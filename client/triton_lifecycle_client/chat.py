"""A conversation in the terminal, written out by the model's own chat template."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triton_lifecycle.errors import LifecycleError, PromptTooLong
from triton_lifecycle.launcher import project_root

from .terminal import UsageFault, err, tell, write

if TYPE_CHECKING:
    from collections.abc import Callable

    from .sync import Client
    from .types import Options

Message = dict[str, str]

_HELP = "Ctrl-C stops an answer · /reset forgets the conversation · /exit or Ctrl-D leaves"


class Conversation:
    """The turns so far, and their form as a prompt.

    Args:
        template: turns messages into a prompt that the model continues as the assistant.
        system: what the model is told before all else.

    """

    def __init__(self, template: Callable[[list[Message]], str], system: str | None = None) -> None:
        self._template = template
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self._turns: list[Message] = []

    def ask(self, text: str) -> str:
        """Add a turn of the user and return the prompt for the answer."""
        self._turns.append({"role": "user", "content": text})
        return self._template(self._opening + self._turns)

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


def template_folder(given: str | None, model: str) -> Path:
    """Return the folder to take the template from: as given, or the model's own in the project's repository."""
    return Path(given) if given else project_root() / "model_repository" / model / "1" / "weights"


def load_template(folder: Path) -> Callable[[list[Message]], str]:
    """Return the chat template of a model folder as a function.

    Raises:
        UsageFault: the folder has no tokenizer or template, or transformers is not installed.

    """
    if not (folder / "tokenizer_config.json").is_file():
        raise UsageFault(
            f"no tokenizer in {folder}; name the model's folder with --tokenizer, or run `lifecycle prepare` "
            "for the built-in model"
        )
    try:
        from transformers import AutoTokenizer  # noqa: PLC0415 - seconds that only chat needs
    except ImportError as error:
        raise UsageFault(
            f"chat writes its prompts with the package transformers, which does not import ({error}); install it, "
            "or use `lifecycle generate`"
        ) from None
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise UsageFault(f"the tokenizer in {folder} does not load: {str(error).splitlines()[0]}") from None
    if not tokenizer.chat_template:
        raise UsageFault(f"the tokenizer in {folder} has no chat template; use `lifecycle generate` for this model")
    return lambda messages: str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def run(client: Client, conversation: Conversation, options: Options, *, read: Callable[[str], str] = input) -> None:
    """Talk until the user leaves. Faults of single answers are shown; the conversation goes on."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401, PLC0415 - gives input() its history and line editing
        err.print(f"[dim]{client.model} at {client.endpoint}. {_HELP}[/]")
    while True:
        try:
            line = read("› " if sys.stdin.isatty() else "").strip()  # noqa: RUF001 - a prompt sign, not a bracket
        except EOFError:
            if sys.stdin.isatty():
                write("\n")
            return
        except KeyboardInterrupt:
            err.print(f"\n[dim]{_HELP}[/]")
            continue
        if line in {"/exit", "/quit"}:
            return
        if line == "/reset":
            conversation.reset()
            err.print("[dim]forgotten[/]")
        elif line.startswith("/"):
            err.print(f"[dim]{_HELP}[/]")
        elif line:
            conversation.answered(_answer(client, conversation.ask(line), options))


def _answer(client: Client, prompt: str, options: Options) -> str:
    """Show one answer as it comes and return its text, or as much of it as there was."""
    with client.stream(prompt, **options) as stream:
        try:
            for chunk in stream:
                write(chunk.text)
            write("\n")
        except KeyboardInterrupt:
            write("\n")
            err.print("[dim]stopped[/]")
        except LifecycleError as error:
            if stream.text:
                write("\n")
            tell(error)
            if isinstance(error, PromptTooLong):
                err.print("[dim]the conversation has become too long for the model: /reset begins anew[/]")
        return stream.text
