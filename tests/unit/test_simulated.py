"""The simulated engine's own behaviour: its clock, its scheduler, its language, its faults. All in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import TYPE_CHECKING

import pytest

from triton_lifecycle.engine import EngineRequest, open_engine
from triton_lifecycle.engine.simulated import Fault, SimulatedEngine, When
from triton_lifecycle.engine.simulated.kv import KVPool
from triton_lifecycle.engine.simulated.text import Detokenizer, Vocabulary
from triton_lifecycle.errors import ConfigError, EngineDied, GenerationFailed
from triton_lifecycle.simulation.virtual_time import run

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from triton_lifecycle.engine import Chunk

EXACT = {"base_ms": 10.0, "per_sequence_us": 0.0, "prefill_tokens_per_s": 1000.0, "max_lag_ms": 0.0}
"""A step takes 10 ms, and 1 ms more for each prompt token beyond one a sequence."""
ids = itertools.count()


class engine:  # noqa: N801 - used like a function
    """A started engine, stopped at the end."""

    def __init__(self, **settings: object) -> None:
        self._engine = SimulatedEngine.from_settings(settings)

    async def __aenter__(self) -> SimulatedEngine:
        await self._engine.start()
        return self._engine

    async def __aexit__(self, *_: object) -> None:
        await self._engine.stop()


def generate(
    sim: SimulatedEngine, prompt: list[int], priority: int = 0, name: str | None = None, **values: object
) -> AsyncGenerator[Chunk, None]:
    """Start a request that by default ends after ``max_tokens`` only."""
    sampling = sim.sampling({"temperature": 0.0, "ignore_eos": True, **values})
    return sim.generate(EngineRequest(name or f"r{next(ids)}", prompt, sampling, priority))


async def tokens(stream: AsyncIterator[Chunk], into: list[int] | None = None) -> list[int]:
    """Return all tokens of a request with one sequence, put into a list that keeps them when the request fails."""
    got = [] if into is None else into
    async for chunk in stream:
        got.extend(token for delta in chunk.deltas for token in delta.token_ids)
    return got


async def times(stream: AsyncIterator[Chunk], since: float) -> list[float]:
    """Return when each chunk came."""
    return [now() - since async for _ in stream]


def prompt(length: int, kind: int = 0) -> list[int]:
    """Return a prompt; those of different kinds share no block."""
    return [300 + (kind * 37 + i) % 1000 for i in range(length)]


def now() -> float:
    """Return the loop's time."""
    return asyncio.get_running_loop().time()


# ---- settings


def test_all_problems_of_the_settings_are_reported_at_once() -> None:
    """Unknown keys, wrong types, ranges and faults that lack something are named together, with their paths."""
    with pytest.raises(ConfigError) as caught:
        SimulatedEngine.from_settings(
            {
                "max_num_seq": 4,
                "block_size": "16",
                "base_ms": -1.0,
                "faults": [{"do": "stall", "on": {"token": 3}}, {"do": "explode"}],
            }
        )
    text = str(caught.value)
    assert "5 problem(s)" in text
    assert "max_num_seq: unknown key; did you mean max_num_seqs?" in text
    assert "block_size: Input should be a valid integer" in text
    assert "base_ms: Input should be greater than or equal to 0" in text
    assert "faults.0: do: stall needs for_s" in text
    assert "faults.1.do: Input should be 'raise', 'stall', 'die' or 'slow'" in text


def test_settings_that_contradict_each_other() -> None:
    """A cache too small for the longest request, a budget below the slots, two speeds, a fault that always strikes."""
    with pytest.raises(ConfigError) as caught:
        SimulatedEngine.from_settings(
            {
                "kv_blocks": 4,
                "max_num_batched_tokens": 8,
                "tokens_per_s": 100.0,
                "base_ms": 1.0,
                "faults": [{"do": "raise"}],
            }
        )
    for part in ("kv_blocks", "max_num_batched_tokens", "tokens_per_s", "faults.0"):
        assert part in str(caught.value)


def test_it_is_opened_by_name() -> None:
    """The name ``simulated`` and an empty ``model.json`` give a working engine."""
    assert isinstance(open_engine("simulated", {}, "."), SimulatedEngine)


