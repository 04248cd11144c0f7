"""Sees to the programs that the tests need from the system and no Python package has: a browser, and Prometheus.

Runs before any package exists, so it uses the standard library alone and is started as a file:
``python3 backend/triton_lifecycle/launcher/system.py``. Does nothing when all is there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import deque

PACKAGE = "chromium"
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
"""What the browser may be called; the tests take the first that is there."""
CHOICE = "LIFECYCLE_BROWSER"
"""The variable that names a browser of the user's own."""
PROMETHEUS = "prometheus"
"""The package, and the program that scrapes; with it comes the one that checks rules and metrics."""
PROMTOOL = "promtool"
LIMIT_S = 900
TAIL_LINES = 15


class SystemFault(Exception):
    """A fault the user can mend."""


def main() -> int:
    """See to the programs; returns a process exit code."""
    try:
        if missing := absent():
            install(missing)
    except SystemFault as error:
        print(f"system: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsystem: interrupted; run this again", file=sys.stderr)
        return 130
    return 0


def browser() -> str | None:
    """Return the browser's program; ``None`` if there is none.

    Raises:
        SystemFault: the one that the user named is not there.

    """
    chosen = os.environ.get(CHOICE)
    if chosen:
        found = shutil.which(chosen)
        if found is None:
            raise SystemFault(f"{CHOICE} names {chosen}, which is no program; correct it, or unset it")
        return found
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


def absent() -> list[str]:
    """Return the packages whose programs are not there.

    Raises:
        SystemFault: the browser that the user named is not there.

    """
    tools = all(map(shutil.which, (PROMETHEUS, PROMTOOL)))
    return [*([PACKAGE] if browser() is None else []), *([] if tools else [PROMETHEUS])]


def install(packages: list[str]) -> None:
    """Install packages from the distribution.

    Raises:
        SystemFault: that is not possible here; the message says what to do.

    """
    wanted = " ".join(packages)
    by_hand = f"install it yourself (Debian: apt-get install --no-install-recommends {wanted})"
    if PACKAGE in packages:
        by_hand += f", or let {CHOICE} name a Chromium or Chrome"
    by_hand += "; the tests look at the timeline's page with a browser, and check the metrics with Prometheus"
    if shutil.which("apt-get") is None:
        raise SystemFault(f"{wanted}: missing, and there is no apt-get to install it with: {by_hand}")
    if os.geteuid() != 0:
        raise SystemFault(f"{wanted}: missing, and only root can install it: {by_hand}")
    print("system 1/2  refreshing the list of packages", flush=True)
    _run(["apt-get", "update"], by_hand)
    print(f"system 2/2  installing {wanted} (about 100 MB each)", flush=True)
    _run(["apt-get", "install", "-y", "--no-install-recommends", *packages], by_hand)
    if left := absent():
        raise SystemFault(f"{wanted} was installed, but the programs of {' '.join(left)} are not on PATH: {by_hand}")
    print("system: done")


def _run(command: list[str], by_hand: str) -> None:
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    # apt has limits of its own for each download, but not for all together.
    with subprocess.Popen(
        ["timeout", str(LIMIT_S), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as process:
        for line in process.stdout or ():
            tail.append(line.rstrip())
            if line.startswith(("Get:", "Unpacking ", "Setting up ")):
                _show(line.strip())
    _show("", end=True)
    if process.returncode != 0:
        said = "\n".join(f"  {line}" for line in tail)
        raise SystemFault(f"`{' '.join(command)}` failed; {by_hand}. It said:\n{said}")


def _show(text: str, *, end: bool = False) -> None:
    """Overwrite the progress line of a terminal."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 12
        print(f"\r            {text[:width]}\033[K", end="\r" if end else "", flush=True)


if __name__ == "__main__":
    sys.exit(main())
