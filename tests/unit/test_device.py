"""KIND_GPU gives an instance one device."""

from __future__ import annotations

import pytest

from triton_lifecycle.engine.device import pinned
from triton_lifecycle.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "device", "visible", "found"),
    [
        ("GPU", "1", None, "1"),
        ("KIND_GPU", "1", "4,7", "7"),
        ("GPU", "0", "GPU-uuid", "GPU-uuid"),
        ("MODEL", "1", None, None),
        ("CPU", "0", "4,7", None),
    ],
)
def test_the_device_is_the_one_that_triton_names(kind, device, visible, found):
    """An index into what the server sees; other kinds leave the environment alone."""
    assert pinned(kind, device, {}, visible) == found


def test_more_devices_need_kind_model():
    """The error names the product of both sizes and what to write instead."""
    settings = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    with pytest.raises(ConfigError, match=r"KIND_GPU is currently for single-GPU models, .*on 4 devices .*KIND_MODEL"):
        pinned("GPU", "0", settings, None)
    assert pinned("MODEL", "0", settings, None) is None


def test_a_device_that_is_not_seen_is_an_error():
    """It names how many there are."""
    with pytest.raises(ConfigError, match="no GPU 2; the server sees 2"):
        pinned("GPU", "2", {}, "4,7")
