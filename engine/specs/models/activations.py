"""What a decoder layer keeps of each token for its backward pass, by arithmetic.

Pure functions without torch, for the planner and for settings that the device decides.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rolemesh.engine.layout.adapters import chosen_targets
from rolemesh.engine.layout.family_records import RECORDS

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

_ATTENTION_INPUTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_MLP_INPUTS = ("mlp.gate_proj", "mlp.up_proj")
_MATRICES = (*_ATTENTION_INPUTS, "self_attn.o_proj", *_MLP_INPUTS, "mlp.down_proj")
"""Of a layer, by their names in it."""

_NORM_BYTES = 4
"""Bytes a token and number that is normed above a frozen norm: its float32."""


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
    """Queries and keys are normed."""

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
        record = RECORDS.get(str(text.get("model_type")))
        head_dim = text.get("head_dim") or hidden // heads
        return cls(
            hidden=hidden,
            query=heads * head_dim,
            key_value=(text.get("num_key_value_heads") or heads) * head_dim,
            inner=text.get("intermediate_size") or 4 * hidden,
            norms_queries=record is not None and record.norms_queries(text),
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


def adapted_layer_bytes(
    widths: LayerWidths,
    tokens: int,
    arithmetic: Arithmetic,
    *,
    rank: int,
    targets: Literal["all_linear"] | Sequence[str],
    frozen_bytes: int = 2,
    num_slices: int = 1,
    shares_tokens: bool = False,
) -> float:
    """Bytes that one layer with an adapter keeps of a micro-batch, without recomputation.

    A frozen matrix or norm keeps no input for a gradient of its own. Attention and the gated MLP
    keep what their own products need, and each factor A the input of its matrix: under autocast a
    rounded copy each, else one that neighbours share. Within 1 % of what `rolemesh fit` counts
    (tests/numerics/test_fit.py).

    Args:
        widths: Of the whole layer.
        tokens: Of the micro-batch.
        arithmetic: How the layer computes.
        rank: Of the adapter.
        targets: As in `AdapterSpec`. A name that is none of a Llama's matrices counts as all.
        frozen_bytes: Of a number of the base. A wider one than its products is rounded for a pass,
            and kept so.
        num_slices: Tensor slices.
        shares_tokens: Whether slices share the tokens between their blocks.
    """
    adapted = _adapted(targets)
    width = 4 if arithmetic == "float32" else 2
    numbers = 0
    for group in (_ATTENTION_INPUTS, _MLP_INPUTS):
        copies = len(adapted.intersection(group))
        numbers += widths.hidden * (copies if arithmetic == "autocast" else min(1, copies))
    inside = width * (2 * (widths.query + widths.key_value) + 3 * widths.inner)
    if "mlp.down_proj" in adapted:
        inside += width * widths.inner
    if widths.norms_queries:
        inside += _NORM_BYTES * (widths.query + widths.key_value)
    narrow = width * rank * len(adapted)
    normed = 2 * _NORM_BYTES * widths.hidden / (num_slices if shares_tokens else 1)
    token = normed + width * numbers + narrow + inside / num_slices
    cast = 0
    if arithmetic != "float32":
        cast = 2 * _factors(widths, rank, adapted)
        cast += 2 * widths.weights if frozen_bytes > 2 else 0
    return tokens * token + cast / num_slices


def _adapted(targets: Literal["all_linear"] | Sequence[str]) -> set[str]:
    """The matrices that have an adapter, by their names in a layer."""
    known = {form for name in _MATRICES for form in (name, name.rpartition(".")[2])}
    if targets != "all_linear" and not known.issuperset(targets):
        return set(_MATRICES)
    return set(chosen_targets(targets, _MATRICES))


def _factors(widths: LayerWidths, rank: int, adapted: Collection[str]) -> int:
    """Numbers of the factors in a layer."""
    sides = {
        "self_attn.q_proj": widths.query,
        "self_attn.k_proj": widths.key_value,
        "self_attn.v_proj": widths.key_value,
        "self_attn.o_proj": widths.query,
    }
    return rank * sum(widths.hidden + sides.get(module, widths.inner) for module in adapted)
