"""Weights that change layout over real transports: every bit, and no byte more than needed.

What goes wrong on the way is in test_weight_transfer_faults.py.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import chain
from typing import Any

import pytest
import torch
from support.planned_bytes import planned_received, planned_sent
from support.rank_processes import RankContext, RankPool
from support.transport_ranks import THREADED, cluster, process_transport
from support.weight_ranks import (
    BUCKET_BYTES,
    WAIT_S,
    assert_equal,
    cut,
    decoder,
    even_generate,
    even_manifest,
    even_train,
    even_whole,
    even_zero,
    hybrids,
    label,
    missing_bytes,
    model_bytes,
    random_weights,
    thinned,
    transfer_once,
)
from torch.utils._python_dispatch import TorchDispatchMode

from rolemesh.engine.layout.boxes import generate_layout, train_layout, whole_layout
from rolemesh.engine.layout.manifest import WeightLayout
from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, TrainLayout
from rolemesh.engine.transport.base import Exchange, Message, Transport
from rolemesh.engine.weights import transfer as transfer_module
from rolemesh.engine.weights.messages import pack
from rolemesh.engine.weights.plan import Plan, make_plan
from rolemesh.engine.weights.transfer import WeightTransfer

ALL_CONFIGURATIONS = [layout for layout in hybrids(8) if layout.world_size > 1]
VANILLA = [layout for layout in hybrids(8, "consecutive") if layout.world_size > 1]


def move(kind: str, source: WeightLayout, target: WeightLayout) -> tuple[Plan, list[Transport]]:
    """Moves random weights, checks every tensor of every rank, returns the counted transports."""
    plan = make_plan(source, target, bucket_bytes=BUCKET_BYTES)
    weights = random_weights(source.manifest)
    if source.dtype == "bfloat16":
        weights = {name: weight.bfloat16() for name, weight in weights.items()}
    with cluster(kind, plan.world_size) as ranks:
        arrived = ranks.run(
            lambda transport: transfer_once(transport, plan, cut(source, transport.rank, weights))
        )
        ranks.fabric.check_pairing()
    for rank, tensors in enumerate(arrived):
        assert_equal(tensors, cut(target, rank, weights))
    for transport in ranks.transports:
        assert transport.received_bytes == planned_received(plan, transport.rank)
        assert transport.sent_bytes == planned_sent(plan, transport.rank)
    return plan, ranks.transports


# --- bytes, counted at the transport (arXiv 2409.19256, Table 2) ------------------------------


@pytest.mark.parametrize("layout", thinned(ALL_CONFIGURATIONS))
def test_received_bytes_equal_table_2(layout: HybridLayout) -> None:
    size = model_bytes(even_manifest(layout))
    parts = layout.train.pp * layout.train.tp
    _, transports = move("local", even_train(layout), even_generate(layout))
    for transport in transports:
        assert transport.received_bytes == Fraction(layout.micro_dp - 1, parts) * size


@pytest.mark.parametrize("layout", thinned(ALL_CONFIGURATIONS))
def test_fused_and_tied_weights_of_a_decoder_receive_only_what_is_missing(
    layout: HybridLayout,
) -> None:
    shape = decoder()
    plan, transports = move(
        "local", train_layout(shape, layout.train), generate_layout(shape, layout, "float32")
    )
    for transport in transports:
        assert transport.received_bytes == missing_bytes(plan, transport.rank)


@pytest.mark.parametrize("layout", thinned(VANILLA))
def test_the_vanilla_grouping_receives_what_its_shards_lack(layout: HybridLayout) -> None:
    plan, transports = move("local", even_train(layout), even_generate(layout))
    interval = HybridLayout(
        layout.train, GenerateLayout(pp=layout.generate.pp, tp=layout.generate.tp)
    )
    bound = make_plan(even_train(interval), even_generate(interval))
    total = 0
    for transport in transports:
        assert transport.received_bytes == missing_bytes(plan, transport.rank)
        total += transport.received_bytes
    assert total >= sum(planned_received(bound, rank) for rank in range(layout.world_size))


def test_the_vanilla_grouping_moves_more_than_the_interval_one_in_the_papers_figure_8() -> None:
    received = {}
    for grouping in ("interval", "consecutive"):
        layout = HybridLayout(TrainLayout(tp=4, dp=2), GenerateLayout(tp=2, grouping=grouping))
        size = model_bytes(even_manifest(layout))
        _, transports = move("local", even_train(layout), even_generate(layout))
        received[grouping] = [Fraction(each.received_bytes, size) for each in transports]
    assert received["interval"] == [Fraction(1, 4)] * 8
    # Of each four ranks, the middle two train a slice that they do not generate with.
    assert received["consecutive"] == [Fraction(quarters, 4) for quarters in (1, 2, 2, 1)] * 2


@pytest.mark.parametrize("layout", thinned(at for at in hybrids(8) if at.micro_dp > 1))
def test_gathering_whole_models_receives_table_2s_other_columns(layout: HybridLayout) -> None:
    manifest = even_manifest(layout)
    size, world_size = model_bytes(manifest), layout.world_size
    parts = layout.train.pp * layout.train.tp
    whole = even_whole(manifest, world_size)
    _, transports = move("local", even_train(layout), whole)
    assert {each.received_bytes for each in transports} == {Fraction(parts - 1, parts) * size}
    _, transports = move("local", even_zero(manifest, world_size), whole)
    assert {each.received_bytes for each in transports} == {
        Fraction(world_size - 1, world_size) * size
    }


# --- every bit, over every transport ----------------------------------------------------------

SOME_LAYOUTS = [
    HybridLayout(TrainLayout(tp=4), GenerateLayout(tp=2)),
    HybridLayout(TrainLayout(pp=2, tp=2), GenerateLayout(tp=1)),
    HybridLayout(TrainLayout(pp=2, dp=2, fsdp=2), GenerateLayout(pp=1)),
    HybridLayout(TrainLayout(dp=4, fsdp=4)),
]


def in_turn(kinds: list[str]) -> list[Any]:
    """Each transport with two of the layouts, which they take in turn."""
    return [
        pytest.param(kind, layout, id=f"{kind}-{label(layout)}")
        for number, kind in enumerate(kinds)
        for layout in SOME_LAYOUTS[number % 2 :: 2]
    ]


@pytest.mark.parametrize(("kind", "layout"), in_turn(THREADED))
def test_there_and_back_is_bit_exact(kind: str, layout: HybridLayout) -> None:
    shape = decoder()
    train = train_layout(shape, layout.train)
    generate = generate_layout(shape, layout, "float32")
    there = make_plan(train, generate, bucket_bytes=BUCKET_BYTES)
    back = make_plan(generate, train, bucket_bytes=BUCKET_BYTES)
    weights = random_weights(train.manifest)

    def there_and_back(transport: Transport) -> dict[str, torch.Tensor]:
        held = cut(train, transport.rank, weights)
        return transfer_once(transport, back, transfer_once(transport, there, held))

    with cluster(kind, layout.world_size) as ranks:
        for rank, tensors in enumerate(ranks.run(there_and_back)):
            assert_equal(tensors, cut(train, rank, weights))
        ranks.fabric.check_pairing()


def in_processes(context: RankContext, kind: str, layouts: list[HybridLayout]) -> list[int]:
    """Trains' weights to vLLM's and back over one transport; received bytes of each way there."""
    shape = decoder()
    received = []
    with process_transport(context, kind) as transport:
        for version, layout in enumerate(layouts):
            train = train_layout(shape, layout.train)
            generate = generate_layout(shape, layout, "float32")
            there = make_plan(train, generate, bucket_bytes=BUCKET_BYTES)
            back = make_plan(generate, train, bucket_bytes=BUCKET_BYTES)
            weights = random_weights(train.manifest)
            held = cut(train, context.rank, weights)
            before = transport.received_bytes
            moved = transfer_once(transport, there, held, version)
            received.append(transport.received_bytes - before)
            assert received[-1] == missing_bytes(there, context.rank)
            assert_equal(moved, cut(generate, context.rank, weights))
            assert_equal(transfer_once(transport, back, moved, version), held)
    return received


@pytest.mark.parametrize("kind", ["gloo", "memory", "shm"])
def test_four_processes_reshard_there_and_back(kind: str, rank_pool: RankPool) -> None:
    received = rank_pool.run(in_processes, 4, kind, SOME_LAYOUTS)
    assert all(sum(each) > 0 for each in received)


def test_eight_processes_reshard_there_and_back(rank_pool: RankPool) -> None:
    layouts = [
        HybridLayout(TrainLayout(tp=4, dp=2), GenerateLayout(tp=2)),
        HybridLayout(TrainLayout(pp=2, tp=2, dp=2), GenerateLayout(tp=1)),
    ]
    received = rank_pool.run(in_processes, 8, "gloo", layouts)
    assert all(min(each) > 0 for each in received)


@pytest.mark.parametrize("kind", ["local", "memory", "nccl"])
def test_narrower_targets_are_cast_before_the_way_and_wider_ones_after(kind: str) -> None:
    layout = HybridLayout(TrainLayout(tp=4), GenerateLayout(tp=2))
    exact, _ = move(kind, even_train(layout), even_generate(layout))
    narrow, _ = move(kind, even_train(layout), even_generate(layout, "bfloat16"))
    assert [planned_received(narrow, rank) * 2 for rank in range(4)] == [
        planned_received(exact, rank) for rank in range(4)
    ]
    wide, _ = move(kind, even_generate(layout, "bfloat16"), even_train(layout))
    back, _ = move(kind, even_generate(layout), even_train(layout))
    assert [planned_received(wide, rank) * 2 for rank in range(4)] == [
        planned_received(back, rank) for rank in range(4)
    ]


class TorchCopies(TorchDispatchMode):
    """Counts what torch copies into tensors in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.copy_.default:
            self.num_bytes += args[0].nbytes
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "layout"), in_turn(["memory", "shm"]))
def test_what_a_rank_lacks_is_copied_once_where_it_may_read_the_others_memory(
    kind: str, layout: HybridLayout
) -> None:
    shape, times = decoder(), {"memory": 1, "shm": 4}[kind]
    train = train_layout(shape, layout.train)
    plan = make_plan(train, generate_layout(shape, layout, "float32"), bucket_bytes=BUCKET_BYTES)
    weights = random_weights(train.manifest)

    def rank(transport: Transport) -> int:
        held = cut(train, transport.rank, weights)
        with TorchCopies() as copies:
            transfer_once(transport, plan, held)
        return copies.num_bytes + transport.copied_bytes

    with cluster(kind, plan.world_size) as ranks:
        copied = ranks.run(rank)
    # Its own shard, and what it has received for another tensor, a rank copies in any case.
    inside = [*chain(*plan.local), *chain(*plan.duplicates)]
    received = sum(planned_received(plan, rank) for rank in range(plan.world_size))
    assert sum(copied) - sum(plan.wire_bytes(copy) for copy in inside) == times * received > 0