# ---- time


def test_duration_is_exact() -> None:
    """A lone request takes its prefill and a step per token, to the microsecond."""

    async def body() -> None:
        async with engine(**EXACT) as sim:
            got = await times(generate(sim, prompt(101), max_tokens=4), now())
            assert got == pytest.approx([0.110, 0.120, 0.130, 0.140], abs=1e-6)

    run(body)


def test_a_step_grows_with_its_sequences() -> None:
    """Ten sequences make each other's tokens later by what each costs."""

    async def body() -> None:
        async with engine(**{**EXACT, "per_sequence_us": 1000.0}) as sim:
            start = now()
            await asyncio.gather(*(tokens(generate(sim, prompt(1, kind), max_tokens=5)) for kind in range(10)))
            assert now() - start == pytest.approx(5 * 0.020, abs=1e-6)

    run(body)


@pytest.mark.parametrize("streams", [1, 16, 64])
def test_tokens_per_s_is_the_total_at_any_load(streams: int) -> None:
    """However many streams share it, the total rate is the one set, in few chunks and with nothing lost."""

    async def body() -> None:
        async with engine(tokens_per_s=50_000.0, prefill_tokens_per_s=1e9) as sim:
            start = now()
            got = await asyncio.gather(*(tokens(generate(sim, prompt(4, k), max_tokens=1000)) for k in range(streams)))
            assert [len(one) for one in got] == [1000] * streams
            assert streams * 1000 / (now() - start) == pytest.approx(50_000, rel=0.05)

    run(body)


def test_chunked_prefill_shares_steps_with_running_streams() -> None:
    """A prompt above the budget takes several steps; a running stream gets its token in each, only later."""

    async def body() -> None:
        async with engine(**EXACT, max_num_batched_tokens=100, max_num_seqs=8) as sim:
            stream = generate(sim, prompt(1), max_tokens=12)
            task = asyncio.create_task(times(stream, now()))
            await asyncio.sleep(0.035)
            await tokens(generate(sim, prompt(250, 1), max_tokens=1))
            gaps = [b - a for a, b in itertools.pairwise([0.0, *await task])]
            # Each step: 100 tokens of budget, one of them the stream's, one free with its sequence.
            assert gaps[:4] == pytest.approx([0.01] * 4)
            assert gaps[4:7] == pytest.approx([0.108, 0.108, 0.061])
            assert gaps[7:] == pytest.approx([0.01] * 5)

    run(body)


def test_spread_keeps_the_mean() -> None:
    """The spread changes single steps by the seed, and their mean not."""

    async def durations(seed: int) -> list[float]:
        async with engine(**EXACT, token_sigma=0.3, seed=seed) as sim:
            ends = await times(generate(sim, prompt(1), max_tokens=1000), now())
            return [b - a for a, b in itertools.pairwise([0.0, *ends])]

    one, again, other = (run(durations, seed) for seed in (1, 1, 2))
    assert one == again != other
    assert sum(one) / len(one) == pytest.approx(0.010, rel=0.05)
    assert max(one) > 0.015


def test_start_up_takes_the_time_set() -> None:
    """``start()`` lasts ``startup_s``, and only then the engine is alive."""

    async def body() -> None:
        sim = SimulatedEngine.from_settings({"startup_s": 24.5})
        start = now()
        task = asyncio.create_task(sim.start())
        await asyncio.sleep(24)
        assert not sim.alive
        await task
        assert sim.alive
        assert now() - start == pytest.approx(24.5)
        await sim.stop()

    run(body)


# ---- queue, slots, blocks


def test_one_slot_makes_queueing_exact() -> None:
    """With one slot each request runs when the one before has ended, in the order of arrival."""

    async def body() -> None:
        async with engine(**EXACT, max_num_seqs=1) as sim:
            start = now()

            async def ends(k: int) -> tuple[float, float]:
                chunks = [chunk async for chunk in generate(sim, prompt(1, k), max_tokens=5)]
                return (chunks[0].scheduled_at or 0) - start, now() - start

            tasks = [asyncio.create_task(ends(k)) for k in range(3)]
            await asyncio.sleep(0.005)
            assert (sim.load().running, sim.load().waiting, sim.load().requests) == (1, 2, 3)
            got = await asyncio.gather(*tasks)
            assert [scheduled for scheduled, _ in got] == pytest.approx([0.00, 0.05, 0.10])
            assert [end for _, end in got] == pytest.approx([0.05, 0.10, 0.15])

    run(body)


