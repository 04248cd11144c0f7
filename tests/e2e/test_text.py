"""Text is what the model said: whole characters, nothing lost between chunks, no part of a stop string."""

from __future__ import annotations

import asyncio
import json
import queue

import numpy as np
import pytest
import tritonclient.grpc as sync_grpc
import tritonclient.grpc.aio as aio_grpc
import tritonclient.http as sync_http
import tritonclient.http.aio as aio_http
from tritonclient.utils import InferenceServerException

from triton_lifecycle.launcher.server import TritonServer
from triton_lifecycle_client import Client

PROMPTS = {
    "emoji": "🎉🌍🚀 🎉🌍🚀 🎉🌍",
    "cjk": "日本の首都は東京です。中国的首都是",
    "arabic": "السلام عليكم ورحمة الله",
    "combining": "e\u0301a\u0308o\u0302 e\u0301a\u0308o\u0302 e\u0301",
    "flags and families": "🇫🇷🇩🇪 👨\u200d👩\u200d👧 🇫🇷🇩🇪",
    "spaces": "a\n    b\n        c\n    d\n",
    "plain": "The capital of France is",
}
FORCED = {
    "emoji": "🎉🌍🚀" * 4,
    "cjk": "世界你好" * 4,
    "arabic": "مرحبا" * 4,
    "combining": "e\u0301a\u0308" * 4,
    "family": "👨\u200d👩\u200d👧" * 3,
    "leading spaces": "    a  b",
}
"""Texts that a grammar has the real model say; their characters are several tokens each."""


@pytest.mark.parametrize("name", PROMPTS)
def test_the_joined_stream_is_the_unary_text(client: Client, name: str):
    """At temperature 0, whatever the script."""
    asked = {"max_tokens": 24, "temperature": 0.0}
    unary = client.generate(PROMPTS[name], **asked)
    with client.stream(PROMPTS[name], **asked) as stream:
        chunks = [chunk.text for chunk in stream]
    assert "".join(chunks) == unary.text
    assert stream.completion.output_tokens == unary.output_tokens


@pytest.mark.parametrize("name", FORCED)
def test_no_character_is_ever_cut(client: Client, name: str):
    """Each chunk holds whole characters, though the model makes them in pieces; the sum is exact."""
    text = FORCED[name]
    sampling = {"structured_outputs": {"choice": [text]}}
    with client.stream("Say:", max_tokens=120, temperature=0.0, sampling=sampling) as stream:
        chunks = [chunk.text for chunk in stream]
    assert "".join(chunks) == text
    assert not any("\ufffd" in chunk for chunk in chunks)
    assert len([chunk for chunk in chunks if chunk]) > 1
    assert client.generate("Say:", max_tokens=120, temperature=0.0, sampling=sampling).text == text


@pytest.mark.parametrize("stop", ["🌍", "🎉STOP", "TOP and", "b 世界"])
def test_no_part_of_a_stop_string_leaks(client: Client, stop: str):
    """Neither whole nor streamed, though it comes in several tokens."""
    text = "a b 世界 c 🎉STOP and 🌍 d"
    sampling = {"structured_outputs": {"choice": [text]}}
    asked = {"max_tokens": 60, "temperature": 0.0, "sampling": sampling, "stop": [stop]}
    before = text.partition(stop)[0]
    with client.stream("Say:", **asked) as stream:
        assert "".join(chunk.text for chunk in stream) == before
    assert stream.completion.finish_reason == "stop"
    assert client.generate("Say:", **asked).text == before


# ---- the official client library


def tensors(kind: type, text: str = PROMPTS["plain"], **sampling) -> list:
    """Return the inputs of a request as tritonclient takes them."""
    inputs = [kind("text_input", [1], "BYTES"), kind("stream", [1], "BOOL"), kind("sampling_parameters", [1], "BYTES")]
    inputs[0].set_data_from_numpy(np.array([text.encode()], dtype=np.object_))
    inputs[1].set_data_from_numpy(np.array([True]))
    parameters = json.dumps({"max_tokens": 8, "temperature": 0} | sampling)
    inputs[2].set_data_from_numpy(np.array([parameters.encode()], dtype=np.object_))
    return inputs


def test_tritonclients_blocking_grpc_streams(server: TritonServer):
    """One stream for two requests, told apart by their ids."""
    answers: queue.Queue = queue.Queue()
    with sync_grpc.InferenceServerClient(server.grpc_url) as triton:
        assert triton.is_model_ready("smollm2")
        triton.start_stream(callback=lambda result, error: answers.put((result, error)))
        for number in range(2):
            triton.async_stream_infer(
                "smollm2",
                tensors(sync_grpc.InferInput),
                request_id=f"sync-{number}",
                enable_empty_final_response=True,
            )
        texts, finals = {"sync-0": "", "sync-1": ""}, 0
        while finals < 2:
            result, error = answers.get(timeout=30)
            assert error is None
            response = result.get_response()
            finals += response.parameters["triton_final_response"].bool_param
            if (text := result.as_numpy("text_output")) is not None:
                texts[response.id] += text[0].decode()
        triton.stop_stream()
    assert texts["sync-0"] == texts["sync-1"]
    assert "Paris" in texts["sync-0"]


def test_tritonclients_asyncio_grpc_streams(server: TritonServer):
    """The same, as coroutines."""

    async def scenario() -> str:
        async def requests():
            yield {"model_name": "smollm2", "inputs": tensors(aio_grpc.InferInput)}

        async with aio_grpc.InferenceServerClient(server.grpc_url) as triton:
            text = ""
            async for result, error in triton.stream_infer(requests()):
                assert error is None
                text += result.as_numpy("text_output")[0].decode()
            return text

    assert "Paris" in asyncio.run(scenario())


def test_tritonclients_http_form_says_what_triton_says(server: TritonServer):
    """Its one route, ``infer``, refuses decoupled models by Triton's own rule, before any backend; the rest works."""
    with sync_http.InferenceServerClient(server.http_url) as triton:
        assert triton.is_model_ready("smollm2")
        assert {"text_input", "stop_words"} <= {
            entry["name"] for entry in triton.get_model_metadata("smollm2")["inputs"]
        }
        with pytest.raises(InferenceServerException, match="decoupled"):
            triton.infer("smollm2", tensors(sync_http.InferInput))

    async def scenario() -> None:
        async with aio_http.InferenceServerClient(server.http_url) as triton:
            assert await triton.is_model_ready("smollm2")
            with pytest.raises(InferenceServerException, match="decoupled"):
                await triton.infer("smollm2", tensors(aio_http.InferInput))

    asyncio.run(scenario())
