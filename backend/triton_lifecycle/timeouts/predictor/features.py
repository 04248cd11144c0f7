"""What is known of a request and of the load when it is admitted, and the numbers that the models see of it."""

from __future__ import annotations

import math
from typing import Annotated, Final

import msgspec

HOUR: Final = 2 * math.pi / 24
_LONGEST: Final = 100.0
"""Tokens' time after which a step that goes on says nothing more about how long it will."""


_STEPS: Final = 5.0
"""Likewise where the step reads prompts: by then it is about to end, however much it reads."""


class Features(msgspec.Struct, frozen=True, gc=False):
    """One request at its admission. The load is that of the others."""

    prompt_tokens: float
    """Its own; estimated from the prompt's bytes until it is tokenized."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    """Per sequence."""
    sequences: int = 1
    running: float = 0
    """Sequences that have made their first token and not their last."""
    waiting: float = 0
    """Sequences that have not made their first token yet."""
    pending: float = 0.0
    """Prompt tokens of those that wait or are being prefilled."""
    in_step: float = 0.0
    """Those of them that are in the engine's present step: they were there when its last tokens came."""
    elapsed: float = 0.0
    """Seconds for which that step has been under way; 0 when there is none."""
    arriving: float = 0.0
    """Prompt tokens of others that are prefilled in a second: they stand in the way of this one's steps."""
    kv_usage: float = 0.0
    """Share of the KV cache in use, 0…1."""
    hour: float = 0.0
    """Of the day, local time, 0…24."""


RATE: Final = ("one", "batch", "batch_8", "batch_32", "arriving", "pending", "kv", "day_sin", "day_cos")
"""What the time per token depends on."""
FIRST: Final = (*RATE, "prompt", "prefill_batch", "waiting", "in_step", "busy", "elapsed", "reading", "drain")
"""What the time to the first token depends on."""


def rate_vector(f: Features, slots: int) -> list[float]:
    """Return the values named by :data:`RATE`, each of order 1.

    A step's time grows with its batch, with a bend where memory gives way to arithmetic: hence the hinges.
    """
    batch = min(slots, f.running + f.waiting + f.sequences)
    day = f.hour * HOUR
    return [
        1.0,
        batch / 16,
        max(0, batch - 8) / 16,
        max(0, batch - 32) / 32,
        f.arriving / 1024,
        f.pending / 1024,
        f.kv_usage,
        0.1 * math.sin(day),
        0.1 * math.cos(day),
    ]


def first_vector(f: Features, slots: int, rate: float, length: float) -> list[float]:
    """Return the values named by :data:`FIRST`: the rest of the present step, then one with this prompt in it.

    Args:
        f: the request.
        slots: sequences that the engine runs at once.
        rate: seconds per token, as predicted: the unit of time, so that all values are of one order on any engine.
        length: tokens that a sequence makes before it leaves its slot.

    """
    values = rate_vector(f, slots)
    others = f.running + f.waiting
    values += [
        f.prompt_tokens / 512,
        (f.pending + f.prompt_tokens) / 1024 * values[1],
        min(slots, f.waiting) / 16,
        f.in_step / 1024,
        min(1.0, others),
        min(f.elapsed / rate, _LONGEST),
        min(f.elapsed / rate, _STEPS) * f.in_step / 1024,
        max(0, others + f.sequences - slots) / slots * length,
    ]
    return values