def test_a_cancelled_waiter_never_runs() -> None:
    """Of three requests on one slot the second leaves while it waits; the third is next, as if it had never been."""

    async def body() -> None:
        async with engine(**EXACT, max_num_seqs=1) as sim:
            start = now()
            first, second, third = (
                asyncio.create_task(tokens(generate(sim, prompt(1, k), max_tokens=5))) for k in range(3)
            )
            await asyncio.sleep(0.02)
            second.cancel()
            await asyncio.gather(first, third)
            assert now() - start == pytest.approx(0.10)

    run(body)


def test_priority_before_arrival() -> None:
    """The queue is ordered by priority, lower first, then by arrival."""

    async def body() -> None:
        async with engine(**EXACT, max_num_seqs=1) as sim:
            order: list[str] = []

            async def one(name: str, priority: int) -> None:
                await tokens(generate(sim, prompt(1), priority, max_tokens=2))
                order.append(name)

            await asyncio.gather(one("running", 9), one("b1", 1), one("a1", 0), one("b2", 1), one("a2", 0))
            assert order == ["a1", "a2", "b1", "b2", "running"]

    run(body)


def test_kv_blocks_hold_the_queue_back() -> None:
    """A prompt whose blocks are not free waits, though slots are; it runs as soon as they are."""

    async def body() -> None:
        async with engine(**EXACT, max_model_len=160, kv_blocks=10, prefix_cache=False) as sim:
            first = asyncio.create_task(tokens(generate(sim, prompt(100, 1), max_tokens=3)))
            second = asyncio.create_task(tokens(generate(sim, prompt(100, 2), max_tokens=3)))
            await asyncio.sleep(0.05)
            assert (sim.load().running, sim.load().waiting, sim.load().kv_usage) == (1, 1, pytest.approx(0.7))
            await first
            await second
            assert sim.load().kv_usage == 0
            assert sim.preemptions == 0

    run(body)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preemption_loses_nothing(*, prefix_cache: bool) -> None:
    """When the blocks run out the latest sequence is preempted and computed again; every answer is as if alone."""

    async def body() -> None:
        sizes = {"max_model_len": 160, "kv_blocks": 12, "prefix_cache": prefix_cache, "max_num_seqs": 8}
        async with engine(**EXACT, **sizes) as sim:
            alone = [await tokens(generate(sim, prompt(30, k), max_tokens=100)) for k in range(4)]
            assert sim.preemptions == 0
            order = []

            async def one(k: int) -> list[int]:
                got = await tokens(generate(sim, prompt(30, k), max_tokens=100))
                order.append(k)
                return got

            assert await asyncio.gather(*map(one, range(4))) == alone
            assert sim.preemptions > 0
            assert order[0] == 0
            assert sim.load().kv_usage == 0

    run(body)


def test_abort_frees_blocks_at_once() -> None:
    """Closing a stream gives its slot and blocks back before anything else runs."""

    async def body() -> None:
        async with engine(**EXACT) as sim:
            stream = generate(sim, prompt(100), max_tokens=500)
            await anext(stream)
            assert sim.load().kv_usage > 0
            await stream.aclose()
            load = sim.load()
            assert (load.running, load.waiting, load.requests, load.kv_usage) == (0, 0, 0, 0.0)

    run(body)


def test_prefix_cache_saves_time() -> None:
    """What is in the cache is not computed again: whole blocks, never the last token; a follow-up finds its answer."""

    async def body() -> None:
        async with engine(**EXACT) as sim:
            start = now()
            first = [chunk async for chunk in generate(sim, prompt(160), max_tokens=40)]
            assert first[0].cached_tokens == 0
            middle = now()
            assert middle - start == pytest.approx(0.159 + 0.4)
            second = [chunk async for chunk in generate(sim, prompt(160), max_tokens=40)]
            assert second[0].cached_tokens == 144
            assert now() - middle == pytest.approx(0.015 + 0.4)
            said = [token for chunk in first for token in chunk.deltas[0].token_ids]
            follow_up = [chunk async for chunk in generate(sim, prompt(160) + said + prompt(8, 5), max_tokens=1)]
            assert follow_up[0].cached_tokens == 192

    run(body)


