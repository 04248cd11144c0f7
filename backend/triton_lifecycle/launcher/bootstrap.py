"""Makes the environment of a checkout: the virtual environment, the locked packages, the project itself.

Runs before any package exists, so it uses the standard library alone and is started as a file:
``python3 backend/triton_lifecycle/launcher/bootstrap.py [--venv .venv]``. It may be interrupted anywhere and started
again; when nothing changed it returns at once.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LOCKS = (ROOT / "requirements" / "cpu.lock", ROOT / "requirements" / "dev.lock")
MINOR = (3, 11)
"""The locked wheels, and the Python backend stub that goes with them, are for this Python."""
WANTED = ".".join(map(str, MINOR))
NEED_BYTES = 4_000_000_000
STAMP = ".lifecycle-stamp"
UNFINISHED = ".lifecycle-unfinished"
TORCH = "torch=="
ABSENT = ("No matching distribution", "Could not find a version", "ResolutionImpossible")
TAIL_LINES = 25

_PROBE = (
    "import os, sys, sysconfig as s;"
    "n = s.get_config_var('INSTSONAME') or '';"
    "d = [s.get_config_var('LIBDIR') or '', sys.base_prefix + '/lib'];"
    "print(*sys.version_info[:2], int('.so' in n and any(os.path.exists(os.path.join(p, n)) for p in d)))"
)


class SetupError(Exception):
    """A fault the user can mend."""


class PipFailed(SetupError):
    """Pip ended with an error; the message holds its last lines."""


def main(arguments: list[str] | None = None) -> int:
    """Run the set-up; returns a process exit code."""
    parser = argparse.ArgumentParser(description="Set up the environment of this checkout.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where to make it (default: .venv)")
    venv: Path = parser.parse_args(arguments).venv.absolute()
    try:
        if is_current(venv):
            return 0
        set_up(venv)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; the next `make setup` goes on from here", file=sys.stderr)
        return 130
    return 0


def fingerprint() -> str:
    """Return a hash of everything the environment is made from."""
    digest = hashlib.sha256()
    for path in (*LOCKS, ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_current(venv: Path) -> bool:
    """Tell whether the environment was finished from the present lock files and for the present place."""
    try:
        return (venv / STAMP).read_text(encoding="utf-8") == stamp_text() and (venv / "bin" / "python").exists()
    except OSError:
        return False


def stamp_text() -> str:
    """Return what marks a finished environment; a moved checkout is set up again, as its paths are written inside."""
    return f"{fingerprint()} {ROOT}\n"


def set_up(venv: Path) -> None:
    """Make or complete the environment."""
    check_disk(venv)
    python = venv / "bin" / "python"
    if python.exists() and version_of(python) != MINOR:
        raise SetupError(
            f"{venv} was made with another Python than {WANTED}. Remove it (rm -r {venv}) and run this again."
        )
    if not (python.exists() and (venv / "bin" / "pip").exists()):
        say(1, f"making {venv}")
        make_venv(find_python(), venv)
    unfinished = venv / UNFINISHED
    if unfinished.exists():
        say(1, "an earlier set-up was interrupted: looking for half-installed packages")
        for name in remove_broken(venv):
            print(f"      {name} was incomplete and will be installed again")
    unfinished.touch()
    (venv / STAMP).unlink(missing_ok=True)
    install(python, venv)
    (venv / STAMP).write_text(stamp_text(), encoding="utf-8")
    unfinished.unlink()
    print("setup: done")


def install(python: Path, venv: Path) -> None:
    """Install torch, the rest of the locks, and the project."""
    torch = torch_requirement(LOCKS[0].read_text(encoding="utf-8"))
    # First and alone: it is the one package that the usual index does not have, so a machine without its index hears of
    # it after seconds, not after the other hundred.
    say(2, f"installing {torch} (about 200 MB)")
    try:
        pip(python, [torch], total=1)
    except PipFailed as error:
        if any(sign in str(error) for sign in ABSENT):
            raise SetupError(no_torch(torch)) from None
        raise
    # --no-deps, because the lock leaves out on purpose what a resolver would bring in: torchvision, torchaudio and
    # torchcodec (their plain builds do not import beside a CPU torch, and transformers imports them when it sees them),
    # a NumPy 2 (the bundled stub was built before it), the GPU compiler, and an older protobuf.
    for step, lock in enumerate(LOCKS, start=3):
        say(step, f"installing {lock.relative_to(ROOT)}")
        pip(python, ["-r", str(lock)], total=count(lock))
    say(5, "installing this project (editable)")
    pip(python, ["--no-build-isolation", "-e", str(ROOT)], total=1)
    extras = [
        name
        for name in ("torchvision", "torchaudio", "torchcodec")
        if list(site_packages(venv).glob(f"{name}-*.dist-info"))
    ]
    if extras:
        raise SetupError(
            f"{', '.join(extras)} in {venv} cannot load beside a CPU torch and would keep vLLM from starting. "
            f"Remove: {python} -m pip uninstall {' '.join(extras)}"
        )


def torch_requirement(lock: str) -> str:
    """Return the lock's line for torch."""
    for line in lock.splitlines():
        if line.startswith(TORCH):
            return line.strip()
    raise SetupError(f"{LOCKS[0]} names no torch; restore it (git checkout {LOCKS[0].relative_to(ROOT)})")


