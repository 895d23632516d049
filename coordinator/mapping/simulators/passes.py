"""Simulators of training and of scoring: seconds of passes over a batch on a layout.

Roofline: a pass takes what its products take, or reading its weights where that is longer. To that
come all-reduces of tensor slices, rows that travel to their experts, heads for tokens of rows that
are cut, the pipeline's fill and drain, gathers of weights that are cut over the data axis, the sum
of gradients, and the optimizer, which reads and writes memory. Of a model with an adapter,
gradients and optimizer are those of its factors, and a backward pass multiplies with the frozen
weights once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rolemesh.coordinator.mapping.job.layouts import Layout
from rolemesh.coordinator.mapping.job.models import Model
from rolemesh.coordinator.mapping.job.systems import System
from rolemesh.coordinator.mapping.job.work import Work
from rolemesh.coordinator.mapping.machines.cluster import DeviceGroup
from rolemesh.coordinator.mapping.simulators.memory import (
    EXPERT_ROW_BYTES,
    rank_parameters,
    rank_trained,
)

_OPTIMIZER_BYTES = 28
"""Memory that AdamW reads and writes for a parameter: gradient, weight and two moments are read,
and the last three written, in float32."""

_ATTENTION_BYTES = 2
"""Of a number of a query, key or value on its way to the rank that attends with it."""

_REDUCES = 2
"""All-reduces of tensor slices in a forward pass of a layer; as many in the backward pass
(arXiv 1909.08053, section 3)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassSeconds:
    """Where the seconds of passes over a batch go. Their sum is the time of the slowest rank."""

    compute: float = 0.0
    """Products, or reading weights where that is longer."""
    slices: float = 0.0
    """All-reduces of tensor slices, and what stages send each other."""
    experts: float = 0.0
    """Rows on their way to the ranks of their experts, and back."""
    heads: float = 0.0
    """Heads for tokens around attention, of rows that are cut."""
    bubble: float = 0.0
    """Filling and draining the pipeline."""
    gathers: float = 0.0
    """Gathers of cut weights, as far as they do not hide behind products."""
    gradients: float = 0.0
    """The sum over replicas."""
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return (
            self.compute
            + self.slices
            + self.experts
            + self.heads
            + self.bubble
            + self.gathers
            + self.gradients
            + self.optimizer
        )


def update_seconds(
    model: Model, layout: Layout, work: Work, group: DeviceGroup, system: System
) -> PassSeconds:
    """An update: all optimizer steps that a step of the run makes of its rows."""
    rows = min(work.rows, work.mini_batch_rows)
    one = _batch(model, layout, work, group, system, rows, trains=True)
    trained, experts = rank_trained(model, layout)
    own, own_experts = trained / layout.fsdp, experts / layout.expert_fsdp
    stride = layout.tp * layout.pp
    gradients = group.reduce_s(
        own * system.gradient_bytes, layout.dp // layout.fsdp, stride * layout.fsdp
    )
    if own_experts:
        gradients += group.reduce_s(
            own_experts * system.gradient_bytes,
            layout.replicas_of_experts,
            stride * max(layout.fsdp, layout.ep),
        )
    own += own_experts
    optimizer = group.read_s(own * _OPTIMIZER_BYTES)
    if layout.offload:
        # Moments come and go, both ways at the same time.
        optimizer = max(optimizer, group.host_s(own * system.moment_bytes))
    optimizer += group.coefficients.optimizer_s
    steps = work.rows * work.epochs / rows
    return PassSeconds(
        compute=one.compute * steps,
        slices=one.slices * steps,
        experts=one.experts * steps,
        heads=one.heads * steps,
        bubble=one.bubble * steps,
        gathers=one.gathers * steps,
        gradients=gradients * steps,
        optimizer=optimizer * steps,
    )


def scoring_seconds(
    model: Model, layout: Layout, work: Work, group: DeviceGroup, system: System
) -> PassSeconds:
    """A forward pass over all rows of a step: log-probs, values or rewards."""
    return _batch(model, layout, work, group, system, work.rows, trains=False)


