"""What every unit test finds as it was."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def fresh_logger() -> Iterator[None]:
    """Let the package's logger be as on import: a test that configures it changes no other."""
    logger = logging.getLogger("triton_lifecycle")
    before = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate = before[:2]
    logger.setLevel(before[2])
