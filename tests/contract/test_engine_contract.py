"""What the pipeline relies on, proved on every engine: the simulated one in virtual time, vLLM with SmolLM2 in real."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.contract.subjects import BLOCK, MAX_MODEL_LEN, SLOTS, Simulated, eventually

from triton_lifecycle.engine import Chunk, Delta, Engine, EngineRequest
from triton_lifecycle.errors import EngineDied, InvalidInput, PromptTooLong, RequestError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests.contract.subjects import Subject

COUNTING = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,"
"""Its greedy answer is clear at every token, in any batch; a little longer than a block, so cheap the second time."""
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
LONG = {"temperature": 0.0, "max_tokens": 180, "ignore_eos": True}

_ids = itertools.count()


async def submit(
    engine: Engine, prompt: str | list[int], priority: int = 0, **values: object
) -> AsyncGenerator[Chunk, None]:
    """Start a request under a new id."""
    tokens = await engine.tokenize(prompt) if isinstance(prompt, str) else prompt
    request = EngineRequest(f"contract-{next(_ids)}", tokens, engine.sampling(values), priority)
    return engine.generate(request)


async def chunks(engine: Engine, prompt: str | list[int], priority: int = 0, **values: object) -> list[Chunk]:
    """Read a request to its end."""
    return [chunk async for chunk in await submit(engine, prompt, priority, **values)]


def join(chunks: list[Chunk], index: int = 0) -> Delta:
    """Merge all deltas of one sequence."""
    deltas = [delta for chunk in chunks for delta in chunk.deltas if delta.index == index]
    ends = [delta.finish_reason for delta in deltas if delta.finish_reason is not None]
    assert len(ends) <= 1, ends
    assert not ends or deltas[-1].finish_reason
    return Delta(
        index,
        "".join(delta.text for delta in deltas),
        tuple(token for delta in deltas for token in delta.token_ids),
        ends[0] if ends else None,
    )


async def answer(engine: Engine, prompt: str | list[int], priority: int = 0, **values: object) -> Delta:
    """Return the one sequence of a request."""
    return join(await chunks(engine, prompt, priority, **values))


async def running(engine: Engine, count: int, **values: object) -> list[AsyncGenerator[Chunk, None]]:
    """Start requests and return them once each has had a chunk."""
    streams = [await submit(engine, COUNTING, **(values or LONG)) for _ in range(count)]
    await asyncio.gather(*(anext(stream) for stream in streams))
    return streams


async def close(streams: list[AsyncGenerator[Chunk, None]]) -> None:
    """Abort all."""
    for stream in streams:
        await stream.aclose()


async def knows(engine: Engine, count: int) -> None:
    """Wait until the engine knows so many requests."""
    await eventually(lambda: engine.load().requests == count)


# ---- limits, tokens


def test_limits(subject: Subject) -> None:
    """The limits are those of the loaded model, and the engine is alive and idle."""

    async def body(engine: Engine) -> None:
        assert engine.limits.max_model_len == MAX_MODEL_LEN
        assert engine.limits.vocab_size > 1000
        assert engine.limits.max_num_seqs == SLOTS
        assert engine.limits.by_priority
        assert engine.alive
        assert engine.load().requests == engine.load().running == engine.load().waiting == 0

    subject.run(body)


def test_sampling_fields_are_named(subject: Subject) -> None:
    """The plain sampling parameters are all there, with their types."""

    async def body(engine: Engine) -> None:
        expected = {"n": int, "max_tokens": int | None, "temperature": float, "ignore_eos": bool}
        assert expected.items() <= dict(engine.sampling_fields).items()
        assert {"stop", "stop_token_ids", "seed", "logprobs", "logit_bias", "bad_words"} <= set(engine.sampling_fields)

    subject.run(body)


@pytest.mark.parametrize("prompt", ["The capital of France is", " ", "Zürich, 東京, 🎉🚀", "\n\t;{}", "word " * 200])
def test_tokenize(subject: Subject, prompt: str) -> None:
    """Any text has tokens, always the same, all within the vocabulary."""

    async def body(engine: Engine) -> None:
        tokens = await engine.tokenize(prompt)
        assert tokens
        assert tokens == await engine.tokenize(prompt)
        assert all(0 <= token < engine.limits.vocab_size for token in tokens)

    subject.run(body)


def test_tokenizing_a_long_prompt_leaves_the_loop_free(subject: Subject) -> None:
    """While a long prompt is tokenized, others on the loop go on; it is then refused as too long."""

    async def body(engine: Engine) -> None:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        task = asyncio.create_task(other())
        with pytest.raises(PromptTooLong):
            # Each engine refuses what is hopeless without tokenizing it, or lets go of the loop, at another length.
            await engine.tokenize("a short word and " * (25_000 if isinstance(subject, Simulated) else 2_000))
        task.cancel()
        assert turns > 1

    subject.run(body)


def test_a_hopelessly_long_prompt_costs_nothing(subject: Subject) -> None:
    """Megabytes for a model of a few hundred tokens are refused as too long within a moment."""

    async def body(engine: Engine) -> None:
        before = asyncio.get_running_loop().time()
        with pytest.raises(PromptTooLong):
            await engine.tokenize("a short word and " * 250_000)
        assert asyncio.get_running_loop().time() - before < 5

    subject.run(body)


def test_prompt_length_limit(subject: Subject) -> None:
    """One token below the model's length is served; at it and above, the refusal names both numbers."""

    async def body(engine: Engine) -> None:
        fits = await engine.tokenize(" the" * (MAX_MODEL_LEN - 1))
        assert len(fits) == MAX_MODEL_LEN - 1
        got = await answer(engine, fits, max_tokens=5, ignore_eos=True)
        assert (len(got.token_ids), got.finish_reason) == (1, "length")
        for length in (MAX_MODEL_LEN, MAX_MODEL_LEN + 1):
            with pytest.raises(PromptTooLong, match=rf"{length}\b.*{MAX_MODEL_LEN}\b"):
                await engine.tokenize(" the" * length)
            with pytest.raises(RequestError):
                await answer(engine, [*fits, *fits[: length - len(fits)]], max_tokens=1)
        with pytest.raises(InvalidInput):
            await engine.tokenize("")

    subject.run(body)


