"""What Triton's own options add: its tracing, whose spans lie between the caller's and ours, and forwarded headers."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import StartServer
from tests.otlp import Receiver, otlp_receiver
from triton_lifecycle.errors import InvalidInput, TotalTimeout
from triton_lifecycle.launcher.server import TritonServer
from triton_lifecycle_client import Client

CALLER = "00-{:032x}-{:016x}-01"


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    """Return a collector for Triton, which speaks HTTP to it, and for us."""
    with otlp_receiver() as running:
        yield running


@pytest.fixture(scope="module")
def optioned(start_server: StartServer, receiver: Receiver) -> Iterator[TritonServer]:
    """A server of the simulated engine that forwards a header; in it Triton and the backend trace every request."""
    options = ("mode=opentelemetry", "rate=1", "level=TIMESTAMPS", f"opentelemetry,url={receiver.http_url}/v1/traces")
    server = start_server(
        "simulated",
        env={
            "LIFECYCLE__MONITORING__TRACING_ENABLED": "true",
            "LIFECYCLE__MONITORING__TRACING_ENDPOINT": receiver.grpc_url,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        },
        extra_args=[
            *(f"--trace-config={option}" for option in options),
            "--grpc-header-forward-pattern=x-request-timeout",
        ],
    )
    yield server
    time.sleep(1.5)
    assert server.stop() == 0, server.log()[-4000:]


@pytest.mark.parametrize(("protocol", "trace"), [("grpc", 1), ("http", 2)])
def test_our_request_is_below_tritons_own(optioned: TritonServer, receiver: Receiver, protocol: str, trace: int):
    """Caller → Triton's request → Triton's model → our request → our stages, in one trace."""
    url = optioned.grpc_url if protocol == "grpc" else optioned.http_url
    with Client(url, model="simulated", protocol=protocol) as client:
        client.generate("x", max_tokens=3, traceparent=CALLER.format(trace, 7))
    spans = receiver.trace(f"{trace:032x}", "InferRequest", "simulated", "text_completion simulated", "execute")
    chain = [spans[name] for name in ("InferRequest", "simulated", "text_completion simulated", "execute")]
    assert [span.parent_id for span in chain] == [f"{7:016x}", *(span.span_id for span in chain[:-1])]
    assert chain[0].service == "triton-inference-server"


def test_a_gateways_header_limits_the_request(optioned: TritonServer):
    """``x-request-timeout`` is a limit in seconds like any other of the caller's; one that is no number is refused."""
    endless = {"max_tokens": 3000, "ignore_eos": True}
    with Client(optioned.grpc_url, model="simulated", headers={"x-request-timeout": "0.4"}) as client:
        with pytest.raises(TotalTimeout, match=r"the total limit of 0\.4 s"):
            client.generate("x", **endless)
        with pytest.raises(TotalTimeout, match=r"the total limit of 0\.3 s"):
            client.generate("x", timeout=0.3, **endless)
    with (
        Client(optioned.grpc_url, model="simulated", headers={"x-request-timeout": "soon"}) as client,
        pytest.raises(InvalidInput, match="x-request-timeout: expected a number, found 'soon'"),
    ):
        client.generate("x", max_tokens=3)
