"""Tiny random Llama-family folders, written offline, for tests that need a real model.

All functions are deterministic in their arguments: the same call writes the same bytes.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaForSequenceClassification

from rolemesh.quickstart.tiny_model import (
    END,
    END_ID,
    HEAD_DIM,
    PAD_ID,
    START,
    START_ID,
    VOCAB_SIZE,
    perturb_vectors,
    tiny_config,
    tiny_tokenizer,
    write_tiny_llama,
)

__all__ = [
    "END",
    "END_ID",
    "HEAD_DIM",
    "PAD_ID",
    "START",
    "START_ID",
    "VOCAB_SIZE",
    "tiny_tokenizer",
    "write_tiny_classifier",
    "write_tiny_llama",
]


def write_tiny_classifier(
    directory: Path | str,
    *,
    seed: int = 0,
    num_labels: int = 2,
    vocab_size: int = VOCAB_SIZE,
    num_layers: int = 2,
    hidden_size: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    max_position_embeddings: int = 512,
) -> Path:
    """Writes a sequence classifier folder with the same backbone shape and tokenizer.

    Args:
        directory: made if absent.
        seed: of the random weights.
        num_labels: logits of the head.
        vocab_size: of tokenizer and model alike.
        num_layers: decoder layers.
        hidden_size: width of the residual stream.
        num_heads: query heads, of 32 each.
        num_kv_heads: key and value heads.
        max_position_embeddings: longest sequence.

    Returns:
        The folder.
    """
    directory = Path(directory)
    config = tiny_config(
        tied=False,
        vocab_size=vocab_size,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        max_position_embeddings=max_position_embeddings,
    )
    config.num_labels = num_labels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForSequenceClassification(config)
    perturb_vectors(model, torch.Generator().manual_seed(seed + 1))
    model.save_pretrained(directory)
    tiny_tokenizer(vocab_size).save_pretrained(directory)
    return directory
