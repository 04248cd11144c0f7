"""What the simulated model says: each token is a hash of all tokens before it, and of nothing else.

So a prompt continued by the tokens already sent yields exactly the rest, whatever batch, engine or process it runs in.
"""

from __future__ import annotations

import math
import sys
from array import array
from typing import TYPE_CHECKING, Any
from zlib import crc32

from triton_lifecycle.engine.simulated.text import END, FIRST_BYTE, FIRST_WORD, SINGLE, SPLIT, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from triton_lifecycle.engine.simulated.sampling import Values

_GOLDEN = 0x9E3779B97F4A7C15
_TABLE = 1 << 12
_END_BITS = 24


Logprobs = dict[str, dict[str, Any]]
"""One token's candidates: token id → ``logprob``, ``rank`` and ``decoded_token``; the chosen one comes first."""


class Language:
    """Chooses tokens.

    Args:
        vocabulary: what can be said.
        seed: another seed, another language.
        mean_length: mean number of tokens before a natural end; ``None`` for no natural end.

    """

    def __init__(self, vocabulary: Vocabulary, seed: int, mean_length: float | None) -> None:
        self.vocabulary = vocabulary
        self._seed = seed
        self._end_below = 0 if mean_length is None else int((1 << _END_BITS) / max(mean_length, 1.0))
        self._quads = [token.to_bytes(4, sys.byteorder) for token in range(len(vocabulary))]
        self._table = _weigh(vocabulary)
        self._inside = _insides()

    def salt(self, sampling: Values, index: int) -> int:
        """Return where the hash starts: all that changes the choice of tokens, apart from the tokens themselves."""
        penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
        spread: tuple[float | int | None, ...] = ()
        if not sampling.greedy:
            seed = None if sampling.seed == -1 else sampling.seed
            spread = (sampling.temperature, sampling.top_p, max(sampling.top_k, 0), sampling.min_p, seed, index)
        return crc32(repr((self._seed, *map(float, penalties), *spread)).encode())

    def begin(self, tokens: Sequence[int], salt: int) -> tuple[int, bytes]:
        """Return the state after these tokens: the hash, and the bytes of a character begun at their end."""
        tail = b""
        for token in tokens[-3:]:
            tail = self._tail(tail, token)
        return crc32(array("I", tokens).tobytes(), salt), tail

    def step(self, state: tuple[int, bytes], token: int) -> tuple[int, bytes]:
        """Return the state after one more token."""
        value, tail = state
        if tail or token < FIRST_WORD:
            tail = self._tail(tail, token)
        return crc32(self._quads[token], value), tail

    def choose(self, state: tuple[int, bytes]) -> int:
        """Return the next token."""
        value, tail = state
        mixed = value * _GOLDEN
        if tail:
            options = self._inside[tail]
            return options[(mixed >> 32) % len(options)]
        if value & ((1 << _END_BITS) - 1) < self._end_below:
            return END
        return self._table[(mixed >> 32) % _TABLE]

    def choose_among(self, state: tuple[int, bytes], banned: Callable[[int], bool]) -> int:
        """Return the most likely token that is not banned; the end if nothing else is left."""
        return next((token for token in self._ranked(state) if not banned(token)), END)

    def logprobs(self, state: tuple[int, bytes], token: int, count: int) -> tuple[float, Logprobs]:
        """Return the chosen token's logprob, and the records of it and of the ``count`` most likely ones."""
        ranks: dict[int, int] = {}
        for rank, candidate in enumerate(self._ranked(state), start=1):
            if rank <= count or candidate == token:
                ranks[candidate] = rank
            if rank >= count and token in ranks:
                break
        ranks = {token: ranks.pop(token, len(self.vocabulary)), **ranks}  # a forced token need not be a likely one
        spread = 0.05 + (state[0] & 0xFF) / 0x100
        records = {
            str(candidate): {
                "logprob": -spread - 0.7 * math.log(rank),
                "rank": rank,
                "decoded_token": self.vocabulary.text((candidate,)),
            }
            for candidate, rank in ranks.items()
        }
        return -spread - 0.7 * math.log(ranks[token]), records

    def _ranked(self, state: tuple[int, bytes]) -> Iterator[int]:
        """Yield all candidates, the most likely first, each once."""
        seen = {first := self.choose(state)}
        yield first
        start = (state[0] * _GOLDEN >> 32) % _TABLE
        for i in range(_TABLE):
            token = self._table[(start + i * 7) % _TABLE]
            if token not in seen:
                seen.add(token)
                yield token

    def _tail(self, tail: bytes, token: int) -> bytes:
        if not FIRST_BYTE <= token < FIRST_WORD:
            return b""
        byte = bytes([token - FIRST_BYTE])
        if tail + byte in self._inside:
            return tail + byte
        return byte if byte in self._inside else b""


def _weigh(vocabulary: Vocabulary) -> list[int]:
    """Return a table in which likely tokens stand more often."""
    common = [vocabulary.ids[word] for word in vocabulary.common if word in vocabulary.ids]
    # With a space in front: words that touch would be read back as one.
    rare = [token for word, token in vocabulary.ids.items() if word.startswith(" ")]
    single = [vocabulary.ids[char] for char in SINGLE if char in vocabulary.ids]
    split = [FIRST_BYTE + char.encode()[0] for char in SPLIT]
    marks = [FIRST_BYTE + byte for byte in b".,.,.,.?!\n"]
    table = []
    for i in range(_TABLE):
        source = common
        if i % 16 == 0:
            source = marks
        elif i % 16 == 1:
            source = rare
        elif i % 32 == 2:
            source = single
        elif i % 32 == 3:
            source = split
        table.append(source[(i * 31 + i // 32) % len(source)])
    return table


def _insides() -> dict[bytes, list[int]]:
    """Return, for each beginning of a split character, the byte tokens that may follow."""
    inside: dict[bytes, list[int]] = {}
    for data in map(str.encode, SPLIT):
        for i in range(1, len(data)):
            options = inside.setdefault(data[:i], [])
            if (token := FIRST_BYTE + data[i]) not in options:
                options.append(token)
    return inside