# ---- generation


def test_max_tokens(subject: Subject) -> None:
    """Exactly ``max_tokens`` tokens come, and the reason is ``length``; the default is 16."""

    async def body(engine: Engine) -> None:
        for count in (1, 7):
            got = await answer(engine, COUNTING, temperature=0.0, max_tokens=count, ignore_eos=True)
            assert (len(got.token_ids), got.finish_reason) == (count, "length")
        assert engine.sampling({}).max_tokens == 16
        assert engine.sampling({"max_tokens": None}).max_tokens is None

    subject.run(body)


def test_max_tokens_is_capped_by_the_model(subject: Subject) -> None:
    """A huge ``max_tokens``, or none, ends where the model's length ends."""

    async def body(engine: Engine) -> None:
        prompt = await engine.tokenize(" the" * (MAX_MODEL_LEN - 4))
        for most in (10**9, None):
            got = await answer(engine, prompt, temperature=0.0, max_tokens=most, ignore_eos=True)
            assert (len(got.token_ids), got.finish_reason) == (4, "length")

    subject.run(body)


def test_finished_once_and_last(subject: Subject) -> None:
    """Of all chunks the last one, and only that, is finished; each carries something new."""

    async def body(engine: Engine) -> None:
        got = await chunks(engine, COUNTING, **GREEDY)
        assert [chunk.finished for chunk in got] == [False] * (len(got) - 1) + [True]
        assert all(delta.token_ids for chunk in got for delta in chunk.deltas)

    subject.run(body)


def test_stream_equals_whole(subject: Subject) -> None:
    """At temperature 0 the joined stream equals the text that a reader takes in one piece."""

    async def body(engine: Engine) -> None:
        streamed = await chunks(engine, COUNTING, **GREEDY)
        assert len(streamed) > 2
        stream = await submit(engine, COUNTING, **GREEDY)
        parts = [await anext(stream)]
        await knows(engine, 0)
        parts += [chunk async for chunk in stream]
        assert len(parts) <= 3
        assert join(parts) == join(streamed)

    subject.run(body)


