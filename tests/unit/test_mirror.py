"""The mirror and the archive, in virtual time, with a store that can be made to fail or to be slow."""

from __future__ import annotations

import asyncio

import pytest

from triton_lifecycle.bus import NoBus
from triton_lifecycle.context import Contexts, Input, Wants
from triton_lifecycle.errors import StoreError, UnknownRequest
from triton_lifecycle.events import Cancelled, Finished
from triton_lifecycle.simulation.virtual_time import run
from triton_lifecycle.store import LAYERS
from triton_lifecycle.store import memory as memory_module
from triton_lifecycle.store.archive import ANSWER_LIMIT_S, Archive
from triton_lifecycle.store.memory import MemoryStore
from triton_lifecycle.store.mirror import BATCH, LONGEST_PAUSE_S, Mirror
from triton_lifecycle.store.records import Records, read_summary

TTLS = dict.fromkeys(LAYERS, 1000.0)


class Shared(MemoryStore):
    """A store beside the process: the one in memory, which passes the contract, with troubles on demand."""

    name = "shared"

    def __init__(self, **settings):
        super().__init__(TTLS, max_requests=100_000, clock=asyncio.get_running_loop().time, **settings)
        self.down = False
        self.takes = 0.0
        self.batches = []

    async def _trouble(self):
        await asyncio.sleep(self.takes)
        if self.down:
            raise StoreError("shared does not answer")

    async def write(self, entries):
        await self._trouble()
        self.batches.append([(entry.id, sorted(entry.layers)) for entry in entries])
        await super().write(entries)

    async def read(self, request_id):
        await self._trouble()
        return await super().read(request_id)

    async def resolve(self, caller_id):
        await self._trouble()
        return await super().resolve(caller_id)

    async def set_marks(self, marks, ttl):
        await self._trouble()
        await super().set_marks(marks, ttl)

    async def mark(self, name):
        await self._trouble()
        return await super().mark(name)

    def wipe(self):
        self.__init__()


class Node:
    """One replica's contexts, mirror and archive."""

    def __init__(self, store, name="a", *, max_finished=100, share_live=True):
        clock = asyncio.get_running_loop().time
        self.memory = MemoryStore(TTLS, max_requests=max_finished, clock=clock)
        self.contexts = Contexts(ended=self.memory, records=Records(name), clock=clock)
        self.mirror = Mirror(
            store,
            self.contexts,
            node=name,
            longest=1000.0,
            shortest=1000.0,
            interval=1.0,
            share_live=share_live,
            clock=clock,
        )
        self.archive = Archive(self.memory, store, self.mirror, name)
        self.mirror.start()

    def open(self, name):
        call = type("Call", (), {"id": name})()
        ctx = self.contexts.open(call, "m", NoBus())
        ctx.input = Input("p", {}, Wants(), exclude_prompt=True)
        return ctx

    def close(self, ctx):
        self.contexts.close(ctx, Finished, finish_reason="stop", output_tokens=0)

    def serve(self, *names):
        for name in names:
            self.close(self.open(name))

    async def aclose(self):
        await self.mirror.aclose(1.0)


async def status(store, caller):
    ours = await store.resolve(caller)
    found = read_summary(ours, await store.read(ours)) if ours else None
    return found and found.status


def in_virtual_time(scenario):
    """Run a scenario in virtual time."""

    def test():
        run(scenario)

    test.__doc__ = scenario.__doc__
    test.__name__ = scenario.__name__
    return test


@in_virtual_time
async def test_an_ended_request_is_written_soon_and_whole():
    """Well before the sync interval, in one writing, in batches of bounded size."""
    store = Shared()
    node = Node(store)
    await asyncio.sleep(0.5)
    node.serve(*(f"c{n}" for n in range(50)))
    await asyncio.sleep(0.1)
    assert [len(batch) for batch in store.batches] == [BATCH, BATCH, 10]
    assert await status(store, "c49") == "finished"
    assert node.mirror.state() == {
        "name": "shared",
        "up": True,
        "written": 50,
        "waiting": 0,
        "lost": 0,
        "failures": 0,
        "orders": 0,
    }
    await node.aclose()


