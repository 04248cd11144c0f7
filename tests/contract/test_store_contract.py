"""What every store promises, shown on the one in memory, a real Redis and a real etcd."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from tests.services import etcd_server, redis_server
from tests.waiting import TRIES, eventually, soon

from triton_lifecycle.config import Config
from triton_lifecycle.errors import ConfigError, StoreError
from triton_lifecycle.store import LAYERS, OPERATION_LIMIT_S, Entry, open_store
from triton_lifecycle.store.memory import MemoryStore

TTLS = {"metadata": 600.0, "input": 600.0, "execution": 600.0, "kv_cache": 2.0, "output": 600.0}


@pytest.fixture(scope="module")
def servers():
    with redis_server("--appendonly", "yes") as redis, etcd_server() as etcd:
        yield {"redis": redis, "etcd": etcd}


def config_of(kind, servers, namespace):
    return Config.model_validate(
        {
            "context_management": {
                "storage_backend": kind,
                "expired_context_timeout": 600.0,
                "layer_timeouts": {"kv_cache": 2.0},
            },
            "distributed": {"namespace": namespace} | {f"{name}_url": its.url for name, its in servers.items()},
        }
    )


@pytest.fixture(params=["memory", "redis", "etcd"])
def on_store(request, servers):
    """Run a scenario with a store of its own name space."""

    def run(scenario):
        async def whole():
            namespace = f"t{time.monotonic_ns()}"
            store = open_store(config_of(request.param, servers, namespace)) or MemoryStore(TTLS, max_requests=5000)
            async with contextlib.aclosing(store):
                return await scenario(store)

        return asyncio.run(whole())

    return run


def entry(number, caller="", **layers):
    return Entry(f"id{number}", {name: value.encode() for name, value in layers.items()}, caller)


def test_what_was_written_is_read(on_store):
    """Layers come back byte for byte, those of many requests too, and nothing is known of others."""

    async def scenario(store):
        anything = bytes(range(256))
        many = [Entry(f"id{n}", dict.fromkeys(LAYERS, anything + str(n).encode())) for n in range(300)]
        await store.write(many)
        for n in (0, 150, 299):
            assert await store.read(f"id{n}") == many[n].layers
        assert await store.read("id300") == {}
        assert await store.read("id29") == many[29].layers

    on_store(scenario)


def test_a_layer_replaces_what_was_there_of_it_alone(on_store):
    """A later writing of one layer leaves the others as they were."""

    async def scenario(store):
        await store.write([entry(1, metadata="live", input="asked")])
        await store.write([entry(1, metadata="ended", output="made"), entry(1, execution="last")])
        expected = {"metadata": b"ended", "input": b"asked", "output": b"made", "execution": b"last"}
        assert await store.read("id1") == expected

    on_store(scenario)


def test_the_callers_id_leads_to_its_latest_use(on_store):
    """The last to be written with a caller's id has it, of two in one batch the second; any text is a caller's id."""

    async def scenario(store):
        name = "käufer/../ 7:*\n"
        assert await store.resolve(name) is None
        await store.write([entry(1, name, metadata="a"), entry(2, name, metadata="b")])
        assert await store.resolve(name) == "id2"
        await store.write([entry(3, name, metadata="c"), entry(1, metadata="d")])
        assert await store.resolve(name) == "id3"

    on_store(scenario)


async def gone(read, layer):
    return layer not in await read


async def unmarked(store, name):
    return await store.mark(name) is None


def test_each_layer_expires_by_itself(on_store):
    """A layer of 2 s goes while the others stay; an old entry has only what is left of its time."""

    async def scenario(store):
        async def written():
            nonlocal at
            at = time.monotonic()
            await store.write([entry(1, "c", metadata="m", kv_cache="k")])
            old = Entry("id2", {"metadata": b"m", "kv_cache": b"k"}, "", 0.0, 5.0)
            await store.write([old])
            return await store.read("id1"), await store.read("id2")

        at = 0.0
        for _ in range(TRIES):  # again, should the machine's clock, by which Redis counts, have been set just then
            first, second = await soon(written, 1.5)
            assert set(first) == {"metadata", "kv_cache"}
            assert set(second) == {"metadata"}
            await eventually(lambda: gone(store.read("id1"), "kv_cache"))
            lived = time.monotonic() - at
            if lived > 1.5:
                break
        assert lived > 1.5
        assert await store.read("id1") == {"metadata": b"m"}
        assert await store.resolve("c") == "id1"

    on_store(scenario)


def test_a_mark_is_a_text_for_a_time(on_store):
    """Marks are read under their name, replaced, and gone after their time."""

    async def scenario(store):
        assert await store.mark("a") is None
        await store.set_marks({"a": "1", "b": "2"}, 60.0)

        async def replaced():
            await store.set_marks({"b": "3"}, 2.0)
            return await store.mark("a"), await store.mark("b")

        assert await soon(replaced, 1.5) == ("1", "3")
        await eventually(lambda: unmarked(store, "b"))
        assert await store.mark("a") == "1"

    on_store(scenario)


def test_closing_twice_does_no_harm(on_store):
    """A store is closed once more when its owner closes it too."""

    async def scenario(store):
        await store.mark("a")
        await store.aclose()

    on_store(scenario)


@pytest.mark.parametrize("kind", ["redis", "etcd"])
def test_one_that_is_down_says_so_in_bounded_time_and_is_used_again_when_it_is_back(kind, servers):
    """Killed: an error at once; frozen: within the limit; back: what was written before is there, and more can be."""
    server = servers[kind]

    async def fails(operation):
        with pytest.raises(StoreError, match=f"{kind} at .* does not answer"):
            await operation()

    async def scenario():
        store = open_store(config_of(kind, servers, "down"))
        async with contextlib.aclosing(store):
            await store.write([entry(1, "c", metadata="before")])
            server.kill()
            await soon(lambda: fails(lambda: store.write([entry(2, metadata="during")])), 1.0)
            await soon(lambda: fails(lambda: store.read("id1")), 1.0)
            server.start()
            assert await eventually(lambda: store.read("id1"), despite=(StoreError,)) == {"metadata": b"before"}
            server.freeze()
            try:
                await soon(lambda: fails(lambda: store.mark("x")), OPERATION_LIMIT_S + 0.5)
            finally:
                server.thaw()

            async def after():
                await store.write([entry(3, metadata="after", kv_cache="k")])
                return await store.read("id3")

            assert "metadata" in await eventually(after, despite=(StoreError,))

    asyncio.run(scenario())


def test_etcd_is_asked_with_name_and_password_where_it_wants_them():
    """With authentication on, the right password works, also after a restart; a wrong one is not shown."""

    async def scenario(server):
        import aiohttp

        async with aiohttp.ClientSession(raise_for_status=True) as session:
            for path, body in (
                ("user/add", {"name": "root", "password": "s3cret@/"}),
                ("user/grant", {"user": "root", "role": "root"}),
                ("enable", {}),
            ):
                async with session.post(f"{server.url}/v3/auth/{path}", json=body):
                    pass
        host = server.url.removeprefix("http://")
        right, wrong = (
            open_store(
                Config.model_validate(
                    {
                        "context_management": {"storage_backend": "etcd"},
                        "distributed": {"etcd_url": f"http://root:{password}@{host}"},
                    }
                )
            )
            for password in ("s3cret%40%2F", "gu3ss")
        )
        async with contextlib.aclosing(right), contextlib.aclosing(wrong):
            await right.write([entry(1, metadata="m")])
            with pytest.raises(StoreError) as caught:
                await wrong.read("id1")
            assert "gu3ss" not in str(caught.value)
            server.kill()
            server.start()
            # The token of before is worth nothing now: the first try may find that out.
            assert await eventually(lambda: right.read("id1"), despite=(StoreError,)) == {"metadata": b"m"}

    with etcd_server() as server:
        asyncio.run(scenario(server))


def test_an_address_that_the_client_refuses_is_told_without_its_password():
    """What only the client finds wrong is a fault of the configuration too, and no secret is in the message."""
    config = Config.model_validate(
        {"context_management": {"storage_backend": "redis"}, "distributed": {"redis_url": "redis://:s3#cret@host"}}
    )
    with pytest.raises(ConfigError, match=r"distributed\.redis_url") as caught:
        open_store(config)
    assert "s3" not in caught.value.message


def test_a_missing_client_is_told_with_what_to_install(monkeypatch):
    """Without the package redis the start fails with a message that names the extra."""
    import sys

    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.delitem(sys.modules, "triton_lifecycle.store.redis", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'triton-lifecycle\[redis\]'"):
        open_store(Config.model_validate({"context_management": {"storage_backend": "redis"}}))
