"""Bytes that a role holds on one device: the arithmetic of what `rolemesh fit` counts.

`fit` runs the trainer on tensors without values, which takes minutes for a large model; a search
asks thousands of times, so that it computes the same by formula. The tests hold it to `fit`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rolemesh.coordinator.mapping.job.layouts import Layout
from rolemesh.coordinator.mapping.job.models import LayerSizes, Model
from rolemesh.coordinator.mapping.job.systems import System
from rolemesh.engine.layout.families import stage_layers
from rolemesh.engine.specs.models.activations import (
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

_GATHERED_LAYER = 8
"""Bytes of a layer's parameter while weights are gathered: two layers in bfloat16, and the sum of
one's gradients in float32."""

_GRADIENT_BYTES = 2
"""Of a number's gradient within a layer."""

EXPERT_ROW_BYTES = 2
"""Of a number of a row that is on its way to an expert, or back."""

_OFFLOAD_BYTES = 4 * (64 << 20)
"""Moments on the device while they are stepped, where they lie on the host between steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBytes:
    """What a role holds on the device of its fullest rank."""

    rest: int
    """Between calls, awake: weights and moments."""
    peak: int
    """While it trains or scores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankParameters:
    """Parameters of the fullest rank that the data axis has not cut yet; none of an adapter.

    Its experts are those that are left to it by `ep`.
    """

    rest: float
    """All but experts."""
    experts: float
    layer: float
    """Of its largest layer, without experts."""
    layer_experts: float
    """The experts of that layer."""
    outer: float
    """Outside the layers."""

    def held(self, layout: Layout) -> float:
        """What the rank holds of them."""
        return self.rest / layout.fsdp + self.experts / layout.expert_fsdp

    def gathered(self, layout: Layout) -> float:
        """Of the largest layer, what is gathered for a pass."""
        rest = self.layer if layout.fsdp > 1 else 0.0
        return rest + (self.layer_experts if layout.expert_fsdp > 1 else 0.0)


def rank_parameters(model: Model, layout: Layout) -> RankParameters:
    """Parameters of the fullest rank."""
    stage = _fullest_stage(model, layout.pp)
    # The first stage has the embedding, the last one the head; they are about equal.
    outer = (model.outer_parameters - model.outer_whole) / layout.tp + model.outer_whole
    if layout.pp > 1:
        outer = model.head_parameters / layout.tp if model.shape.head == "lm_head" else outer
    owners = layout.tp * layout.ep
    return RankParameters(
        rest=stage.sizes.on_slice(layout.tp) + outer,
        experts=stage.sizes.experts / owners,
        layer=stage.largest.on_slice(layout.tp),
        layer_experts=stage.largest.experts / owners,
        outer=outer,
    )


def rank_trained(model: Model, layout: Layout) -> tuple[float, float]:
    """Parameters of the fullest rank that training changes, not cut over the data axis.

    Returns:
        All but experts, and experts; an adapter has none of them.
    """
    if model.shape.adapter is None:
        whole = rank_parameters(model, layout)
        return whole.rest, whole.experts
    sizes = _fullest_stage(model, layout.pp).sizes
    return sizes.factors_on_slice(layout.tp) + model.trained_head_parameters, 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    """Layers that stand on one stage."""

    sizes: LayerSizes
    """Of all of them together."""
    largest: LayerSizes
    dense: int
    """Layers with one MLP."""
    sparse: int
    """Layers with experts."""


@lru_cache(maxsize=1024)
def _fullest_stage(model: Model, pp: int) -> _Stage:
    """The stage whose layers have most parameters."""
    stages = [stage_layers(model.shape, pp=stage, size=pp) for stage in range(pp)]
    fullest = max(stages, key=lambda layers: sum(model.layers[one].total for one in layers))
    sizes = [model.layers[layer] for layer in fullest]
    sparse = sum(model.shape.kind(layer) == "sparse" for layer in fullest)
    return _Stage(
        sizes=sum(sizes, LayerSizes()),
        largest=max(sizes, key=lambda one: one.total),
        dense=len(sizes) - sparse,
        sparse=sparse,
    )


