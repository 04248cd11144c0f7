"""The benchmark's closed loop and its prompts."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
from load.overhead.measure import BenchFailed, Order, Prompt, Sample, closed_loop, combine, percentile
from load.overhead.parts import simulated_repository
from load.overhead.prompts import PromptMaker
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path


class _FakeSource:
    """Answers ``<prompt>1``, ``2``, … and notes how many streams are open at once."""

    def __init__(self, responses: int = 3, *, hangs: bool = False) -> None:
        self.responses = responses
        self.hangs = hangs
        self.open_now = 0
        self.most = 0
        self.closed = 0

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def stream(self, prompt: Prompt, max_tokens: int, *, stream: bool) -> AsyncGenerator[str, None]:
        self.open_now += 1
        self.most = max(self.most, self.open_now)
        try:
            for number in range(self.responses):
                await asyncio.sleep(3600 if self.hangs else 0)
                yield f"{prompt.text if not number else ''}{number}"
        finally:
            self.open_now -= 1
            self.closed += 1


def _order(count: int = 5, concurrency: int = 2, limit_s: float = 10.0, expected: list[str] | None = None) -> Order:
    prompts = [Prompt(f"p{number}:") for number in range(count)]
    return Order(prompts, concurrency, max_tokens=6, limit_s=limit_s, expected=expected, keep_texts=True)


def test_every_request_is_made_and_counted():
    """All requests run, and tokens, responses, first times and gaps are counted."""
    sample = asyncio.run(closed_loop(_FakeSource(), _order()))
    assert (sample.requests, sample.tokens, sample.responses) == (5, 30, 15)
    assert (len(sample.first), len(sample.gaps)) == (5, 10)
    assert sample.texts == [f"p{number}:012" for number in range(5)]
    assert sample.seconds > 0
    assert sample.rate == pytest.approx(30 / sample.seconds)


def test_no_more_streams_than_asked_for():
    """The concurrency is met and never exceeded."""
    source = _FakeSource()
    asyncio.run(closed_loop(source, _order(count=9, concurrency=3)))
    assert source.most == 3


def test_an_unexpected_answer_fails():
    """A stream that differs from the expected text fails the measurement and shows where."""
    with pytest.raises(BenchFailed, match="from character 4 it goes on '12' instead of '2'"):
        asyncio.run(closed_loop(_FakeSource(), _order(count=1, expected=["p0:02"])))


def test_time_is_bounded_and_streams_are_closed():
    """A source that hangs fails the measurement at its limit, with every stream closed."""
    source = _FakeSource(hangs=True)
    with pytest.raises(BenchFailed, match="0 of 5 requests were done"):
        asyncio.run(closed_loop(source, _order(limit_s=0.05)))
    assert (source.open_now, source.closed) == (0, 2)


def test_an_answer_without_a_response_fails():
    """A stream that ends without any response is no success."""
    with pytest.raises(BenchFailed, match="no response"):
        asyncio.run(closed_loop(_FakeSource(responses=0), _order()))


def test_combined_samples_ran_at_the_same_time():
    """Samples of several clients add up, but their time does not."""
    one = Sample(2.0, 0.5, 1, 10, 5, [0.1], [0.2])
    both = combine([one, Sample(4.0, 0.5, 2, 30, 5, [0.3], [])])
    assert (both.seconds, both.cpu_seconds, both.tokens, both.first, both.rate) == (4.0, 1.0, 40, [0.1, 0.3], 10.0)


def test_percentile_of_nothing_is_not_a_number():
    """A percentile needs values; without any it is NaN."""
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
    assert percentile([], 50) != percentile([], 50)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A folder with a small tokenizer whose tokens are words."""
    vocabulary = {f"▁{word}": number for number, word in enumerate(["one", "two", "three", "four", "five", "x1"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="▁x1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Replace("▁", " ")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_prompts_have_the_exact_length_and_differ(weights: Path):
    """Every prompt has as many tokens as asked for, and none comes twice."""
    prompts = PromptMaker(weights, length=4, seed=1).make(50)
    assert {len(prompt.ids) for prompt in prompts} == {4}
    assert len({prompt.text for prompt in prompts}) == 50


def test_the_same_seed_makes_the_same_prompts(weights: Path):
    """Two runs with one seed measure the same prompts; another seed makes others."""
    one, again, other = (PromptMaker(weights, 4, seed).make(5) for seed in (1, 1, 2))
    assert one == again
    assert one != other


def test_prompts_that_cannot_be_made_fail(weights: Path):
    """When no further prompt exists, it fails instead of searching for ever."""
    with pytest.raises(BenchFailed, match="exactly 1 tokens"):
        PromptMaker(weights, length=1, seed=1).make(6)


def test_the_simulated_model_is_copied_and_set(tmp_path: Path):
    """The benchmark's repository has the speed set and room for every stream; the original stays as it was."""
    model = tmp_path / "repository" / "simulated"
    (model / "1").mkdir(parents=True)
    settings = {"max_model_len": 100, "block_size": 16, "base_ms": 5.0, "faults": [{"do": "raise"}]}
    (model / "1" / "model.json").write_text(json.dumps(settings))
    simulated_repository(model, tmp_path / "copy")
    copied = json.loads((tmp_path / "copy" / "simulated" / "1" / "model.json").read_text())
    assert copied["tokens_per_s"] == 50_000
    assert copied["kv_blocks"] == 64 * 7
    assert "base_ms" not in copied
    assert copied["faults"] == []
    assert json.loads((model / "1" / "model.json").read_text()) == settings
