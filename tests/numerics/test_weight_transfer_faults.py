"""Transfers of weights that fail: what does not fit, ranks that stop or die, bytes that change."""

from __future__ import annotations

import os
import signal
from contextlib import closing

import pytest
import torch
from support.local_transport import LocalHub
from support.planned_bytes import planned_received
from support.rank_processes import RankContext, RankPool
from support.transport_ranks import THREADED, cluster, process_transport
from support.weight_ranks import (
    BUCKET_BYTES,
    WAIT_S,
    assert_equal,
    cut,
    decoder,
    even_generate,
    even_train,
    random_weights,
    transfer_once,
)

from rolemesh.engine.layout.boxes import generate_layout, train_layout
from rolemesh.engine.layout.manifest import ManifestError
from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, TrainLayout
from rolemesh.engine.transport.base import Exchange, Message, TransferFailedError, Transport
from rolemesh.engine.weights.plan import Plan, make_plan
from rolemesh.engine.weights.transfer import TransferMismatchError, WeightTransfer

PAIR = HybridLayout(TrainLayout(tp=2), GenerateLayout(tp=1))


def pair_plan(bucket_bytes: int = BUCKET_BYTES) -> Plan:
    return make_plan(even_train(PAIR), even_generate(PAIR), bucket_bytes=bucket_bytes)


def pair_weights(rank: int) -> dict[str, torch.Tensor]:
    source = even_train(PAIR)
    return cut(source, rank, random_weights(source.manifest))


def test_different_policy_versions_are_refused_on_all_ranks_before_anything_moves() -> None:
    def rank(transport: Transport) -> str:
        with pytest.raises(TransferMismatchError) as caught:
            transfer_once(transport, pair_plan(), pair_weights(transport.rank), transport.rank)
        assert transport.received_bytes == transport.sent_bytes == 0
        # Nothing was moved: the transport goes on.
        transfer_once(transport, pair_plan(), pair_weights(transport.rank), 7)
        return str(caught.value)

    with cluster("local", 2) as ranks:
        messages = ranks.run(rank)
    assert "rank 1 has policy_version 1, rank 0 0" in messages[0]
    assert "rank 0 has policy_version 0, rank 1 1" in messages[1]


def test_different_plans_are_refused_before_anything_moves() -> None:
    def rank(transport: Transport) -> None:
        plan = pair_plan(bucket_bytes=100 + 100 * transport.rank)
        with pytest.raises(TransferMismatchError, match="has plan"):
            transfer_once(transport, plan, pair_weights(transport.rank))
        assert transport.received_bytes == 0

    with cluster("local", 2) as ranks:
        ranks.run(rank)


@pytest.mark.parametrize("damage", ["missing", "shape", "dtype"])
def test_tensors_that_are_not_the_layouts_are_refused(damage: str) -> None:
    tensors = pair_weights(0)
    name = "layer.0.b"
    if damage == "missing":
        del tensors[name]
    elif damage == "shape":
        tensors[name] = tensors[name][1:]
    else:
        tensors[name] = tensors[name].double()
    with (
        cluster("local", 2) as ranks,
        pytest.raises(ManifestError, match=r"layer\.0\.b"),
    ):
        transfer_once(ranks.transports[0], pair_plan(), tensors)


def test_a_transport_of_another_rank_or_too_few_ranks_is_refused() -> None:
    with cluster("local", 2) as ranks:
        with pytest.raises(ValueError, match="the plan is for rank 1 of 2"):
            WeightTransfer(pair_plan(), 1, ranks.transports[0], timeout_s=WAIT_S)
        with pytest.raises(ValueError, match="rank 0 of 1"):
            WeightTransfer(pair_plan(), 0, LocalHub(1).transport(0), timeout_s=WAIT_S)