def test_prefix_cache_forgets_the_longest_unused() -> None:
    """Idle blocks give way when room is needed, ends of prompts first; the usage counts only what is held."""

    async def body() -> None:
        async with engine(**EXACT, max_model_len=160, kv_blocks=12) as sim:
            for kind, hit in [(1, 0), (1, 80), (2, 0), (3, 0), (1, 16), (3, 80)]:
                (chunk,) = [chunk async for chunk in generate(sim, prompt(90, kind), max_tokens=1)]
                assert chunk.cached_tokens == hit, kind
                assert sim.load().kv_usage == 0

    run(body)


def test_pool_never_overbooks() -> None:
    """Under any order of admissions, growth and releases the pool neither overbooks nor loses a block."""
    choose = random.Random(5)
    pool = KVPool(20)
    held: list[tuple[list[int], int]] = []
    for _ in range(5000):
        if choose.random() < 0.5:
            hashes = [choose.randrange(3) * 100 + i for i in range(choose.randrange(6))]
            hits, private = pool.match(hashes), choose.randrange(1, 5)
            if pool.admit(hashes[:hits], private):
                for key in hashes[hits : hits + private]:
                    pool.publish(key)
                published = len(hashes[hits : hits + private])
                held.append((hashes[: hits + published], private - published))
        elif held:
            pool.release(*held.pop(choose.randrange(len(held))))
        assert 0 <= pool.free <= 20
        assert 0 <= pool.usage <= 1
    for one in held:
        pool.release(*one)
    assert pool.free == 20


# ---- what it says


def test_same_seed_same_events() -> None:
    """A mixed run with cancels, faults, preemptions and spread repeats event for event with the same seed only."""

    async def events(seed: int) -> list[object]:
        log: list[object] = []
        choose = random.Random(99)
        faults = [
            {"do": "raise", "on": {"probability": 0.1, "token": 5}},
            {"do": "stall", "for_s": 0.2, "on": {"nth_request": 7}},
            {"do": "slow", "for_s": 0.5, "factor": 3.0, "on": {"nth_request": 20}},
        ]
        small = {"max_num_seqs": 6, "kv_blocks": 20, "max_model_len": 300, "token_sigma": 0.2, "first_token_sigma": 0.5}
        async with engine(seed=seed, faults=faults, mean_output_tokens=40.0, **small) as sim:

            async def one(k: int, at: float, leave: float | None) -> None:
                await asyncio.sleep(at)
                stream = generate(
                    sim, prompt(20 + k, k), k % 3, ignore_eos=False, max_tokens=80, n=1 + k % 2, temperature=1.0
                )
                try:
                    async with asyncio.timeout(leave):
                        async for chunk in stream:
                            log.append((round(now(), 9), k, chunk))
                except (TimeoutError, GenerationFailed) as error:
                    log.append((round(now(), 9), k, str(error)))

            plans = [(k, choose.uniform(0, 1), choose.choice([None, None, 0.3])) for k in range(60)]
            await asyncio.gather(*(one(*plan) for plan in plans))
            assert sim.load().requests == 0
            log.append(sim.preemptions)
        return log

    first = run(events, 1)
    assert first == run(events, 1)
    assert first != run(events, 2)
    assert any("failed on this request" in entry[2] for entry in first[:-1] if isinstance(entry[2], str))  # type: ignore[index]
    assert first[-1] > 0  # type: ignore[operator]


