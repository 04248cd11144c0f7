"""One request, asked in each of the four ways that the contract has, with nothing of ours in between."""

from __future__ import annotations

import json
import queue
from typing import TYPE_CHECKING, Any, Final

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from triton_lifecycle.schema import INPUT_BY_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triton_lifecycle.launcher.server import TritonServer

WAYS: Final = ("http", "http-stream", "grpc", "grpc-stream")
LIMIT_S: Final = 60.0

Response = dict[str, list[Any]]
"""One response: by output name, one element per sequence."""

_TYPES: Final = {
    "TYPE_STRING": ("BYTES", np.object_),
    "TYPE_BOOL": ("BOOL", np.bool_),
    "TYPE_INT64": ("INT64", np.int64),
}
_TRITONS_OWN: Final = frozenset({"model_name", "model_version", "id", "sequence_id", "sequence_start", "sequence_end"})


class RefusedError(Exception):
    """The answer was an error; ``responses`` came before it."""

    def __init__(self, text: str, responses: list[Response], status: int | None = None) -> None:
        super().__init__(text)
        self.responses = responses
        self.status = status


def ask(
    server: TritonServer,
    way: str,
    *,
    model: str = "smollm2",
    parameters: Mapping[str, Any] | None = None,
    request_id: str = "",
    **inputs: Any,
) -> list[Response]:
    """Return the responses that hold anything, the last with the ending.

    Args:
        server: a running server.
        way: one of :data:`WAYS`; those that stream set the input ``stream``.
        model: whom to ask.
        parameters: the request's parameters.
        request_id: the caller's id.
        inputs: by name; ``sampling_parameters`` may be an object.

    Raises:
        RefusedError: the answer is an error.

    """
    if isinstance(inputs.get("sampling_parameters"), dict):
        inputs["sampling_parameters"] = json.dumps(inputs["sampling_parameters"])
    if way.endswith("-stream"):
        inputs["stream"] = True
    call = _http if way.startswith("http") else _grpc
    return call(server, way, model, dict(parameters or {}), request_id, inputs)


def refusal(server: TritonServer, way: str, **asked: Any) -> str:
    """Return the text of the error that such a request must be answered with, before anything else."""
    with pytest.raises(RefusedError) as caught:
        ask(server, way, **asked)
    assert caught.value.responses == []
    assert caught.value.status in {None, 200, 400}, "a caller's fault is never a 5xx"
    return str(caught.value)


def joined(responses: list[Response], index: int = 0) -> str:
    """Return the whole text of one sequence."""
    return "".join(response["text_output"][index] for response in responses)


def _http(
    server: TritonServer, way: str, model: str, parameters: dict[str, Any], request_id: str, inputs: dict[str, Any]
) -> list[Response]:
    route = "generate_stream" if way == "http-stream" else "generate"
    body = inputs | ({"parameters": parameters} if parameters else {}) | ({"id": request_id} if request_id else {})
    answer = httpx.post(f"http://{server.http_url}/v2/models/{model}/{route}", json=body, timeout=LIMIT_S)
    # An error that comes first has a status of its own; the backend's still comes as an event, Triton's own does not.
    events = [json.loads(line[5:]) for line in answer.text.splitlines() if line.startswith("data:")]
    documents = events or [answer.json()]
    responses: list[Response] = []
    for document in documents:
        if "error" in document:
            raise RefusedError(document["error"], responses, answer.status_code)
        found = {name: value for name, value in document.items() if name not in _TRITONS_OWN}
        if found:
            responses.append({name: value if isinstance(value, list) else [value] for name, value in found.items()})
    return responses


def _grpc(
    server: TritonServer, _: str, model: str, parameters: dict[str, Any], request_id: str, inputs: dict[str, Any]
) -> list[Response]:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    responses: list[Response] = []
    with triton_grpc.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        client.async_stream_infer(
            model,
            [tensor(name, value) for name, value in inputs.items()],
            request_id=request_id,
            timeout=parameters.pop("timeout", None),
            parameters=parameters,
            enable_empty_final_response=True,
        )
        while True:
            result, error = answers.get(timeout=LIMIT_S)
            if error is not None:
                raise RefusedError(error.message(), responses)
            response = result.get_response()
            found = {
                output.name: [_plain(value) for value in result.as_numpy(output.name)] for output in response.outputs
            }
            if found:
                responses.append(found)
            if response.parameters["triton_final_response"].bool_param:
                return responses


def tensor(name: str, value: Any) -> Any:
    """Return an input as tritonclient takes it; texts may be given as bytes."""
    kind, dtype = _TYPES[INPUT_BY_NAME[name].data_type]
    values = value if isinstance(value, list) else [value]
    made = triton_grpc.InferInput(name, [len(values)], kind)
    raw = [element.encode() if isinstance(element, str) else element for element in values]
    made.set_data_from_numpy(np.array(raw, dtype=dtype))
    return made


def _plain(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value.item()
