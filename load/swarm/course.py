"""How a run goes: how many users there are when, and its end in order."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

import gevent
from locust import LoadTestShape

from load.swarm.campaign import READY_S
from load.swarm.settings import Settings
from load.swarm.users import chosen
from triton_lifecycle.errors import InvalidInput

if TYPE_CHECKING:
    from load.swarm.campaign import Campaign

MARGIN_S: Final = READY_S + 5.0
"""Who does not say that it has drained is waited for so much longer than it may take."""

log = logging.getLogger(__name__)
Tick = tuple[int, float, list[type[Any]]]


class Course(LoadTestShape):  # type: ignore[misc]
    """Follows ``--shape``; at the end of ``--run-time`` lets what is under way come to its end."""

    use_common_options = True

    def __init__(self) -> None:
        super().__init__()
        self._settings: Settings | None = None
        self._last: Tick | None = None
        self._drained: set[str] = set()
        self._drain_until: float | None = None

    def reset_time(self) -> None:
        """Begin anew; Locust calls this at a run's beginning, twice."""
        super().reset_time()
        self._settings = self._last = self._drain_until = None
        self._drained.clear()

    def worker_drained(self, client_id: str) -> None:
        """Take note that a worker has nothing under way any more."""
        self._drained.add(client_id)

    def tick(self) -> Tick | None:
        """Return users, how many a second, and of which classes; ``None`` at the end."""
        environment = self.runner.environment
        try:
            settings = self._settings = self._settings or Settings.read(environment.parsed_options)
        except InvalidInput as error:
            log.error("%s", error.message)  # noqa: TRY400 - a typing error on the web page needs no traceback
            return None
        elapsed = self.get_run_time()
        if settings.run_time is not None and elapsed >= settings.run_time and self._last is not None:
            return self._last if self._draining(settings) else None
        workers = getattr(self.runner, "worker_count", 1)
        named = list(environment.parsed_options.user_classes or [])
        users = workers if settings.open_loop else settings.users_at(elapsed)
        pace = float(max(1, workers) if settings.open_loop else settings.spawn_rate)
        self._last = (users, pace, chosen(settings, named))
        return self._last

    def _draining(self, settings: Settings) -> bool:
        """Order the end once; return whether something is still under way that may go on."""
        now = time.monotonic()
        mine: Campaign | None = getattr(self.runner.environment, "campaign", None)
        if self._drain_until is None:
            self._drain_until = now + settings.drain + MARGIN_S
            if mine is None:
                self.runner.send_message("lifecycle_drain", None)
            else:
                gevent.spawn(mine.drain)
        if now >= self._drain_until:
            return False
        if mine is not None:
            return not mine.drained
        return len(self._drained) < int(self.runner.worker_count)
