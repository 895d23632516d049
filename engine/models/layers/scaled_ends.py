"""Both ends of a decoder whose family scales them: the embedding's rows, and the logits.

Shape letters: B rows, T longest row, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rolemesh.engine.layout.families import DecoderShape
from rolemesh.engine.parallel.tensor_parallel import VocabularySliceEmbedding


def unscaled(embedding: nn.Embedding) -> tuple[Callable[[torch.Tensor], torch.Tensor], float]:
    """What an embedding looks up, without the factor that its class multiplies by; and the factor.

    Weights are rounded before they are multiplied: the product of a rounded weight is no rounded
    product.

    Returns:
        A function from int64 [B, T] to the rows, floating [B, T, D]; and the factor, 1 for most.
    """
    is_slice = isinstance(embedding, VocabularySliceEmbedding)
    scale: float = getattr(embedding, "scale" if is_slice else "scalar_embed_scale", 1.0)
    if scale == 1.0:
        # What stands in the place of its class's forward stays.
        return embedding.forward, scale
    if isinstance(embedding, VocabularySliceEmbedding):
        return embedding.rows, scale
    return lambda tokens: nn.Embedding.forward(embedding, tokens), scale


def divide_states(lm: Any, shape: DecoderShape) -> None:
    """Moves a division of logits to the states that the head multiplies, in place.

    Log-probs here are products of states and the head's matrix, of which logits never exist as a
    whole. Called once a model, before its weights are seen rounded.

    Args:
        lm: A transformers model, whole or of a rank; its config is its own.
        shape: Of the whole model. Nothing happens where its family divides no logits.

    Raises:
        ValueError: The config's number is none to divide by.
    """
    name = shape.record.logits_over
    if not name or shape.head != "lm_head":
        return
    divisor = getattr(lm.config, name)
    if not isinstance(divisor, int | float) or divisor <= 0:
        raise ValueError(f"{name} is {divisor!r} in the model's config: give a number above 0")
    setattr(lm.config, name, 1.0)
    if divisor != 1 and not isinstance(lm.base_model.norm, nn.Identity):
        lm.base_model.norm.register_forward_hook(lambda _, args, states_BTD: states_BTD / divisor)
