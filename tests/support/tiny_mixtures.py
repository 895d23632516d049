"""A tiny mixture of experts with the tiny tokenizer, which services train and sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.tiny_families import write_tiny_decoder
from support.tiny_models import END_ID, PAD_ID, START_ID, VOCAB_SIZE, tiny_tokenizer


def write_tiny_mixture(
    folder: Path, *, seed: int = 0, vocab_size: int = VOCAB_SIZE, **config: Any
) -> Path:
    """GLM4-MoE with 8 experts in the second of two layers, and a bias of them.

    Args:
        folder: Made if absent.
        seed: Of the random weights.
        vocab_size: Of model and tokenizer.
        **config: Over these sizes.
    """
    sizes = {
        "num_hidden_layers": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_mtp_layers": 0,
        "max_position_embeddings": 512,
        "bos_token_id": START_ID,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
    }
    write_tiny_decoder(folder, "glm4_moe", seed=seed, vocab_size=vocab_size, **{**sizes, **config})
    tiny_tokenizer(vocab_size).save_pretrained(folder)
    return folder
