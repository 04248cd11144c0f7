"""One answer in the making: its tokens, why it ends, and what of it nobody has taken yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton_lifecycle.engine import Delta
from triton_lifecycle.engine.simulated.text import END, Detokenizer

if TYPE_CHECKING:
    from triton_lifecycle.engine.simulated.language import Language, Logprobs
    from triton_lifecycle.engine.simulated.sampling import Values

_FORCED = 100.0
"""A logit bias this high forces a token, its negative bans it; what lies between is accepted and changes nothing."""


class Sequence:
    """Makes a token whenever the scheduler says so.

    Args:
        language: what there is to say.
        prompt: the prompt's tokens.
        sampling: checked parameters.
        index: which of the request's ``n`` sequences this is.
        max_model_len: prompt and output together.

    """

    def __init__(self, language: Language, prompt: list[int], sampling: Values, index: int, max_model_len: int) -> None:
        self.index = index
        self.tokens = list(prompt)
        """Prompt and output."""
        self.reason: str | None = None
        """Why it ended; ``None`` before."""
        self._language = language
        self._sampling = sampling
        self._prompt = len(prompt)
        room = max_model_len - len(prompt)
        self._limit = len(prompt) + (room if sampling.max_tokens is None else min(sampling.max_tokens, room))
        self._state = language.begin(prompt, language.salt(sampling, index))
        self._stop_ids = frozenset(sampling.stop_token_ids or ())
        self._ending = self._stop_ids if sampling.ignore_eos else self._stop_ids | {END}
        self._stops = sampling.stops
        self._detokenizer = Detokenizer(
            language.vocabulary,
            prompt,
            self._stops,
            keep_stop=sampling.include_stop_str_in_output,
            show_end=not sampling.skip_special_tokens,
        )
        bias = sampling.logit_bias or {}
        self._forced = next((token for token, by in bias.items() if by >= _FORCED), None)
        self._banned = {token for token, by in bias.items() if by <= -_FORCED}
        words = language.vocabulary.words
        self._bad = [words(prefix + word.lstrip()) for word in sampling.bad_words or () for prefix in ("", " ")]
        self._free = self._forced is None and not self._banned and not self._bad and not sampling.min_tokens
        self._taken = self._prompt
        self._told = False
        self._logprob = None if sampling.logprobs is None else 0.0
        self._logprobs: list[Logprobs] = []

    @property
    def made(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self._prompt

    def advance(self) -> bool:
        """Make the next token; True when it was the last."""
        state = self._state
        token = self._language.choose(state) if self._free else self._choose(state)
        if self._logprob is not None:
            logprob, records = self._language.logprobs(state, token, self._sampling.logprobs or 0)
            self._logprobs.append(records)
            self._logprob += logprob
        self._state = self._language.step(state, token)
        self.tokens.append(token)
        if token in self._ending or (self._stops and self._completes_stop(token)):
            self.reason = "stop"
        elif len(self.tokens) >= self._limit:
            self.reason = "length"
        return self.reason is not None

    def take(self) -> Delta | None:
        """Return what is new since the last call; ``None`` if nothing is."""
        new = self.tokens[self._taken :]
        if not new and (self.reason is None or self._told):
            return None
        self._taken = len(self.tokens)
        self._told = self.reason is not None
        logprobs, self._logprobs = self._logprobs, []
        return Delta(
            self.index,
            self._text(new),
            tuple(new),
            self.reason,
            self._logprob,
            None if self._logprob is None else logprobs,
        )

    def _text(self, new: list[int]) -> str:
        if not self._sampling.detokenize:
            return ""
        if self._stops:
            return self._detokenizer.take(ended=self._told)
        ended_by_token = self.reason == "stop"
        if ended_by_token and not self._sampling.include_stop_str_in_output:
            new = new[:-1]
        return self._detokenizer.text_of(new)

    def _completes_stop(self, token: int) -> bool:
        return self._detokenizer.push(token, may_stop=self.made > self._sampling.min_tokens)

    def _choose(self, state: tuple[int, bytes]) -> int:
        early = self.made < self._sampling.min_tokens
        if self._forced is not None and not (early and self._forced in self._ending):
            return self._forced
        if early or self._banned or self._bad:
            return self._language.choose_among(state, lambda token: self._is_banned(token, early=early))
        return self._language.choose(state)

    def _is_banned(self, token: int, *, early: bool) -> bool:
        if token in self._banned or (early and (token == END or token in self._stop_ids)):
            return True
        output = self.tokens[self._prompt :]
        return any(bad[-1] == token and output[len(output) - len(bad) + 1 :] == bad[:-1] for bad in self._bad)
