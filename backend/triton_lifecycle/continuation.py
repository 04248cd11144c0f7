"""An answer that broke off elsewhere goes on here, behind the tokens of it that the caller has.

A caller that asks for ``return_token_ids`` is told the tokens of its answer. It may send the same request again, to
this server or another one, with those tokens as ``continue_token_ids``: prompt and tokens are read together, which
costs a prefill in the place of as many steps. What may be continued so is what may be continued after an engine's
death (``engine/splice.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from triton_lifecycle.engine import Engine, EngineRequest, Limits, too_long
from triton_lifecycle.errors import InvalidInput, Unsupported

BYTES_PER_TOKEN: Final = 4
"""About what a token is as text."""


def check(ids: Sequence[int], limits: Limits, max_tokens: int | None) -> None:
    """Prove that these can be the first tokens of an answer that is not whole yet.

    Raises:
        InvalidInput: they cannot; the message says which and why.

    """
    wrong = next((token for token in ids if not 0 <= token < limits.vocab_size), None)
    if wrong is not None:
        raise InvalidInput(
            f"continue_token_ids: {wrong} is not in the vocabulary (0 … {limits.vocab_size - 1}); send the "
            "token_ids of the answer as they came"
        )
    if max_tokens is not None and len(ids) >= max_tokens:
        raise InvalidInput(
            f"continue_token_ids: {len(ids)} tokens are given and max_tokens, which counts them too, is {max_tokens}: "
            "nothing is left to be made"
        )


def work(prompt: str, max_tokens: int | None, given: Sequence[int]) -> tuple[int, int | None]:
    """Return the bytes to be read and the tokens to be made at most, for whoever reckons before tokens are counted."""
    size = len(prompt) if prompt.isascii() else len(prompt.encode())
    return size + BYTES_PER_TOKEN * len(given), None if max_tokens is None else max(1, max_tokens - len(given))


def begin(engine: Engine, asked: EngineRequest, given: Sequence[int]) -> tuple[EngineRequest, int]:
    """Return the request for what follows, and how many of the given tokens it takes as they are.

    Raises:
        PromptTooLong: prompt and tokens leave no room.
        Unsupported: going on would not be exact.

    """
    length, limit = len(asked.token_ids) + len(given), engine.limits.max_model_len
    if length >= limit:
        raise too_long(length, limit)
    rest = engine.remainder(asked, given)
    # Where a token that is made anew may be another one, the caller's tokens would no longer be those of its text.
    if rest is None or (rest.kept < len(given) and not engine.repeatable(asked.sampling)):
        raise Unsupported(
            "continue_token_ids: this answer cannot be continued exactly from its tokens (it depends on more than "
            "these, see compatibility.md, or ends within a character); ask for it anew"
        )
    return rest.request, rest.kept
