"""The store in this process: what it keeps, what goes first, and what it costs."""

from __future__ import annotations

import pytest

from triton_lifecycle.store import Entry
from triton_lifecycle.store import memory as module
from triton_lifecycle.store.memory import MemoryStore

TTLS = {"metadata": 10.0, "input": 5.0, "output": 10.0}


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def entry(name, caller="", layers=("metadata", "input")):
    return Entry(name, {layer: f"{name}.{layer}".encode() for layer in layers}, caller)


def test_the_one_longest_not_asked_for_goes_first(clock):
    """Asking for a request keeps it; the caller's id of one that went leads nowhere."""
    store = MemoryStore(TTLS, max_requests=3, clock=clock)
    for name in "abc":
        store.claim(f"caller {name}", name)
        store.put(entry(name, f"caller {name}"))
    assert store.get("a")
    store.put(entry("d"))
    assert [bool(store.get(name)) for name in "abcd"] == [True, False, True, True]
    assert (store.claimant("caller a"), store.claimant("caller b")) == ("a", None)
    assert len(store) == 3


def test_a_later_use_of_a_callers_id_outlives_the_end_of_the_earlier(clock):
    """When the request of the first use is forgotten, the id still leads to the second."""
    store = MemoryStore(TTLS, max_requests=1, clock=clock)
    store.claim("c", "first")
    store.claim("c", "second")
    store.put(entry("first", "c"))
    store.put(entry("other"))
    assert store.claimant("c") == "second"


def test_each_layer_goes_at_its_own_time(clock):
    """A layer is gone at the moment its time is over, cleaned up or not, and the request with the last of them."""
    store = MemoryStore(TTLS, max_requests=10, clock=clock)
    store.put(entry("a"))
    clock.now += 4.9
    assert set(store.get("a")) == {"metadata", "input"}
    clock.now += 0.2
    assert set(store.get("a")) == {"metadata"}
    assert store.expire(100) == 1
    assert len(store) == 1
    clock.now += 5.0
    assert store.get("a") == {}
    store.expire(100)
    assert len(store) == 0
    assert store.lost == 0


def test_cleaning_takes_small_steps(clock):
    """Of a thousand that are over, no more go at once than asked for; each that comes takes some along."""
    store = MemoryStore({"metadata": 10.0}, max_requests=5000, clock=clock)
    for number in range(1000):
        store.put(entry(str(number), layers=["metadata"]))
    clock.now += 11
    assert store.expire(100) == 100
    assert len(store) == 900
    store.put(entry("new", layers=["metadata"]))
    assert len(store) == 901 - module.EXPIRED_AT_ONCE


def test_what_waits_for_another_store_is_pushed_out_only_beyond_the_spare_room(clock, monkeypatch):
    """Pinned ones go last and are counted; written ones are kept as the others are."""
    monkeypatch.setattr(module, "SPARE", 3)
    store = MemoryStore(TTLS, max_requests=2, clock=clock)
    for number in range(5):
        store.put(entry(str(number)), pinned=True)
    assert (len(store), store.lost) == (5, 0)
    store.put(entry("5"), pinned=True)
    assert (len(store), store.lost, store.get("0")) == (5, 1, {})
    batch = store.pinned(2, 1000)
    assert [one.id for one in batch] == ["1", "2"]
    store.unpin(batch)
    assert (store.waiting, len(store)) == (3, 5)
    store.unpin(store.pinned(10, 1000))
    assert (len(store), store.lost) == (2, 1)


def test_a_batch_is_bounded_in_bytes_but_never_empty(clock):
    """One that is larger than the bound goes alone."""
    store = MemoryStore({"output": 10.0}, max_requests=10, clock=clock)
    for name, size in (("a", 500), ("b", 10), ("c", 10), ("d", 90)):
        store.put(Entry(name, {"output": b"x" * size}), pinned=True)
    sizes = []
    while batch := store.pinned(10, 100):
        sizes.append([one.id for one in batch])
        store.unpin(batch)
    assert sizes == [["a"], ["b", "c"], ["d"]]


@pytest.mark.parametrize("kept_more", [True, False])
def test_all_can_be_made_to_wait_again_in_their_order(clock, kept_more):
    """What was kept comes before what waits, whichever are more."""
    store = MemoryStore(TTLS, max_requests=100, clock=clock)
    kept, waiting = (6, 2) if kept_more else (2, 6)
    for number in range(kept):
        store.put(entry(f"k{number}"))
    for number in range(waiting):
        store.put(entry(f"w{number}"), pinned=True)
    store.pin_all()
    expected = [f"k{n}" for n in range(kept)] + [f"w{n}" for n in range(waiting)]
    assert [one.id for one in store.pinned(100, 10**6)] == expected
    assert store.waiting == len(store) == 8


def test_one_that_expires_while_it_waits_is_counted_as_lost(clock):
    """Its time is over before another store had it."""
    store = MemoryStore(TTLS, max_requests=100, clock=clock)
    store.put(entry("a"), pinned=True)
    clock.now += 11
    store.expire(10)
    assert (len(store), store.lost) == (0, 1)


def test_nothing_is_kept_where_nothing_may_be(clock):
    """With room for none, an entry and its claim are gone at once."""
    store = MemoryStore(TTLS, max_requests=0, clock=clock)
    store.claim("c", "a")
    store.put(entry("a", "c"))
    assert (len(store), store.get("a"), store.claimant("c")) == (0, {}, None)
    assert not any(generation.born for generation in store._generations)
