"""Quantiles of a few numbers, as the tables show them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

SHARES: Final = (0.5, 0.9, 0.99)


def quantiles(values: Iterable[float]) -> dict[str, float]:
    """Return ``p50``, ``p90``, ``p99`` and ``max`` (nearest rank); nothing for no values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    found = {f"p{share * 100:g}": ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in SHARES}
    return found | {"max": ordered[-1]}
