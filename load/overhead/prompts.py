"""Prompts of an exact number of tokens, each one different, so that no prefix cache decides."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from load.overhead.measure import BenchFailed, Prompt

if TYPE_CHECKING:
    from pathlib import Path

ATTEMPTS = 200


class PromptMaker:
    """Makes prompts with a model's own tokenizer; the same seed, the same prompts.

    Args:
        weights: the model's folder, with ``tokenizer.json``.
        length: tokens in each prompt.
        seed: another seed, other prompts.

    """

    def __init__(self, weights: Path, length: int, seed: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(weights / "tokenizer.json"))
        self._length = length
        self._random = random.Random(seed)  # noqa: S311 - repeatable, not secret
        texts = (self._tokenizer.decode([token]) for token in range(self._tokenizer.get_vocab_size()))
        self._words = sorted({text for text in texts if text[:1] == " " and text[1:].isalpha() and text.isascii()})
        self._made: set[str] = set()

    def make(self, count: int) -> list[Prompt]:
        """Return ``count`` prompts that were never returned before.

        Raises:
            BenchFailed: the tokenizer does not give such prompts.

        """
        return [self._one() for _ in range(count)]

    def _one(self) -> Prompt:
        for _ in range(ATTEMPTS):
            # Words that are one token each mostly stay so side by side; whether they did is looked up.
            text = "".join(self._random.choices(self._words, k=self._length)).lstrip()
            ids = self._tokenizer.encode(text).ids
            if len(ids) == self._length and text not in self._made:
                self._made.add(text)
                return Prompt(text, ids)
        raise BenchFailed(
            f"this model's tokenizer makes no prompts of exactly {self._length} tokens out of plain words"
        )
