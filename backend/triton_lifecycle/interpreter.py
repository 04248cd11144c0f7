"""Which Python program starts our helper processes."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def python_program() -> str:
    """Return an interpreter: inside Triton's stub ``sys.executable`` may name the stub itself."""
    program = sys.executable or ""
    name = Path(program).name
    return program if "python" in name and "stub" not in name else shutil.which("python3") or "python3"
