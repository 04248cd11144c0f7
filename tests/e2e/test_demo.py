"""`make demo` is this command: what a newcomer sees first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_demo_shows_paris_and_where_the_time_went():
    """Both protocols answer with Paris, both requests' time is shown, and nothing is left running."""
    lifecycle = Path(sys.executable).with_name("lifecycle")
    done = subprocess.run([lifecycle, "demo"], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Paris") >= 2
    for milestone in ("received", "admitted", "scheduled", "first token", "finished"):
        assert milestone in done.stdout.replace("_", " ")
