"""Stage 3: a permit or a refusal, at once; and the limits that the predicted time gives."""

from __future__ import annotations

from functools import partial

from triton_lifecycle.admission import Ask, Permit
from triton_lifecycle.context import Context
from triton_lifecycle.continuation import work
from triton_lifecycle.embedding import Embedding
from triton_lifecycle.errors import DeadlineExceeded
from triton_lifecycle.events import Admitted, LoadLimitMoved, Predicted
from triton_lifecycle.stages import Services
from triton_lifecycle.timeouts.adjuster import adjust
from triton_lifecycle.timeouts.limits import choose
from triton_lifecycle.timeouts.predictor import Interval, Prediction, Predictor


class Schedule:
    """Gives a request its permit, which is held until the request ends."""

    def __init__(self, services: Services) -> None:
        self._timeouts = services.config.timeout_handling
        self._admission = services.admission
        self._predictor = services.predictor
        self._supervisor = services.supervisor

    async def __call__(self, ctx: Context) -> None:
        """Admit the request; raises a subclass of ``Overloaded`` when there is no room."""
        if ctx.deadline is None:
            # A plug-in stands in the place of 'receive'.
            ctx.start_deadline(choose(self._timeouts, ctx.metadata.timeout))
        prediction = None
        if ctx.execution.sampling is not None and self._predictor is not None:
            prediction = self._set_limits(ctx, self._predictor)
        ask = _ask(ctx, prediction)
        ctx.permit = self._admission.admit(ask)
        ctx.held.callback(_release, ctx, ctx.permit)
        ctx.publish(
            Admitted,
            at=ctx.mark("admitted"),
            priority=ctx.metadata.priority,
            limits=ctx.execution.limits,
            sequences=ask.sequences,
        )

    def _silence(self, predictor: Predictor) -> float:
        """Return how long the engine has been silent; while it reads more than was ever seen, that has its patience."""
        silence = self._supervisor.silence()
        unknown = predictor.unexplored or self._supervisor.reads_again
        return max(0.0, silence - self._timeouts.default_timeout) if unknown else silence

    def _set_limits(self, ctx: Context, predictor: Predictor) -> Prediction | None:
        prediction = predictor.forecast(ctx.id)
        limits = adjust(
            self._timeouts,
            ctx.metadata.timeout,
            prediction,
            waiting_share=_waiting_share(predictor),
            usual_silence=self._supervisor.usual_silence,
        )
        ctx.adjust_deadline(limits, partial(self._silence, predictor))
        if prediction is not None:
            ctx.publish(
                Predicted,
                first_token=_plain(prediction.first_token),
                per_token=_plain(prediction.per_token),
                total=_plain(prediction.total),
            )
        return prediction


def _ask(ctx: Context, prediction: Prediction | None) -> Ask:
    sampling, source = ctx.execution.sampling, None if ctx.input is None else ctx.input.source
    prompt, ids = ctx.execution.prompt, None
    if isinstance(source, Embedding):
        prompt, ids = ("", source.source) if isinstance(source.source, list) else (source.source, None)
    given = () if ctx.input is None else ctx.input.continued
    prompt_bytes, max_tokens = work(prompt, None if sampling is None else sampling.max_tokens, given)
    return Ask(
        sequences=1 if sampling is None else sampling.n,
        prompt_bytes=prompt_bytes,
        prompt_tokens=None if ids is None else len(ids),
        max_tokens=max_tokens,
        priority=ctx.metadata.priority,
        tenant=ctx.metadata.tenant,
        left=None if ctx.deadline is None else ctx.deadline.left,
        at_least=None if prediction is None else prediction.total.low,
    )


def _release(ctx: Context, permit: Permit) -> None:
    scheduled = ctx.execution.times.get("scheduled")
    if scheduled is None and ctx.interruption is None and ctx.execution.attempts:
        # An embedding: the engine does not say when it began.
        scheduled = permit.admitted_at
    moved = permit.release(
        tokens=ctx.output.tokens,
        worked=None if scheduled is None else ctx.now() - scheduled,
        timed_out=isinstance(ctx.interruption, DeadlineExceeded),
    )
    if moved is not None:
        ctx.publish(LoadLimitMoved, before=moved[0], limit=moved[1])


def _waiting_share(predictor: Predictor) -> float:
    return predictor.waiting / (predictor.waiting + predictor.running) if predictor.waiting else 0.0


def _plain(interval: Interval) -> tuple[float, float, float]:
    return interval.value, interval.low, interval.high
