"""The container, without a container engine: what Dockerfile.triton would lay out is laid out here and compared."""

from __future__ import annotations

import ast
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from docker.utils.build import exclude_paths
from dockerfile_parse import DockerfileParser
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from triton_lifecycle import config
from triton_lifecycle.launcher.installation import SERVED_AS, assemble_backends, find_installation

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "Dockerfile.triton"
BACKENDS = "opt/tritonserver/backends"
LLAMA = ROOT / "deploy" / "model_repository" / "llama"

OPTIONAL = {
    "vllm",
    "opentelemetry",
    "torch",
    "transformers",
    "gguf",
    "jinja2",
    "uvloop",
    "xgrammar",
    "triton_python_backend_utils",
    "river",
}
"""Imports that vLLM's image brings or that code does without."""


@dataclass(frozen=True)
class Instruction:
    """One instruction of the Dockerfile, continuation lines joined."""

    word: str
    value: str


@pytest.fixture(scope="module")
def instructions() -> list[Instruction]:
    """Parse the Dockerfile."""
    parser = DockerfileParser(fileobj=io.BytesIO(DOCKERFILE.read_bytes()))
    return [Instruction(entry["instruction"], entry["value"]) for entry in parser.structure]


def only(instructions: list[Instruction], word: str) -> str:
    """Return the value of the one instruction of its kind."""
    [found] = [entry.value for entry in instructions if entry.word == word]
    return found


def copies(instructions: list[Instruction]) -> list[tuple[str, str]]:
    """Return source and destination of every COPY, arguments at their defaults."""
    arguments = dict(entry.value.split("=", 1) for entry in instructions if entry.word == "ARG" and "=" in entry.value)
    pairs = []
    for entry in instructions:
        if entry.word == "COPY":
            value = re.sub(r"\$\{(\w+)\}", lambda found: arguments[found[1]], entry.value)
            *sources, target = shlex.split(value)
            pairs += [(source, target) for source in sources]
    return pairs


def build_context(root: Path) -> set[str]:
    """Return the files that Docker would see of a checkout, by the rules of its own client."""
    patterns = [line.strip() for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()]
    found = exclude_paths(str(root), [line for line in patterns if line and not line.startswith("#")])
    return {path for path in found if (root / path).is_file()}


def build(instructions: list[Instruction], image: Path) -> Path:
    """Do in a folder what COPY and `ln -s` do in the image; large files, the weights, are left out."""
    context = build_context(ROOT)
    for source, target in copies(instructions):
        for path in context:
            if path == source or path.startswith(source):
                name = Path(path).name if path == source else path.removeprefix(source)
                destination = image / target.lstrip("/") / name
                destination.parent.mkdir(parents=True, exist_ok=True)
                if (ROOT / path).stat().st_size < 1_000_000:
                    shutil.copy(ROOT / path, destination)
    commands = " ".join(entry.value for entry in instructions if entry.word == "RUN")
    for target, link in re.findall(r"\bln -s (\S+) (\S+)", commands):
        (image / link.lstrip("/")).symlink_to(image / target.lstrip("/") if target.startswith("/") else target)
    return image


def files(folder: Path) -> dict[str, bytes]:
    """Return a folder's files with their content, caches left out; links are followed."""
    folder = folder.resolve()
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture
def image(instructions: list[Instruction], tmp_path: Path) -> Path:
    """Lay the image out."""
    return build(instructions, tmp_path / "image")


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """Return the backend folder that the local launcher hands to a real tritonserver."""
    return assemble_backends(find_installation(), tmp_path / "state")


def test_every_copied_path_exists_and_is_in_the_context(instructions: list[Instruction]) -> None:
    """Every COPY source is in the checkout and not hidden from Docker by .dockerignore."""
    context = build_context(ROOT)
    pairs = copies(instructions)
    assert {source for source, _ in pairs} >= {"backend/", "model_repository/"}
    for source, _ in pairs:
        assert (ROOT / source).exists(), source
        assert any(path == source or path.startswith(source) for path in context), source


@pytest.mark.parametrize("name", SERVED_AS)
def test_the_backend_folder_is_the_one_a_real_server_loads(image: Path, served: Path, name: str) -> None:
    """File for file, ``backend: "vllm"`` and ``backend: "lifecycle"`` are in the image what the local server loads."""
    laid_out = files(image / BACKENDS / name)
    assert laid_out == files(served / name)
    assert {"model.py", "triton_lifecycle/model.py"} <= laid_out.keys()