def test_every_continuation_is_exact() -> None:
    """From wherever an answer is cut, half a character included, the rest and its text are exactly the rest."""

    async def body() -> None:
        async with engine(mean_output_tokens=60.0) as sim:
            start = await sim.tokenize("The capital of France is")
            for values in ({}, {"temperature": 0.7, "seed": 3}):
                whole = [c async for c in generate(sim, start, max_tokens=120, ignore_eos=False, **values)]
                text = "".join(delta.text for chunk in whole for delta in chunk.deltas)
                said = [token for chunk in whole for delta in chunk.deltas for token in delta.token_ids]
                for cut in range(1, len(said)):
                    rest = [
                        c
                        async for c in generate(
                            sim, start + said[:cut], max_tokens=120 - cut, ignore_eos=False, **values
                        )
                    ]
                    assert [t for c in rest for d in c.deltas for t in d.token_ids] == said[cut:]
                    assert text.endswith("".join(d.text for c in rest for d in c.deltas))

    run(body)


def test_text_survives_the_round_trip() -> None:
    """What was generated, and any text at all, is the same after decoding and encoding again."""

    async def body() -> None:
        async with engine(mean_output_tokens=None) as sim:
            vocabulary = Vocabulary(2048)
            said = await tokens(generate(sim, prompt(5), max_tokens=1500))
            while vocabulary.text(said).endswith("\ufffd"):
                said.pop()  # it may end within a character
            text = vocabulary.text(said)
            assert await sim.tokenize(text) == said
            assert any(ord(char) > 0x1F000 for char in text)
            assert any(0x3000 < ord(char) < 0xA000 for char in text)
            for text in ("Zürich — 東京 👩‍🚀 \x00\n\t", "The Capital of FRANCE, 1234.5!", " " * 9):
                assert vocabulary.text(await sim.tokenize(text)) == text

    run(body)


def test_a_chunk_never_holds_half_a_character() -> None:
    """Characters of several tokens appear whole, in the chunk of their last token, and joined equal the whole text."""

    async def body() -> None:
        async with engine(**EXACT) as sim:
            chunks = [chunk async for chunk in generate(sim, prompt(7), max_tokens=1200)]
            assert len(chunks) == 1200
            texts = [chunk.deltas[0].text for chunk in chunks]
            assert not any("\ufffd" in text for text in texts)
            said = [token for chunk in chunks for token in chunk.deltas[0].token_ids]
            whole = Vocabulary(2048).text(said)
            assert whole.rstrip("\ufffd") == "".join(texts)
            assert texts.count("") > 10

    run(body)


def test_stop_string_inside_one_token_and_across_many() -> None:
    """A stop string is found wherever it lies; a beginning of it that comes to nothing is shown after all."""
    vocabulary = Vocabulary(2048)

    def shown(text: str, stops: list[str], *, keep: bool = False) -> list[str]:
        detokenizer = Detokenizer(vocabulary, [], stops, keep_stop=keep, show_end=False)
        parts = []
        for token in vocabulary.words(text):
            stopped = detokenizer.push(token, may_stop=True)
            parts.append(detokenizer.take(ended=stopped))
            if stopped:
                return parts
        return [*parts, detokenizer.take(ended=True)]

    assert "".join(shown("the river and the sea", ["iver"])) == "the r"
    assert "".join(shown("the river and the sea", ["river and the"])) == "the "
    assert "".join(shown("the river and the sea", ["river and now"])) == "the river and the sea"
    assert "".join(shown("the river and the sea", ["sea", "and"])) == "the river "
    assert "".join(shown("the river and the sea", ["and"], keep=True)) == "the river and"
    assert shown("a 🚀.", ["🚀"])[-1] == ""


def test_natural_end() -> None:
    """Answers end by themselves with ``stop``, at lengths around the mean set, unless told to go on."""

    async def body() -> None:
        async with engine(mean_output_tokens=30.0, tokens_per_s=1e6) as sim:
            answers = [
                [c async for c in generate(sim, prompt(9, kind), max_tokens=1000, ignore_eos=False)]
                for kind in range(300)
            ]
            lengths = [sum(len(d.token_ids) for c in chunks for d in c.deltas) for chunks in answers]
            assert all(chunks[-1].deltas[-1].finish_reason == "stop" for chunks in answers)
            assert 24 < sum(lengths) / len(lengths) < 37
            assert len(await tokens(generate(sim, prompt(9), max_tokens=1000))) == 1000

    run(body)


