"""Joining a new attempt's output to what earlier attempts have made, so that nothing is lost or repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from triton_lifecycle.engine import Chunk, Delta
from triton_lifecycle.errors import GenerationFailed

CONTINUED: Final = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "allowed_token_ids", "repetition_penalty"),
        *("max_tokens", "min_tokens", "ignore_eos", "stop_token_ids"),
        *("logprobs", "detokenize", "skip_special_tokens", "output_kind"),
    }
)
"""Sampling parameters that look at the tokens so far and at nothing else of the answer's past: whether a token belongs
to the prompt or to the answer is the same to them. (vLLM counts the prompt's tokens for a repetition penalty, but not
for the other penalties.)"""


def continues(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    """Whether only such sampling parameters are set as let an answer be continued from its tokens."""
    if values["seed"] is not None and values["temperature"] > 0:
        return False
    return all(values[name] == default for name, default in defaults.items() if name not in CONTINUED)


class Known(msgspec.Struct):
    """What of one sequence is there already, and must not come again."""

    token_ids: Sequence[int] = ()
    """The first tokens that the new attempt will make."""
    chars: int = 0
    """Characters at the start of the new attempt's text that were sent already."""
    cumulative_logprob: float | None = None
    """Of the tokens that the new attempt takes as given."""
    exact: bool = True
    """Whether the tokens made anew must be the known ones."""


class Splice:
    """Takes out of a new attempt's chunks what is known already.

    Args:
        known: by sequence.

    """

    def __init__(self, known: Sequence[Known]) -> None:
        self._known = known
        self._seen = [0] * len(known)
        self._chars = [sequence.chars for sequence in known]

    def apply(self, chunk: Chunk) -> Chunk | None:
        """Return what of a chunk is new; ``None`` when nothing is.

        Raises:
            GenerationFailed: the new attempt took another way than the one before.

        """
        deltas = tuple([new for delta in chunk.deltas if (new := self._new(delta)) is not None])
        if not deltas and not chunk.finished:
            return None
        return msgspec.structs.replace(chunk, deltas=deltas)

    def _new(self, delta: Delta) -> Delta | None:
        if delta.index >= len(self._known):
            return delta
        known = self._known[delta.index]
        skipped = self._skip(delta, known)
        chars = min(self._chars[delta.index], len(delta.text))
        self._chars[delta.index] -= chars
        text, ids = delta.text[chars:], delta.token_ids[skipped:]
        if not text and not ids and delta.finish_reason is None:
            return None
        before = known.cumulative_logprob
        total = delta.cumulative_logprob
        return Delta(
            delta.index,
            text,
            ids,
            delta.finish_reason,
            total if total is None or before is None else before + total,
            None if delta.logprobs is None else delta.logprobs[skipped:],
        )

    def _skip(self, delta: Delta, known: Known) -> int:
        """Return how many of the delta's tokens are known."""
        seen = self._seen[delta.index]
        again = known.token_ids[seen : seen + len(delta.token_ids)]
        self._seen[delta.index] = seen + len(again)
        early = delta.finish_reason is not None and self._seen[delta.index] < len(known.token_ids)
        if known.exact and (early or tuple(again) != tuple(delta.token_ids[: len(again)])):
            raise GenerationFailed(
                "the engine was restarted, and its new answer differs from what was sent already; send it again"
            )
        return len(again)
