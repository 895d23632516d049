"""A sequence classifier whose weights are set by hand: it counts letters."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
from support.tiny_models import END_ID, PAD_ID, START_ID, tiny_tokenizer
from transformers import LlamaConfig, LlamaForSequenceClassification

HIDDEN_SIZE = 32
WEIGHT = 1e-3
"""What is counted moves the last state this little, so that its norm stays as it was: the logit is
off by a millionth of itself."""
ALWAYS, COUNTED, OTHER, SHARE = 0, 1, 2, 3
"""Dimensions of a state: a constant, which kind the token is of, and the share of counted ones."""


@torch.no_grad()
def write_counting_classifier(
    folder: Path, letters: Collection[str], *, vocab_size: int, scale: float
) -> Path:
    """Writes the folder: logit = share of counted tokens in the row * scale.

    One layer attends to all tokens alike, which gives the share. All states have the same norm.

    Args:
        folder: Made if absent.
        letters: What is counted; each is one token.
        vocab_size: Of the tiny tokenizer.
        scale: What a row of counted tokens alone would get.
    """
    tokenizer = tiny_tokenizer(vocab_size)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=HIDDEN_SIZE,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=HIDDEN_SIZE,
        max_position_embeddings=512,
        pad_token_id=PAD_ID,
        bos_token_id=START_ID,
        eos_token_id=END_ID,
        num_labels=1,
        dtype="float32",
    )
    model = LlamaForSequenceClassification(config)
    for name, parameter in model.named_parameters():
        # Without queries and keys attention is even; without the rest of the layer that is all.
        if not name.endswith("norm.weight"):
            parameter.zero_()
    embedding = model.model.embed_tokens.weight
    counted = tokenizer.convert_tokens_to_ids(sorted(letters))
    embedding[:, ALWAYS] = 1
    embedding[:, OTHER] = 1
    embedding[counted, OTHER] = 0
    embedding[counted, COUNTED] = 1
    # Two entries of a state are 1: normed, they are this.
    normed = (HIDDEN_SIZE / 2) ** 0.5
    attention = model.model.layers[0].self_attn
    attention.v_proj.weight[0, COUNTED] = 1 / normed
    attention.o_proj.weight[SHARE, 0] = WEIGHT
    model.score.weight[0, SHARE] = scale / (WEIGHT * normed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