def test_concurrent_requests_do_not_mix(subject: Subject) -> None:
    """Four equal requests at once give what one alone gives, and so does one among others."""

    async def body(engine: Engine) -> None:
        alone = await answer(engine, COUNTING, **GREEDY)
        others = ["2, 4, 6, 8, 10, 12, 14, 16, 18, 20,", "a, b, c, d, e, f, g, h, i, j,"]
        got = await asyncio.gather(*(answer(engine, p, **GREEDY) for p in [COUNTING] * 4 + others))
        assert got[:4] == [alone] * 4
        assert got[4].token_ids != alone.token_ids

    subject.run(body)


@pytest.mark.parametrize("n", [2, 3])
def test_several_sequences(subject: Subject, n: int) -> None:
    """``n`` sequences come under their indices, each ends once, and the request ends with the last of them."""

    async def body(engine: Engine) -> None:
        got = await chunks(engine, "Once upon a time", n=n, max_tokens=6, ignore_eos=True, temperature=1.0, seed=7)
        assert {delta.index for chunk in got for delta in chunk.deltas} == set(range(n))
        assert [chunk.finished for chunk in got] == [False] * (len(got) - 1) + [True]
        for index in range(n):
            one = join(got, index)
            assert (len(one.token_ids), one.finish_reason) == (6, "length")

    subject.run(body)


def test_min_tokens(subject: Subject) -> None:
    """With ``min_tokens`` nothing ends earlier, not even at a stop token or a stop string."""

    async def body(engine: Engine) -> None:
        plain = await answer(engine, COUNTING, **GREEDY)
        values = {**GREEDY, "min_tokens": 9, "ignore_eos": False}
        for stop in ({}, {"stop_token_ids": [plain.token_ids[2]]}, {"stop": plain.text[2:4]}):
            got = await answer(engine, COUNTING, **values, **stop)
            assert 9 <= len(got.token_ids) <= 12

    subject.run(body)


def test_stop_strings_do_not_leak(subject: Subject) -> None:
    """The text ends before the stop string, no chunk shows a part of it, and the reason is ``stop``."""

    async def body(engine: Engine) -> None:
        plain = await answer(engine, COUNTING, **GREEDY)
        stop = plain.text[5:9]
        until = plain.text[: plain.text.find(stop)]
        got = await chunks(engine, COUNTING, **GREEDY, stop=["not in there", stop])
        assert (join(got).text, join(got).finish_reason) == (until, "stop")
        shown = itertools.accumulate("".join(delta.text for delta in chunk.deltas) for chunk in got)
        assert all(until.startswith(text) for text in shown)
        kept = await answer(engine, COUNTING, **GREEDY, stop=stop, include_stop_str_in_output=True)
        assert kept.text == until + stop
        never = await answer(engine, COUNTING, **GREEDY, stop="not in there")
        assert never == plain

    subject.run(body)


def test_stop_token_ids(subject: Subject) -> None:
    """A stop token ends the sequence; it is among the ids and not in the text."""

    async def body(engine: Engine) -> None:
        plain = await answer(engine, COUNTING, **GREEDY)
        stop = max(plain.token_ids, key=plain.token_ids.index)  # the one that appears latest
        until = plain.token_ids.index(stop)
        got = await answer(engine, COUNTING, **GREEDY, stop_token_ids=[stop])
        assert (got.token_ids, got.finish_reason) == (plain.token_ids[: until + 1], "stop")
        before = await answer(engine, COUNTING, **{**GREEDY, "max_tokens": until})
        assert got.text == before.text

    subject.run(body)


def test_logprobs(subject: Subject) -> None:
    """Each token comes with one mapping of token ids, as text, to records; without being asked for, none comes."""

    async def body(engine: Engine) -> None:
        got = await chunks(engine, COUNTING, **GREEDY, logprobs=2)
        for delta in (delta for chunk in got for delta in chunk.deltas):
            assert len(delta.logprobs) == len(delta.token_ids)
            for token, records in zip(delta.token_ids, delta.logprobs, strict=True):
                assert records[str(token)].keys() == {"logprob", "rank", "decoded_token"}
                assert records[str(token)]["logprob"] <= 0
                assert 2 <= len(records) <= 3
            assert delta.cumulative_logprob <= 0
        plain = (await chunks(engine, COUNTING, **GREEDY))[0].deltas[0]
        assert plain.logprobs is None
        assert plain.cumulative_logprob is None

    subject.run(body)


