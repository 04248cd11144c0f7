"""From samples to figures. Nothing here measures."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import msgspec

from load.overhead.measure import Sample, percentile
from load.overhead.processes import Serving

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

BARE = "bare AsyncLLM"
GRPC = "ours, gRPC"
HTTP = "ours, HTTP"
TRITONSERVER = "tritonserver"


class Spread(msgspec.Struct, frozen=True):
    """A figure over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of at least one value."""
        known = list(values)
        return cls(median(known), min(known), max(known))


class Cell(msgspec.Struct):
    """One measurement of the engine part."""

    target: str
    concurrency: int
    round: int
    sample: Sample
    other_engine: float
    """Share of one core that the idle engine used just before."""


class EngineRow(msgspec.Struct, frozen=True):
    """One line of the comparison; times in milliseconds, percentiles over all rounds."""

    concurrency: int
    target: str
    tokens_per_s: Spread
    ratio: Spread | None
    """To bare, round by round."""
    first_p50: float
    first_p99: float
    first_added: Spread | None
    """p50 less that of bare, round by round."""
    gap_p50: float
    tokens_per_response: float
    client_us_per_token: float
    rounds: int


def engine_rows(cells: Sequence[Cell]) -> list[EngineRow]:
    """Return a line per concurrency and target, in the order in which they were measured."""
    rows = []
    for concurrency, target in dict.fromkeys((cell.concurrency, cell.target) for cell in cells):
        own = _by_round(cells, concurrency, target)
        bare = _by_round(cells, concurrency, BARE)
        pairs = [] if target == BARE else [(own[r], bare[r]) for r in own if r in bare]
        samples = list(own.values())
        tokens = sum(sample.tokens for sample in samples)
        first = [value * 1e3 for sample in samples for value in sample.first]
        rows.append(
            EngineRow(
                concurrency=concurrency,
                target=target,
                tokens_per_s=Spread.of(sample.rate for sample in samples),
                ratio=Spread.of(ours.rate / theirs.rate for ours, theirs in pairs) if pairs else None,
                first_p50=percentile(first, 50),
                first_p99=percentile(first, 99),
                first_added=Spread.of(_first_ms(ours) - _first_ms(theirs) for ours, theirs in pairs) if pairs else None,
                gap_p50=percentile([value * 1e3 for sample in samples for value in sample.gaps], 50),
                tokens_per_response=tokens / sum(sample.responses for sample in samples),
                client_us_per_token=sum(sample.cpu_seconds for sample in samples) / tokens * 1e6,
                rounds=len(samples),
            )
        )
    return rows


class Work(msgspec.Struct):
    """One measurement with the CPU time of the serving processes beside it."""

    transport: str
    round: int
    sample: Sample
    used: Serving


class CpuRow(msgspec.Struct, frozen=True):
    """CPU time per streamed token in microseconds."""

    transport: str
    both: Spread
    stub: Spread
    tritonserver: Spread
    tokens_per_response: float
    tokens_per_s: Spread
    client_us_per_token: float
    rounds: int


class PlaceRow(msgspec.Struct, frozen=True):
    """Where CPU time goes, in microseconds: one thread, or tritonserver as a whole."""

    place: str
    per_token: dict[str, Spread]
    """By transport."""
    per_request: dict[str, Spread]
    """Of a request with one token."""


def place_rows(works: Sequence[Work], requests: Sequence[Work]) -> list[PlaceRow]:
    """Return a line per place, the costliest of the stub first and tritonserver last."""
    names = {name for work in (*works, *requests) for name in work.used.threads}
    rows = [PlaceRow(name, _at(works, name), _at(requests, name)) for name in names]
    rows.sort(key=lambda row: -max((each.median for each in row.per_token.values()), default=0.0))
    return [*rows, PlaceRow(TRITONSERVER, _at(works, None), _at(requests, None))] if rows else []


def _at(works: Sequence[Work], thread: str | None) -> dict[str, Spread]:
    found: dict[str, list[float]] = {}
    for work in works:
        used = work.used.tritonserver if thread is None else work.used.threads.get(thread, 0.0)
        found.setdefault(work.transport, []).append(used / work.sample.tokens * 1e6)
    return {transport: Spread.of(values) for transport, values in found.items()}


def cpu_rows(works: Sequence[Work]) -> list[CpuRow]:
    """Return a line per transport."""
    rows = []
    for transport in dict.fromkeys(work.transport for work in works):
        own = [work for work in works if work.transport == transport]
        samples = [work.sample for work in own]
        tokens = sum(sample.tokens for sample in samples)
        rows.append(
            CpuRow(
                transport=transport,
                both=Spread.of(work.used.both / work.sample.tokens * 1e6 for work in own),
                stub=Spread.of(work.used.stub / work.sample.tokens * 1e6 for work in own),
                tritonserver=Spread.of(work.used.tritonserver / work.sample.tokens * 1e6 for work in own),
                tokens_per_response=tokens / sum(sample.responses for sample in samples),
                tokens_per_s=Spread.of(sample.rate for sample in samples),
                client_us_per_token=sum(sample.cpu_seconds for sample in samples) / tokens * 1e6,
                rounds=len(own),
            )
        )
    return rows


class SimulatedSetup(msgspec.Struct, frozen=True):
    """How the simulated part was run."""

    offered_per_s: float
    streams: int
    clients: int


class SimulatedRow(msgspec.Struct, frozen=True):
    """What arrived of the simulated engine's tokens. Shares are of one core."""

    setup: SimulatedSetup
    tokens_per_s: Spread
    responses_per_s: Spread
    tokens_per_response: float
    gap_p50: float
    gap_p99: float
    stub_share: float
    tritonserver_share: float
    client_share: float
    serving_us_per_token: float
    rounds: int


def simulated_row(works: Sequence[Work], setup: SimulatedSetup | None) -> SimulatedRow | None:
    """Return the one line of the simulated part, ``None`` when nothing was measured."""
    if not works or setup is None:
        return None
    samples = [work.sample for work in works]
    seconds, tokens = sum(s.seconds for s in samples), sum(s.tokens for s in samples)
    gaps = [value * 1e3 for sample in samples for value in sample.gaps]
    return SimulatedRow(
        setup=setup,
        tokens_per_s=Spread.of(sample.rate for sample in samples),
        responses_per_s=Spread.of(sample.responses / sample.seconds for sample in samples),
        tokens_per_response=tokens / sum(sample.responses for sample in samples),
        gap_p50=percentile(gaps, 50),
        gap_p99=percentile(gaps, 99),
        stub_share=sum(work.used.stub for work in works) / seconds,
        tritonserver_share=sum(work.used.tritonserver for work in works) / seconds,
        client_share=sum(sample.cpu_seconds for sample in samples) / seconds,
        serving_us_per_token=sum(work.used.both for work in works) / tokens * 1e6,
        rounds=len(works),
    )


def _by_round(cells: Sequence[Cell], concurrency: int, target: str) -> dict[int, Sample]:
    return {c.round: c.sample for c in cells if c.concurrency == concurrency and c.target == target}


def _first_ms(sample: Sample) -> float:
    return percentile(sample.first, 50) * 1e3
