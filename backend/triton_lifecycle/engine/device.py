"""KIND_GPU: the one device that Triton gives a model instance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triton_lifecycle.errors import ConfigError


def pinned(kind: str, device: str, settings: Mapping[str, Any], visible: str | None) -> str | None:
    """Return the value that ``CUDA_VISIBLE_DEVICES`` must have; ``None`` leaves it as it is.

    Args:
        kind: ``model_instance_kind`` as Triton names it: ``GPU``, ``CPU``, ``MODEL``.
        device: ``model_instance_device_id``, an index into the devices that the server sees.
        settings: the content of ``model.json``.
        visible: the present value.

    Raises:
        ConfigError: the model wants more than one device, or the server does not see this one.

    """
    if kind.upper().removeprefix("KIND_") != "GPU":
        return None
    ranks = 1
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        ranks *= int(settings.get(name, 1))
    if ranks > 1:
        raise ConfigError(
            "KIND_GPU is currently for single-GPU models, please specify KIND_MODEL in the model's config.pbtxt for "
            f"multi-GPU models: this one runs on {ranks} devices (tensor_parallel_size × pipeline_parallel_size); "  # noqa: RUF001
            "use instance_group [{ count: 1, kind: KIND_MODEL }]"
        )
    seen = [name.strip() for name in (visible or "").split(",") if name.strip()]
    if not seen:
        return device
    if not device.isdigit() or int(device) >= len(seen):
        raise ConfigError(f"config.pbtxt: there is no GPU {device}; the server sees {len(seen)} ({visible})")
    return seen[int(device)]