@in_virtual_time
async def test_a_live_request_is_written_at_each_interval_and_only_what_changed():
    """First all that is true of it, then the layers that changed, then nothing until something does."""
    store = Shared()
    node = Node(store)
    await asyncio.sleep(0.1)
    ctx = node.open("c")
    await asyncio.sleep(1.0)
    assert store.batches == [[(ctx.id, ["execution", "input", "metadata"])]]
    assert await status(store, "c") == "live"
    await asyncio.sleep(3.0)
    assert len(store.batches) == 1
    ctx.kv.cached_tokens = 16
    await asyncio.sleep(1.0)
    assert store.batches[1:] == [[(ctx.id, ["kv_cache", "metadata"])]]
    await asyncio.sleep(600)
    assert store.batches[2:] == [[(ctx.id, ["execution", "input", "kv_cache", "metadata"])]], "before its time is over"
    node.close(ctx)
    await asyncio.sleep(0.1)
    assert await status(store, "c") == "finished"
    assert node.mirror._live == {}
    await node.aclose()


@in_virtual_time
async def test_live_requests_are_not_written_unless_they_are_shared():
    """Without ``distributed.enabled`` the store sees ends alone."""
    store = Shared()
    node = Node(store, share_live=False)
    ctx = node.open("c")
    await asyncio.sleep(5)
    assert store.batches == []
    node.close(ctx)
    await asyncio.sleep(1)
    assert await status(store, "c") == "finished"
    await node.aclose()


@in_virtual_time
async def test_what_ends_while_the_store_is_down_is_written_when_it_is_back():
    """Tried again after bounded pauses; nothing is lost within the bound."""
    store = Shared()
    node = Node(store, max_finished=5)
    node.serve("before")
    await asyncio.sleep(1)
    store.down = True
    live = node.open("live")
    node.serve(*(f"during{n}" for n in range(30)))
    await asyncio.sleep(120)
    assert not node.mirror.up
    assert 20 < node.mirror.failures < 40
    assert node.memory.waiting == 30
    store.down = False
    await asyncio.sleep(LONGEST_PAUSE_S + 1)
    assert node.mirror.up
    assert [await status(store, name) for name in ("before", "during0", "during29")] == ["finished"] * 3
    assert await status(store, "live") == "live"
    assert node.mirror.state()["lost"] == 0
    node.close(live)
    await node.aclose()
    assert await status(store, "live") == "finished"


@in_virtual_time
async def test_beyond_the_bound_what_is_lost_is_counted_exactly():
    """The oldest go first, each counted; what is left reaches the store."""
    memory_module.SPARE, spare = 10, memory_module.SPARE
    try:
        store = Shared()
        store.down = True
        node = Node(store, max_finished=5)
        node.serve(*(f"c{n}" for n in range(40)))
        assert node.memory.lost == 40 - 15
        store.down = False
        await asyncio.sleep(LONGEST_PAUSE_S + 1)
        told = [bool(await status(store, f"c{n}")) for n in range(40)]
        assert told == [False] * 25 + [True] * 15
        assert node.mirror.state()["written"] == 15
        await node.aclose()
    finally:
        memory_module.SPARE = spare


@in_virtual_time
async def test_a_store_that_comes_back_empty_gets_everything_again():
    """What is in memory is written anew, live ones whole; one that kept its data gets only what it missed."""
    store = Shared()
    node = Node(store)
    live = node.open("live")
    node.serve("a", "b")
    await asyncio.sleep(2)
    store.down = True
    node.serve("c")
    await asyncio.sleep(1)
    store.down = False
    store.batches.clear()
    await asyncio.sleep(10)
    assert [[len(layers) for _, layers in batch] for batch in store.batches] == [[3]], "only c was missed"
    store.down = True
    node.serve("d")
    await asyncio.sleep(1)
    store.wipe()
    await asyncio.sleep(10)
    assert [await status(store, name) for name in "abcd"] == ["finished"] * 4
    assert await status(store, "live") == "live"
    node.close(live)
    await node.aclose()


@in_virtual_time
async def test_the_callers_id_leads_to_its_latest_use_on_whichever_replica():
    """A retry at another replica is what is told, from both; an earlier use that ends later does not take it back."""
    store = Shared()
    one, two = Node(store, "one"), Node(store, "two")
    earlier = one.open("c")
    await asyncio.sleep(2)
    two.serve("c")
    await asyncio.sleep(1)
    assert (await one.archive.find("c")).node == "two"
    one.close(earlier)
    await asyncio.sleep(1)
    assert (await one.archive.find("c")).node == (await two.archive.find("c")).node == "two"
    assert (await two.archive.find(earlier.id)).node == "one"
    await one.aclose()
    await two.aclose()


