"""Small real models and adapters that the tests make or take from packages."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def make_adapter(folder: Path, base: Path, *, seed: int, scale: float = 1.0) -> Path:
    """Write a LoRA adapter of random weights for a llama-like model; large enough to change what it says.

    Args:
        folder: where to write it.
        base: the model's folder, for its shapes.
        seed: of the weights.
        scale: of the weights; 0 makes an adapter that changes nothing.

    """
    shape = json.loads((base / "config.json").read_text(encoding="utf-8"))
    hidden, layers, rank = shape["hidden_size"], shape["num_hidden_layers"], 8
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, hidden, generator=random) * 0.05
        tensors[f"{name}.lora_B.weight"] = torch.randn(hidden, rank, generator=random) * scale
    folder.mkdir(parents=True)
    save_file({key: value.to(torch.bfloat16) for key, value in tensors.items()}, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
