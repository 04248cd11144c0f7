"""What the predictor has seen, in a file: the observations themselves, not what a model made of them.

So the file says nothing about a model's insides, serves whichever model the next process uses, and can be read. It is
small (some 2,000 observations), replaced as a whole, and never trusted: what cannot be read is left aside.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Final

import msgspec

from triton_lifecycle.timeouts.predictor.online import Observation
from triton_lifecycle.timeouts.predictor.subscriber import KEPT

log = logging.getLogger(__name__)

VERSION: Final = 1
MAX_BYTES: Final = 4 * 2**20


class Saved(msgspec.Struct, frozen=True):
    """The content of the file."""

    version: int
    observations: tuple[Observation, ...]


def save(path: Path, observations: tuple[Observation, ...]) -> None:
    """Replace the file; a reader sees the old one or the new one. Failure is logged, never raised. Blocks."""
    beside = path.parent / f"{path.name}.{os.getpid()}.new"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(msgspec.json.encode(Saved(VERSION, observations[-KEPT:])))
        beside.replace(path)
    except OSError as error:
        log.warning("timeout_handling.state_path: %s cannot be written: %s", path, error.strerror)
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def load(path: Path) -> tuple[Observation, ...]:
    """Return what the file holds; nothing, with a warning, when it cannot be used. Blocks."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes")  # noqa: TRY301 - one way out for all that is wrong
        saved = msgspec.json.decode(path.read_bytes(), type=Saved)
        if saved.version != VERSION:
            raise ValueError(f"it has version {saved.version}, not {VERSION}")  # noqa: TRY301
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        log.warning("timeout_handling.state_path: %s is not used: %s", path, error)
        return ()
    return saved.observations[-KEPT:]
