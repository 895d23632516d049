"""What a decoder layer keeps of each token for its backward pass, by arithmetic.

Pure functions without torch, for the planner and for settings that the device decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Arithmetic = Literal["autocast", "bfloat16", "float32"]
"""How the layers compute: a float32 stream and bfloat16 products; bfloat16 from end to end; or
float32 from end to end."""

_STREAM_BYTES: Mapping[Arithmetic, tuple[int, int]] = {
    "autocast": (10, 16),
    "bfloat16": (4, 12),
    "float32": (8, 16),
}
"""Bytes a token and number of the hidden width: of inputs of attention and MLP, which every slice
keeps whole, and of norms and residuals, of which it keeps its share where slices share tokens."""

_QK_NORM_BYTES: Mapping[Arithmetic, int] = {"autocast": 6, "bfloat16": 6, "float32": 8}
"""Bytes a token and number of queries and keys that are normed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWidths:
    """Numbers that a layer computes of each token."""

    hidden: int
    query: int
    """Query heads x head width."""
    key_value: int
    """Key-value heads x head width."""
    inner: int
    """Of the MLP."""
    norms_queries: bool = False
    """Queries and keys are normed a head (qwen3)."""

    @classmethod
    def of_config(cls, text: Mapping[str, Any]) -> LayerWidths | None:
        """Reads config.json, or its part on text; None where it does not say the hidden width.

        What else it does not say counts as in a layer of an early GPT: heads of full width, and an
        MLP four times as wide.
        """
        hidden = text.get("hidden_size")
        if not isinstance(hidden, int):
            return None
        heads = text.get("num_attention_heads") or 1
        head_dim = text.get("head_dim") or hidden // heads
        return cls(
            hidden=hidden,
            query=heads * head_dim,
            key_value=(text.get("num_key_value_heads") or heads) * head_dim,
            inner=text.get("intermediate_size") or 4 * hidden,
            norms_queries=str(text.get("model_type", "")).startswith("qwen3"),
        )

    @property
    def weights(self) -> int:
        """Elements of the matrices of attention and a gated MLP."""
        attention = 2 * self.hidden * (self.query + self.key_value)
        return attention + 3 * self.hidden * self.inner


def layer_bytes(
    widths: LayerWidths,
    tokens: int,
    arithmetic: Arithmetic,
    *,
    num_slices: int = 1,
    shares_tokens: bool = False,
) -> float:
    """Bytes that one layer keeps of a micro-batch on a rank, without recomputation.

    Attention keeps no scores (fused kernels), and queries, keys, values and its output once; the
    gated MLP keeps gate, its activation, the other product and the product of both: 34 bytes a
    token and hidden number in arXiv 2205.05198 (eq. 2) are of an MLP of two matrices. Where weights
    are rounded for a pass, the rounded ones are kept, too. Within 1 % of what `rolemesh fit` counts
    for llama, qwen2 and qwen3 (tests/unit/engine/fit/test_activations.py).

    Args:
        widths: Of the whole layer.
        tokens: Of the micro-batch.
        arithmetic: How the layer computes.
        num_slices: Tensor slices.
        shares_tokens: Whether slices share the tokens between their blocks.
    """
    width = 4 if arithmetic == "float32" else 2
    whole, shared = _STREAM_BYTES[arithmetic]
    stream = widths.hidden * (whole + shared / (num_slices if shares_tokens else 1))
    heads = widths.query + widths.key_value
    inside = width * (2 * heads + 4 * widths.inner)
    if widths.norms_queries:
        inside += _QK_NORM_BYTES[arithmetic] * heads
    rounded = 0 if arithmetic == "float32" else 2 * widths.weights
    return tokens * (stream + inside / num_slices) + rounded / num_slices
