"""An event loop on which waiting takes no time: hours of timeouts pass in milliseconds, exactly and repeatably.

``looptime`` was tried first: its pytest plugin breaks every fixture unless pytest-asyncio is installed too, its 42
empty cycles before each move of the clock cost 0.4 ms a timer, and it rounds to microseconds, too coarse for an engine
step. Here the clock moves where the loop would have slept: in its selector, which is a public seam of asyncio.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Executor

P = ParamSpec("P")
T = TypeVar("T")

START = 1000.0
"""Where the clock starts; not 0, so that a time that was never set shows."""

REAL_LIMIT = 10.0
"""Real seconds to wait for a thread or socket when no timer is left, before the loop is called stuck."""


class StuckError(RuntimeError):
    """Every task waits for something that nothing will ever bring about."""


class _Selector(selectors.DefaultSelector):
    """Polls for real events, and moves the clock instead of sleeping."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.start = self.now = start

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            ready = super().select(REAL_LIMIT)
            if not ready:
                raise StuckError(
                    f"at {self.now - self.start:.6f} s: no timer is set and nothing came for {REAL_LIMIT} s"
                )
            return ready
        ready = super().select(0)
        if not ready and timeout > 0:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose :meth:`time` moves only by the timers set on it.

    Args:
        start: what the clock shows at first, in seconds.

    """

    def __init__(self, start: float = START) -> None:
        self._virtual = _Selector(start)
        super().__init__(self._virtual)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._virtual.now


class RepeatableLoop(VirtualLoop):
    """A virtual loop without threads: what is handed to one is done on the spot, so that two runs are alike."""

    def run_in_executor(  # type: ignore[override]
        self,
        executor: Executor | None,  # noqa: ARG002 - asyncio's signature
        func: Callable[..., T],
        *args: Any,  # noqa: ANN401
    ) -> asyncio.Future[T]:
        """Call the function now; the future is done when this returns."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - belongs to the future
            future.set_exception(error)
        return future


def run(function: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a coroutine function in virtual time and return its result; a task left behind is an error."""

    async def checked() -> T:
        result = await function(*args, **kwargs)
        await asyncio.sleep(0)  # what was just cancelled may end
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
            raise AssertionError(f"tasks left running: {left}")
        return result

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(checked())
