"""Recorded requests, as numbers: what was known of each at its admission, and what it took. ``record`` makes them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Final

from triton_lifecycle.timeouts.predictor import Features, Observation

FOLDER: Final = Path(__file__).parent
_FEATURES: Final = Features.__struct_fields__
_OUTCOMES: Final = tuple(name for name in Observation.__struct_fields__ if name != "features")
_WHOLE: Final = frozenset({"max_tokens", "sequences"})


def write(path: Path, observations: list[Observation]) -> None:
    """Write one line for each request; times are in seconds, and begin with the first admission."""
    began = min(seen.admitted for seen in observations)
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(_FEATURES + _OUTCOMES)
        for seen in observations:
            row = [getattr(seen.features, name) for name in _FEATURES]
            row += [
                getattr(seen, name) - (began if name in {"admitted", "ended"} else 0)
                if getattr(seen, name) is not None
                else None
                for name in _OUTCOMES
            ]
            lines.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in row])


def read(path: Path) -> list[Observation]:
    """Return what :func:`write` wrote, in the order of the requests' ends."""
    found = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            known = {name: int(row[name]) if name in _WHOLE else float(row[name]) for name in _FEATURES}
            took = {name: float(row[name]) if row[name] else None for name in _OUTCOMES}
            features = Features(**known)  # type: ignore[arg-type] # mypy sees int | float for both
            found.append(Observation(features, **took))  # type: ignore[arg-type] # times are never None
    return sorted(found, key=lambda seen: seen.ended)