def test_continuing_gives_the_rest(subject: Subject) -> None:
    """From the prompt and the tokens already sent, at temperature 0, exactly the remaining tokens come."""

    async def body(engine: Engine) -> None:
        prompt = await engine.tokenize(COUNTING)
        whole = await answer(engine, prompt, **GREEDY)
        for sent in (1, 7, 11):
            rest = await answer(engine, [*prompt, *whole.token_ids[:sent]], **{**GREEDY, "max_tokens": 12 - sent})
            assert rest.token_ids == whole.token_ids[sent:]
            assert whole.text.endswith(rest.text)

    subject.run(body)


# ---- bad input


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", {"n": 0}),
        ("n", {"n": 100_000}),
        ("n", {"n": 2, "temperature": 0.0}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": -1}),
        ("min_tokens", {"min_tokens": -1}),
        ("min_tokens", {"min_tokens": 9, "max_tokens": 8}),
        ("temperature", {"temperature": -0.1}),
        ("temperature", {"temperature": 2.1}),
        ("temperature", {"temperature": float("nan")}),
        ("temperature", {"temperature": float("inf")}),
        ("top_p", {"top_p": 0.0}),
        ("top_p", {"top_p": 1.1}),
        ("top_k", {"top_k": -2}),
        ("min_p", {"min_p": 1.5}),
        ("presence_penalty", {"presence_penalty": 2.5}),
        ("frequency_penalty", {"frequency_penalty": -2.5}),
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("logprobs", {"logprobs": -2}),
        ("logprobs", {"logprobs": 1000}),
        ("prompt_logprobs", {"prompt_logprobs": -1}),
        ("stop", {"stop": ""}),
        ("stop", {"stop": ["a"], "detokenize": False}),
        ("stop_token_ids", {"stop_token_ids": [9_999_999]}),
        ("stop_token_ids", {"stop_token_ids": [9_999_999], "min_tokens": 2}),
        ("logit_bias", {"logit_bias": {9_999_999: 1.0}}),
        ("bad_words", {"bad_words": [""]}),
        ("max_tokenz", {"max_tokenz": 5}),
    ],
)
def test_illegal_sampling(subject: Subject, field: str, values: dict[str, Any]) -> None:
    """An illegal value is refused with its field's name, before any chunk, and the engine goes on."""

    async def body(engine: Engine) -> None:
        with pytest.raises(InvalidInput, match=rf"\b{field}\b"):
            await chunks(engine, COUNTING, **values)
        assert engine.alive
        assert (await answer(engine, COUNTING, max_tokens=1)).finish_reason

    subject.run(body)


# ---- leaving early


def test_abort_while_waiting(subject: Subject) -> None:
    """A request that is closed before it runs leaves the engine at once, and the next in the queue runs instead."""

    async def body(engine: Engine) -> None:
        streams = await running(engine, SLOTS)
        waits = asyncio.create_task(answer(engine, COUNTING, **LONG))
        await knows(engine, SLOTS + 1)
        behind = asyncio.create_task(answer(engine, COUNTING, **GREEDY))
        await knows(engine, SLOTS + 2)
        waits.cancel()
        await knows(engine, SLOTS + 1)
        await streams.pop().aclose()
        assert (await behind).finish_reason == "length"
        await close(streams)

    subject.run(body)


def test_abort_while_prefilling(subject: Subject) -> None:
    """A request that is closed in the middle of its prompt leaves at once; a running stream is unharmed."""

    async def body(engine: Engine) -> None:
        expected = await answer(engine, COUNTING, **GREEDY)
        other = asyncio.create_task(answer(engine, COUNTING, **GREEDY))
        await knows(engine, 1)
        prefill = asyncio.create_task(answer(engine, " river" * (MAX_MODEL_LEN - 80), **LONG))
        await knows(engine, 2)
        await asyncio.sleep(0.01)
        prefill.cancel()
        with pytest.raises(asyncio.CancelledError):
            await prefill
        assert await other == expected

    subject.run(body)


def test_abort_while_running(subject: Subject) -> None:
    """A request that is closed between two chunks leaves at once, also with several sequences; others are unharmed."""

    async def body(engine: Engine) -> None:
        expected = await answer(engine, COUNTING, **GREEDY)
        other = asyncio.create_task(answer(engine, COUNTING, **GREEDY))
        (leaving,) = await running(engine, 1)
        (leaving_too,) = await running(engine, 1, n=2, max_tokens=180, ignore_eos=True)
        await close([leaving, leaving_too])
        assert await other == expected

    subject.run(body)