def trained_bytes(
    model: Model, layout: Layout, system: System, *, averages: bool = False
) -> RankBytes:
    """Of a role that trains: the larger one of what the layers and what the head take.

    The base beneath an adapter is held once, without gradients and moments. With `averages` a
    moving average of what is trained is held in float32.
    """
    parameters = rank_parameters(model, layout)
    has_adapter = model.shape.adapter is not None
    trained, trained_experts = rank_trained(model, layout)
    own = trained / layout.fsdp + trained_experts / layout.expert_fsdp
    moments = own * system.moment_bytes
    held = own * system.weight_bytes + (0 if layout.offload else moments)
    if averages:
        held += own * 4
    if has_adapter:
        # A score head counts twice, which is a row.
        held += parameters.held(layout) * system.frozen_bytes
    shape, tokens = model.shape, layout.own_tokens
    # A stage keeps what came in for each pass that is under way (1F1B).
    under_way = layout.pp
    hidden = tokens * shape.hidden_size * system.activation_bytes
    stage = _fullest_stage(model, layout.pp)
    dense = _mlp_layer(model, layout, system, shape.intermediate_size) if stage.dense else 0.0
    sparse = _expert_layer(model, layout, system)
    keeps_inputs = layout.recompute == "full"
    own_layers = stage.dense * dense + stage.sparse * sparse
    kept = under_way * ((stage.dense + stage.sparse) * hidden if keeps_inputs else own_layers)
    # Where a layer goes backward, gradients of both inner products of its MLP lie beside it.
    working = 2 * tokens * _inner_width(model) / layout.tp * _GRADIENT_BYTES
    working += max(dense, sparse) if keeps_inputs else 0.0
    gathered = 0.0
    if layout.fsdp > 1:
        # What is outside the layers is whole while the stage runs.
        layer = parameters.gathered(layout)
        gathered = parameters.outer * 4 + layer * _GATHERED_LAYER
        if has_adapter:
            gathered = (parameters.outer + 2 * layer) * system.frozen_bytes
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
    parameters = rank_parameters(model, layout)
    held = parameters.held(layout) * system.frozen_bytes
    gathered = 0.0
    if layout.fsdp > 1:
        gathered = (parameters.outer + 2 * parameters.gathered(layout)) * system.frozen_bytes
    shape, tokens = model.shape, layout.own_tokens
    hidden = tokens * shape.hidden_size * system.activation_bytes
    wide = _inner_width(model)
    rows = 0
    if shape.experts is not None:
        rows = 2 * EXPERT_ROW_BYTES * tokens * model.chosen * shape.hidden_size
    passes = 4 * hidden + 3 * tokens * wide / layout.tp * system.activation_bytes + rows
    return RankBytes(
        rest=int(held), peak=int(held + gathered + max(passes, _head_bytes(model, layout)))
    )


def _inner_width(model: Model) -> int:
    """Of the widest MLP that a token goes through."""
    shape = model.shape
    if shape.experts is None:
        return shape.intermediate_size
    chosen = model.chosen * shape.experts.inner_size + shape.experts.shared_size
    return max(shape.intermediate_size, chosen)


def _expert_layer(model: Model, layout: Layout, system: System) -> float:
    """What a layer with experts keeps for its backward pass, on a rank; 0 where there is none."""
    shape, experts = model.shape, model.shape.experts
    if experts is None:
        return 0.0
    # An MLP as wide as the experts that a token goes through, and rows on their way: to experts
    # that are trained, kept for their gradients, and back, kept for those of the router.
    inner = model.chosen * experts.inner_size
    kept = _mlp_layer(model, layout, system, inner + experts.shared_size)
    ways = 2 if shape.adapter is None else 1
    rows = layout.own_tokens * model.chosen
    kept += ways * rows * shape.hidden_size * EXPERT_ROW_BYTES
    if shape.adapter is None or system.frozen_bytes > 2:
        # Rounded copies are of all experts, but where they are gathered as such.
        weight = 2 * 3 * shape.hidden_size * experts.inner_size / layout.tp
        copied = experts.number / layout.ep if layout.expert_fsdp == 1 else 0
        kept += weight * (copied - model.chosen)
    return kept


def _mlp_layer(model: Model, layout: Layout, system: System, inner: int) -> float:
    """What a layer with one MLP of a width keeps for its backward pass, on a rank."""
    shape = model.shape
    widths = LayerWidths(
        hidden=shape.hidden_size,
        query=shape.num_heads * shape.head_dim,
        # Ranks that cut rows have a key-value head each, or more.
        key_value=max(shape.num_kv_heads, layout.tp * layout.cp) * shape.head_dim,
        inner=inner,
        norms_queries=shape.has_qk_norm,
    )
    arithmetic: Arithmetic = "autocast" if system.activation_bytes == 4 else "bfloat16"
    if shape.adapter is not None:
        return adapted_layer_bytes(
            widths,
            layout.own_tokens,
            arithmetic,
            rank=shape.adapter.rank,
            targets=shape.adapter.targets,
            frozen_bytes=system.frozen_bytes,
            num_slices=layout.tp,
        )
    return layer_bytes(widths, layout.own_tokens, arithmetic, num_slices=layout.tp)


def _head_bytes(model: Model, layout: Layout) -> float:
    if model.shape.head != "lm_head":
        return 4.0 * layout.own_tokens * model.shape.hidden_size
    logits = min(_LOGITS_BYTES, 4 * layout.own_tokens * model.shape.vocab_size)
    hidden = 4.0 * layout.own_tokens * model.shape.hidden_size
    return _HEAD_COPIES * logits / layout.tp + hidden
