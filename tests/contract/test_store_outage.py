"""A real Redis and a real etcd die under load, and no request and no request's status is lost.

The manager is fed as Triton feeds it, with the simulated engine; a second replica that shares the store is asked too.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from unittest.mock import Mock

import msgspec
import pytest
from tests.fakes import pb_utils
from tests.services import etcd_server, redis_server
from tests.waiting import eventually, in_time, until

from triton_lifecycle import control
from triton_lifecycle.config import Config
from triton_lifecycle.engine import open_engine
from triton_lifecycle.errors import LifecycleError
from triton_lifecycle.manager import Manager
from triton_lifecycle.store.history import History
from triton_lifecycle_client.timeline import view
from triton_lifecycle_client.types import Status

RATE = 150.0
"""Requests a second."""
HOT = 100
"""Ended requests kept in memory: far fewer than are served, so nearly all answers come from the store."""


def config_of(kind, url, node):
    return Config.model_validate(
        {
            "timeout_handling": {"enabled": False},
            "context_management": {
                "storage_backend": kind,
                "max_finished": HOT,
                "keep_prompts": "hash",
                "keep_outputs": "text",
            },
            "distributed": {"enabled": True, "node_name": node, f"{kind}_url": url, "context_sync_interval": 0.2},
        }
    )


def asked(verb, target=""):
    return pb_utils.InferenceRequest({"text_input": ["-"]}, {"control": verb, "control_id": target})


class Replica:
    """A manager with the simulated engine, and questions to it."""

    def __init__(self, config, **engine):
        self._manager = Manager(config, open_engine("simulated", engine, ""), "test", "1", pb_utils)

    def __enter__(self):
        self._manager.start()
        return self

    def __exit__(self, *_):
        self._manager.stop()

    def submit(self, request):
        self._manager.submit([request])

    def ask(self, verb, target=""):
        request = asked(verb, target)
        self.submit(request)
        until(lambda: request.sender.finals)
        if request.sender.errors:
            return request.sender.errors[0].message()
        return json.loads(request.sender.text())


class Load(threading.Thread):
    """Sends requests at an even rate until it is told to stop."""

    def __init__(self, replica):
        super().__init__(daemon=True)
        self._replica = replica
        self._over = threading.Event()
        self.requests = []

    def run(self):
        began = time.monotonic()
        while not self._over.wait(max(0.0, began + len(self.requests) / RATE - time.monotonic())):
            number = len(self.requests)
            parameters = {"max_tokens": 4 + number % 13, "ignore_eos": True}
            request = pb_utils.InferenceRequest(
                {"text_input": [f"prompt {number}"], "stream": [bool(number % 2)]}, parameters, request_id=f"c{number}"
            )
            self.requests.append(request)
            self._replica.submit(request)

    def stop(self):
        self._over.set()
        self.join()
        until(lambda: all(request.sender.finals for request in self.requests))


def statuses(config, ids):
    """Ask a replica that has served none of these requests."""

    async def whole():
        history = History(config)
        try:
            answers = {}
            for one in ids:
                try:
                    question = {"control": "status", "control_id": one}
                    answers[one] = json.loads(
                        await control.answer(question, history.contexts, history.archive, Mock(control.Served))
                    )
                except LifecycleError as error:
                    answers[one] = {"status": error.slug}
            return answers
        finally:
            await history.aclose()

    return asyncio.run(whole())


@pytest.mark.parametrize(
    ("kind", "keeps_data"), [("redis", True), ("redis", False), ("etcd", True)], ids=["redis", "redis, emptied", "etcd"]
)
def test_a_store_that_dies_under_load_costs_no_request_and_no_status(kind, keeps_data):
    """Killed, and back 300 requests later: 0 failed; all ended ones of then are told by two replicas.

    If the store comes back empty, it is given again what is in memory: the last requests are told, up to the bound.
    """
    arguments = {"redis": ("--appendonly", "yes") if keeps_data else (), "etcd": ()}[kind]
    with {"redis": redis_server, "etcd": etcd_server}[kind](*arguments) as server:
        ours, other = (config_of(kind, server.url, node) for node in ("ours", "other"))
        with Replica(ours) as replica:
            load = Load(replica)
            load.start()
            until(lambda: len(load.requests) > 2 * HOT)
            server.kill()
            killed_at = len(load.requests)
            until(lambda: len(load.requests) > killed_at + 3 * HOT)
            until(lambda: not (store := replica.ask("state")["store"])["up"] and store["waiting"] > HOT)
            during = replica.ask("state")["store"]
            # A store that is known to be down is not waited for.
            nobody = in_time(lambda: replica.ask("status", "nobody"), 1.5)
            recent = replica.ask("status", f"c{len(load.requests) - 50}")
            server.start()
            back_at = len(load.requests)
            until(lambda: len(load.requests) > back_at + 2 * HOT)
            load.stop()
            until(lambda: replica.ask("state")["store"]["waiting"] == 0)
            state = replica.ask("state")
            ids = [request.request_id() for request in load.requests]
            here = {one: replica.ask("status", one) for one in ids[:: len(ids) // 60]}
            there = statuses(other, ids)
        total = len(ids)
        assert state["counts"]["completed"] == state["counts"]["received"] == total
        assert not any(request.sender.errors for request in load.requests), "0 failed"
        assert state["store"]["lost"] == 0
        assert not during["up"]
        assert during["failures"] >= 1
        assert during["waiting"] > HOT, "more waited than is kept otherwise"
        assert nobody.startswith(f"store_unavailable: {kind} at ")
        assert recent["status"] in {"finished", "live"}
        # A store that has lost its data gets all that waited for it, and what was in memory besides.
        expected = ids if keeps_data else ids[killed_at - HOT // 2 :]
        told = [one for one in expected if there[one]["status"] == "finished"]
        assert len(told) == len(expected)
        assert all(answer["status"] == "finished" for one, answer in here.items() if one in set(expected))
        number = killed_at + 3
        known, request = there[ids[number]], load.requests[number]
        assert known["outputs"] == [request.sender.text()] if number % 2 else known["outputs"]
        assert (known["node"], known["output_tokens"], known["kind"]) == ("ours", 4 + number % 13, "prompt")
        assert len(known["prompt_hash"]) == 64
        assert known.get("prompt") is None
        print(
            f"\n{kind}: {total} requests, store killed after {killed_at} and back after {back_at}: 0 failed; "
            f"{len(told)} of {len(expected)} statuses told by another replica; {state['store']}"
        )


def test_a_live_request_is_seen_from_another_replica_and_known_as_lost_when_its_own_is_gone():
    """While it runs its progress is told; after its replica was killed it is `lost`, not `live` for ever."""

    async def scenario(url):
        config = config_of("redis", url, "other")

        def told(name):
            return statuses(config, [name])[name]

        async def becomes(name, status, more=lambda _: True):
            async def now():
                found = await asyncio.to_thread(told, name)
                return found if found["status"] == status and more(found) else None

            return await eventually(now)

        # So slow that a long answer goes on for minutes, whatever is waited for meanwhile.
        with Replica(config_of("redis", url, "ours"), base_ms=50.0) as replica:
            request = pb_utils.InferenceRequest(
                {"text_input": ["long"], "stream": [True]},
                {"max_tokens": 1500, "ignore_eos": True, "tenant": "t1", "priority": 3},
                request_id="mine",
            )
            replica.submit(request)
            first = await becomes("mine", "live", lambda found: found["output_tokens"] > 0)
            assert (first["node"], first["tenant"], first["priority"]) == ("ours", "t1", 3)
            await becomes("mine", "live", lambda found: found["output_tokens"] > first["output_tokens"])
            theirs = pb_utils.InferenceRequest(
                {"text_input": ["other"], "stream": [True]},
                {"max_tokens": 1500, "ignore_eos": True},
                request_id="theirs",
            )
            replica.submit(theirs)
            await becomes("theirs", "live")
            assert (await asyncio.to_thread(cancel_elsewhere, config, "theirs"))["cancelled"]
            await eventually(lambda: theirs.sender.finals)
            assert theirs.sender.errors[0].message().startswith("cancelled: ")

            # A process that took over the name has another birthday: what the first one left is not its own. (Here the
            # first one lives on and signs again each second, so that the two take turns.)
            async def lost():
                await mark(config, "alive:ours", str(time.time()))
                return (await asyncio.to_thread(told, "mine"))["status"] == "lost"

            await eventually(lost)
            assert replica.ask("cancel", "mine")["cancelled"]
            await eventually(lambda: request.sender.finals)
            await becomes("mine", "cancelled")

    with redis_server() as server:
        asyncio.run(scenario(server.url))


def test_a_request_of_another_replica_has_a_timeline():
    """Ended and live: its phases follow each other without a gap, up to its end or up to now; its replica is named."""
    with redis_server() as server:
        ours, other = (config_of("redis", server.url, node) for node in ("ours", "other"))
        with Replica(ours) as replica, Replica(other) as asked_one:
            sent = [
                pb_utils.InferenceRequest(
                    {"text_input": [name], "stream": [True]}, {"max_tokens": most, "ignore_eos": True}, request_id=name
                )
                for name, most in (("short", 20), ("long", 1500))
            ]
            for request in sent:
                replica.submit(request)
            until(lambda: sent[0].sender.finals, 10)
            until(lambda: "first_token" in told(asked_one, "long")["times_ms"], 10)
            until(lambda: told(asked_one, "short")["status"] == "finished", 10)
            short, long = (timeline(told(asked_one, name)) for name in ("short", "long"))
            later = timeline_after(asked_one, long["output_tokens"])
            replica.ask("cancel", "long")
    assert (short["status"], short["output_tokens"], long["status"]) == ("completed", 20, "live")
    for shown in (short, long, later):
        ends = [phase["at"] + phase["s"] for phase in shown["phases"]]
        assert [phase["at"] for phase in shown["phases"]] == pytest.approx([0.0, *ends[:-1]], abs=1e-5)
        assert ends[-1] == pytest.approx(shown["total_s"], abs=1e-5)
        assert [phase["phase"] for phase in shown["phases"]] == ["queue", "prefill", "decode"]
    assert later["total_s"] > long["total_s"], "a live one goes on"


def told(replica, name):
    answer = replica.ask("status", name)
    return {"times_ms": {}, "status": answer} if isinstance(answer, str) else answer


def timeline(status):
    shown = view.document(view.of_status(msgspec.convert(status, Status)))
    assert shown["notes"] == ["served by the replica 'ours'"]
    return shown["requests"][0]


def timeline_after(replica, tokens):
    """Return the timeline of the long one once it has more tokens."""
    until(lambda: told(replica, "long")["output_tokens"] > tokens, 10)
    return timeline(told(replica, "long"))


def cancel_elsewhere(config, name):
    async def whole():
        history = History(config)
        try:
            asked = {"control": "cancel", "control_id": name}
            return json.loads(await control.answer(asked, history.contexts, history.archive, Mock(control.Served)))
        finally:
            await history.aclose()

    return asyncio.run(whole())


async def mark(config, name, text):
    from triton_lifecycle.store import open_store

    store = open_store(config)
    await store.set_marks({name: text}, 60.0)
    await store.aclose()
