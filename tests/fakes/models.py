"""Small real models and adapters that the tests make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

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


IMAGE_TOKEN: Final = "<image>"
IMAGE_TOKENS: Final = 7
"""What one image becomes in the tiny vision model's prompt: four features, two marks and a tag around them."""
VISION_TEMPLATE: Final = (
    "{% for message in messages %}{{ message['role'] }}:"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_vision_model(folder: Path, tokenizer: Path) -> Path:
    """Write an Idefics3 of random weights, whole and real but tiny, whose answer depends on the image.

    Args:
        folder: where to write it.
        tokenizer: a model's folder, whose tokenizer it takes, with what stands for an image added.

    """
    from transformers import (
        AutoTokenizer,
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3Processor,
        LlamaConfig,
    )
    from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    words = AutoTokenizer.from_pretrained(tokenizer)
    words.chat_template = None
    added = [IMAGE_TOKEN, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    words.add_special_tokens({"additional_special_tokens": added})
    text = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
        # Large, so that what a tiny model says depends clearly on what it has seen.
        initializer_range=0.5,
        tie_word_embeddings=False,
    )
    vision = Idefics3VisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        initializer_range=0.3,
    )
    config = Idefics3Config(
        vision_config=vision,
        text_config=text,
        scale_factor=2,
        image_token_id=words.convert_tokens_to_ids(IMAGE_TOKEN),
        pad_token_id=words.pad_token_id,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config).to(torch.bfloat16)
    with torch.no_grad():
        model.model.connector.modality_projection.proj.weight.normal_(std=0.5)
    model.save_pretrained(folder)
    side = {"longest_edge": 32}
    pictures = Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
    processor = Idefics3Processor(
        image_processor=pictures, tokenizer=words, image_seq_len=4, chat_template=VISION_TEMPLATE
    )
    processor.save_pretrained(folder)
    return folder
