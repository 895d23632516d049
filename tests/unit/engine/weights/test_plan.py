"""The planner: what arrives, and in which rounds."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planned_bytes import planned_received, planned_sent
from support.weight_shards import (
    assert_same,
    carry_out,
    divisors,
    missing_elements,
    numbered,
    shards,
)

from rolemesh.engine.layout.boxes import generate_layout, train_layout, whole_layout
from rolemesh.engine.layout.families import (
    EMBEDDING,
    LM_HEAD,
    NORM,
    DecoderShape,
)
from rolemesh.engine.layout.manifest import (
    Box,
    DtypeName,
    Manifest,
    ManifestError,
    Parameter,
    Piece,
    RankShard,
    WeightLayout,
)
from rolemesh.engine.layout.ranks import (
    GenerateLayout,
    HybridLayout,
    LayoutError,
    RankOrder,
    TrainLayout,
)
from rolemesh.engine.weights.plan import Plan, make_plan


def decoder(**changes: Any) -> DecoderShape:
    sizes = {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 24,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 2,
        "vocab_size": 100,
    }
    return DecoderShape.from_config({**sizes, **changes})


def check_plan(plan: Plan) -> None:
    """The target arrives, each missing element once on each rank, and the counts are right."""
    weights = numbered(plan.source.manifest)
    after = carry_out(plan, shards(plan.source, weights))
    assert_same(after, shards(plan.target, weights))
    for rank in range(plan.world_size):
        missing = sum(
            count * (4 if plan.wire_dtype(name) == "float32" else 2)
            for name, count in (
                missing_elements(plan, rank).items() if rank < len(plan.target.ranks) else ()
            )
        )
        assert planned_received(plan, rank) == missing
    sent = sum(planned_sent(plan, rank) for rank in range(plan.world_size))
    assert sent == sum(planned_received(plan, rank) for rank in range(plan.world_size))


# --- random layouts -----------------------------------------------------------------------


def random_layout(manifest: Manifest, ranks: int, draw: random.Random, *, whole: bool) -> Any:
    """Grids of boxes, each on some ranks, in tensors of their own or stacked with padding.

    `whole`: every box is on some rank. Without, a rank may also hold a box in two tensors.
    """
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    shapes: list[dict[str, tuple[int, ...]]] = [{} for _ in range(ranks)]
    for name, parameter in manifest.items():
        grids = [random_cuts(size, draw) for size in parameter.shape]
        boxes: list[Box] = list(itertools.product(*grids))
        for number, box in enumerate(boxes):
            most = min(ranks, draw.choice([1, 2, ranks]))
            for rank in draw.sample(range(ranks), draw.randint(1 if whole else 0, most)):
                for twin in range(1 if draw.random() < 0.7 else 2):
                    tensor = f"{name}.{number}.{twin}"
                    origin = tuple(draw.randint(0, 2) for _ in box)
                    pieces[rank].append(Piece(name, box, tensor, origin))
                    shapes[rank][tensor] = tuple(
                        at + stop - start + draw.randint(0, 1)
                        for at, (start, stop) in zip(origin, box, strict=True)
                    )
    return WeightLayout(
        manifest,
        tuple(RankShard(tuple(held), of) for held, of in zip(pieces, shapes, strict=True)),
        draw.choice(["float32", "bfloat16", None]),
    )


def random_cuts(size: int, draw: random.Random) -> list[tuple[int, int]]:
    inner = draw.sample(range(1, size), min(size - 1, draw.randint(0, 3)))
    return list(itertools.pairwise([0, *sorted(inner), size]))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 6), st.integers(8, 300))
def test_random_boxes_arrive_and_come_back_exactly(
    seed: int, ranks: int, target_ranks: int, bucket_bytes: int
) -> None:
    draw = random.Random(seed)
    manifest = {
        f"p{number}": Parameter(
            tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 3))), "float32"
        )
        for number in range(draw.randint(1, 3))
    }
    source = random_layout(manifest, ranks, draw, whole=True)
    between = random_layout(manifest, target_ranks, draw, whole=draw.random() < 0.5)
    plan = make_plan(source, between, bucket_bytes=bucket_bytes)
    check_plan(plan)
    check_rounds(plan, bucket_bytes)
    covering = random_layout(manifest, target_ranks, draw, whole=True)
    weights = numbered(manifest)
    there = carry_out(make_plan(source, covering), shards(source, weights))
    back = carry_out(make_plan(covering, source), there)
    assert_same(back, shards(source, weights))


def check_rounds(plan: Plan, bound: int) -> None:
    """No rank sends or receives more than the bound in a round."""
    for bucket in plan.buckets:
        assert bucket.copies
        totals: dict[tuple[str, int], int] = defaultdict(int)
        for copy in bucket.copies:
            totals["sent", copy.source] += plan.wire_bytes(copy)
            totals["received", copy.target] += plan.wire_bytes(copy)
        assert max(totals.values()) <= bound


# --- layouts of training and generation ---------------------------------------------------

REAL_SHAPES = [
    decoder(),
    decoder(model_type="qwen2", tie_word_embeddings=True, vocab_size=37),
    decoder(model_type="qwen3", num_key_value_heads=8, vocab_size=64),
    decoder(attention_bias=True, mlp_bias=True, num_key_value_heads=1, tie_word_embeddings=True),
]


DTYPES: list[DtypeName] = ["float32", "bfloat16"]
ORDERS: list[RankOrder] = ["tp-pp-dp", "tp-dp-pp"]


def real_layout(shape: DecoderShape, ranks: int, draw: random.Random) -> WeightLayout:
    """A layout of exactly `ranks` ranks that fits the shape."""
    dtype: DtypeName = draw.choice(DTYPES)
    kind = draw.choice(["train", "train", "generate", "generate", "whole"])
    if kind == "whole":
        return whole_layout(shape.manifest(dtype), ranks)
    while True:
        tp = draw.choice([size for size in divisors(ranks) if 8 % size == 0])
        pp = draw.choice([size for size in divisors(ranks // tp) if size <= shape.num_layers])
        dp = ranks // (tp * pp)
        order: RankOrder = draw.choice(ORDERS)
        train = TrainLayout(pp=pp, tp=tp, dp=dp, fsdp=draw.choice(divisors(dp)), order=order)
        if kind == "train":
            return train_layout(shape, train, dtype)
        generate = GenerateLayout(
            pp=draw.choice(divisors(pp)),
            tp=draw.choice(divisors(tp)),
            grouping=draw.choice(["interval", "consecutive"]),
        )
        try:
            return generate_layout(shape, HybridLayout(train, generate), dtype)
        except LayoutError:
            continue


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from(REAL_SHAPES),
    st.sampled_from([1, 2, 3, 4, 6, 8]),
    st.sampled_from([None, 1, 4, 8]),
)
def test_layouts_of_models_arrive_and_come_back_exactly(
    seed: int, shape: DecoderShape, ranks: int, other_ranks: int | None
) -> None:
    draw = random.Random(seed)
    source = real_layout(shape, ranks, draw)
    target = real_layout(shape, other_ranks or ranks, draw)
    plan = make_plan(source, target, bucket_bytes=draw.choice([256, 4096, 2**20]))
    check_plan(plan)
    weights = numbered(source.manifest)
    back = carry_out(make_plan(target, source), carry_out(plan, shards(source, weights)))
    assert_same(back, shards(source, weights))


# --- who sends, and when ------------------------------------------------------------------


def lone_ranks(layout: WeightLayout, before: int) -> WeightLayout:
    """The layout on ranks `before`, `before` + 1, ..."""
    return replace(layout, ranks=(RankShard((), {}),) * before + layout.ranks)


def test_replicas_at_equal_distance_share_the_sending() -> None:
    shape = decoder()
    source = whole_layout(shape.manifest("float32"), 4)
    plan = make_plan(source, lone_ranks(whole_layout(shape.manifest("float32"), 4), 4))
    check_plan(plan)
    sent = [planned_sent(plan, rank) for rank in range(8)]
    largest = max(parameter.num_bytes for parameter in source.manifest.values())
    assert max(sent[:4]) - min(sent[:4]) <= largest
    assert sent[4:] == [0] * 4


def test_the_nearest_block_of_ranks_sends() -> None:
    # Two replicas of four slices: gathering them whole never leaves a replica, though rank 4 is
    # next to rank 3.
    shape = decoder(num_key_value_heads=8)
    plan = make_plan(
        train_layout(shape, TrainLayout(tp=4, dp=2)), whole_layout(shape.manifest("float32"), 8)
    )
    pairs = {(copy.source, copy.target) for bucket in plan.buckets for copy in bucket.copies}
    assert pairs == {(a, b) for a in range(8) for b in range(8) if a // 4 == b // 4 and a != b}


def test_an_element_that_two_tensors_need_is_received_once() -> None:
    # Training stages 0 and 1 of a tied model hold the embedding at both ends; on one rank here.
    shape = decoder(tie_word_embeddings=True)
    stages = train_layout(shape, TrainLayout(pp=2))
    both = RankShard(
        stages.ranks[0].pieces + stages.ranks[1].pieces,
        {**stages.ranks[0].shapes, **stages.ranks[1].shapes},
    )
    target = replace(stages, ranks=(RankShard((), {}), both))
    plan = make_plan(whole_layout(shape.manifest("float32")), target)
    check_plan(plan)
    (copy,) = plan.duplicates[1]
    assert (copy.source_tensor, copy.target_tensor) == (EMBEDDING, LM_HEAD)


def test_a_tensor_is_copied_from_its_namesake() -> None:
    shape = decoder(tie_word_embeddings=True)
    stages = train_layout(shape, TrainLayout(pp=2))
    both = RankShard(
        stages.ranks[1].pieces + stages.ranks[0].pieces,
        {**stages.ranks[0].shapes, **stages.ranks[1].shapes},
    )
    one = replace(stages, ranks=(both,))
    plan = make_plan(one, one)
    assert all(copy.source_tensor == copy.target_tensor for copy in plan.local[0])
    assert not plan.buckets


def test_messages_between_two_ranks_keep_model_order() -> None:
    shape = decoder()
    layout = HybridLayout(TrainLayout(pp=2, tp=4), GenerateLayout(tp=2))
    plan = make_plan(
        train_layout(shape, layout.train),
        generate_layout(shape, layout, "float32"),
        bucket_bytes=64,
    )
    check_rounds(plan, 64)
    positions = {name: position for position, name in enumerate(plan.source.manifest)}
    seen: dict[tuple[int, int], list[int]] = defaultdict(list)
    for bucket in plan.buckets:
        for copy in bucket.copies:
            seen[copy.source, copy.target].append(positions[copy.parameter])
    assert all(order == sorted(order) for order in seen.values())


def test_rounds_keep_every_sender_busy() -> None:
    # Four stages to one: if the stages took turns, there would be four times as many rounds.
    shape = decoder(num_hidden_layers=16, hidden_size=32, intermediate_size=96, vocab_size=64)
    plan = make_plan(
        train_layout(shape, TrainLayout(pp=4)), whole_layout(shape.manifest("float32"), 4)
    )
    bound = 8192
    rounds = make_plan(plan.source, plan.target, bucket_bytes=bound).buckets
    busiest = max(
        max(planned_sent(plan, rank), planned_received(plan, rank))
        for rank in range(plan.world_size)
    )
    assert len(rounds) <= 1.5 * busiest / bound


def test_every_rank_makes_the_same_plan() -> None:
    shape = decoder()
    sides = [
        (
            train_layout(shape, TrainLayout(tp=2, dp=4, fsdp=2)),
            whole_layout(shape.manifest("float32"), 8),
        )
        for _ in range(2)
    ]
    assert make_plan(*sides[0]) == make_plan(*sides[1])


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "bfloat16"),
        ("bfloat16", "float16", "float16"),
        ("float32", "float32", "float32"),
    ],
)
def test_the_narrower_type_travels(source: Any, target: Any, expected: str) -> None:
    shape = decoder()
    plan = make_plan(
        train_layout(shape, TrainLayout(pp=2), source), whole_layout(shape.manifest(target), 2)
    )
    assert plan.wire_dtype(NORM) == expected
    check_plan(plan)


# --- what does not fit --------------------------------------------------------------------


def edited(layout: WeightLayout, edit: Callable[[Piece], Piece | None]) -> WeightLayout:
    """The layout with pieces changed, or left out."""
    return replace(
        layout,
        ranks=tuple(
            replace(shard, pieces=tuple(filter(None, map(edit, shard.pieces))))
            for shard in layout.ranks
        ),
    )


def test_other_shapes_are_refused_with_both() -> None:
    with pytest.raises(ManifestError, match=rf"{EMBEDDING}.*\(100, 8\).*\(101, 8\)"):
        make_plan(
            whole_layout(decoder().manifest("float32")),
            whole_layout(decoder(vocab_size=101).manifest("float32")),
        )


def test_other_parameters_are_refused_by_name() -> None:
    small, large = (
        whole_layout(decoder(num_hidden_layers=1).manifest("float32")),
        whole_layout(decoder().manifest("float32")),
    )
    with pytest.raises(ManifestError, match=r"layers\.1\..* is absent in the source"):
        make_plan(small, large)
    with pytest.raises(ManifestError, match=r"layers\.1\..* absent in the target"):
        make_plan(large, small)


def test_an_element_that_nobody_holds_is_refused() -> None:
    whole = whole_layout(decoder().manifest("float32"), 2)
    source = edited(whole, lambda piece: None if piece.parameter == NORM else piece)
    with pytest.raises(ManifestError, match=rf"no rank .*\(0, 8\).*{NORM}.*rank 0"):
        make_plan(source, whole)


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"parameter": "model.extra"}, "model.extra.*does not name"),
        ({"box": ((0, 9),)}, r"\(0, 9\).*\(8,\)"),
        ({"box": ((3, 3),)}, "not empty"),
        ({"box": ((0, 1), (0, 1))}, r"whose shape is \(8,\)"),
    ],
    ids=["name", "outside", "empty", "dimensions"],
)
def test_a_piece_that_is_no_part_of_its_parameter_is_refused(
    side: str, change: dict[str, Any], words: str
) -> None:
    whole = whole_layout(decoder().manifest("float32"))
    bad = edited(whole, lambda piece: replace(piece, **change) if piece.tensor == NORM else piece)
    source, target = (bad, whole) if side == "source" else (whole, bad)
    with pytest.raises(ManifestError, match=rf"(?s)rank 0 of the {side}.*{words}"):
        make_plan(source, target)


def test_a_bucket_that_holds_nothing_is_refused() -> None:
    whole = whole_layout(decoder().manifest("float32"))
    with pytest.raises(ValueError, match="bucket_bytes is 7: give at least 8"):
        make_plan(whole, whole, bucket_bytes=7)