@pytest.mark.parametrize("kind", ["local", "memory", "shm"])
def test_a_rank_that_stops_half_way_ends_the_others_at_once(kind: str) -> None:
    # A dozen rounds: the one that is under way when rank 1 stops is not the last.
    plan = pair_plan(bucket_bytes=16)

    def rank(transport: Transport) -> str:
        transfer = WeightTransfer(plan, transport.rank, transport, timeout_s=WAIT_S)
        run = transfer.run(pair_weights(transport.rank))
        if transport.rank == 1:
            with closing(run):  # type: ignore[type-var]
                next(run)
            return ""
        with pytest.raises(TransferFailedError, match="bucket") as caught:
            list(run)
        assert caught.value.peer == 1
        assert list(run) == []
        return str(caught.value)

    with cluster(kind, 2) as ranks:
        assert "with rank 1" in ranks.run(rank)[0]


def test_changed_bytes_are_noticed_when_they_are_checked() -> None:
    plan = pair_plan()

    def damage(transport: Transport) -> None:
        start = transport._start

        def damaged(
            sends: list[Message], receives: list[Message], label: str, is_control: bool
        ) -> Exchange:
            exchange = start(sends, receives, label, is_control)
            if label.startswith("bucket"):
                exchange.wait(WAIT_S)
                receives[0].buffer[17] ^= 4
            return exchange

        transport._start = damaged  # type: ignore[method-assign, assignment]

    def rank(transport: Transport) -> TransferFailedError | None:
        if transport.rank == 0:
            damage(transport)
        transfer = WeightTransfer(
            plan, transport.rank, transport, timeout_s=WAIT_S, checks_bytes=True
        )
        try:
            for _ in transfer.run(pair_weights(transport.rank)):
                pass
        except TransferFailedError as error:
            return error
        return None

    with cluster("shm", 2) as ranks:
        errors = ranks.run(rank)
    assert "arrived with other bytes than were sent" in str(errors[0])
    assert errors[0].peer == 1


def test_checked_bytes_that_are_right_arrive_and_do_not_count_as_payload() -> None:
    plan = pair_plan(bucket_bytes=100)
    weights = random_weights(plan.source.manifest)

    def rank(transport: Transport) -> None:
        transfer = WeightTransfer(
            plan, transport.rank, transport, timeout_s=WAIT_S, checks_bytes=True
        )
        arrived = dict(transfer.run(pair_weights(transport.rank)))
        assert_equal(arrived, cut(plan.target, transport.rank, weights))
        assert transport.received_bytes == planned_received(plan, transport.rank)

    for kind in THREADED:
        with cluster(kind, 2) as ranks:
            ranks.run(rank)


def lose_a_rank(context: RankContext, kind: str) -> str:
    """Rank 3 is killed when it holds its first tensor; how the transfer ends for the others."""
    layout = HybridLayout(TrainLayout(tp=4), GenerateLayout(tp=1))
    shape = decoder()
    train = train_layout(shape, layout.train)
    plan = make_plan(train, generate_layout(shape, layout, "float32"), bucket_bytes=BUCKET_BYTES)
    held = cut(train, context.rank, random_weights(train.manifest))
    with process_transport(context, kind) as transport:
        transfer = WeightTransfer(plan, context.rank, transport, timeout_s=WAIT_S)
        run = transfer.run(held)
        if context.rank == 3:
            next(name for name, _ in run if "qkv" in name)
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(TransferFailedError, match="bucket") as caught:
            list(run)
        assert caught.value.seconds < WAIT_S / 2
        return f"{caught.value.peer} {caught.value}"


@pytest.mark.parametrize("kind", ["gloo", "shm"])
def test_a_rank_killed_mid_transfer_ends_it_everywhere_and_is_named(
    kind: str, rank_pool: RankPool
) -> None:
    outcomes = rank_pool.outcomes(lose_a_rank, 4, kind)
    assert "died" in str(outcomes[3].failure)
    reports = [outcomes[rank].value for rank in range(3)]
    # Whoever notices first gives up, and the rest may see that first: one names the dead rank.
    assert any(report.startswith("3 ") for report in reports), (reports, outcomes)
    assert all(outcomes[rank].failure is None for rank in range(3)), outcomes