@pytest.mark.parametrize("tied", [True, False])
def test_a_whole_model_on_one_rank_reaches_eight_and_comes_back(tied: bool) -> None:
    shape = decoder(tie_word_embeddings=tied)
    spread = train_layout(shape, TrainLayout(pp=2, tp=2, dp=2, fsdp=2))
    move("local", whole_layout(shape.manifest("float32")), spread)
    move("local", spread, whole_layout(shape.manifest("float32")))


# --- order of work ------------------------------------------------------------------------------


class NotedExchange(Exchange):
    def __init__(self, exchange: Exchange, label: str, notes: list[str]) -> None:
        self._exchange = exchange
        self._label = label
        self._notes = notes

    def wait(self, timeout_s: float) -> None:
        self._exchange.wait(timeout_s)
        self._notes.append(f"{self._label} is there")


def note_rounds(transport: Transport, notes: list[str]) -> None:
    """Notes when rounds start and end."""
    start = transport._start

    def noted(
        sends: list[Message], receives: list[Message], label: str, is_control: bool
    ) -> Exchange:
        notes.append(f"{label} leaves")
        return NotedExchange(start(sends, receives, label, is_control), label, notes)

    transport._start = noted  # type: ignore[method-assign, assignment]


def test_a_bucket_is_packed_while_the_last_one_travels_and_travels_while_it_is_unpacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = HybridLayout(TrainLayout(tp=2), GenerateLayout(tp=1))
    source, target = even_train(layout), even_generate(layout)
    plan = make_plan(source, target, bucket_bytes=40)
    count = len(plan.buckets)
    assert count >= 3
    weights = random_weights(source.manifest)
    notes: list[str] = []

    def run(transport: Transport) -> None:
        transfer = WeightTransfer(plan, transport.rank, transport, timeout_s=WAIT_S)
        if transport.rank == 0:
            note_rounds(transport, notes)
            own = cut(source, 0, weights)

            def noted(parcels: object, outgoing: object, tensors: object) -> None:
                if tensors is own:
                    notes.append("packed")
                pack(parcels, outgoing, tensors)  # type: ignore[arg-type]

            monkeypatch.setattr(transfer_module, "pack", noted)
            for name, _ in transfer.run(own):
                notes.append(name)
        else:
            for _ in transfer.run(cut(source, 1, weights)):
                pass

    with cluster("local", 2) as ranks:
        ranks.run(run)
    steps = [note for note in notes if "bucket" in note or note == "packed"]
    expected = ["packed", f"bucket 1 of {count} leaves"]
    for number in range(1, count):
        expected += [
            "packed",
            f"bucket {number} of {count} is there",
            f"bucket {number + 1} of {count} leaves",
        ]
    assert steps == [*expected, f"bucket {count} of {count} is there"]
    first = min(notes.index(name) for name in target.ranks[0].shapes)
    assert notes.index(f"bucket {count} of {count} leaves") > first
