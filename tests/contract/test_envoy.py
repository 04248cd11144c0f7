"""What the real Envoy makes of our configuration, before HTTP servers that answer as Triton does."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.waiting import until

from triton_lifecycle.launcher.balancer import Balancer
from triton_lifecycle.launcher.envoy import Front, Policy, Replica
from triton_lifecycle.launcher.ports import PortTaken, free_ports

GOOD = (200, {"text_output": "good"})
FULL = (400, {"error": "queue_full: 64 requests are waiting; retry after 1.8 s"})
BAD = (400, {"error": "invalid_input: max_tokens must be at least 1"})
QUOTED = (400, {"error": "invalid_input: priority must be a number, found 'draining: x'"})
LIMIT_S = 60.0


class Threads(ThreadingHTTPServer):
    """Waits at its end for the threads of its connections."""

    daemon_threads = False


class Server:
    """Answers `generate` as it is told, and readiness."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.answer = GOOD
        self.ready = True
        self.asked = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = LIMIT_S

            def do_GET(self) -> None:
                self.reply(200 if outer.ready else 400, {})

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                outer.asked += 1
                self.reply(*outer.answer)

            def reply(self, status: int, document: dict[str, str]) -> None:
                body = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._http = Threads(("127.0.0.1", port), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join(LIMIT_S)
        self._http.server_close()


class Front3:
    """An Envoy and the servers behind it."""

    def __init__(self, folder: Path, count: int, policy: Policy) -> None:
        http, grpc, admin, *ports = free_ports("127.0.0.1", 3 + count)
        self.port = http
        self.servers = [Server(port) for port in ports]
        self.balancer = Balancer(
            [Replica("127.0.0.1", port, port) for port in ports],
            Front("127.0.0.1", http, grpc, admin),
            policy,
            state=folder,
        )

    def ask(self, headers: dict[str, str] | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        try:
            connection.request("POST", "/v2/models/m/generate", body=b"{}", headers=headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def leaves_out(self, server: Server) -> bool:
        """Tell whether so many requests are served, and none by this one, that each thread of Envoy's had its turn."""
        before = server.asked
        return [self.ask()[0] for _ in range(6)] == [200] * 6 and server.asked == before


@contextlib.contextmanager
def running(folder: Path, count: int, **policy: object) -> Iterator[Front3]:
    made = Front3(folder, count, Policy(model="m", **{"check_interval": 0.2} | policy))
    try:
        made.balancer.start()
        made.balancer.wait_ready(LIMIT_S)
        yield made
    finally:
        made.balancer.stop()
        for server in made.servers:
            server.close()


def test_a_refusal_goes_to_another_replica_and_a_fault_does_not(tmp_path):
    """`queue_full` is answered by another one, unseen; a wrong request is answered as it is, by one replica."""
    with running(tmp_path, 2, eject_after=10_000) as front:
        full, good = front.servers
        full.answer = FULL
        assert [front.ask()[0] for _ in range(10)] == [200] * 10
        assert full.asked > 0
        assert good.asked == 10
        full.answer = good.answer = BAD
        before = full.asked + good.asked
        status, body = front.ask()
        assert (status, json.loads(body)) == BAD
        assert full.asked + good.asked == before + 1
        full.answer = good.answer = FULL
        status, body = front.ask()
        assert (status, json.loads(body)) == (503, FULL[1])


def test_a_slug_that_an_error_quotes_is_no_refusal(tmp_path):
    """Only what stands at the error's beginning says what it is: further on may stand a caller's own words."""
    with running(tmp_path, 2, eject_after=10_000) as front:
        for server in front.servers:
            server.answer = QUOTED
        status, body = front.ask()
        assert (status, json.loads(body)) == QUOTED
        assert sum(server.asked for server in front.servers) == 1


# Each replica is asked once whether it is ready, and not again while a test runs: a yes would end what is looked at.
ONE_CHECK = {"check_interval": 600.0, "check_timeout": LIMIT_S / 2}


def test_a_replica_that_goes_on_refusing_is_left_out(tmp_path):
    """After so many refusals in a row it is not asked any more."""
    with running(tmp_path, 2, eject_after=3, eject_for=600.0, **ONE_CHECK) as front:
        full, _ = front.servers
        full.answer = FULL
        until(lambda: front.ask()[0] == 200 and front.balancer.ready() == 1)
        until(lambda: front.leaves_out(full))


@pytest.mark.parametrize("ended_by", [{"eject_for": 0.5, **ONE_CHECK}, {"eject_for": 600.0}], ids=["time", "readiness"])
def test_a_replica_that_was_left_out_is_asked_again(tmp_path, ended_by):
    """Once its time has passed, or once it says that it is ready; what it refuses no more it serves."""
    with running(tmp_path, 2, eject_after=3, **ended_by) as front:
        full, _ = front.servers
        full.answer = FULL
        until(lambda: front.ask()[0] == 200 and front.balancer.ready() == 1)
        full.answer = GOOD
        asked = full.asked
        until(lambda: front.balancer.ready() == 2)
        until(lambda: front.ask()[0] == 200 and full.asked > asked)


def test_a_replica_whose_model_is_not_ready_gets_nothing(tmp_path):
    """One that says no is left out; when all do the answer is ours: a slug, a message and a hint."""
    with running(tmp_path, 2) as front:
        first, second = front.servers
        first.ready = False
        until(lambda: front.balancer.ready() == 1)
        until(lambda: front.leaves_out(first))
        second.ready = False
        until(lambda: front.ask()[0] == 503)
        status, body = front.ask()
        assert status == 503
        assert json.loads(body)["error"].startswith("draining: no replica takes requests")
        first.ready = second.ready = True
        until(lambda: front.ask()[0] == 200)


def test_requests_with_the_same_affinity_meet_the_same_replica(tmp_path):
    """Under `ring_hash` a header's value leads to one replica, and different values to different ones."""
    with running(tmp_path, 3, strategy="ring_hash") as front:
        for value in range(40):  # that none of them meets one of three happens once in ten million times
            before = [server.asked for server in front.servers]
            for _ in range(2):
                front.ask({"x-lifecycle-affinity": f"prefix {value}"})
            grown = [server.asked - then for server, then in zip(front.servers, before, strict=True)]
            assert sorted(grown) == [0, 0, 2]
        assert all(server.asked for server in front.servers)


def test_an_envoy_that_is_stopped_leaves_nothing(tmp_path):
    """Its process and its file are gone, and its port is free for the next one with the same settings."""
    with running(tmp_path, 1) as front:
        front.balancer.stop()
        assert not front.balancer.running
        assert list((tmp_path / "envoy").iterdir()) == []
        front.balancer = front.balancer.again()
        front.balancer.start()
        front.balancer.wait_ready(LIMIT_S)
        assert front.ask()[0] == 200


def test_no_other_may_listen_on_its_ports(tmp_path):
    """A second Envoy is refused before it starts, and the kernel shares the port with nobody who asks for that."""
    with running(tmp_path, 1) as front:
        with pytest.raises(PortTaken, match=rf"port {front.port} \(http\) .*in use by envoy"):
            front.balancer.again().start()
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            with pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", front.port))


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_what_each_replica_got_is_counted(tmp_path, kind):
    """By cluster and in the order of the replicas."""
    with running(tmp_path, 2) as front:
        before = front.balancer.counts()[kind]
        for _ in range(8):
            front.ask()
        got = [after - then for after, then in zip(front.balancer.counts()[kind], before, strict=True)]
        assert got == ([server.asked for server in front.servers] if kind == "http" else [0, 0])
