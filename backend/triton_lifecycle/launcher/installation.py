"""Finds a tritonserver and lays out what it needs: a backend folder that holds ours, and an environment.

Two kinds of installation are known. A native one (NVIDIA's container) is used as it is. Elsewhere the package
``nvidia-pytriton`` is the carrier of the binaries; its layout needs the adjustments explained where they are made.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from triton_lifecycle.launcher import LauncherError, project_root

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NATIVE_ROOT = Path("/opt/tritonserver")
PYTHON_MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
SERVED_AS = ("vllm", "lifecycle")
"""The names under which a model's config.pbtxt may ask for our backend."""


@dataclass(frozen=True)
class Installation:
    """One tritonserver.

    Attributes:
        binary: the program.
        backends: the folder of its own backends.
        stubs: folder of Python backend stubs by Python version; ``None`` when the installation has one fixed stub.
        libraries: folder of its shared libraries; ``None`` when the system's loader finds them.

    """

    binary: Path
    backends: Path
    stubs: Path | None = None
    libraries: Path | None = None

    @property
    def stub(self) -> Path:
        """The Python backend's stub for this interpreter."""
        folder = self.backends / "python" if self.stubs is None else self.stubs / PYTHON_MINOR
        return folder / "triton_python_backend_stub"


def find_installation() -> Installation:
    """Return the tritonserver to use: a native one first, else the one that nvidia-pytriton carries."""
    on_path = shutil.which("tritonserver")
    for binary in [NATIVE_ROOT / "bin" / "tritonserver", *([Path(on_path)] if on_path else [])]:
        backends = binary.resolve().parents[1] / "backends"
        if os.access(binary, os.X_OK) and backends.is_dir():
            return Installation(binary, backends)
    # Located, not imported: importing pytriton unpacks files and changes the environment.
    spec = importlib.util.find_spec("pytriton")
    if spec is not None and spec.origin is not None:
        root = Path(spec.origin).parent / "tritonserver"
        binary = root / "bin" / "tritonserver"
        if binary.is_file():
            libraries = root.parents[1] / "nvidia_pytriton.libs"
            return Installation(binary, root / "backends", root / "python_backend_stubs", libraries)
    raise LauncherError(
        f"no tritonserver: neither {NATIVE_ROOT}, nor on PATH, nor in the package nvidia-pytriton of {sys.executable}. "
        "Run `make setup`, or use NVIDIA's Triton container."
    )


def state_folder() -> Path:
    """Return the folder for backend layouts, logs and records: ``.lifecycle`` in the project, else under /tmp."""
    wanted = project_root() / ".lifecycle"
    for folder in (wanted, Path(tempfile.gettempdir()) / f"triton-lifecycle-{os.getuid()}"):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK) and folder.stat().st_uid in {os.getuid(), 0}:
            return folder
    raise LauncherError(f"cannot write to {wanted}; run this in a folder you may write to")


def backend_source() -> Path:
    """Return the folder that holds our ``model.py`` and the package."""
    return Path(__file__).resolve().parents[2]


def assemble_backends(
    installation: Installation, state: Path, source: Path | None = None, served_as: Sequence[str] = SERVED_AS
) -> Path:
    """Lay out the folder for ``--backend-directory`` and return it.

    Its name is a hash of all it is made of: a second call finds it ready, and several at once do not disturb each
    other, since a complete folder is renamed into place.

    Args:
        installation: whose own backends to include.
        state: where to put it.
        source: the folder that holds ``model.py`` and ``triton_lifecycle``; by default the one of this package.
        served_as: backend names that lead to ``source``; none leaves the Python backend alone.

    """
    source = source or backend_source()
    library = installation.backends / "python" / "libtriton_python.so"
    for needed in (library, installation.stub):
        if not needed.is_file():
            raise LauncherError(_missing(installation, needed))
    facts = [installation, installation.stub, source, tuple(served_as), library.stat().st_mtime_ns]
    target = state / "backends" / hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
    if (target / "python" / library.name).is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=target.parent))
    try:
        _lay_out(installation, partial, source, served_as)
        partial.chmod(0o755)
        partial.rename(target)
    except OSError:
        if not (target / "python" / library.name).is_file():  # else another start was faster
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _lay_out(installation: Installation, folder: Path, source: Path, served_as: Sequence[str]) -> None:
    # The library must be a real file: Triton resolves links and refuses one that "escapes backend directory" as soon
    # as another backend (ours) is built upon it.
    python = folder / "python"
    shutil.copytree(
        installation.backends / "python", python, symlinks=False, ignore=shutil.ignore_patterns("__pycache__")
    )
    if installation.stubs is not None:
        # pytriton keeps a stub per Python version aside; Triton takes the one beside its library. It must match the
        # interpreter's minor version: it embeds that version and loads the packages built for it.
        shutil.copy2(installation.stub, python / installation.stub.name)
    for backend in installation.backends.iterdir():
        if backend.is_dir() and backend.name not in {"python", *served_as}:
            (folder / backend.name).symlink_to(backend)
    for name in served_as:
        if (source / "model.py").is_file():
            (folder / name).symlink_to(source)
        else:  # installed from a wheel: the one-line file is not part of the package
            (folder / name).mkdir()
            line = "from triton_lifecycle.model import TritonPythonModel  # noqa: F401\n"
            (folder / name / "model.py").write_text(line, encoding="utf-8")


