"""The outbox with a scripted broker in virtual time, and what the configuration makes of the sinks."""

from __future__ import annotations

import asyncio
import itertools
import sys

import pytest

from triton_lifecycle import sinks
from triton_lifecycle.config import Config, Distributed, EventDriven, Recorder
from triton_lifecycle.errors import ConfigError
from triton_lifecycle.events import TYPES, DeadlineMoved, FirstToken, Progress, decode
from triton_lifecycle.simulation.virtual_time import run
from triton_lifecycle.sinks.outbox import BATCH, Outbox


def event(request, seq):
    return FirstToken(request_id=request, seq=seq, at=0.0)


class Scripted:
    """A broker that does for each batch what its script says, then takes everything."""

    def __init__(self, *script):
        self.script = list(script)
        self.got = []
        self.attempts = []
        self.closed = 0

    async def send(self, batch):
        self.attempts.append((asyncio.get_running_loop().time(), len(batch)))
        step = self.script.pop(0) if self.script else "take"
        if step == "hang":
            await asyncio.Event().wait()
        if step in {"take", "take, then fail"}:
            self.got += batch
        if step in {"fail", "take, then fail"}:
            raise ConnectionError("scripted")
        return step if isinstance(step, int) else 0

    async def close(self):
        self.closed += 1


def outbox(broker, size=1000, time_limit=10.0):
    return Outbox("test", broker, TYPES, size=size, time_limit=time_limit)


