"""What becomes of a request whose attempt failed: one table."""

from __future__ import annotations

from enum import Enum

import msgspec


class Step(Enum):
    """What to do next."""

    AGAIN = "again"
    """Begin anew: the caller has nothing yet."""
    CONTINUE = "continue"
    """Go on behind the tokens that were made."""
    REPEAT = "repeat"
    """Make the same answer once more, and send what is new: where going on would not be exact."""
    FAIL = "fail"


class Trouble(msgspec.Struct, frozen=True):
    """A request's failed attempts."""

    fruitless: int
    """How many in a row brought no token beyond those there were."""
    most: int
    """How many of those there may be: ``max_recovery_attempts``; 0 means that nothing is tried again."""
    quarantined: bool = False
    """Whether the request kills the engine."""


def decide(
    trouble: Trouble,
    *,
    made: bool = False,
    sent: bool = False,
    continuable: bool = False,
    repeatable: bool = False,
) -> Step:
    """Return the next step for a request on which the engine failed.

    Args:
        trouble: its failed attempts.
        made: whether it has tokens.
        sent: whether the caller has them.
        continuable: whether the engine can go on exactly behind them.
        repeatable: whether the engine would make the same tokens again.

    """
    if trouble.quarantined or not trouble.most or trouble.fruitless > trouble.most:
        return Step.FAIL
    if not made:
        return Step.AGAIN
    if continuable:
        return Step.CONTINUE
    if not sent:
        return Step.AGAIN
    return Step.REPEAT if repeatable else Step.FAIL
