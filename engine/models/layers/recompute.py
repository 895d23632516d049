"""Activation recomputation: parts of a layer run again in the backward pass.

It changes memory and time, never a number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rolemesh.engine.models.layers.routing import routed_again
from rolemesh.engine.parallel.data_parallel import layers_of


def apply_recompute(model: PreTrainedModel, mode: Literal["none", "selective", "full"]) -> None:
    """Wraps the decoder layers of a model in place.

    Args:
        model: A transformers model.
        mode: "none"; "selective", attention only (large activations, few operations: arXiv
            2205.05198, section 5); or "full", whole layers.

    Raises:
        ValueError: The model has no layers, or (selective) no attention that can be told apart.
    """
    if mode == "none":
        return
    layers = layers_of(model)
    if not layers:
        raise ValueError(
            f"model.recompute is {mode!r}, but {type(model).__name__} has no layers that support "
            "it: set it to 'none'"
        )
    for layer in layers:
        part: Any = layer if mode == "full" else getattr(layer, "self_attn", None)
        if part is None:
            raise ValueError(
                f"model.recompute is 'selective', but {type(layer).__name__} has no self_attn: "
                "set it to 'full' or 'none'"
            )
        forward = part.forward
        if isinstance(forward, MethodType):
            # It stays a method: what rounds weights gives it others in the module's place.
            part.forward = MethodType(_recomputed(forward.__func__), part)
        else:
            part.forward = _recomputed(forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Dropout is off, so no random state needs to be kept. Autocast is restored by torch.
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), routed_again()),
            **kwargs,
        )

    return recomputed