def test_close_after_the_end(subject: Subject) -> None:
    """Closing is harmless before the start, after the last chunk, and twice."""

    async def body(engine: Engine) -> None:
        never = await submit(engine, COUNTING, **GREEDY)
        await never.aclose()
        stream = await submit(engine, COUNTING, **GREEDY)
        async with aclosing(stream):
            async for chunk in stream:
                if chunk.finished:
                    await stream.aclose()
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    subject.run(body)


def test_slots_are_free_after_aborts(subject: Subject) -> None:
    """Aborting twice as many requests as fit leaves the whole capacity to the next."""

    async def body(engine: Engine) -> None:
        tasks = [asyncio.create_task(answer(engine, COUNTING, **LONG)) for _ in range(2 * SLOTS)]
        await knows(engine, 2 * SLOTS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await knows(engine, 0)
        await close(await running(engine, SLOTS))

    subject.run(body)


# ---- order, load, facts


def test_priority(subject: Subject) -> None:
    """Of the requests that wait, the one with the lower priority value runs first, whatever came first."""

    async def body(engine: Engine) -> None:
        streams = await running(engine, SLOTS)
        order: list[str] = []

        async def run(name: str, priority: int) -> None:
            await answer(engine, COUNTING, priority, temperature=0.0, max_tokens=2, ignore_eos=True)
            order.append(name)

        tasks = []
        for known, (name, priority) in enumerate([("last", 5), ("second", 0), ("first", -3)], start=SLOTS + 1):
            tasks.append(asyncio.create_task(run(name, priority)))
            await knows(engine, known)
        await streams.pop().aclose()
        await asyncio.gather(*tasks)
        assert order == ["first", "second", "last"]
        await close(streams)

    subject.run(body)


def test_slow_reader_gets_merged_chunks(subject: Subject) -> None:
    """Who reads slowly gets fewer, larger chunks, and loses nothing."""

    async def body(engine: Engine) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        expected = await answer(engine, COUNTING, **GREEDY)
        slowly = max(0.3, (loop.time() - began) / 4)  # a quarter of what this machine needs for the whole answer
        got = []
        async for chunk in await submit(engine, COUNTING, **GREEDY):
            got.append(chunk)
            await asyncio.sleep(slowly)
        assert len(got) < 12
        assert max(len(delta.token_ids) for chunk in got for delta in chunk.deltas) > 1
        assert join(got) == expected

    subject.run(body)


def test_load(subject: Subject) -> None:
    """The load tells running from waiting, and how much of the KV cache is in use."""

    async def body(engine: Engine) -> None:
        streams = await running(engine, SLOTS)
        waits = asyncio.create_task(answer(engine, COUNTING, **LONG))
        await knows(engine, SLOTS + 1)
        await eventually(lambda: (engine.load().running, engine.load().waiting) == (SLOTS, 1))
        assert 0 < engine.load().kv_usage < 1
        waits.cancel()
        await close(streams)

    subject.run(body)


def test_scheduled_at(subject: Subject) -> None:
    """``scheduled_at`` lies between the submission and the first chunk; for a request that waited, behind the wait."""

    async def body(engine: Engine) -> None:
        loop = asyncio.get_running_loop()
        submitted = loop.time()
        stream = await submit(engine, COUNTING, **GREEDY)
        first = await anext(stream)
        assert first.scheduled_at is not None
        assert submitted <= first.scheduled_at <= loop.time()
        await stream.aclose()

        streams = await running(engine, SLOTS)
        waits = asyncio.create_task(chunks(engine, COUNTING, **GREEDY))
        await knows(engine, SLOTS + 1)
        await asyncio.sleep(0.1)
        freed = loop.time()
        await close(streams)
        assert ((await waits)[0].scheduled_at or 0) >= freed

    subject.run(body)


def test_cached_tokens(subject: Subject) -> None:
    """A prompt is added to the prefix cache in whole blocks; seen again it is found there, its last token never."""

    async def body(engine: Engine) -> None:
        prompt = await engine.tokenize("One day " + "there was a little house by the sea, and " * 16)
        assert len(prompt) > 4 * BLOCK
        first = await chunks(engine, prompt, **GREEDY)
        second = await chunks(engine, prompt, **GREEDY)
        assert first[0].cached_tokens == 0
        assert first[0].created_tokens == len(prompt) // BLOCK * BLOCK
        assert second[0].cached_tokens == (len(prompt) - 1) // BLOCK * BLOCK
        assert second[0].created_tokens == len(prompt) // BLOCK * BLOCK - second[0].cached_tokens
        assert join(first) == join(second)

    subject.run(body)


# ---- going on after a failure


@pytest.mark.parametrize("made", [1, 5, 20])
def test_the_remainder_is_exact(subject: Subject, made: int) -> None:
    """An answer that is continued from any of its tokens ends as the whole one does: tokens, text and reason."""

    async def body(engine: Engine) -> None:
        prompt = await engine.tokenize(COUNTING)
        whole = EngineRequest(f"contract-{next(_ids)}", prompt, engine.sampling(GREEDY | {"max_tokens": 24}))
        undisturbed = join([chunk async for chunk in engine.generate(whole)])
        rest = engine.remainder(whole, undisturbed.token_ids[:made])
        assert rest is not None
        assert rest.kept == made, "each token of this answer makes whole characters"
        request = msgspec.structs.replace(rest.request, id=f"contract-{next(_ids)}")
        continued = join([chunk async for chunk in engine.generate(request)])
        assert continued.token_ids == undisturbed.token_ids[made:]
        assert undisturbed.text.endswith(continued.text)
        assert continued.finish_reason == undisturbed.finish_reason == "length"

    subject.run(body)


@pytest.mark.parametrize(
    "values",
    [
        {"n": 2},
        {"seed": 3},
        {"stop": ["x"]},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"bad_words": ["x"]},
    ],
    ids=lambda values: next(iter(values)),
)
def test_what_has_no_exact_remainder(subject: Subject, values: dict[str, Any]) -> None:
    """Where an answer depends on its past by more than its tokens there is no remainder."""

    async def body(engine: Engine) -> None:
        prompt = await engine.tokenize(COUNTING)
        random = EngineRequest("r", prompt, engine.sampling({"temperature": 1.0, **values}))
        assert engine.remainder(random, [5, 6]) is None
        assert engine.repeatable(random.sampling) == ("seed" in values)
        plain = EngineRequest("r", prompt, engine.sampling({"temperature": 0.7, "top_p": 0.9, "max_tokens": 10}))
        assert engine.remainder(plain, [5, 6]) is not None
        assert not engine.repeatable(plain.sampling)

    subject.run(body)