def test_the_links_lead_nowhere_outside_the_backend_folder(image: Path) -> None:
    """Triton refuses a backend that escapes its backend directory."""
    for name in SERVED_AS:
        assert (image / BACKENDS / name).resolve().is_relative_to((image / BACKENDS).resolve())


def test_the_official_backend_is_kept_beside_ours(instructions: list[Instruction]) -> None:
    """``backend: "vllm_official"`` stays, for comparison, and is moved before ours takes its name."""
    text = " ".join(entry.value for entry in instructions if entry.word == "RUN")
    moved = text.index(f"mv /{BACKENDS}/vllm /{BACKENDS}/vllm_official")
    assert moved < text.index(f"ln -s lifecycle /{BACKENDS}/vllm")


def test_python_models_find_the_package_and_no_foreign_model_py(instructions: list[Instruction], image: Path) -> None:
    """What the .pth file names holds the same package and the client, but no module named ``model``."""
    commands = " ".join(entry.value for entry in instructions if entry.word == "RUN")
    [folder] = re.findall(r"echo /(\S+)\s+> \S+ -c '[^']+'\)/triton_lifecycle\.pth\"", commands)
    package = image / folder / "triton_lifecycle"
    assert package.resolve() == (image / BACKENDS / "lifecycle" / "triton_lifecycle").resolve()
    assert (image / folder / "triton_lifecycle_client" / "cli.py").is_file()
    assert not (image / folder / "model.py").exists(), "another Python-based backend could take it for its own"
    settings = [entry.value for entry in instructions if entry.word == "ENV"]
    assert not any("PYTHONPATH" in value for value in settings), "isolated stubs ignore it"


def test_the_model_repository_is_where_the_server_looks(instructions: list[Instruction], image: Path) -> None:
    """The command serves the repository that was copied, with every model of the checkout in it."""
    command = json.loads(only(instructions, "CMD"))
    assert command[0] == "tritonserver"
    [repository] = [part.split("=")[1] for part in command if part.startswith("--model-repository=")]
    for model in (ROOT / "model_repository").iterdir():
        laid_out = image / repository.lstrip("/") / model.name
        assert (laid_out / "config.pbtxt").read_bytes() == (model / "config.pbtxt").read_bytes()
        assert (laid_out / "1" / "model.json").is_file()


def test_nothing_secret_or_cached_reaches_the_image(tmp_path: Path) -> None:
    """Of a littered checkout only code, configuration and finished weights are in the context."""
    wanted = {
        "backend/model.py",
        "backend/triton_lifecycle/engine/vllm.py",
        "client/triton_lifecycle_client/cli.py",
        "deploy/model_repository/llama/config.pbtxt",
        "model_repository/smollm2/1/weights/model.safetensors",
        "requirements/cpu.lock",
    }
    litter = {
        ".env",
        ".git/config",
        ".lifecycle/logs/server.log",
        ".venv/bin/python",
        "id_rsa",
        "backend/.env",
        "backend/triton_lifecycle/.mypy_cache/x.json",
        "backend/triton_lifecycle/__pycache__/model.cpython-311.pyc",
        "backend/triton_lifecycle/stray.pyc",
        "client/notes.txt",
        "model_repository/smollm2/1/.weights.lock",
        "model_repository/smollm2/1/weights.partial/model.safetensors",
        "model_repository/smollm2/1/__pycache__/model.cpython-311.pyc",
        "requirements/dev.lock",
        "tests/unit/test_bus.py",
    }
    for name in wanted | litter:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert build_context(tmp_path) == wanted


def test_the_base_image_is_required_and_named_by_the_user(instructions: list[Instruction]) -> None:
    """Without BASE the build stops with a sentence that says what to give; no registry is written down."""
    assert Instruction("ARG", "BASE") in instructions
    found = re.fullmatch(r"\$\{(\w+):\?(\S+)\}", only(instructions, "FROM"))
    assert found is not None
    base, message = found.groups()
    assert base == "BASE"
    assert "--build-arg" in message
    assert "-vllm-python-py3" in message
    assert not re.search(r"\b[\w-]+\.(io|com|org|dev)/", DOCKERFILE.read_text(encoding="utf-8"))