def no_torch(torch: str) -> str:
    """Say what to do where the package index has no CPU build of torch."""
    return (
        f"your package index has no `{torch}`. It is PyTorch's CPU build, which PyTorch keeps in an index of its own:\n"
        "  1. find the address of the CPU wheel index on pytorch.org's install page (Linux, Pip, CPU);\n"
        "  2. let pip ask it as well:  export PIP_EXTRA_INDEX_URL=<that address>\n"
        "     or, for a folder of downloaded wheels:  export PIP_FIND_LINKS=<folder>\n"
        "  3. run `make setup` again."
    )


def find_python() -> Path:
    """Return a Python of the right version, with a shared libpython if there is one."""
    candidates = [Path(sys.executable)]
    name = f"python{WANTED}"
    candidates += [Path(folder) / name for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    usable = []
    for candidate in dict.fromkeys(candidates):
        facts = probe(candidate)
        if facts is not None and facts[0] == MINOR:
            if facts[1]:
                return candidate
            usable.append(candidate)
    if usable:
        raise SetupError(
            f"{usable[0]} has no shared libpython, which Triton's Python backend loads. "
            f"Install the distribution's libpython{WANTED} (Debian: apt install libpython{WANTED}), "
            "or a Python built with --enable-shared."
        )
    running = ".".join(map(str, sys.version_info[:3]))
    raise SetupError(
        f"the CPU environment needs Python {WANTED}; this is {running}, and there is no {name} on PATH. "
        f"Install {name} (from the distribution, pyenv, or `uv python install {WANTED}`), then run `make setup`."
    )


def probe(python: Path) -> tuple[tuple[int, int], bool] | None:
    """Return a Python's version and whether it has a shared libpython; ``None`` if it does not run."""
    try:
        answer = subprocess.run([str(python), "-c", _PROBE], capture_output=True, text=True, timeout=20, check=True)
        major, minor, shared = answer.stdout.split()
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return (int(major), int(minor)), shared == "1"


def version_of(python: Path) -> tuple[int, int] | None:
    """Return a Python's major and minor version; ``None`` if it does not run."""
    facts = probe(python)
    return None if facts is None else facts[0]


def make_venv(python: Path, venv: Path) -> None:
    """Make an empty virtual environment."""
    existed = venv.exists()
    answer = subprocess.run([str(python), "-m", "venv", str(venv)], capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        if not existed:  # else it may hold somebody's files
            shutil.rmtree(venv, ignore_errors=True)
        hint = f"Debian and Ubuntu have it in a package of its own: apt install python{WANTED}-venv"
        said = (answer.stdout + answer.stderr).strip()
        raise SetupError(f"{python} cannot make a virtual environment. {hint}\nIt said:\n{said}")


def check_disk(venv: Path) -> None:
    """Raise when the packages would not fit."""
    place = next(folder for folder in (venv, *venv.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    need = NEED_BYTES // 8 if list(site_packages(venv).glob("torch-*.dist-info")) else NEED_BYTES
    if free < need:
        raise SetupError(
            f"the packages need about {need / 1e9:.1f} GB in {place}, and {free / 1e9:.1f} GB are free there. "
            "Free some space, or choose another place with VENV=<folder>, then run `make setup` again."
        )


def remove_broken(venv: Path) -> list[str]:
    """Forget packages of which files are missing, so that pip installs them again; returns their names."""
    site = site_packages(venv)
    broken = []
    for info in sorted(site.glob("*.dist-info")):
        if not _complete(site, info / "RECORD"):
            shutil.rmtree(info)
            broken.append(info.name[: -len(".dist-info")])
    return broken


def _complete(site: Path, record: Path) -> bool:
    try:
        with record.open(encoding="utf-8", newline="") as file:
            return all((site / row[0]).exists() for row in csv.reader(file) if row and not row[0].endswith(".pyc"))
    except OSError:
        return False


def site_packages(venv: Path) -> Path:
    """Return where the environment keeps its packages."""
    return venv / "lib" / f"python{WANTED}" / "site-packages"


def count(lock: Path) -> int:
    """Return the number of packages in a lock file."""
    return sum("==" in line and not line.startswith("#") for line in lock.read_text(encoding="utf-8").splitlines())


def pip(python: Path, what: list[str], *, total: int) -> None:
    """Run ``pip install --no-deps`` and show how far it is."""
    command = [str(python), "-m", "pip", "install", "--no-deps", "--disable-pip-version-check", *what]
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    done = 0
    # In a session of its own: a Ctrl-C reaches it once, from here, and it is waited for.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            for line in process.stdout or ():
                tail.append(line.rstrip())
                if line.startswith(("Collecting ", "Requirement already satisfied: ", "Processing ", "Obtaining ")):
                    done += 1
                    if done % 40 == 0 and not sys.stdout.isatty():
                        print(f"      {done}/{total} packages", flush=True)
                    show(f"{min(done, total):3d}/{total} {line.split(':')[-1].split()[0 if ':' in line else 1]}")
                elif line.startswith("Installing collected packages"):
                    show("unpacking")
        except BaseException:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    show("", end=True)
    if process.returncode != 0:
        raise PipFailed(_pip_story(list(tail)))


def _pip_story(tail: list[str]) -> str:
    text = "\n".join(f"  {line}" for line in tail)
    if "No space left on device" in text:
        return f"the disk is full. Free some space and run `make setup` again; it goes on from here.\n{text}"
    return f"pip failed; its last lines:\n{text}"


def say(step: int, text: str) -> None:
    """Print the beginning of a step."""
    print(f"setup {step}/5  {text}", flush=True)


def show(text: str, *, end: bool = False) -> None:
    """Overwrite the progress line of a terminal."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 8
        print(f"\r      {text[:width]}\033[K", end="\r" if end else "", flush=True)


if __name__ == "__main__":
    sys.exit(main())
