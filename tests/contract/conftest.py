"""Each contract test runs on the simulated engine and on the real one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.contract.subjects import Real, Simulated, Subject

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    """Load vLLM once."""
    subject = Real()
    yield subject
    subject.close()


@pytest.fixture(params=["simulated", pytest.param("vllm", marks=pytest.mark.real_engine)])
def subject(request: pytest.FixtureRequest) -> Subject:
    """The engine under contract."""
    if request.param == "simulated":
        return Simulated()
    return request.getfixturevalue("real")
