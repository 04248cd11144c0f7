"""The KV cache as numbers: how many blocks are taken, and which full blocks a later prompt can use again."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class KVPool:
    """A fixed number of blocks.

    A block is *private* to one sequence until it is full; then it is *shared* under the hash of all tokens up to its
    end. Shared blocks that nobody uses stay *idle*, for the next prompt that begins alike, until their room is needed:
    the one longest unused goes first.

    Args:
        blocks: how many there are.

    """

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._private = 0
        self._shared: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Blocks that can be had, idle ones included."""
        return self._blocks - self._private - len(self._shared)

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0…1."""
        return 1.0 - self.free / self._blocks

    def match(self, hashes: Sequence[int]) -> int:
        """Return how many blocks from the beginning are here."""
        for i, key in enumerate(hashes):
            if key not in self._shared and key not in self._idle:
                return i
        return len(hashes)

    def admit(self, hits: Sequence[int], private: int) -> bool:
        """Take the shared blocks ``hits`` and ``private`` new ones, or nothing if they do not fit."""
        if private + sum(key in self._idle for key in hits) > self.free:
            return False
        for key in hits:
            self._share(key)
        return self.reserve(private)

    def reserve(self, count: int) -> bool:
        """Take new private blocks, or none if there is no room for all."""
        if count > self.free:
            return False
        self._private += count
        while self._private + len(self._shared) + len(self._idle) > self._blocks:
            self._idle.popitem(last=False)
        return True

    def publish(self, key: int) -> None:
        """Turn one private block, now full, into the shared block ``key``; two alike become one."""
        self._private -= 1
        self._share(key)

    def release(self, shared: Sequence[int], private: int) -> None:
        """Give back what a sequence held; the ends of prompts, which fewer share, are to be forgotten first."""
        self._private -= private
        for key in reversed(shared):
            if self._shared[key] == 1:
                del self._shared[key]
                self._idle[key] = None
            else:
                self._shared[key] -= 1

    def _share(self, key: int) -> None:
        self._idle.pop(key, None)
        self._shared[key] = self._shared.get(key, 0) + 1
