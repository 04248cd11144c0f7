"""Which faults strike which requests: decided once per request, from the seed."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from triton_lifecycle.engine.simulated.settings import Fault


class FaultPlan:
    """Matches faults with requests.

    Args:
        faults: those to begin with.
        seed: decides what ``probability`` strikes.

    """

    def __init__(self, faults: Iterable[Fault], seed: int) -> None:
        self._seed = seed
        self._faults: list[Fault] = []
        self._left: list[float] = []
        self._requests = 0
        for fault in faults:
            self.add(fault)

    def add(self, fault: Fault) -> None:
        """Let one more fault strike from now on."""
        self._faults.append(fault)
        self._left.append(float("inf") if fault.times is None else fault.times)

    def clear(self) -> None:
        """Let nothing strike any more."""
        self._faults.clear()
        self._left.clear()

    def strike(self, prompt: Callable[[], str]) -> list[Fault]:
        """Return the faults of the next request, the earliest first; ``prompt`` is asked only where it matters."""
        self._requests += 1
        struck = []
        for i, fault in enumerate(self._faults):
            if self._left[i] > 0 and self._matches(i, prompt):
                self._left[i] -= 1
                struck.append(fault)
        return sorted(struck, key=lambda fault: fault.on.token or 0)

    def _matches(self, i: int, prompt: Callable[[], str]) -> bool:
        on = self._faults[i].on
        if on.nth_request is not None and on.nth_request != self._requests:
            return False
        if on.prompt_contains is not None and on.prompt_contains not in prompt():
            return False
        if on.probability is None:
            return True
        return Random(f"{self._seed}/{i}/{self._requests}").random() < on.probability  # noqa: S311 - a simulation
