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
    max_position_embeddings: int = 512,
) -> Path:
    """Writes a sequence classifier folder with the same backbone shape and tokenizer.

    Args:
        directory: made if absent.
        seed: of the random weights.
        num_labels: logits of the head.
        max_position_embeddings: longest sequence.

    Returns:
        The folder.
    """
    directory = Path(directory)
    config = tiny_config(tied=False, max_position_embeddings=max_position_embeddings)
    config.num_labels = num_labels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForSequenceClassification(config)
    perturb_vectors(model, torch.Generator().manual_seed(seed + 1))
    model.save_pretrained(directory)
    tiny_tokenizer(VOCAB_SIZE).save_pretrained(directory)
    return directory
