"""Text and tokens of the simulated engine: words, and bytes for what is not a word.

Decoding any tokens and encoding the text again gives the same tokens, as long as they were generated or encoded here.
"""

from __future__ import annotations

import asyncio
import codecs
import itertools
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

END = 0
"""The end-of-sequence token; special, so without text unless asked for."""
FIRST_BYTE = 1
"""Token of byte 0; the other 255 follow."""
FIRST_WORD = FIRST_BYTE + 256

_WORDS = """
a about across after again air all along always and answer any are around as at be because bell bird black blue book
both bread bridge bright bring by can capital city clear close cloud cold come corner could day deep door down early
earth east even evening every eye fall far field find fire first fish five flower for forest France friend from full
garden give glass go gold good grass green ground hand hard has have hear heart here hill home house how idea if in into
is island it just keep kind know lake land large last late leaf learn leave left letter light like line little long look
make many map may moon more morning mountain move music name near new night north not now ocean of often old on one open
or other our out over paper Paris part path people place plain question quiet rain read red rest right river road room
sail sea season see seven sing sky slow small snow some song sound south space spring star stone story street summer sun
table take tell ten that the their then there they thing three time to town tree turn two under until up valley very
voice walk wall warm was water way west what wheel when where which white who wide wind window winter with wood word
work world year yellow yes you young
"""
COMMON = _WORDS.split()
SINGLE = [*"世界你好山水火木日月星空花海", *"🎉🌍🌙☀⭐🌊"]
"""Characters that are one token each."""
SPLIT = [*"雪雨風森川🚀🐟🎵éß"]
"""Characters that are generated as several byte tokens, so that half a character can be met."""

_PIECE = re.compile(r" ?[A-Za-z]{1,32}|.", re.DOTALL)
_SLICE = 20_000
"""Pieces that are encoded without giving the event loop a turn; about 5 ms."""


def _made_up() -> Iterator[str]:
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    for count in itertools.count(2):
        yield from ("".join(parts) for parts in itertools.product(syllables, repeat=count))


class Vocabulary:
    """All tokens: their bytes, and the way back.

    Args:
        size: how many; made-up words fill what the real ones leave.

    """

    def __init__(self, size: int) -> None:
        self.common = [f" {word}" for word in COMMON]
        known = dict.fromkeys([*self.common, *SINGLE])
        for word in COMMON:
            known.update(dict.fromkeys([word, word.capitalize(), f" {word.capitalize()}"]))
        room = size - FIRST_WORD
        words = list(known) if len(known) <= room else list(known)[:room]
        words += itertools.islice((f" {w}" for w in _made_up() if f" {w}" not in known), room - len(words))
        self.ids = {word: FIRST_WORD + i for i, word in enumerate(words)}
        self.pieces = [b"", *(bytes([b]) for b in range(256)), *(word.encode() for word in words)]

    def __len__(self) -> int:
        return len(self.pieces)

    async def encode(self, text: str) -> list[int]:
        """Return the text's tokens; a long one is encoded in slices, between which the event loop runs."""
        pieces = _PIECE.finditer(text)
        tokens: list[int] = []
        while part := list(itertools.islice(pieces, _SLICE)):
            if tokens:
                await asyncio.sleep(0)
            tokens.extend(itertools.chain.from_iterable(self._encode(match[0]) for match in part))
        return tokens

    def words(self, text: str) -> list[int]:
        """Return a short text's tokens at once."""
        return [token for match in _PIECE.finditer(text) for token in self._encode(match[0])]

    def text(self, tokens: Iterable[int]) -> str:
        """Return the tokens' text; what is no UTF-8 shows as U+FFFD."""
        return b"".join([self.pieces[token] for token in tokens]).decode(errors="replace")

    def _encode(self, piece: str) -> Sequence[int]:
        token = self.ids.get(piece)
        if token is not None:
            return (token,)
        return [FIRST_BYTE + byte for byte in piece.encode(errors="replace")]


class Detokenizer:
    """One sequence's tokens, becoming text: never half a character, and never a stop string or the start of one.

    Args:
        vocabulary: the tokens' bytes.
        prompt: tokens before the first; half a character at their end is completed by what follows.
        stops: stop strings; with any, each token is given to :meth:`push` first.
        keep_stop: leave the stop string in the text.
        show_end: give the end token a text.

    """

    def __init__(
        self, vocabulary: Vocabulary, prompt: Sequence[int], stops: Sequence[str], *, keep_stop: bool, show_end: bool
    ) -> None:
        self._pieces = vocabulary.pieces
        self._end = b"<|end|>" if show_end else b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.text_of(prompt[-3:])
        self._stops = stops
        self._keep_stop = keep_stop
        self._hold = 0 if keep_stop or not stops else max(map(len, stops)) - 1
        self._text = ""
        self._taken = 0

    def text_of(self, tokens: Iterable[int]) -> str:
        """Return what the next tokens add, without regard to stop strings."""
        pieces = self._pieces
        return self._decoder.decode(b"".join([pieces[t] if t else self._end for t in tokens]))

    def push(self, token: int, *, may_stop: bool) -> bool:
        """Add a token's text; True when it completes a stop string, behind which the text is then cut."""
        new = self.text_of((token,))
        self._text += new
        if not new or not may_stop:
            return False
        searched = len(self._text) - len(new)
        found = []
        for stop in self._stops:
            at = self._text.find(stop, max(0, searched - len(stop) + 1))
            if at >= 0:
                found.append((at + len(stop), at))
        if not found:
            return False
        behind, at = min(found, key=lambda f: f[0])
        self._text = self._text[: behind if self._keep_stop else at]
        return True

    def take(self, *, ended: bool) -> str:
        """Return what was pushed and may be shown, and was not returned before."""
        until = len(self._text) if ended else max(self._taken, len(self._text) - self._hold)
        new = self._text[self._taken : until]
        self._taken = until
        return new
