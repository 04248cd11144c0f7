"""A server closed as docs/security.md says: what it still answers to whom, over both protocols."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from tests.e2e.conftest import StartServer
from triton_lifecycle import errors
from triton_lifecycle.launcher.server import TritonServer
from triton_lifecycle_client import Client

TOKEN = "the operators' own word"
APIS = "model-repository,trace,logging,shared-memory"
KEY, WORD = "x-admin", "another-word"


@pytest.fixture(scope="module")
def closed(start_server: StartServer) -> Iterator[TritonServer]:
    """A server of the simulated engine, with a control token and Triton's management restricted."""
    server = start_server(
        "simulated",
        env={"LIFECYCLE_CONTROL_TOKEN": TOKEN},
        extra_args=[f"--http-restricted-api={APIS}:{KEY}={WORD}", f"--grpc-restricted-protocol={APIS}:{KEY}={WORD}"],
    )
    yield server
    time.sleep(1.5)
    assert server.stop() == 0, server.log()[-4000:]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_requests_pass_and_control_requests_need_the_token(closed: TritonServer, protocol: str):
    """Anybody generates; who has not the token neither sees nor cancels what others do."""
    url = closed.grpc_url if protocol == "grpc" else closed.http_url
    with (
        Client(url, model="simulated", protocol=protocol) as anybody,
        Client(url, model="simulated", protocol=protocol, control_token=TOKEN) as operator,
    ):
        assert anybody.generate("x", max_tokens=3, request_id="mine").output_tokens == 3
        for ask in (lambda: anybody.status("mine"), lambda: anybody.cancel("mine"), anybody.state):
            with pytest.raises(errors.Forbidden):
                ask()
        assert operator.status("mine").status == "finished"
        assert operator.state().counts["completed"] >= 1
    assert TOKEN not in closed.log()


def test_tritons_own_management_needs_its_header(closed: TritonServer):
    """Unloading, trace and log settings are refused without the header, and allowed with it."""
    base = f"http://{closed.http_url}/v2"
    for path in ("repository/models/simulated/unload", "trace/setting", "logging"):
        assert httpx.post(f"{base}/{path}", json={}, timeout=10).status_code == 403
    assert httpx.post(f"{base}/repository/index", headers={KEY: WORD}, timeout=10).status_code == 200
    with triton_grpc.InferenceServerClient(closed.grpc_url) as client:
        with pytest.raises(InferenceServerException, match="restricted"):
            client.get_model_repository_index()
        # Over gRPC Triton wants its own prefix before the header's name.
        assert client.get_model_repository_index(headers={f"triton-grpc-protocol-{KEY}": WORD}).models
