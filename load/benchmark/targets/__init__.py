"""Who can be asked: ours through our client, any OpenAI-compatible server, a Triton with the official backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from load.benchmark.options import OPENAI
from load.benchmark.targets.foreign import OpenAiTarget, TritonTarget
from load.benchmark.targets.lifecycle import LifecycleTarget

if TYPE_CHECKING:
    from load.benchmark.asking import Target


def open_target(kind: str, url: str, model: str, metrics_url: str | None = None) -> Target:
    """Return a target of this kind; nothing is sent yet."""
    if kind in OPENAI:
        return OpenAiTarget(url, model)
    if kind == "triton":
        return TritonTarget(url, model, metrics_url)
    return LifecycleTarget(url, model, metrics_url)
