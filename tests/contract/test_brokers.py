"""Events to a real Redis and to a real broker of Kafka's protocol, in good times and in bad ones."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict

import pytest
from tests.fakes import pb_utils
from tests.fakes.harness import Harness
from tests.services import kafka_broker, redis_server
from tests.waiting import LIMIT_S as WAIT_S
from tests.waiting import eventually

from triton_lifecycle import sinks
from triton_lifecycle.config import Config, Distributed, EventDriven
from triton_lifecycle.engine import open_engine
from triton_lifecycle.events import Finished, FirstToken, Received, decode

LIMIT_S = 1.0
SILENCE_S = 1.0
"""After this long without an event a topic has been read to its end, once all that must be there has come."""


class OnRedis:
    """A Redis and how to read from it."""

    backend = "redis"

    def __init__(self, service):
        self.service = service
        self.settings = {"redis_url": service.url}

    async def read(self, least):
        """Return (id, request, event) of all that is there, in order."""
        from redis.asyncio import Redis

        async with Redis.from_url(self.service.url) as client:
            found = await client.xrange("lifecycle:events")
        events = [(fields[b"id"].decode(), decode(fields[b"event"])) for _, fields in found]
        return [(entry, event.request_id, event) for entry, event in events]


class OnKafka:
    """A broker of Kafka's protocol and how to read from it."""

    backend = "kafka"

    def __init__(self, service):
        self.service = service
        self.settings = {"kafka_servers": service.url}

    async def read(self, least):
        """Return (id, key, event) of all that is there, in the order of each partition; there are so many at least."""
        return await asyncio.to_thread(self._read, least)

    def _read(self, least):
        from confluent_kafka import Consumer, TopicPartition

        consumer = Consumer({"bootstrap.servers": self.service.url, "group.id": "test", "log_level": 0})
        found = []
        try:
            topics = consumer.list_topics("lifecycle.events", timeout=WAIT_S).topics
            partitions = topics["lifecycle.events"].partitions
            consumer.assign([TopicPartition("lifecycle.events", number, 0) for number in partitions])
            # Tansu's high watermarks run behind, so the end is told by silence.
            began = last = time.monotonic()
            while time.monotonic() < (last + SILENCE_S if len(found) >= least else began + WAIT_S):
                message = consumer.poll(0.2)
                if message is not None and message.error() is None:
                    last = time.monotonic()
                    entry = dict(message.headers())["id"].decode()
                    found.append((entry, message.key().decode(), decode(message.value())))
        finally:
            consumer.close()
        return found


@contextlib.contextmanager
def broker(name, *, started=True):
    if name == "redis":
        with redis_server(started=started) as service:
            yield OnRedis(service)
    else:
        with kafka_broker(started=started) as service:
            yield OnKafka(service)


both = pytest.mark.parametrize("name", ["redis", "kafka"])


def open_sink(at, tmp_path, *, size=10_000, limit=LIMIT_S, **settings):
    config = Config(
        event_driven=EventDriven(event_queue_size=size, event_processing_timeout=limit),
        distributed=Distributed(enabled=True, event_bus_backend=at.backend, **at.settings, **settings),
    )
    [sink] = sinks.open_sinks(config, tmp_path)
    return sink


def event(request, seq):
    return FirstToken(request_id=request, seq=seq, at=0.0)


def give(sink, seqs, requests=10):
    for seq in seqs:
        for number in range(requests):
            sink.take(event(f"r{number}", seq))


def in_order(found):
    """Return each request's numbers, the second copies taken out; the id and the key must fit."""
    by_request = defaultdict(list)
    for entry, key, event in found:
        assert (entry, key) == (f"{event.request_id}:{event.seq}", event.request_id)
        if event.seq not in by_request[key]:
            by_request[key].append(event.seq)
    for seqs in by_request.values():
        assert seqs == sorted(seqs)
    return dict(by_request)


def balanced(counts):
    return counts["taken"] == counts["sent"] + counts["lost"] + counts["backlog"]


@both
def test_every_event_arrives_in_the_order_of_its_request(name, tmp_path):
    """Keyed by request, with ids, once each when nothing goes wrong."""

    async def scenario():
        with broker(name) as at:
            sink = open_sink(at, tmp_path, limit=10.0)
            give(sink, range(50))
            await eventually(lambda: not sink.counts()["backlog"])
            found = await at.read(sink.counts()["sent"])
            assert len(found) == 500
            assert in_order(found) == {f"r{number}": list(range(50)) for number in range(10)}
            assert sink.counts() == {"taken": 500, "sent": 500, "lost": 0, "retried": 0, "backlog": 0}
            await sink.aclose()

    asyncio.run(scenario())


@both
def test_a_broker_that_comes_late_gets_everything(name, tmp_path):
    """Down at the start: events wait, and go out once it is there."""

    async def scenario():
        with broker(name, started=False) as at:
            sink = open_sink(at, tmp_path)
            give(sink, range(20))
            await eventually(lambda: sink.counts()["retried"])
            assert sink.counts()["backlog"] == 200
            at.service.start()
            await eventually(lambda: not sink.counts()["backlog"])
            assert in_order(await at.read(sink.counts()["sent"])) == {
                f"r{number}": list(range(20)) for number in range(10)
            }
            assert sink.counts()["lost"] == 0
            assert sink.counts()["retried"] > 0
            await sink.aclose()

    asyncio.run(scenario())


