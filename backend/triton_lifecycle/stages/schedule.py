"""Stage 3: a permit or a refusal, at once, and the deadline."""

from __future__ import annotations

from triton_lifecycle.admission import Admission
from triton_lifecycle.config import Config
from triton_lifecycle.context import Context
from triton_lifecycle.events import Admitted
from triton_lifecycle.timeouts.deadline import Deadline
from triton_lifecycle.timeouts.limits import choose


class Schedule:
    """Gives a request its permit and starts its deadline; both are held until the request ends."""

    def __init__(self, config: Config, admission: Admission) -> None:
        self._timeouts = config.timeout_handling
        self._admission = admission

    async def __call__(self, ctx: Context) -> None:
        """Admit the request; raises a subclass of ``Overloaded`` when there is no room."""
        ctx.held.enter_context(self._admission.permit())
        limits = choose(self._timeouts, ctx.metadata.timeout)
        ctx.execution.limits = limits.named()
        ctx.deadline = Deadline(limits, ctx.interrupt)
        ctx.held.callback(ctx.deadline.close)
        ctx.publish(
            Admitted,
            at=ctx.mark("admitted"),
            priority=ctx.metadata.priority,
            limits=ctx.execution.limits,
            sequences=1 if ctx.execution.sampling is None else ctx.execution.sampling.n,
        )