def _missing(installation: Installation, needed: Path) -> str:
    if installation.stubs is not None and needed == installation.stub:
        have = (
            ", ".join(sorted(p.name for p in installation.stubs.iterdir())) if installation.stubs.is_dir() else "none"
        )
        return (
            f"nvidia-pytriton carries no Python backend stub for Python {PYTHON_MINOR} (it has: {have}). "
            "Make the environment with one of those; the CPU lock file is for Python 3.11."
        )
    return f"{needed} is missing: the Triton installation is incomplete. Reinstall it (`make setup`)."


def libpython_folder() -> Path | None:
    """Return the folder of this interpreter's own shared libpython, ``None`` if it has none."""
    name = sysconfig.get_config_var("INSTSONAME") or sysconfig.get_config_var("LDLIBRARY")
    # LIBDIR is where Python was built to go; relocated builds (uv's) are found by their prefix instead.
    for folder in (sysconfig.get_config_var("LIBDIR"), f"{sys.base_prefix}/lib", sysconfig.get_config_var("LIBPL")):
        if name and folder and ".so" in name and (Path(folder) / name).is_file():
            return Path(folder)
    return None


def has_gpu() -> bool:
    """Tell whether an NVIDIA device is visible to this process."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def child_environment(
    installation: Installation, *, mark: Mapping[str, str], given: Mapping[str, str], source: Path | None = None
) -> dict[str, str]:
    """Return the environment for tritonserver and all below it.

    Args:
        installation: whose libraries must be found.
        mark: variables that identify the server's processes; they win over all else.
        given: the caller's wishes; they win over the defaults set here.
        source: the backend folder, importable for the stub.

    """
    env = dict(os.environ)
    if not (os.environ.get("TRITON_LIFECYCLE_ONLINE") or given.get("TRITON_LIFECYCLE_ONLINE")):
        # Models come from disk; without this a mistyped path becomes minutes of name look-ups at a hub.
        env.setdefault("HF_HUB_OFFLINE", "1")
        env.setdefault("TRANSFORMERS_OFFLINE", "1")
    env.setdefault("VLLM_NO_USAGE_STATS", "1")
    env.setdefault("PYTHONUNBUFFERED", "1")
    if not has_gpu():
        # In GiB. vLLM's own default would take a large part of a laptop's memory.
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    env.update(given)
    # The stub embeds an interpreter: it knows no virtual environment and reads no .pth file, so the packages and our
    # own code (which is installed through such a file) are named here.
    code = source or backend_source()
    paths = [str(code), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = _joined(paths)
    # vLLM starts its processes with the `python3` found first.
    env["PATH"] = _joined([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    if installation.libraries is not None:
        # Our interpreter's libpython first: a system one of another patch version lacks symbols that the environment's
        # extension modules want ("undefined symbol: _PyModule_Add"). Then what tritonserver itself links against.
        own = libpython_folder()
        folders = [str(own) if own else "", str(installation.libraries), env.get("LD_LIBRARY_PATH", "")]
        env["LD_LIBRARY_PATH"] = _joined(folders)
    env.update(mark)
    return env


def _joined(parts: Sequence[str]) -> str:
    return os.pathsep.join(dict.fromkeys(part for part in parts if part))
