"""The tensors of the official vLLM backend's contract, and a few inputs of ours, as one table.

Triton's generate routes turn a key that names a declared input into that tensor, lists included, and refuse any other
list. So the sampling parameters that are lists by nature are inputs too: ``stop`` and ``stop_token_ids``, and
``stop_words`` and ``bad_words`` as TensorRT-LLM's backend names them (an empty text among them means nothing).
``token_ids`` and ``continue_token_ids`` let an answer that broke off go on elsewhere (``continuation.py``).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

TritonType = Literal["TYPE_STRING", "TYPE_BOOL", "TYPE_FP32", "TYPE_UINT32", "TYPE_INT64"]


class Tensor(msgspec.Struct, frozen=True):
    """One input or output of the model."""

    name: str
    data_type: TritonType
    dims: tuple[int, ...]
    optional: bool = True

    def as_config(self, *, output: bool = False) -> dict[str, Any]:
        """Return what Triton's auto-completion takes."""
        config: dict[str, Any] = {"name": self.name, "data_type": self.data_type, "dims": list(self.dims)}
        if not output:
            config["optional"] = self.optional
        return config


INPUTS: tuple[Tensor, ...] = (
    Tensor("text_input", "TYPE_STRING", (1,)),
    Tensor("image", "TYPE_STRING", (-1,)),
    Tensor("stream", "TYPE_BOOL", (1,)),
    Tensor("sampling_parameters", "TYPE_STRING", (1,)),
    Tensor("exclude_input_in_output", "TYPE_BOOL", (1,)),
    Tensor("return_finish_reason", "TYPE_BOOL", (1,)),
    Tensor("return_cumulative_logprob", "TYPE_BOOL", (1,)),
    Tensor("return_logprobs", "TYPE_BOOL", (1,)),
    Tensor("return_num_input_tokens", "TYPE_BOOL", (1,)),
    Tensor("return_num_output_tokens", "TYPE_BOOL", (1,)),
    Tensor("embedding_request", "TYPE_STRING", (1,)),
    Tensor("stop", "TYPE_STRING", (-1,)),
    Tensor("stop_token_ids", "TYPE_INT64", (-1,)),
    Tensor("stop_words", "TYPE_STRING", (-1,)),
    Tensor("bad_words", "TYPE_STRING", (-1,)),
    Tensor("continue_token_ids", "TYPE_INT64", (-1,)),
)

OUTPUTS: tuple[Tensor, ...] = (
    Tensor("text_output", "TYPE_STRING", (-1,)),
    Tensor("finish_reason", "TYPE_STRING", (-1,)),
    Tensor("cumulative_logprob", "TYPE_FP32", (-1,)),
    Tensor("logprobs", "TYPE_STRING", (-1,)),
    Tensor("num_input_tokens", "TYPE_UINT32", (1,)),
    Tensor("num_output_tokens", "TYPE_UINT32", (-1,)),
    Tensor("token_ids", "TYPE_INT64", (-1,)),
)

INPUT_BY_NAME = {tensor.name: tensor for tensor in INPUTS}
OUTPUT_BY_NAME = {tensor.name: tensor for tensor in OUTPUTS}


def complete(config: Any) -> Any:  # noqa: ANN401 - pb_utils.ModelConfig exists only inside Triton
    """Add to a model's configuration what the contract fixes: every tensor, decoupled answers, no batching by Triton.

    Args:
        config: ``pb_utils.ModelConfig`` as Triton hands it to ``auto_complete_config``.

    """
    for tensor in INPUTS:
        config.add_input(tensor.as_config())
    for tensor in OUTPUTS:
        config.add_output(tensor.as_config(output=True))
    config.set_model_transaction_policy({"decoupled": True})
    config.set_max_batch_size(0)
    return config