def test_it_runs_as_a_numbered_user_and_stops_in_order(instructions: list[Instruction]) -> None:
    """Not root, so that Kubernetes sees it; tritonserver itself gets SIGTERM, since the command has no shell."""
    user = [entry.value for entry in instructions if entry.word == "USER"][-1]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    assert only(instructions, "STOPSIGNAL") == "SIGTERM"
    assert isinstance(json.loads(only(instructions, "CMD")), list)
    assert "ENTRYPOINT" not in {entry.word for entry in instructions}, "NVIDIA's own stays in force"
    assert only(instructions, "EXPOSE").split() == ["8000", "8001", "8002"]


def test_the_health_check_asks_the_server_whether_it_is_ready(instructions: list[Instruction]) -> None:
    """The very command fails where no server listens, and asks for /v2/health/ready."""
    command = json.loads(only(instructions, "HEALTHCHECK").partition("CMD")[2])
    assert command[:2] == ["python3", "-c"]
    assert "'/v2/health/ready'" in command[2]
    nobody = command[2].replace("8000", "1")
    done = subprocess.run([sys.executable, "-c", nobody], capture_output=True, timeout=20, check=False)
    assert b"ConnectionRefusedError" in done.stderr
    assert done.returncode == 1


def installed_names(instructions: list[Instruction]) -> set[str]:
    """Return the packages that the image is given when it lacks them."""
    [loop] = [entry.value for entry in instructions if entry.word == "RUN" and "pip install" in entry.value]
    return set(loop.split("for name in ")[1].split(";")[0].split())


def test_what_the_image_may_lack_is_pinned(instructions: list[Instruction]) -> None:
    """Every package of the list has its version in the lock file, under the very same spelling."""
    pinned = {line.split("==")[0] for line in (ROOT / "requirements" / "cpu.lock").read_text().splitlines()}
    assert installed_names(instructions) <= pinned


def test_all_that_our_code_imports_is_in_the_image(instructions: list[Instruction]) -> None:
    """Every package imported by backend and client, and every dependency of the project, is looked after."""
    roots = set()
    for source in [*(ROOT / "backend").rglob("*.py"), *(ROOT / "client").rglob("*.py")]:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                roots |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                roots.add(node.module.split(".")[0])
    foreign = roots - set(sys.stdlib_module_names) - OPTIONAL - {"triton_lifecycle", "triton_lifecycle_client"}
    providers = metadata.packages_distributions()
    listed = {name.lower().replace("_", "-") for name in installed_names(instructions)}
    for name in foreign:
        assert {found.lower().replace("_", "-") for found in providers[name]} & listed, f"{name} is imported"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for requirement in project["dependencies"]:
        name = re.split(r"[^\w-]", requirement)[0]
        assert name.lower().replace("_", "-") in listed, requirement


def test_hadolint_finds_nothing() -> None:
    """The linter for Dockerfiles, which has ShellCheck in it, has no complaint at any level."""
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, "--no-color", DOCKERFILE], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_gpu_example_fits_the_backend() -> None:
    """Tensor parallel over two devices with the kind that it needs, by a backend name that the image serves."""
    triton = text_format.Parse((LLAMA / "config.pbtxt").read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
    assert triton.backend in SERVED_AS
    assert [(group.count, group.kind) for group in triton.instance_group] == [
        (1, model_config_pb2.ModelInstanceGroup.KIND_MODEL)
    ]
    settings = json.loads((LLAMA / "1" / "model.json").read_text(encoding="utf-8"))
    assert settings["tensor_parallel_size"] == 2
    lifecycle = config.load(LLAMA / "request_lifecycle.yaml")
    assert lifecycle.timeout_handling.enabled
    assert lifecycle.admission.max_live_requests == 2 * settings["max_num_seqs"]


def test_the_gpu_example_is_not_where_one_gpu_would_fail_on_it() -> None:
    """`--model-repository model_repository` loads everything in there, on any machine."""
    for path in (ROOT / "model_repository").glob("*/1/model.json"):
        assert json.loads(path.read_text(encoding="utf-8")).get("tensor_parallel_size", 1) == 1, path
