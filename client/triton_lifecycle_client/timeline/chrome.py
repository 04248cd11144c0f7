"""Chrome's trace format, which Perfetto opens: a track for each lane of requests, and counters.

Requests that do not overlap share a lane, so that a long recording needs no more tracks than requests ran at once.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any, Final

import msgspec

from triton_lifecycle_client.terminal import UsageFault

from .view import View, depth

if TYPE_CHECKING:
    from pathlib import Path

    from triton_lifecycle.story import Story

_PID: Final = 1


def write(path: Path, view: View) -> None:
    """Write the trace; raises ``UsageFault`` when the file cannot be written."""
    try:
        path.write_bytes(msgspec.json.encode(trace(view)))
    except OSError as error:
        raise UsageFault(f"--chrome {path}: {error.strerror or error}") from None


def trace(view: View) -> dict[str, Any]:
    """Return the trace; times are microseconds from the first arrival."""
    begin = view.begin
    found: list[dict[str, Any]] = [_named("process_name", "triton-lifecycle", 0)]
    lanes = _lanes(view.stories)
    found += [_named("thread_name", f"lane {lane}", lane) for lane in sorted(set(lanes))]
    for story, lane in zip(view.stories, lanes, strict=True):
        found += _slices(story, lane, begin)
        found += _instants(story, lane, begin)
    for at, waiting, running in depth(view.stories):
        counted = {"waiting": waiting, "running": running}
        found.append({"ph": "C", "pid": _PID, "name": "requests", "ts": _us(at - begin), "args": counted})
    return {
        "traceEvents": found,
        "displayTimeUnit": "ms",
        "otherData": {"source": view.source, "begin_unix_s": view.wall},
    }


def _lanes(stories: list[Story]) -> list[int]:
    """Return the lane of each request, numbered from 1; a lane holds one request at a time."""
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    lanes = []
    for story in stories:
        while busy and busy[0][0] <= story.begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy) + 1
        # Of no length, it would not keep the next request that arrives at the same moment away.
        heapq.heappush(busy, (max(story.end, story.begin + 1e-6), lane))
        lanes.append(lane)
    return lanes


def _slices(story: Story, lane: int, begin: float) -> list[dict[str, Any]]:
    about = {
        "id": story.id,
        "caller_id": story.caller_id,
        "model": story.model,
        "status": story.status,
        "slug": story.slug,
        "message": story.message,
        "output_tokens": story.output_tokens,
    }
    if story.prepared is not None:
        about |= {"prompt_bytes": story.prepared.prompt_bytes, "tenant": story.prepared.tenant}
    if story.scheduled is not None:
        about |= {"prompt_tokens": story.scheduled.prompt_tokens, "cached_tokens": story.scheduled.cached_tokens}
    whole = _slice(f"{story.caller_id or story.id} · {story.slug or story.status}", "request", story.begin, story.end)
    parts = [_slice(part.phase, "phase", part.begin, part.end) for part in story.segments()]
    for item in (whole, *parts):
        item["tid"] = lane
        item["ts"] = _us(item["ts"] - begin)
    return [whole | {"args": about}, *parts]


def _slice(name: str, category: str, begin: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "pid": _PID, "name": name, "cat": category, "ts": begin, "dur": _us(end - begin)}


def _instants(story: Story, lane: int, begin: float) -> list[dict[str, Any]]:
    marks: list[tuple[str, float, dict[str, Any]]] = [
        (f"{count} tokens" if count > 1 else "token", at, {"tokens": count}) for at, count in story.tokens
    ]
    marks += [
        ("deadline moved", at, {"due_us": _us(due - begin), "limit": limit}) for at, due, limit in story.deadlines
    ]
    marks += [("retry", retry.at, {"attempt": retry.attempt, "slug": retry.slug}) for retry in story.retries]
    return [
        {"ph": "i", "s": "t", "pid": _PID, "tid": lane, "name": name, "ts": _us(at - begin), "args": args}
        for name, at, args in marks
    ]


def _named(what: str, name: str, lane: int) -> dict[str, Any]:
    return {"ph": "M", "pid": _PID, "tid": lane, "name": what, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
