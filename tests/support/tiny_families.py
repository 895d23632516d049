"""Tiny random decoders of every family that can be spread over ranks, written offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from rolemesh.engine.models.buffers import saved_buffers
from rolemesh.engine.models.images.text_parts import register_text_parts

register_text_parts()

AUTO_CLASSES: dict[str, Any] = {
    "lm_head": AutoModelForCausalLM,
    "values": AutoModelForTokenClassification,
    "labels": AutoModelForSequenceClassification,
}
"""What can stand on top."""


def write_tiny_decoder(
    directory: Path | str,
    family: str,
    *,
    head: str = "lm_head",
    seed: int = 0,
    max_shard_size: str = "5GB",
    **config: Any,
) -> Path:
    """Writes config and float32 safetensors; no tokenizer.

    Weights are wide enough that a forgotten part shows, and no bias is 0 and no norm 1. Nor is a
    buffer that is in the file.

    Args:
        directory: made if absent.
        family: model_type.
        head: key of AUTO_CLASSES.
        seed: of the random weights.
        max_shard_size: of a file; a small one makes several files and an index.
        **config: over the sizes below.

    Returns:
        The folder.
    """
    directory = Path(directory)
    sizes = {
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "initializer_range": 0.15,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AUTO_CLASSES[head].from_config(
            AutoConfig.for_model(family, **{**sizes, **config}), dtype=torch.float32
        )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter += 0.2 * torch.randn(parameter.shape)
            for _, buffer in saved_buffers(model):
                buffer += 0.2 * torch.randn(buffer.shape)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory
