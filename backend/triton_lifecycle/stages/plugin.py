"""A plug-in as a stage: whatever it does costs its own request alone, and its name is in the error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from triton_lifecycle.context import Context
from triton_lifecycle.errors import LifecycleError, PluginFailed

log = logging.getLogger(__name__)


class PluginStage:
    """Runs a plug-in within its time.

    Args:
        name: as the configuration has it.
        call: the coroutine function.
        limit: seconds for one call; ``None`` for one in the place of 'execute', which the request's deadline bounds.
        hands_on: what it must return for the built-in stage behind it; ``None`` when that may be anything.

    """

    def __init__(
        self, name: str, call: Callable[..., Awaitable[Any]], limit: float | None, hands_on: type | None = None
    ) -> None:
        self._name = name
        self._call = call
        self._limit = limit
        self._hands_on = hands_on

    async def __call__(self, ctx: Context, *rest: Any) -> Any:  # noqa: ANN401 - what stages hand on
        """Call the plug-in.

        Raises:
            LifecycleError: the plug-in raised it itself: it goes to the caller as it is.
            PluginFailed: the plug-in raised anything else, or did not return in time.

        """
        scope = asyncio.timeout(self._limit)
        try:
            async with scope:
                result = await self._call(ctx, *rest)
        except LifecycleError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and scope.expired():
                raise PluginFailed(
                    f"stage {self._name!r} did not return within {self._limit:g} s (pipeline.plugin_timeout)"
                ) from error
            log.exception("request %s failed in the plug-in %s", ctx.id, self._name)
            raise PluginFailed(
                f"stage {self._name!r} failed with {type(error).__name__}; "
                f"the server's log has the details under request {ctx.id}"
            ) from error
        if self._hands_on is not None and result is not None and not isinstance(result, self._hands_on):
            raise PluginFailed(
                f"stage {self._name!r} returned {type(result).__name__}; the stage behind it takes "
                f"{self._hands_on.__name__}, or nothing when None is returned"
            )
        return result
