"""The store in this process: ended requests, bounded by number and age, at the same cost however many there are."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from triton_lifecycle.store import Entry

SPARE: Final = 10_000
"""Finished requests that may wait for another store beyond those that are kept here anyway."""

EXPIRED_AT_ONCE: Final = 2
"""For each request that comes, so that what is over goes faster than anything comes."""


class _Generation:
    """The layers that live equally long: who came first goes first, so the next to expire is always at the front."""

    def __init__(self, ttl: float, layers: Iterable[str]) -> None:
        self.ttl = ttl
        self.layers = frozenset(layers)
        self.born: OrderedDict[str, float] = OrderedDict()


class MemoryStore:
    """Layers of requests by our id, and our ids by the caller's.

    A request that waits to be written to another store is *pinned*: it is pushed out only when more than
    ``max_requests`` + :data:`SPARE` wait. Of the others, the one longest not asked for goes first.

    Args:
        ttls: seconds by layer; layers without one are not kept.
        max_requests: requests kept that do not wait.
        clock: monotonic seconds.

    """

    name = "memory"

    def __init__(
        self, ttls: Mapping[str, float], *, max_requests: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._max_requests = max_requests
        self._generations = [
            _Generation(ttl, [layer for layer, its in ttls.items() if its == ttl]) for ttl in sorted(set(ttls.values()))
        ]
        self._kept: OrderedDict[str, Entry] = OrderedDict()
        self._pinned: OrderedDict[str, Entry] = OrderedDict()
        self._callers: dict[str, str] = {}
        self._marks: dict[str, tuple[float, str]] = {}
        self.lost = 0
        """Requests that were pushed out or expired while they waited to be written elsewhere."""

    def __len__(self) -> int:
        """Return how many requests are kept."""
        return len(self._kept) + len(self._pinned)

    @property
    def waiting(self) -> int:
        """Requests that wait to be written to another store."""
        return len(self._pinned)

    def waits(self, request_id: str) -> bool:
        """Whether this request waits to be written to another store."""
        return request_id in self._pinned

    def claim(self, caller_id: str, request_id: str) -> None:
        """Let the caller's id lead to this request from now on."""
        self._callers[caller_id] = request_id

    def claimant(self, caller_id: str) -> str | None:
        """Return our id of the request that last claimed the caller's id."""
        return self._callers.get(caller_id)

    def release(self, caller_id: str, request_id: str) -> None:
        """Forget a claim, if it is still this request's."""
        if self._callers.get(caller_id) == request_id:
            del self._callers[caller_id]

    def put(self, entry: Entry, *, pinned: bool = False) -> None:
        """Keep an entry; layers of the same request that are not in it stay as they are."""
        known = self._kept.pop(entry.id, None) or self._pinned.pop(entry.id, None)
        if known is not None:
            entry = msgspec.structs.replace(
                entry, layers=known.layers | entry.layers, caller_id=entry.caller_id or known.caller_id
            )
        now = self._clock() - entry.age
        for generation in self._generations:
            if not generation.layers.isdisjoint(entry.layers):
                generation.born[entry.id] = now
                if known is not None:
                    generation.born.move_to_end(entry.id)
        (self._pinned if pinned else self._kept)[entry.id] = entry
        self._make_room()
        self.expire(EXPIRED_AT_ONCE)

    def get(self, request_id: str) -> Mapping[str, bytes]:
        """Return the layers that are kept of a request, which counts as asking for it."""
        entry = self._kept.get(request_id)
        if entry is not None:
            self._kept.move_to_end(request_id)
        else:
            entry = self._pinned.get(request_id)
        if entry is None:
            return {}
        now = self._clock()
        over = [its.layers for its in self._generations if now - its.born.get(request_id, now) >= its.ttl]
        return {name: value for name, value in entry.layers.items() if not any(name in layers for layers in over)}

    def expire(self, most: int) -> int:
        """Forget layers whose time is over; return of how many requests, which are at most ``most`` a layer."""
        now = self._clock()
        found = 0
        for generation in self._generations:
            for _ in range(most):
                if not generation.born:
                    break
                request_id, born = next(iter(generation.born.items()))
                if now - born < generation.ttl:
                    break
                del generation.born[request_id]
                self._drop_layers(request_id, generation.layers)
                found += 1
        return found

    def pinned(self, most: int, most_bytes: int) -> list[Entry]:
        """Return the longest waiting entries: at most ``most``, and of ``most_bytes`` together, but at least one."""
        batch: list[Entry] = []
        size = 0
        for entry in self._pinned.values():
            size += sum(map(len, entry.layers.values()))
            if batch and (len(batch) >= most or size > most_bytes):
                break
            batch.append(entry)
        return batch

    def unpin(self, entries: Iterable[Entry]) -> None:
        """Take note that these were written elsewhere."""
        for entry in entries:
            if self._pinned.get(entry.id) is entry:
                del self._pinned[entry.id]
                self._kept[entry.id] = entry
        self._make_room()

    def pin_all(self) -> None:
        """Have everything written again, what was kept before what waits."""
        if len(self._kept) >= len(self._pinned):
            self._kept.update(self._pinned)
            self._pinned = self._kept
        else:
            for request_id, entry in reversed(self._kept.items()):
                self._pinned[request_id] = entry
                self._pinned.move_to_end(request_id, last=False)
        self._kept = OrderedDict()

    async def write(self, entries: Sequence[Entry]) -> None:
        """Put down layers; they expire by themselves."""
        for entry in entries:
            self.put(entry)
            if entry.caller_id:
                self.claim(entry.caller_id, entry.id)

    async def read(self, request_id: str) -> Mapping[str, bytes]:
        """Return the layers that are there of a request."""
        return self.get(request_id)

    async def resolve(self, caller_id: str) -> str | None:
        """Return our id of the request that last used the caller's id."""
        return self.claimant(caller_id)

    async def set_marks(self, marks: Mapping[str, str], ttl: float) -> None:
        """Put down small texts by name."""
        until = self._clock() + ttl
        self._marks |= {name: (until, text) for name, text in marks.items()}

    async def mark(self, name: str) -> str | None:
        """Return the text put down under a name, while it lives."""
        until, text = self._marks.get(name, (0.0, ""))
        return text if self._clock() < until else None

    async def aclose(self) -> None:
        """Nothing is held."""

    def _make_room(self) -> None:
        while len(self._kept) > self._max_requests:
            self._forget(self._kept.popitem(last=False)[1])
        while len(self._pinned) > self._max_requests + SPARE:
            self.lost += 1
            self._forget(self._pinned.popitem(last=False)[1])

    def _forget(self, entry: Entry) -> None:
        for generation in self._generations:
            generation.born.pop(entry.id, None)
        self.release(entry.caller_id, entry.id)

    def _drop_layers(self, request_id: str, layers: frozenset[str]) -> None:
        home = self._kept if request_id in self._kept else self._pinned
        entry = home[request_id]
        left = {name: value for name, value in entry.layers.items() if name not in layers}
        if left:
            home[request_id] = msgspec.structs.replace(entry, layers=left)
            return
        del home[request_id]
        self.lost += home is self._pinned
        self._forget(entry)
