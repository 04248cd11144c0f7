"""A stage before the engine: short prompts go first, and very long ones are refused at once."""

import msgspec

from triton_lifecycle.context import Context
from triton_lifecycle.errors import InvalidInput


class RouteByLength:
    """Gives each request a priority by the length of its prompt. Its place is right behind 'receive'.

    vLLM takes lower numbers first (with scheduling_policy: priority in model.json). A caller's own priority stays.
    """

    def __init__(self, short: int = 1000, longest: int = 100_000, later: int = 10, adapter: str | None = None) -> None:
        self._short = short
        self._longest = longest
        self._later = later
        self._adapter = adapter

    async def __call__(self, ctx: Context) -> None:
        """Refuse, or set the priority and the adapter."""
        source = ctx.input.source
        if not isinstance(source, str):
            return
        if len(source) > self._longest:
            # An error of ours goes to the caller as it is: here INVALID_ARG with this text.
            raise InvalidInput(f"text_input: this model takes {self._longest} characters, found {len(source)}")
        if len(source) > self._short:
            if not ctx.metadata.priority:
                ctx.metadata = msgspec.structs.replace(ctx.metadata, priority=self._later)
            if self._adapter is not None:
                ctx.input.parameters.setdefault("lora_name", self._adapter)