def test_events_go_out_in_batches_in_order_with_their_ids():
    """Many events are few batches; each has an id that is its own for ever, its request as key, and its JSON."""

    async def scenario():
        broker = Scripted()
        box = outbox(broker)
        events = [event(f"r{n % 7}", n // 7) for n in range(300)]
        for each in events:
            box.take(each)
        await box.aclose()
        assert [decode(entry.body) for entry in broker.got] == events
        assert [entry.id for entry in broker.got[:2]] == ["r0:0", "r1:0"]
        assert broker.got[8].key == "r1"
        assert [size for _, size in broker.attempts] == [BATCH, BATCH, 300 - 2 * BATCH]
        assert box.counts() == {"taken": 300, "sent": 300, "lost": 0, "retried": 0, "backlog": 0}

    run(scenario)


@pytest.mark.parametrize("trouble", ["fail", "hang", "take, then fail"])
def test_a_batch_that_failed_goes_again_before_any_other(trouble):
    """Also one that hung, and one that was taken without a word: nothing is lost, and ids tell what came twice."""

    async def scenario():
        broker = Scripted(*[trouble] * 5)
        box = outbox(broker, time_limit=2.0)
        events = [event("r", seq) for seq in range(200)]
        for each in events:
            box.take(each)
        await asyncio.sleep(60)
        first_copies = list(dict.fromkeys(entry.id for entry in broker.got))
        assert first_copies == [f"r:{seq}" for seq in range(200)]
        assert (len(broker.got) > 200) == (trouble == "take, then fail")
        assert box.counts() == {"taken": 200, "sent": 200, "lost": 0, "retried": 5 * BATCH, "backlog": 0}
        assert broker.closed == 5
        await box.aclose()

    run(scenario)


def test_pauses_grow_to_a_bound():
    """A broker that is down for a minute is asked some twenty times, not some thousand, and at least every 5 s."""

    async def scenario():
        broker = Scripted(*["fail"] * 1000)
        box = outbox(broker)
        box.take(event("r", 0))
        await asyncio.sleep(60)
        times = [at for at, _ in broker.attempts]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert 12 <= len(times) <= 30
        assert max(gaps) <= 5.1
        await box.aclose()

    run(scenario)


def test_what_finds_no_room_is_lost_and_counted_exactly():
    """While the broker is down so many wait as may; the rest is lost, and both are told."""

    async def scenario():
        broker = Scripted(*["fail"] * 10)
        box = outbox(broker, size=50)
        for seq in range(80):
            box.take(event("r", seq))
        assert box.counts() == {"taken": 80, "sent": 0, "lost": 30, "retried": 0, "backlog": 50}
        await asyncio.sleep(120)
        counts = box.counts()
        assert (counts["sent"], counts["lost"], counts["backlog"]) == (50, 30, 0)
        assert [entry.id for entry in broker.got] == [f"r:{seq}" for seq in range(50)]
        await box.aclose()

    run(scenario)


def test_what_a_broker_will_never_take_is_counted_and_stops_nothing():
    """Two events of a batch that are refused for good are lost; the others are sent."""

    async def scenario():
        box = outbox(Scripted(2))
        for seq in range(10):
            box.take(event("r", seq))
        await box.aclose()
        assert box.counts() == {"taken": 10, "sent": 8, "lost": 2, "retried": 0, "backlog": 0}

    run(scenario)


def test_the_end_waits_a_bounded_time_and_counts_the_rest():
    """With the broker down the end takes some seconds, and what waited is lost and counted."""

    async def scenario():
        box = outbox(Scripted(*["hang"] * 100))
        for seq in range(10):
            box.take(event("r", seq))
        began = asyncio.get_running_loop().time()
        await box.aclose()
        assert asyncio.get_running_loop().time() - began <= sinks.FLUSH_S + 0.1
        assert box.counts()["lost"] == 10
        assert box.counts()["backlog"] == 0

    run(scenario)


def distributed(**values):
    return Config(distributed=Distributed(enabled=True, **values))


def test_local_is_no_sink(tmp_path):
    """Without a recorder, and with the local backend or distribution off, nothing is opened."""
    assert sinks.open_sinks(Config(), tmp_path) == []
    assert sinks.open_sinks(distributed(), tmp_path) == []
    assert sinks.open_sinks(Config(distributed=Distributed(event_bus_backend="redis")), tmp_path) == []
    assert not sinks.wanted(distributed())


@pytest.mark.parametrize("backend", ["redis", "kafka"])
def test_the_backend_is_chosen_by_name_and_tokens_by_a_switch(backend, tmp_path):
    """Events of each token are sent only when asked for."""

    async def scenario():
        for tokens in (False, True):
            [sink] = sinks.open_sinks(distributed(event_bus_backend=backend, events_include_tokens=tokens), tmp_path)
            assert sink.name == backend
            assert (Progress in sink.types, DeadlineMoved in sink.types) == (tokens, tokens)
            assert FirstToken in sink.types
            await sink.aclose()

    run(scenario)


@pytest.mark.parametrize(("backend", "module"), [("redis", "redis.asyncio"), ("kafka", "confluent_kafka")])
def test_a_client_that_is_missing_is_named(backend, module, tmp_path, monkeypatch):
    """The message says which key asks for it and what to install."""
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"triton_lifecycle.sinks.{backend}", raising=False)
    with pytest.raises(ConfigError, match=rf"event_bus_backend: '{backend}'.*triton-lifecycle\[{backend}\]"):
        sinks.open_sinks(distributed(event_bus_backend=backend), tmp_path)


def test_an_address_that_the_client_refuses_is_named_without_its_password(tmp_path):
    """What only the client finds wrong is said at the start too, and no secret is in the message."""
    with pytest.raises(ConfigError) as caught:
        sinks.open_sinks(distributed(event_bus_backend="redis", redis_url="redis://:secret@host:port"), tmp_path)
    assert "distributed.redis_url" in caught.value.message
    assert "secret" not in caught.value.message


def test_a_recorder_that_cannot_write_is_refused_at_the_start(tmp_path):
    """The message names the key and the reason."""
    (tmp_path / "file").touch()
    config = Config(event_driven=EventDriven(recorder=Recorder(path="file/events.jsonl")))
    with pytest.raises(ConfigError, match=r"event_driven\.recorder\.path: .*file/events\.jsonl cannot be written"):
        sinks.open_sinks(config, tmp_path)