@in_virtual_time
async def test_a_live_request_of_a_replica_that_is_gone_is_told_as_lost():
    """Some intervals after its last sign of life."""
    store = Shared()
    one, two = Node(store, "one"), Node(store, "two")
    ctx = one.open("c")
    await asyncio.sleep(2)
    assert (await two.archive.find("c")).status == "live"
    one.mirror._task.cancel()
    await asyncio.sleep(30)
    assert (await two.archive.find(ctx.id)).status == "lost"
    await two.aclose()


@in_virtual_time
async def test_an_answer_is_given_in_bounded_time_whatever_the_store_does():
    """What is in memory is told; what is not gets an honest error, soon."""
    store = Shared()
    node = Node(store)
    node.serve("here")
    await asyncio.sleep(0.5)
    store.takes = 60.0
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert (await node.archive.find("here")).status == "finished"
    with pytest.raises(StoreError, match=r"shared is too slow.*not known in this process"):
        await node.archive.find("elsewhere")
    assert loop.time() - began <= 2 * ANSWER_LIMIT_S + 0.01
    store.takes, store.down = 0.0, True
    await asyncio.sleep(60)
    assert (await node.archive.find("here")).status == "finished"
    with pytest.raises(StoreError, match="does not answer"):
        await node.archive.find("elsewhere")
    await node.aclose()


@in_virtual_time
async def test_what_waits_is_written_at_the_stop_and_what_cannot_be_is_counted():
    """The last writing has its limit."""
    store = Shared()
    node = Node(store)
    await asyncio.sleep(0.5)
    node.serve("last")
    await node.aclose()
    assert await status(store, "last") == "finished"
    node = Node(store)
    await asyncio.sleep(0.5)
    store.takes = 3600.0
    node.serve("never")
    began = asyncio.get_running_loop().time()
    await node.aclose()
    assert asyncio.get_running_loop().time() - began <= 1.01
    assert node.memory.lost == 1


def owned(node, name):
    """Open a request whose owner ends it as its interruption says."""
    ctx = node.open(name)

    async def live():
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            node.contexts.close(ctx, Cancelled)

    ctx.task = asyncio.get_running_loop().create_task(live())
    return ctx


@in_virtual_time
async def test_a_request_is_cancelled_through_another_replica():
    """Within two syncs, and only that one; several orders at once are all carried out; the answer tells the end."""
    store = Shared()
    node, other = Node(store), Node(store, "b")
    first, second, third = (owned(node, name) for name in ("one", "two", "three"))
    await asyncio.sleep(1.5)
    loop = asyncio.get_running_loop()
    began = loop.time()
    found = [await other.archive.find(name) for name in ("one", "two")]
    ended = await asyncio.gather(*(other.archive.cancel(each) for each in found))
    assert [each.status for each in ended] == ["cancelled", "cancelled"]
    assert loop.time() - began < 2.5
    assert (first.sealed, second.sealed, third.sealed) == (True, True, False)
    assert node.mirror.state()["orders"] == 2
    assert (await other.archive.find("three")).status == "live"
    third.interrupt(UnknownRequest("enough"))
    await asyncio.sleep(0.1)
    await node.aclose()
    await other.aclose()


@in_virtual_time
async def test_a_cancel_that_nobody_confirms_ends_in_bounded_time():
    """A replica that does not look at its orders, or a store that is down, is an honest error."""
    store = Shared()
    node, other = Node(store), Node(store, "b")
    ctx = owned(node, "one")
    await asyncio.sleep(1.5)
    found = await other.archive.find("one")
    node.mirror._orders.look = lambda: asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(StoreError, match=r"'a' has not confirmed within 5.0 s"):
        await other.archive.cancel(found)
    assert loop.time() - began < 5.1
    store.down = True
    with pytest.raises(StoreError, match="does not answer"):
        await other.archive.cancel(found)
    assert not ctx.sealed
    ctx.interrupt(UnknownRequest("enough"))
    await asyncio.sleep(0.1)
    store.down = False
    await node.aclose()
    await other.aclose()
