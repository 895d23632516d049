"""Training shards that live inside generation weights: bit-exact, and no second copy of them."""

from __future__ import annotations

import gc

import pytest
import torch
from support.rank_processes import RankContext, RankPool
from support.transport_ranks import cluster, process_transport
from support.weight_ranks import (
    WAIT_S,
    assert_equal,
    cut,
    decoder,
    random_weights,
)

from rolemesh.engine.layout.boxes import generate_layout, train_layout
from rolemesh.engine.layout.manifest import DtypeName, ManifestError
from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, TrainLayout
from rolemesh.engine.transport.base import Transport
from rolemesh.engine.weights.plan import Plan, make_plan
from rolemesh.engine.weights.reuse import SharedWeights
from rolemesh.engine.weights.transfer import WeightTransfer

LAYOUT = HybridLayout(TrainLayout(pp=2, tp=2), GenerateLayout(tp=1))
BUCKET_BYTES = 20_000


def plan_for(dtype: DtypeName = "float32", *, tied: bool = False) -> Plan:
    shape = decoder(tie_word_embeddings=tied)
    return make_plan(
        train_layout(shape, LAYOUT.train),
        generate_layout(shape, LAYOUT, dtype),
        bucket_bytes=BUCKET_BYTES,
    )


def parameters_of(plan: Plan, rank: int) -> dict[str, torch.Tensor]:
    weights = random_weights(plan.source.manifest)
    return {
        name: torch.nn.Parameter(tensor) for name, tensor in cut(plan.source, rank, weights).items()
    }


def storages(tensors: object = None) -> int:
    """Bytes of all storages of the given tensors, or of all tensors that this process has."""
    found = gc.get_objects() if tensors is None else tensors
    live = {}
    for each in found:  # type: ignore[attr-defined]
        if isinstance(each, torch.Tensor):
            storage = each.untyped_storage()
            live[storage.data_ptr()] = storage.nbytes()
    return sum(live.values())


@pytest.mark.parametrize("tied", [True, False])
def test_there_and_back_is_bit_exact_and_a_shard_is_held_once(tied: bool) -> None:
    plan = plan_for(tied=tied)
    weights = random_weights(plan.source.manifest)

    def run(transport: Transport) -> None:
        rank = transport.rank
        parameters = parameters_of(plan, rank)
        before = storages(parameters.values())
        transfer = WeightTransfer(plan, rank, transport, timeout_s=WAIT_S)
        shared = SharedWeights(plan, rank, parameters)
        for version in range(2):
            arrived = dict(shared.enter(transfer.run(parameters, policy_version=version)))
            assert_equal(arrived, cut(plan.target, rank, weights))
            assert_equal(parameters, cut(plan.source, rank, weights))
            # Every parameter is a part of a generation tensor: nothing else is held.
            assert storages([*arrived.values(), *parameters.values()]) == storages(arrived.values())
            # A write to a parameter is a write to the generation tensor, as strides demand.
            name = next(iter(parameters))
            with torch.no_grad():
                parameters[name].add_(0)
            shared.leave()
            del arrived
            assert all(parameter.is_contiguous() for parameter in parameters.values())
            assert_equal(parameters, cut(plan.source, rank, weights))
            assert storages(parameters.values()) == before

    with cluster("local", LAYOUT.world_size) as ranks:
        ranks.run(run)


def measure(context: RankContext) -> tuple[int, int, int]:
    """Bytes by which the transition grows this process: at the end, at most, and the bound."""
    plan = plan_for()
    # What is alive now is looked at no more: a process with torch has half a million objects.
    gc.freeze()
    try:
        return measure_new(context, plan)
    finally:
        gc.unfreeze()


def measure_new(context: RankContext, plan: Plan) -> tuple[int, int, int]:
    with process_transport(context, "shm") as transport:
        parameters = parameters_of(plan, context.rank)
        transfer = WeightTransfer(plan, context.rank, transport, timeout_s=WAIT_S)
        shared = SharedWeights(plan, context.rank, parameters)
        before = storages()
        arrived: dict[str, torch.Tensor] = {}
        most = 0
        for name, tensor in shared.enter(transfer.run(parameters)):
            arrived[name] = tensor
            most = max(most, storages() - before)
        del tensor
        gc.collect()
        padding = storages(arrived.values()) - piece_bytes(plan, context.rank)
        extra = storages() - before
        assert extra == transport.received_bytes + padding
        buffers = 4 * BUCKET_BYTES
        largest = max(storages([each]) for each in arrived.values())
        # Two tensors can be under way: one that a bucket ends, one that it begins.
        return extra, most, extra + buffers + 2 * largest


def piece_bytes(plan: Plan, rank: int) -> int:
    return sum(
        4 * torch.Size([stop - start for start, stop in piece.box]).numel()
        for piece in plan.target.ranks[rank].pieces
    )


def test_the_transition_costs_the_received_bytes_and_no_second_shard(rank_pool: RankPool) -> None:
    for extra, most, bound in rank_pool.run(measure, LAYOUT.world_size):
        assert 0 < extra <= most <= bound


def test_parameters_of_another_dtype_stay_where_they_are() -> None:
    plan = plan_for("bfloat16")

    def run(transport: Transport) -> None:
        parameters = parameters_of(plan, transport.rank)
        places = {name: parameter.data_ptr() for name, parameter in parameters.items()}
        shared = SharedWeights(plan, transport.rank, parameters)
        transfer = WeightTransfer(plan, transport.rank, transport, timeout_s=WAIT_S)
        for _ in shared.enter(transfer.run(parameters)):
            pass
        assert places == {name: parameter.data_ptr() for name, parameter in parameters.items()}
        shared.leave()

    with cluster("local", LAYOUT.world_size) as ranks:
        ranks.run(run)


def test_entering_twice_and_missing_parameters_are_refused() -> None:
    plan = plan_for()
    parameters = parameters_of(plan, 0)
    shared = SharedWeights(plan, 0, parameters)
    home = plan.local[0][0]
    tensor = torch.zeros(plan.target.ranks[0].shapes[home.target_tensor])
    list(shared.enter([(home.target_tensor, tensor)]))
    with pytest.raises(RuntimeError, match="call leave first"):
        list(shared.enter([]))
    del parameters[home.source_tensor]
    with pytest.raises(ManifestError, match="is missing"):
        SharedWeights(plan, 0, parameters)
