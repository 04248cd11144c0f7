"""Reads what tritonserver wrote: why a start failed, and how far a start has come."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_GLOG = re.compile(r"^([IWEF])\d{4} [\d:.]+ \d+ [\w.]+:\d+\] (.*)$")
_LOAD = re.compile(r"failed to load '([^']+)' version \d+: (.*)", re.DOTALL)
_CODES = re.compile(r"^(?:ERROR: |Internal: |Invalid argument: |TritonModelException: |Failed to create instance: )+")
_RAISED = re.compile(r"(?:^|\s|\] )((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Died|Interrupt)): (.+)$")
_USAGE = re.compile(r"^(?:error: (.+)|\S*tritonserver: (.+))$", re.IGNORECASE)
_NOISE = ("CudaDriverHelper", "Failed to initialize NVML", "See root cause above")
_PHASES = (
    (re.compile(r"loading: ([\w.-]+):\d+"), "loading {0}"),
    (re.compile(r"TRITONBACKEND_ModelInstanceInitialize: ([\w.-]+?)_\d+"), "starting {0}"),
    (re.compile(r"Initializing a V1 LLM engine"), "starting vLLM's engine"),
    (re.compile(r"Starting to load model|Loading safetensors"), "loading the weights"),
    (re.compile(r"GPU KV cache size|CPU KV cache size|# \w+ blocks"), "reserving the KV cache"),
    (re.compile(r"init engine .* took|Warming up"), "warming up the engine"),
    (re.compile(r"successfully loaded '([\w.-]+)'"), "loaded {0}"),
)
_ASIDE = re.compile(r"^\s*[|+]|resource_tracker|^\s*warnings\.warn\(")
"""Rows of Triton's tables, and what Python warns of when a process ends: they say nothing of the end's cause."""
_EXIT_TIMED_OUT = "Exit timeout expired"
_LINES = 24


def read(path: Path, *, last_bytes: int = 400_000) -> str:
    """Return the end of a log as text; empty when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - last_bytes))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def explain(text: str) -> str:
    """Return the lines of a server's log that say why it did not come up."""
    loads: dict[str, str] = {}
    errors: list[str] = []
    raised: list[str] = []
    for line in text.splitlines():
        if (entry := _GLOG.match(line)) is not None:
            message = _plain(entry[2])
            if (load := _LOAD.search(message)) is not None:
                loads[load[1]] = _without_trace(load[2])
            elif entry[1] in "EF":
                errors.append(_without_trace(message))
        elif not line.startswith("|") and (error := _RAISED.search(line)) is not None:
            raised.append(f"{error[1]}: {error[2].strip()}")
        elif (usage := _USAGE.match(line)) is not None:
            errors.append(usage[1] or usage[2])
    causes = [line for line in dict.fromkeys(raised) if not any(noise in line for noise in _NOISE)]
    if loads:
        told = [f"model {name}: {reason}" for name, reason in loads.items()]
        known = "\n".join(told)
        told += [f"earlier: {cause}" for cause in causes[:3] if cause not in known]
    else:
        told = list(dict.fromkeys(e for e in errors if not any(noise in e for noise in _NOISE))) + causes[:3]
    if not told:
        last = [line for line in text.splitlines() if line.strip() and not _ASIDE.search(line)][-10:]
        told = ["its last lines were:", *last] if last else ["its log does not say why"]
    return "\n".join("\n".join(told).splitlines()[:_LINES])


def exit_timed_out(text: str) -> bool:
    """Tell whether a server gave up waiting for the requests that were running when it was asked to end."""
    return _EXIT_TIMED_OUT in text


def phase(text: str) -> str:
    """Return in a few words what a starting server is doing, ``""`` if the log does not tell."""
    for line in reversed(text.splitlines()):
        for pattern, words in _PHASES:
            if (found := pattern.search(line)) is not None:
                return words.format(*found.groups())
    return ""


def _plain(message: str) -> str:
    # Triton writes its messages as JSON strings, line ends escaped.
    if message.startswith('"'):
        try:
            return str(json.loads(message))
        except ValueError:
            return message
    return message


def _without_trace(message: str) -> str:
    # What follows "At:" is the embedded interpreter's stack: file paths, of no use to the reader.
    return _CODES.sub("", message.partition("\n\nAt:\n")[0].strip())
