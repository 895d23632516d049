"""Seconds of what moves and does not compute: weights, experience, roles that sleep and wake.

Of a model with an adapter, an update brings samplers its factors alone: in float32, and whole on
each rank, since they are small.
"""

from __future__ import annotations

from rolemesh.coordinator.mapping.job.layouts import Layout
from rolemesh.coordinator.mapping.job.models import Model
from rolemesh.coordinator.mapping.job.systems import System
from rolemesh.coordinator.mapping.job.work import Work
from rolemesh.coordinator.mapping.machines.cluster import DeviceGroup
from rolemesh.coordinator.mapping.simulators.memory import rank_trained

_TOKEN_BYTES = 24
"""Bytes of a token that a call pulls: its id, and two columns of float32 and one of int64."""


_FACTOR_BYTES = 4
"""Of a number of a factor that is on its way to a sampler."""


def updated_bytes(model: Model, system: System) -> float:
    """What an update of a sampler brings: all weights, or the factors of an adapter."""
    if model.shape.adapter is None:
        return model.num_parameters * system.sampled_bytes
    return model.factor_parameters * _FACTOR_BYTES


def received_bytes(model: Model, layout: Layout, item_bytes: int = 2) -> float:
    """Weights that a rank lacks for sampling, in the mean over ranks, by our planner's rule.

    A rank copies what it holds and receives each other element once, so that it gets its
    generation shard without its training shard, which lies inside (interval grouping). With
    everything cut evenly this is Table 2's (d_g - 1) / (t p) M of arXiv 2409.19256.
    """
    if model.shape.adapter is not None:
        own = rank_trained(model, layout)[0] / layout.fsdp
        return max(0.0, model.factor_parameters - own) * _FACTOR_BYTES
    layers = model.in_layers
    cut_outer = model.outer_parameters - model.outer_whole
    ranks = layout.tp * layout.pp
    sampled_ranks = layout.generate_tp * layout.generate_pp
    # A tied embedding lies on the last stage too, as its projection.
    held = layers.cut + cut_outer * (2 if model.shape.is_tied and layout.pp > 1 else 1)
    cut = layers.cut + cut_outer * (2 if model.shape.is_tied and layout.generate_pp > 1 else 1)
    whole = layers.whole + model.outer_whole
    sampled = (cut + layers.experts) / sampled_ranks + whole / layout.generate_pp
    own = (held / ranks + whole / layout.pp) / layout.fsdp
    own += layers.experts / ranks / layout.ep / layout.expert_fsdp
    return max(0.0, sampled - own) * item_bytes


def reshard_seconds(model: Model, layout: Layout, group: DeviceGroup, system: System) -> float:
    """Weights from training to sampling on the same ranks (Table 2 of arXiv 2409.19256)."""
    if system.reshard == "none":
        return 0.0
    ranks = layout.tp * layout.pp
    item = system.sampled_bytes
    whole = updated_bytes(model, system)
    if system.reshard == "zero":
        return group.gather_s(whole, layout.world_size, 1)
    if system.reshard == "vanilla":
        return group.gather_s(whole, ranks, 1)
    lacks = received_bytes(model, layout, item)
    if model.shape.adapter is not None:
        members = ranks * layout.fsdp
        reach = 1 if members == 1 else max(1, _reach(layout) // members)
        return group.fetch_s(lacks, members, reach) + group.read_s(2 * whole)
    slices = layout.tp // layout.generate_tp
    stages = layout.pp // layout.generate_pp
    spread = max(layout.fsdp, layout.ep)
    members = slices * stages * spread
    # Neighbours on the slice axis stand next to each other; those of stages and of the data axis
    # at greater distances, so that the group reaches that much further.
    reach = 1 if stages == 1 and spread == 1 else max(1, _reach(layout) // members)
    local = group.read_s(2 * whole / (layout.generate_tp * layout.generate_pp))
    return group.fetch_s(lacks, members, reach) + local


def _reach(layout: Layout) -> int:
    """Ranks from the first to the last member of the group that shares a generation shard."""
    is_spread = layout.fsdp > 1 or layout.ep > 1
    return layout.world_size if is_spread else layout.tp * layout.pp


def publish_seconds(model: Model, layout: Layout, group: DeviceGroup, system: System) -> float:
    """Each rank of the actor copies its shard to host memory, where samplers fetch it.

    A system with a second copy gathers the whole and broadcasts it, parameter by parameter.
    """
    if system.reshard == "copy":
        whole = updated_bytes(model, system)
        ranks = layout.tp * layout.pp
        gathered = group.gather_s(whole / ranks, layout.fsdp, ranks)
        network = group.network_bandwidth * group.coefficients.network
        return gathered + whole / network + group.coefficients.call_s
    own = updated_bytes(model, system) / (layout.tp * layout.pp * max(layout.fsdp, layout.ep))
    return group.host_s(own) + group.coefficients.call_s


def take_seconds(model: Model, layout: Layout, group: DeviceGroup, system: System) -> float:
    """Each rank of a rollout service fetches its boxes over gRPC, and loads them."""
    if system.reshard == "copy":
        # It has received them with the broadcast.
        return group.coefficients.call_s
    box = updated_bytes(model, system)
    if model.shape.adapter is None:
        box /= layout.tp * layout.pp
    machine = group.network_bandwidth * group.coefficients.network / group.per_machine
    stream = min(group.coefficients.stream_bandwidth, machine)
    return box / stream + group.host_s(box) + group.coefficients.call_s


def switch_seconds(rest_bytes: float, group: DeviceGroup) -> float:
    """A role leaves its devices, or comes back, with all that it holds between calls."""
    return group.host_s(rest_bytes)


def experience_seconds(work: Work, layout: Layout, group: DeviceGroup) -> float:
    """A call: its ranks pull the rows that they compute, each over a stream of its own."""
    coefficients = group.coefficients
    num_bytes = work.rows * work.row_tokens * _TOKEN_BYTES
    streams = layout.train.num_parts * coefficients.stream_bandwidth
    return num_bytes / streams + work.rows * coefficients.row_s + coefficients.call_s
