"""A stage before the engine: addresses and numbers are taken out of a prompt before anything reads it."""

import re

import msgspec

from triton_lifecycle.chat import Conversation
from triton_lifecycle.context import Context

EMAIL = r"[\w.+-]+@[\w-]+(\.[\w-]+)+"
CARD = r"\b(?:\d[ -]?){13,19}\b"


class Redact:
    """Replaces whatever matches one of the patterns. Its place is right behind 'receive'."""

    def __init__(self, patterns: tuple[str, ...] | list[str] = (EMAIL, CARD), replacement: str = "[redacted]") -> None:
        self._pattern = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
        self._replacement = replacement

    async def __call__(self, ctx: Context) -> None:
        """Put a cleaned prompt, or cleaned turns, in the place of the caller's."""
        source = ctx.input.source
        if isinstance(source, str):
            source = self._clean(source)
        elif isinstance(source, Conversation):
            turns = [turn | {"content": self._clean(turn["content"])} for turn in source.messages]
            source = msgspec.structs.replace(source, messages=turns)
        # Input is frozen: a stage that changes it puts another in its place.
        ctx.input = msgspec.structs.replace(ctx.input, source=source)

    def _clean(self, text: str) -> str:
        return self._pattern.sub(self._replacement, text)
