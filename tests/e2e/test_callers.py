"""Other models as callers: an ensemble that holds ours, and a Python model that calls it (BLS)."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import REPOSITORY, START_LIMIT_S
from tests.waiting import TRIES
from triton_lifecycle.launcher.server import TritonServer
from triton_lifecycle_client import Client

CALLER = '''
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Asks the model behind it, joins what it streams, and passes its errors on."""

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        prompt = pb_utils.get_input_tensor_by_name(request, "PROMPT")
        sampling = json.dumps({"max_tokens": 6, "temperature": 0}).encode()
        inner = pb_utils.InferenceRequest(
            model_name="simulated",
            requested_output_names=["text_output"],
            inputs=[
                pb_utils.Tensor("text_input", prompt.as_numpy()),
                pb_utils.Tensor("stream", np.array([True])),
                pb_utils.Tensor("sampling_parameters", np.array([sampling], dtype=np.object_)),
            ],
        )
        text = b""
        for response in inner.exec(decoupled=True):
            if response.has_error():
                return pb_utils.InferenceResponse(output_tensors=[], error=response.error())
            for tensor in response.output_tensors():
                text += tensor.as_numpy()[0]
        return pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", np.array([text], dtype=np.object_))])
'''
CALLER_CONFIG = """
backend: "python"
input [ { name: "PROMPT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
ENSEMBLE_CONFIG = """
platform: "ensemble"
input [
  { name: "QUESTION" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "HOW" data_type: TYPE_STRING dims: [ 1 ] }
]
output [ { name: "ANSWER" data_type: TYPE_STRING dims: [ -1 ] } ]
ensemble_scheduling { step [ {
  model_name: "simulated"
  model_version: -1
  input_map { key: "text_input" value: "QUESTION" }
  input_map { key: "sampling_parameters" value: "HOW" }
  output_map { key: "text_output" value: "ANSWER" }
} ] }
"""
SAMPLING = json.dumps({"max_tokens": 6, "temperature": 0})
NOT_OURS = "Stub process 'caller_0' is not healthy"
"""The stub that runs CALLER crashes now and then in Triton 2.51; see compatibility.md."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository of the simulated model and its two callers."""
    folder = tmp_path_factory.mktemp("callers")
    shutil.copytree(REPOSITORY / "simulated", folder / "simulated", ignore=shutil.ignore_patterns("__pycache__"))
    for name, config in (("caller", CALLER_CONFIG), ("whole", ENSEMBLE_CONFIG)):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config, encoding="utf-8")
    (folder / "caller" / "1" / "model.py").write_text(CALLER, encoding="utf-8")
    return folder


@contextmanager
def serving(repository: Path, caller: str) -> Iterator[TritonServer]:
    """Run the simulated model with one caller; it ends in order, unless the block fails."""
    with TritonServer(repository, models=["simulated", caller], log_path=repository / "triton.log") as running:
        yield running.wait_ready(START_LIMIT_S)
        time.sleep(1.5)
        assert running.stop() == 0, running.log()[-4000:]
        assert running.leftovers == []


def right(server: TritonServer) -> str:
    """Return what the model says when it is asked directly."""
    with Client(server.grpc_url, model="simulated") as client:
        return client.generate("Tell me", max_tokens=6, temperature=0.0).text


def ask(server: TritonServer, model: str, **body: str) -> httpx.Response:
    return httpx.post(f"http://{server.http_url}/v2/models/{model}/generate", json=body, timeout=60)


def test_a_python_model_may_call_ours(repository: Path):
    """It gets the whole stream, and an error of ours as it is."""
    for left in reversed(range(TRIES)):
        with suppress(CrashedCaller) if left else nullcontext(), serving(repository, "caller") as server:
            answer, refused = (_asked(server, prompt) for prompt in ("Tell me", ""))
            assert answer.status_code == 200, (answer.text, server.log()[-4000:])
            assert answer.json()["TEXT"] == right(server)
            assert "invalid_input: text_input: the prompt is empty" in refused.text
            return


def _asked(server: TritonServer, prompt: str) -> httpx.Response:
    answer = ask(server, "caller", PROMPT=prompt)
    if NOT_OURS in answer.text:
        server.kill()
        raise CrashedCaller(server.log()[-4000:])
    return answer


class CrashedCaller(Exception):
    """Triton's stub of the calling model is gone."""


def test_an_ensemble_may_hold_ours(repository: Path):
    """Its answer is the model's, the prompt before it as ever; a wrong request is refused with our words."""
    with serving(repository, "whole") as server:
        whole = ask(server, "whole", QUESTION="Tell me", HOW=SAMPLING).json()
        assert whole["ANSWER"] == "Tell me" + right(server)
        refused = ask(server, "whole", QUESTION="Tell me", HOW='{"max_tokenz": 1}')
        assert "did you mean 'max_tokens'?" in refused.text
