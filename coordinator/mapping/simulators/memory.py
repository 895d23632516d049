"""Bytes that a role holds on one device: the arithmetic of what `rolemesh fit` counts.

`fit` runs the trainer on tensors without values, which takes minutes for a large model; a search
asks thousands of times, so that it computes the same by formula. The tests hold it to `fit`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rolemesh.coordinator.mapping.job.layouts import Layout
from rolemesh.coordinator.mapping.job.models import Model, whole_factors, whole_parameters
from rolemesh.coordinator.mapping.job.systems import System
from rolemesh.engine.specs.activations import (
    Arithmetic,
    LayerWidths,
    adapted_layer_bytes,
    layer_bytes,
)

_LOGITS_BYTES = 1 << 30
"""Logits that a head computes at a time, in float32 and of all slices
(`ModelSpec.logprob_chunk_tokens`)."""

_HEAD_COPIES = 3
"""Tensors as large as these logits at a head's peak."""

_OFFLOAD_BYTES = 4 * (64 << 20)
"""Moments on the device while they are stepped, where they lie on the host between steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBytes:
    """What a role holds on the device of its fullest rank."""

    rest: int
    """Between calls, awake: weights and moments."""
    peak: int
    """While it trains or scores."""


def rank_parameters(model: Model, layout: Layout) -> tuple[float, float, float]:
    """Parameters of the fullest rank, not cut over the data axis.

    Returns:
        All, those of one layer, and those outside the layers; none of an adapter.
    """
    inside, outside = _whole(model)
    layers = -(-model.shape.num_layers // layout.pp)
    layer = (model.layer_parameters - inside) / layout.tp + inside
    # The first stage has the embedding, the last one the head; they are about equal.
    outer = (model.outer_parameters - outside) / layout.tp + outside
    if layout.pp > 1:
        outer = model.head_parameters / layout.tp if model.shape.head == "lm_head" else outer
    return layers * layer + outer, layer, outer


def rank_trained(model: Model, layout: Layout) -> float:
    """Parameters of the fullest rank that training changes, not cut over the data axis."""
    if model.shape.adapter is None:
        return rank_parameters(model, layout)[0]
    layers = -(-model.shape.num_layers // layout.pp)
    whole = _whole_factors(model)
    cut = model.factor_parameters / model.shape.num_layers - whole
    return layers * (cut / layout.tp + whole) + model.trained_head_parameters


@lru_cache(maxsize=1024)
def _whole(model: Model) -> tuple[int, int]:
    return whole_parameters(model.shape)


@lru_cache(maxsize=1024)
def _whole_factors(model: Model) -> int:
    return whole_factors(model.shape)


def trained_bytes(
    model: Model, layout: Layout, system: System, *, averages: bool = False
) -> RankBytes:
    """Of a role that trains: the larger one of what the layers and what the head take.

    The base beneath an adapter is held once, without gradients and moments. With `averages` a
    moving average of what is trained is held in float32.
    """
    parameters, layer, outer = rank_parameters(model, layout)
    has_adapter = model.shape.adapter is not None
    own = rank_trained(model, layout) / layout.fsdp
    moments = own * system.moment_bytes
    held = own * system.weight_bytes + (0 if layout.offload else moments)
    if averages:
        held += own * 4
    if has_adapter:
        # A score head counts twice, which is a row.
        held += parameters / layout.fsdp * system.frozen_bytes
    shape, tokens = model.shape, layout.micro_batch_tokens
    layers = -(-shape.num_layers // layout.pp)
    # A stage keeps what came in for each pass that is under way (1F1B).
    under_way = layout.pp
    hidden = tokens * shape.hidden_size * system.activation_bytes
    one_layer = _layer_activations(model, layout, system)
    keeps_inputs = layout.recompute == "full"
    kept = layers * under_way * (hidden if keeps_inputs else one_layer)
    working = one_layer if keeps_inputs else 0.0
    gathered = 0.0
    if layout.fsdp > 1:
        # What is outside the layers is whole while the stage runs, and two layers are.
        gathered = outer * 4 + 2 * layer * system.gathered_bytes
        if has_adapter:
            gathered = (outer + 2 * layer) * system.frozen_bytes
    head = _head_bytes(model, layout)
    # Its gradient is whole until it is summed.
    head_gradient = 4 * model.head_parameters / layout.tp if layout.fsdp > 1 else 0.0
    if has_adapter:
        head_gradient = 0.0
    passes = own * system.gradient_bytes + kept + gathered + head_gradient + max(working, head)
    step = own * system.gradient_bytes + (min(moments, _OFFLOAD_BYTES) if layout.offload else 0)
    return RankBytes(rest=int(held), peak=int(held + max(passes, step)))


def scored_bytes(model: Model, layout: Layout, system: System) -> RankBytes:
    """Of a role that only scores."""
    parameters, layer, outer = rank_parameters(model, layout)
    held = parameters / layout.fsdp * system.frozen_bytes
    gathered = 0.0
    if layout.fsdp > 1:
        gathered = (outer + 2 * layer) * system.frozen_bytes
    shape = model.shape
    hidden = layout.micro_batch_tokens * shape.hidden_size * system.activation_bytes
    wide = layout.micro_batch_tokens * shape.intermediate_size / layout.tp
    passes = 4 * hidden + 3 * wide * system.activation_bytes
    return RankBytes(
        rest=int(held), peak=int(held + gathered + max(passes, _head_bytes(model, layout)))
    )


def _layer_activations(model: Model, layout: Layout, system: System) -> float:
    """What one layer keeps for its backward pass, on a rank."""
    shape = model.shape
    widths = LayerWidths(
        hidden=shape.hidden_size,
        query=shape.num_heads * shape.head_dim,
        key_value=shape.num_kv_heads * shape.head_dim,
        inner=shape.intermediate_size,
        norms_queries=shape.has_qk_norm,
    )
    arithmetic: Arithmetic = "autocast" if system.activation_bytes == 4 else "bfloat16"
    if shape.adapter is not None:
        return adapted_layer_bytes(
            widths,
            layout.micro_batch_tokens,
            arithmetic,
            rank=shape.adapter.rank,
            targets=shape.adapter.targets,
            frozen_bytes=system.frozen_bytes,
            num_slices=layout.tp,
        )
    return layer_bytes(widths, layout.micro_batch_tokens, arithmetic, num_slices=layout.tp)


def _head_bytes(model: Model, layout: Layout) -> float:
    if model.shape.head != "lm_head":
        return 4.0 * layout.micro_batch_tokens * model.shape.hidden_size
    logits = min(_LOGITS_BYTES, 4 * layout.micro_batch_tokens * model.shape.vocab_size)
    hidden = 4.0 * layout.micro_batch_tokens * model.shape.hidden_size
    return _HEAD_COPIES * logits / layout.tp + hidden
