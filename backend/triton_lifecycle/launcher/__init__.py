"""What stands around the server: set-up, the model's weights, the tritonserver process, and a doctor for all of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

UNBROKEN = 10_000
"""Columns of an output that is no terminal: whatever reads it wants each line whole."""
Progress = Callable[[str], None]
"""Receives one short line for each step of a long piece of work."""


class LauncherError(Exception):
    """A fault the user can mend; the text says what was wrong, where, and what to do."""


class DiskFull(LauncherError):
    """There is not enough room; nothing half-written is left behind."""

    def __init__(self, what: str, where: Path, *, need: int, free: int) -> None:
        super().__init__(
            f"no room for {what}: {need / 1e6:.0f} MB are needed in {where}, {free / 1e6:.0f} MB are free there. "
            "Free some space or choose another place, then run the same command again."
        )
        self.need = need
        self.free = free


def project_root() -> Path:
    """Return the checkout this package runs from, or the current folder when it is installed elsewhere."""
    root = Path(__file__).resolve().parents[3]
    return (
        root if (root / "backend" / "triton_lifecycle").is_dir() and (root / "pyproject.toml").is_file() else Path.cwd()
    )


def silent(_: str) -> None:
    """Drop a progress line."""