@both
def test_a_broker_that_stands_still_gets_everything_at_least_once(name, tmp_path):
    """Frozen for longer than the limit: batches are tried again, and order holds once second copies are taken out."""

    async def scenario():
        with broker(name) as at:
            sink = open_sink(at, tmp_path)
            give(sink, range(10))
            await eventually(lambda: not sink.counts()["backlog"])
            at.service.freeze()
            give(sink, range(10, 30))
            await eventually(lambda: sink.counts()["retried"])
            at.service.thaw()
            await eventually(lambda: not sink.counts()["backlog"])
            assert in_order(await at.read(sink.counts()["sent"])) == {
                f"r{number}": list(range(30)) for number in range(10)
            }
            assert sink.counts()["sent"] == 300
            await sink.aclose()

    asyncio.run(scenario())


@both
def test_a_broker_that_dies_under_load_costs_no_request(name, tmp_path):
    """Killed for some seconds while requests run: none fails, tokens flow, sent + lost is exactly what was taken.

    That it costs no speed is measured by ``python -m load.bus``.
    """

    async def scenario():
        engine = open_engine("simulated", {"tokens_per_s": 5000, "mean_output_tokens": None}, "")
        await engine.start()
        with broker(name) as at:
            harness = Harness(engine=engine)
            sink = open_sink(at, tmp_path, size=300)
            harness.bus.subscribe(sink.take, sink.types)
            served, tokens, stop = [], [0], asyncio.Event()
            harness.bus.subscribe(lambda event: tokens.__setitem__(0, tokens[0] + event.output_tokens), [Finished])

            async def caller():
                while not stop.is_set():
                    request = pb_utils.InferenceRequest({"text_input": "a b c", "stream": True}, {"max_tokens": 50})
                    await harness.serve(request)
                    served.append(request)

            callers = [asyncio.create_task(caller()) for _ in range(16)]
            await eventually(lambda: sink.counts()["sent"])
            at.service.kill()
            before = tokens[0]
            # Tokens flow without the broker, and the queue overflows as it is meant to.
            await eventually(lambda: tokens[0] > before + 10_000 and sink.counts()["lost"])
            gone = sink.counts()["sent"]  # with a broker that keeps all in memory
            at.service.start()
            await eventually(lambda: sink.counts()["backlog"] < 100)
            stop.set()
            await asyncio.gather(*callers)
            await eventually(lambda: not sink.counts()["backlog"])
            assert [error.message() for request in served for error in request.sender.errors] == []
            counts = harness.contexts.counts
            assert counts["received"] == counts["completed"] == len(served)
            figures = sink.counts()
            assert balanced(figures)
            assert figures["taken"] == sum(isinstance(event, sink.types) for event in harness.events)
            found = await at.read(figures["sent"] - gone)
            in_order(found)
            assert len({entry for entry, _, _ in found}) <= figures["sent"]
            assert found[-1][2].request_id in {event.request_id for event in harness.events[-500:]}
            await sink.aclose()
        await engine.stop()

    asyncio.run(scenario())


def test_a_redis_whose_memory_is_full_refuses_whole_batches(tmp_path):
    """What is there is an unbroken beginning of each request; the rest waits or is lost, and is counted."""

    async def scenario():
        with redis_server("--maxmemory", "1500kb", "--maxmemory-policy", "noeviction") as service:
            at = OnRedis(service)
            sink = open_sink(at, tmp_path, size=20_000, limit=10.0)
            for start in range(0, 2000, 100):
                give(sink, range(start, start + 100))
                await asyncio.sleep(0.05)
            await eventually(lambda: sink.counts()["retried"])
            await asyncio.sleep(0.5)
            figures = sink.counts()
            assert balanced(figures)
            assert figures["backlog"] > 0
            found = in_order(await at.read(sink.counts()["sent"]))
            assert sum(map(len, found.values())) == figures["sent"]
            for seqs in found.values():
                assert seqs == list(range(len(seqs)))
            await sink.aclose()
            assert balanced(sink.counts())
            assert sink.counts()["backlog"] == 0

    asyncio.run(scenario())


def test_a_redis_stream_keeps_about_so_many(tmp_path):
    """The oldest go first, beyond events_max_length."""

    async def scenario():
        with redis_server() as service:
            at = OnRedis(service)
            sink = open_sink(at, tmp_path, events_max_length=500)
            give(sink, range(200))
            await eventually(lambda: not sink.counts()["backlog"])
            found = await at.read(sink.counts()["sent"])
            assert 500 <= len(found) <= 700
            assert found[-1][2].seq == 199
            await sink.aclose()

    asyncio.run(scenario())


def test_an_event_too_large_for_kafka_stops_no_other(tmp_path):
    """It is lost and counted; those before and behind it arrive."""

    async def scenario():
        with kafka_broker() as service:
            at = OnKafka(service)
            sink = open_sink(at, tmp_path)
            sink.take(event("r", 0))
            sink.take(Received(request_id="r", seq=1, at=0.0, caller_id="x" * 2_000_000, model="m", wall=0.0))
            sink.take(event("r", 2))
            await eventually(lambda: not sink.counts()["backlog"])
            assert sink.counts() == {"taken": 3, "sent": 2, "lost": 1, "retried": 0, "backlog": 0}
            assert in_order(await at.read(sink.counts()["sent"])) == {"r": [0, 2]}
            await sink.aclose()

    asyncio.run(scenario())
