"""A real tritonserver with the simulated engine, asked over gRPC."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from load.models import copy_with
from triton_lifecycle.config import Admission as AdmissionSettings
from triton_lifecycle.errors import LifecycleError
from triton_lifecycle.events import Event
from triton_lifecycle.launcher import project_root
from triton_lifecycle.launcher.server import TritonServer
from triton_lifecycle.recording import read
from triton_lifecycle_client import NO_RETRY, AsyncClient

MODEL: Final = "simulated"
READY_S: Final = 120.0
ANSWERED_S: Final = 120.0
"""When a caller stops waiting for whatever word; all have deadlines far below."""
QUIET_S: Final = 1.5
"""Between the last stream and the end: Triton may still hold the request."""


class TritonServed:
    """One tritonserver for one load. What its recorder wrote is told when it has ended.

    Args:
        settings: the model's ``admission``; everything else is as shipped.
        tell: called with the admission of each request, if it was admitted, and then its end.
        engine: the simulated engine's settings.

    """

    def __init__(self, settings: AdmissionSettings, tell: Callable[[Event], None], engine: Mapping[str, Any]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="lifecycle-overload-"))
        self._tell = tell
        self._events = self._folder / "events.jsonl"
        model = self._folder / "models" / MODEL
        lifecycle = {
            "admission": settings.model_dump(mode="json", exclude_unset=True),
            "event_driven": {"recorder": {"path": str(self._events)}},
        }
        copy_with(project_root() / "model_repository" / MODEL, model, engine, lifecycle)
        self._server = TritonServer(model.parent, models=[MODEL])
        self._client: AsyncClient | None = None

    async def start(self) -> None:
        """Be ready for requests."""
        await asyncio.to_thread(lambda: self._server.start().wait_ready(READY_S))
        self._client = AsyncClient(self._server.grpc_url, model=MODEL, retry=NO_RETRY)

    async def serve(self, prompt: str, max_tokens: int, left: float) -> LifecycleError | None:
        """Ask for one answer as a stream; return its error, if any."""
        if self._client is None:
            raise RuntimeError("start() comes first")
        try:
            async with asyncio.timeout(ANSWERED_S):
                async for _ in self._client.stream(prompt, max_tokens=max_tokens, timeout=left):
                    pass
        except LifecycleError as error:
            return error
        return None

    async def close(self) -> None:
        """End the server and tell what happened in it."""
        try:
            if self._client is not None:
                await self._client.aclose()
            await asyncio.to_thread(self._stop)
            self._tell_all()
        finally:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def _stop(self) -> None:
        try:
            time.sleep(QUIET_S)
            self._server.stop()
        finally:
            self._server.kill()

    def _tell_all(self) -> None:
        recording = read(self._events)
        if recording.lost or recording.cut:
            raise RuntimeError(f"the recording of the load is not whole: {recording.lost} events were lost")
        for story in sorted(recording.stories, key=lambda story: story.end):
            for event in (story.admitted, story.ending):
                if event is not None:
                    self._tell(event)