def test_a_character_that_is_half_made_is_made_anew(subject: Subject) -> None:
    """Tokens of a character that is not complete have had no text yet: with the remainder it comes once, and whole."""

    async def body(engine: Engine) -> None:
        pieces = await engine.tokenize("\U0001f9ff", special=False)
        prompt = await engine.tokenize(COUNTING)
        asked = EngineRequest("r", prompt, engine.sampling(GREEDY))
        for made in range(1, len(pieces) + 1):
            rest = engine.remainder(asked, pieces[:made])
            assert rest is not None
            assert rest.kept in {0, made}
            assert made < len(pieces) or rest.kept == made

    subject.run(body)


def test_restart(subject: Subject) -> None:
    """A restart ends every request with ``EngineDied``, and the engine is as new: same answers, same limits."""

    async def body(engine: Engine) -> None:
        limits, before = engine.limits, await answer(engine, COUNTING, **GREEDY)
        [stream] = await running(engine, 1)
        restart = asyncio.create_task(engine.restart())
        with pytest.raises(EngineDied):
            async for _ in stream:
                pass
        await restart
        assert engine.alive
        assert engine.limits == limits
        assert await answer(engine, COUNTING, **GREEDY) == before

    subject.run(body)


# ---- the end; this test comes last, since it ends the engine that the others share


def test_stop(subject: Subject) -> None:
    """A stopped engine is not alive, knows no request, refuses the next as dead, and may be stopped again."""

    async def body(engine: Engine) -> None:
        await engine.tokenize(COUNTING)
        sampling = engine.sampling(GREEDY)
        await engine.stop()
        assert not engine.alive
        assert engine.load().requests == 0
        with pytest.raises(EngineDied):
            await anext(engine.generate(EngineRequest("late", [5, 6, 7], sampling)))
        await engine.stop()

    subject.run(body)
