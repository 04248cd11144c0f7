"""A stand-in for ``triton_python_backend_utils``: the part of it that the Triton seam uses.

Like the real sender, it refuses anything after FINAL.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class TritonModelException(Exception):
    """A model's own error."""


class TritonError:
    """An error with a code."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    """A named array."""

    def __init__(self, name: str, array: np.ndarray[Any, Any]) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray[Any, Any]:
        return self._array


class InferenceResponse:
    """Outputs, or an error."""

    def __init__(self, output_tensors: list[Tensor], error: TritonError | None = None) -> None:
        self.tensors = {tensor.name(): tensor.as_numpy().tolist() for tensor in output_tensors}
        self.error = error


class Metric:
    """Keeps what was written."""

    def __init__(self, labels: dict[str, str], buckets: list[float] | None = None) -> None:
        self.labels, self.buckets = labels, buckets
        self.value = 0.0
        self.observed: list[float] = []

    def increment(self, value: float) -> None:
        self.value += value

    def set(self, value: float) -> None:
        self.value = value

    def observe(self, value: float) -> None:
        self.observed.append(value)


class MetricFamily:
    """A named metric; the last one of each name can be looked at, and of each name and labels."""

    COUNTER, GAUGE, HISTOGRAM = range(3)
    made: dict[str, Metric] = {}  # noqa: RUF012 - a record for tests
    series: dict[tuple[str, frozenset[tuple[str, str]]], Metric] = {}  # noqa: RUF012 - likewise

    def __init__(self, name: str, description: str, kind: int) -> None:
        self.name, self.description, self.kind = name, description, kind

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> Metric:  # noqa: N802 - Triton's name
        assert (buckets is not None) == (self.kind == self.HISTOGRAM)
        metric = self.made[self.name] = self.series[self.name, frozenset(labels.items())] = Metric(labels, buckets)
        return metric

    @classmethod
    def value(cls, name: str, **labels: str) -> float:
        """Return the sum of what the series of this name with these labels hold: values, or numbers of observations."""
        found = [
            metric
            for (known, _), metric in cls.series.items()
            if known == name and labels.items() <= metric.labels.items()
        ]
        assert found, f"no series {name} with {labels}"
        return sum(metric.value if metric.buckets is None else len(metric.observed) for metric in found)


class ResponseSender:
    """Keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[InferenceResponse | None, bool]] = []

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if self.finals:
            raise RuntimeError("response sender has been closed")
        self.sent.append((response, bool(flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL)))

    @property
    def finals(self) -> int:
        return sum(final for _, final in self.sent)

    @property
    def errors(self) -> list[TritonError]:
        return [response.error for response, _ in self.sent if response is not None and response.error is not None]

    def text(self) -> str:
        """Return the first sequence's text over all responses."""
        parts = [response.tensors["text_output"][0] for response, _ in self.sent if response and not response.error]
        return "".join(parts)


class InferenceRequest:
    """A request as Triton hands it to ``execute``."""

    def __init__(
        self, tensors: dict[str, Any] | None = None, parameters: dict[str, Any] | None = None, request_id: str = ""
    ) -> None:
        self._tensors = [Tensor(name, _array(value)) for name, value in (tensors or {}).items()]
        self._parameters = json.dumps(parameters or {})
        self._id = request_id
        self.sender = ResponseSender()
        self.cancelled = False
        self.polls = 0

    def request_id(self) -> str:
        return self._id

    def inputs(self) -> list[Tensor]:
        return self._tensors

    def parameters(self) -> str:
        return self._parameters

    def timeout(self) -> int:
        return 0

    def get_response_sender(self) -> ResponseSender:
        return self.sender

    def is_cancelled(self) -> bool:
        if self.sender.finals:
            raise RuntimeError("is_cancelled() after FINAL reads freed memory in the server")
        self.polls += 1
        return self.cancelled


def _array(value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, np.ndarray):
        return value
    values = value if isinstance(value, list) else [value]
    if isinstance(values[0], bool):
        return np.array(values, dtype=np.bool_)
    if values and all(isinstance(v, int) for v in values):
        return np.array(values, dtype=np.int64)
    return np.array([v if isinstance(v, bytes) else v.encode() for v in values], dtype=np.object_)