def _batch(
    model: Model,
    layout: Layout,
    work: Work,
    group: DeviceGroup,
    system: System,
    rows: int,
    *,
    trains: bool,
) -> PassSeconds:
    """Passes over rows that the replicas share, in micro-batches."""
    own_rows = math.ceil(rows / layout.train.num_parts)
    tokens = work.computed_tokens(own_rows)
    passes = min(own_rows, max(1, math.ceil(tokens / layout.micro_batch_tokens)))
    # Of a pass, what a rank computes.
    micro_tokens = tokens / passes / layout.cp
    ranks = layout.pp * layout.tp
    flops = model.forward_flops(micro_tokens, work.context) / ranks
    # Recomputing is a forward pass more.
    recomputes = trains and layout.recompute == "full"
    has_adapter = model.shape.adapter is not None
    item = system.frozen_bytes if has_adapter else system.gathered_bytes
    weights = model.read_parameters(micro_tokens, layout.ep) / ranks * item
    layers = math.ceil(model.shape.num_layers / layout.pp)
    beside = group.layers_s(layers, micro_tokens * model.shape.hidden_size / layout.tp)
    beside += group.coefficients.pass_s
    compute = max(group.compute_s(flops), group.read_s(weights)) + beside
    compute *= 2 if recomputes else 1
    if trains:
        # With weights, and with activations where weights have gradients.
        back_flops = model.backward_flops(micro_tokens, work.context) / ranks
        read_s = group.read_s(weights) * (1 if has_adapter else 2)
        compute += max(group.compute_s(back_flops), read_s) + 2 * beside
    hidden = micro_tokens * model.shape.hidden_size * system.activation_bytes
    turns = 1 if not trains else 3 if layout.recompute == "full" else 2
    slices = _REDUCES * turns * layers * group.reduce_s(hidden, layout.tp, 1)
    if layout.pp > 1:
        crosses = layout.pp * layout.tp > group.per_machine
        stride = group.per_machine if crosses else layout.tp
        slices += (2 if trains else 1) * group.send_s(hidden, stride, layout.tp)
    experts = turns * _exchange_s(model, layout, group, micro_tokens)
    heads = turns * _heads_s(model, layout, group, micro_tokens)
    gathers = _gathers(model, layout, group, system, trains=trains)
    exposed = max(0.0, gathers - group.coefficients.hidden * compute)
    return PassSeconds(
        compute=passes * compute,
        slices=passes * slices,
        experts=passes * experts,
        heads=passes * heads,
        bubble=(layout.pp - 1) * (compute + slices + experts + heads + exposed),
        gathers=passes * exposed,
    )


def _exchange_s(model: Model, layout: Layout, group: DeviceGroup, tokens: float) -> float:
    """Rows of a pass to the ranks of their experts and back, in one direction of the pass.

    A rank sends as many rows as it gets: experts are taken to be chosen equally often.
    """
    experts = model.shape.experts
    if experts is None or layout.ep == 1:
        return 0.0
    rows = tokens * model.chosen * model.shape.hidden_size * EXPERT_ROW_BYTES
    layers = math.ceil(len(experts.layers) / layout.pp)
    others = rows * (layout.ep - 1) / layout.ep
    return 2 * layers * group.fetch_s(others, layout.ep, layout.tp * layout.pp)


def _heads_s(model: Model, layout: Layout, group: DeviceGroup, tokens: float) -> float:
    """Queries, keys, values and what is attended on their way, in one direction of the pass."""
    if layout.cp == 1:
        return 0.0
    shape = model.shape
    kv_heads = max(shape.num_kv_heads / layout.tp, layout.cp)
    numbers = 2 * (shape.num_heads / layout.tp + kv_heads) * shape.head_dim
    others = tokens * numbers * _ATTENTION_BYTES * (layout.cp - 1) / layout.cp
    layers = math.ceil(shape.num_layers / layout.pp)
    # Before attention and behind it: two exchanges.
    stride = layout.tp * layout.pp
    return 2 * layers * group.fetch_s(others / 2, layout.cp, stride)


def _gathers(
    model: Model, layout: Layout, group: DeviceGroup, system: System, *, trains: bool
) -> float:
    """Weights made whole for a pass, and the sum of its gradients (FSDP2, ZeRO-3)."""
    if layout.fsdp == 1:
        return 0.0
    parameters = rank_parameters(model, layout)
    has_adapter = model.shape.adapter is not None
    is_frozen = has_adapter or not trains
    item = system.frozen_bytes if is_frozen else system.gathered_bytes
    trained, trained_experts = rank_trained(model, layout)
    added = trained * system.gathered_bytes if has_adapter else 0.0

    def seconds(rest: float, experts: float) -> float:
        """Of so many bytes; experts are cut over other ranks."""
        stride = layout.tp * layout.pp
        if layout.ep == 1:
            return group.gather_s(rest + experts, layout.fsdp, stride)
        apart = group.gather_s(experts, layout.expert_fsdp, stride * layout.ep)
        return group.gather_s(rest, layout.fsdp, stride) + apart

    gathered = seconds(parameters.rest * item + added, parameters.experts * item)
    if not trains:
        return gathered
    # Gathered for the forward and for the backward pass, which sums gradients in float32.
    return 2 * gathered + seconds(4 * trained, 4 * trained_experts)