def test_bans_and_forces() -> None:
    """``logit_bias`` of ±100 and ``bad_words`` ban or force tokens; seeds and sequences differ."""

    async def body() -> None:
        async with engine(tokens_per_s=1e6) as sim:
            plain = await tokens(generate(sim, prompt(9), max_tokens=40))
            banned = next(token for token in plain if token >= 257 and plain.index(token) > 0)
            before = plain.index(banned)
            got = await tokens(generate(sim, prompt(9), max_tokens=40, logit_bias={str(banned): -100}))
            assert got[:before] == plain[:before]
            assert banned not in got
            word = Vocabulary(2048).text([banned]).strip()
            assert await tokens(generate(sim, prompt(9), max_tokens=40, bad_words=[word])) == got
            assert await tokens(generate(sim, prompt(9), max_tokens=3, logit_bias={500: 100.0})) == [500] * 3
            drawn = {
                tuple(await tokens(generate(sim, prompt(9), max_tokens=9, temperature=1.0, seed=seed)))
                for seed in range(9)
            }
            assert len(drawn) == 9

    run(body)


# ---- faults


def test_raise_fails_one_request_only() -> None:
    """The request that is struck gets the tokens made before and then ``GenerationFailed``; others go on."""

    async def body() -> None:
        fault = {"do": "raise", "on": {"prompt_contains": " river", "token": 5}}
        async with engine(**EXACT, faults=[fault]) as sim:
            bad, good = await sim.tokenize("the river and"), await sim.tokenize("the sea and")
            expected = asyncio.create_task(tokens(generate(sim, good, max_tokens=20)))
            got: list[int] = []
            with pytest.raises(GenerationFailed, match="after 5 tokens"):
                await tokens(generate(sim, bad, max_tokens=20), into=got)
            assert len(got) == 5
            assert len(await expected) == 20
            assert sim.alive
            assert sim.load().requests == 0

    run(body)


def test_nth_request_and_times() -> None:
    """A fault strikes the request it counts to, before its first token, and as often as it may."""

    async def body() -> None:
        faults = [
            {"do": "raise", "on": {"nth_request": 2}},
            {"do": "raise", "on": {"prompt_contains": "sea"}, "times": 1},
        ]
        async with engine(faults=faults) as sim:
            ends = []
            for text in ("one", "two", "sea", "sea", "two"):
                try:
                    ends.append(len(await tokens(generate(sim, await sim.tokenize(text), max_tokens=2))))
                except GenerationFailed:
                    ends.append(-1)
            assert ends == [2, -1, -1, 2, 2]

    run(body)


def test_stall_holds_all_tokens() -> None:
    """During a stall, injected in the middle of a step, nobody gets a token; afterwards nothing is missing."""

    async def body() -> None:
        async with engine(**EXACT) as sim:
            start = now()

            def read(k: int) -> asyncio.Task[list[float]]:
                return asyncio.create_task(times(generate(sim, prompt(1, k), max_tokens=10), start))

            tasks = [read(0), read(1)]
            await asyncio.sleep(0.035)
            sim.inject(Fault(do="stall", for_s=2.0))
            first, second, late = await asyncio.gather(*tasks, read(2))
            assert first == second == pytest.approx([0.01, 0.02, 0.03, *(2.035 + 0.01 * i for i in range(7))])
            assert late == pytest.approx([2.045 + 0.01 * i for i in range(10)])

    run(body)


def test_stall_of_an_idle_engine_holds_what_comes() -> None:
    """A request that comes during a stall is scheduled after it, and can leave before."""

    async def body() -> None:
        async with engine(**EXACT) as sim:
            start = now()
            sim.inject(Fault(do="stall", for_s=1.0))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await tokens(generate(sim, prompt(1), max_tokens=1))
            assert sim.load().requests == 0
            first = [chunk async for chunk in generate(sim, prompt(1), max_tokens=1)]
            assert first[0].scheduled_at == pytest.approx(start + 1.0)

    run(body)


def test_slow_stretches_steps() -> None:
    """While it lasts each step takes ``factor`` times as long."""

    async def body() -> None:
        async with engine(**EXACT) as sim:
            sim.inject(Fault(do="slow", for_s=0.09, factor=5.0))
            got = await times(generate(sim, prompt(1), max_tokens=5), now())
            assert got == pytest.approx([0.05, 0.10, 0.11, 0.12, 0.13])

    run(body)


