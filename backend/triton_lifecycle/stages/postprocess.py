"""Stage 5: from a chunk to the named outputs of one response."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from triton_lifecycle.context import Context, Sequence
from triton_lifecycle.engine import Chunk, Delta


class Response(msgspec.Struct, frozen=True):
    """One response to the caller."""

    outputs: dict[str, list[Any]]
    """By output name, one element per sequence."""
    final: bool


async def postprocess(ctx: Context, chunk: Chunk) -> Response | None:
    """Return the response for a chunk: the deltas when streaming, else the whole answer once it is finished."""
    if ctx.input is None:
        return None
    if ctx.metadata.stream:
        return Response(_outputs(ctx, _by_sequence(ctx, chunk)), final=chunk.finished)
    if not chunk.finished:
        return None
    return Response(_outputs(ctx, _whole(ctx)), final=True)


def partial(ctx: Context) -> dict[str, list[Any]] | None:
    """Return the outputs of a unary answer that time ended, ``None`` when there is no token to give.

    What has no finish reason of its own ended by ``timeout``.
    """
    sampling = ctx.execution.sampling
    if ctx.input is None or sampling is None or not ctx.output.tokens:
        return None
    for _ in range(len(ctx.output.sequences), sampling.n):
        ctx.output.sequences.append(Sequence())
    for sequence in ctx.output.sequences:
        sequence.finish_reason = sequence.finish_reason or "timeout"
    return _outputs(ctx, _whole(ctx))


def _whole(ctx: Context) -> list[Delta]:
    prompt = ctx.execution.prompt if ctx.input is not None and not ctx.input.exclude_prompt else ""
    return [
        Delta(
            index=index,
            text=prompt + "".join(sequence.text),
            token_ids=tuple(sequence.token_ids),
            finish_reason=sequence.finish_reason,
            cumulative_logprob=sequence.cumulative_logprob,
            logprobs=sequence.logprobs,
        )
        for index, sequence in enumerate(ctx.output.sequences)
    ]


def _by_sequence(ctx: Context, chunk: Chunk) -> list[Delta]:
    """Give every sequence its place, so that element i is always sequence i, also when it has nothing new."""
    sampling = ctx.execution.sampling
    count = 1 if sampling is None else sampling.n
    if count == 1:
        return list(chunk.deltas)
    found = {delta.index: delta for delta in chunk.deltas}
    return [found.get(index) or _nothing_new(ctx, index) for index in range(count)]


def _nothing_new(ctx: Context, index: int) -> Delta:
    known = ctx.output.sequences[index] if index < len(ctx.output.sequences) else None
    return Delta(
        index=index,
        text="",
        token_ids=(),
        finish_reason=None if known is None else known.finish_reason,
        cumulative_logprob=None if known is None else known.cumulative_logprob,
    )


def _outputs(ctx: Context, deltas: list[Delta]) -> dict[str, list[Any]]:
    outputs: dict[str, list[Any]] = {"text_output": [delta.text for delta in deltas]}
    wants = ctx.input.wants if ctx.input is not None else None
    if wants is None:
        return outputs
    if wants.finish_reason:
        outputs["finish_reason"] = [str(delta.finish_reason) for delta in deltas]
    if wants.cumulative_logprob:
        outputs["cumulative_logprob"] = [
            0.0 if delta.cumulative_logprob is None else delta.cumulative_logprob for delta in deltas
        ]
    if wants.logprobs:
        outputs["logprobs"] = [json.dumps(delta.logprobs) for delta in deltas]
    if wants.num_input_tokens:
        outputs["num_input_tokens"] = [ctx.execution.prompt_tokens or 0]
    if wants.token_ids and len(deltas) == 1 and deltas[0].token_ids:
        outputs["token_ids"] = list(deltas[0].token_ids)
    if wants.num_output_tokens:
        outputs["num_output_tokens"] = [len(delta.token_ids) for delta in deltas]
    return outputs
