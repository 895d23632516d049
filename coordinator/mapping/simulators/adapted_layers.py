"""What a decoder layer with an adapter keeps of each token for its backward pass, by arithmetic.

Beside `engine/specs/activations.py`, which has layers whose weights are all trained. A frozen
matrix or norm keeps no input for a gradient of its own; what is kept is for the gradients of
inputs, and for the factors.
"""

from __future__ import annotations

from collections.abc import Collection

from rolemesh.engine.specs.activations import Arithmetic, LayerWidths

_ATTENTION_INPUTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_MLP_INPUTS = ("mlp.gate_proj", "mlp.up_proj")

_NORM_BYTES = 4
"""Bytes a token and number that is normed: its float32."""


def adapted_layer_bytes(
    widths: LayerWidths,
    tokens: int,
    arithmetic: Arithmetic,
    *,
    rank: int,
    targets: Collection[str],
    frozen_bytes: int = 2,
    num_slices: int = 1,
) -> float:
    """Bytes that one layer keeps of a micro-batch on a rank, without recomputation.

    Attention and the gated MLP keep what their own products need, and each factor A the input of
    its matrix: under autocast a rounded copy each, else one that neighbours share. Within 1 % of
    what `rolemesh fit` counts (tests/numerics/test_fit.py).

    Args:
        widths: Of the whole layer.
        tokens: Of the micro-batch.
        arithmetic: How the layer computes.
        rank: Of the adapter.
        targets: Matrices that have one, by their names in the layer, e.g. "mlp.up_proj".
        frozen_bytes: Of a number of the base. A wider one than its products is rounded for a pass,
            and kept so.
        num_slices: Tensor slices.
    """
    width = 4 if arithmetic == "float32" else 2
    numbers = 0
    for group in (_ATTENTION_INPUTS, _MLP_INPUTS):
        copies = len(set(targets).intersection(group))
        numbers += widths.hidden * (copies if arithmetic == "autocast" else min(1, copies))
    inside = width * (2 * (widths.query + widths.key_value) + 3 * widths.inner)
    if "mlp.down_proj" in targets:
        inside += width * widths.inner
    if widths.norms_queries:
        inside += _NORM_BYTES * (widths.query + widths.key_value)
    narrow = width * rank * len(targets)
    token = 2 * _NORM_BYTES * widths.hidden + width * numbers + narrow + inside / num_slices
    cast = 0
    if arithmetic != "float32":
        cast = 2 * _factors(widths, rank, targets)
        cast += 2 * widths.weights if frozen_bytes > 2 else 0
    return tokens * token + cast / num_slices


def _factors(widths: LayerWidths, rank: int, targets: Collection[str]) -> int:
    """Numbers of the factors in a layer."""
    sides = {
        "self_attn.q_proj": widths.query,
        "self_attn.k_proj": widths.key_value,
        "self_attn.v_proj": widths.key_value,
        "self_attn.o_proj": widths.query,
    }
    return rank * sum(widths.hidden + sides.get(module, widths.inner) for module in targets)