def test_die_ends_everything_until_the_next_start() -> None:
    """Death ends running and waiting requests at once, also during a stall; a new start gives a fresh engine."""

    async def body() -> None:
        async with engine(**EXACT, max_num_seqs=2, startup_s=3.0) as sim:
            tasks = [asyncio.create_task(tokens(generate(sim, prompt(1, k), max_tokens=50))) for k in range(4)]
            await asyncio.sleep(0.1)
            sim.inject(Fault(do="stall", for_s=100.0))
            sim.inject(Fault(do="die"))
            assert not sim.alive
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(end) for end in ends] == [EngineDied] * 4
            load = sim.load()
            assert (load.running, load.waiting, load.kv_usage, load.requests) == (0, 0, 0.0, 0)
            with pytest.raises(EngineDied):
                await tokens(generate(sim, prompt(1)))
            await sim.stop()
            await sim.start()
            assert sim.alive
            assert len(await tokens(generate(sim, prompt(1), max_tokens=5))) == 5

    run(body)


def test_die_at_a_token_and_continue() -> None:
    """An engine that dies at token 32 of 100 continues, after a restart, with exactly the missing tokens."""

    async def body() -> None:
        async with engine() as sim:
            whole = await tokens(generate(sim, prompt(20), max_tokens=100))
            sim.inject(Fault(do="die", on=When(token=32), times=1))
            got: list[int] = []
            with pytest.raises(EngineDied):
                await tokens(generate(sim, prompt(20), max_tokens=100), into=got)
            assert len(got) == 32
            await sim.start()
            got += await tokens(generate(sim, prompt(20) + got, max_tokens=68))
            assert got == whole

    run(body)


def test_probability_is_met_and_repeats() -> None:
    """A probability strikes about its share of the requests, the same ones in each run."""

    async def struck() -> list[bool]:
        async with engine(tokens_per_s=1e6, faults=[{"do": "raise", "on": {"probability": 0.1}}]) as sim:
            ends = await asyncio.gather(
                *(tokens(generate(sim, prompt(1), max_tokens=1)) for _ in range(1000)), return_exceptions=True
            )
            return [isinstance(end, GenerationFailed) for end in ends]

    first = run(struck)
    assert 70 < sum(first) < 130
    assert first == run(struck)


def test_the_same_id_twice() -> None:
    """A request id that is in the engine already is refused, and the first request with it goes on."""

    async def body() -> None:
        async with engine(**EXACT) as sim:
            first = asyncio.create_task(tokens(generate(sim, prompt(1), name="same", max_tokens=5)))
            await asyncio.sleep(0.01)
            with pytest.raises(GenerationFailed, match="same"):
                await tokens(generate(sim, prompt(1), name="same"))
            assert len(await first) == 5

    run(body)


def test_a_thousand_requests_with_random_ends_leave_nothing() -> None:
    """After cancels at random times, failures, a death and a restart, no request, slot or block is left."""

    async def body() -> None:
        choose = random.Random(3)
        faults = [{"do": "raise", "on": {"probability": 0.05, "token": 3}}]
        sizes = {"max_num_seqs": 32, "kv_blocks": 200, "max_model_len": 512}
        async with engine(faults=faults, **sizes) as sim:

            async def one(k: int) -> None:
                await asyncio.sleep(choose.uniform(0, 20))
                try:
                    async with asyncio.timeout(choose.choice([None, choose.uniform(0, 2)])):
                        await tokens(generate(sim, prompt(choose.randrange(1, 200), k % 7), k % 4, max_tokens=60))
                except (TimeoutError, GenerationFailed, EngineDied):
                    pass

            async def death() -> None:
                await asyncio.sleep(10)
                sim.inject(Fault(do="die"))
                await asyncio.sleep(0.5)
                await sim.start()

            await asyncio.gather(death(), *map(one, range(1000)))
            load = sim.load()
            assert (load.running, load.waiting, load.requests, load.kv_usage) == (0, 0, 0, 0.0)

    run(body)
