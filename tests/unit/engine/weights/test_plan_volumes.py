"""The planner: how little travels, against Table 2 and Fig. 14 of arXiv 2409.19256."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.planned_bytes import planned_received, planned_sent
from support.weight_shards import (
    divisors,
)

from rolemesh.engine.layout.boxes import generate_layout, train_layout, whole_layout
from rolemesh.engine.layout.families import (
    EMBEDDING,
    LM_HEAD,
    NORM,
    DecoderShape,
    cut_of,
)
from rolemesh.engine.layout.manifest import (
    Manifest,
    num_elements,
)
from rolemesh.engine.layout.ranks import (
    GenerateLayout,
    HybridLayout,
    TrainLayout,
)
from rolemesh.engine.layout.slices import is_stack
from rolemesh.engine.weights.plan import Plan, make_plan

SENDER_SLACK = 1.05
"""Busiest sender over the mean, paper's settings: the two ends of the pipeline also hold embedding
and head, 1 to 3 % of these models."""

FIG_14 = {
    "7B": ((4096, 11008, 32, 32, 32), (1, 8, 2), (1, 2)),
    "13B": ((5120, 13824, 40, 40, 40), (1, 8, 2), (1, 4)),
    "34B": ((8192, 22016, 48, 64, 8), (4, 8, 1), (1, 8)),
    "70B": ((8192, 28672, 80, 64, 8), (8, 8, 1), (1, 8)),
}
"""Model: (hidden, inner, layers, heads, key-value heads), (p, t, d), (p_g, t_g): arXiv 2409.19256,
Fig. 14, with fewer replicas, since d does not occur in the volume."""


def dividing_shape(layout: TrainLayout, *, is_tied: bool) -> DecoderShape:
    """A model all of whose sizes the layout divides."""
    return DecoderShape.from_config(
        {
            "model_type": "qwen2",
            "hidden_size": 4,
            "intermediate_size": 3 * layout.tp,
            "num_hidden_layers": layout.pp,
            "num_attention_heads": 2 * layout.tp,
            "num_key_value_heads": layout.tp,
            "head_dim": 2,
            "vocab_size": 64 * layout.tp,
            "tie_word_embeddings": is_tied,
        }
    )


def sizes_by_group(shape: DecoderShape, manifest: Manifest) -> dict[str, int]:
    """Elements of the parameters that are treated alike."""
    totals: dict[str, int] = defaultdict(int)
    for name, parameter in manifest.items():
        group = {EMBEDDING: "embedding", LM_HEAD: "head", NORM: "norm"}.get(
            name, "whole" if cut_of(shape, name) == "whole" else "cut"
        )
        totals[group] += num_elements(parameter.box)
    return totals


def hybrids(most_ranks: int) -> Iterator[HybridLayout]:
    for pp, tp, dp in itertools.product(range(1, most_ranks + 1), repeat=3):
        if pp * tp * dp <= most_ranks:
            train = TrainLayout(pp=pp, tp=tp, dp=dp)
            for pp_g, tp_g in itertools.product(divisors(pp), divisors(tp)):
                yield HybridLayout(train, GenerateLayout(pp=pp_g, tp=tp_g))


@pytest.mark.parametrize("most_ranks", [8, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_received_bytes_are_those_of_table_2(is_tied: bool, most_ranks: int) -> None:
    """Bytes received a rank are (d_g - 1) / (tp) M, group by group of parameters.

    arXiv 2409.19256, Table 2, HybridFlow. Layers' parameters that slices cut: exactly that on every
    rank. Norms of layers, which slices do not cut: (1/p_g - 1/p) of them, and only stages move.
    Embedding, last norm and head stand on one stage only (a tied embedding on both ends), so their
    share depends on the rank: 1/t_g if the rank generates with them, less 1/t if it trains them;
    over all ranks the cut ones again make (d_g - 1) / (tp).
    """
    for layout in hybrids(most_ranks):
        train, generate = layout.train, layout.generate
        shape = dividing_shape(train, is_tied=is_tied)
        source = train_layout(shape, train, "bfloat16")
        plan = make_plan(source, generate_layout(shape, layout, "bfloat16"))
        sizes = sizes_by_group(shape, source.manifest)
        slices = train.tp * train.pp
        ends = 0
        for rank in range(layout.world_size):
            at, generated = train.coordinates(rank), layout.coordinates(rank)
            expected = (layout.micro_dp - 1) * sizes["cut"] // slices
            expected += sizes["whole"] // generate.pp - sizes["whole"] // train.pp
            is_first = (generated.pp == 0, at.pp == 0)
            is_last = (generated.pp == generate.pp - 1, at.pp == train.pp - 1)
            either = tuple(map(any, zip(is_first, is_last, strict=True)))
            for group, (is_wanted, is_held) in {
                "embedding": either if is_tied else is_first,
                "head": is_last,
            }.items():
                end = is_wanted * sizes[group] // generate.tp - is_held * sizes[group] // train.tp
                ends += end
                expected += end
            expected += (is_last[0] - is_last[1]) * sizes["norm"]
            assert planned_received(plan, rank) == 2 * expected, (layout, rank)
            # No redundancy: what is copied and what is received is the generation shard.
            shard = plan.target.ranks[rank]
            local = sum(num_elements(copy.box) for copy in plan.local[rank])
            assert local + expected == sum(num_elements(piece.box) for piece in shard.pieces)
            assert not plan.duplicates[rank]
        if not is_tied:
            both = sizes["embedding"] + sizes["head"]
            assert ends * slices == layout.world_size * (layout.micro_dp - 1) * both


def test_experts_that_ranks_share_out_are_received_once() -> None:
    """The argument of Table 2 for experts: a rank receives what it generates with and has not.

    It generates with 1 / (t_g p_g) of all experts, and holds 1 / (t p ep) of them, which is a part
    of those. All else is held and received as without ep.
    """
    for layout in hybrids(8):
        for ep in divisors(layout.train.dp)[1:]:
            train = replace(layout.train, ep=ep)
            shared = HybridLayout(train, layout.generate)
            shape = DecoderShape.from_config(
                {
                    "model_type": "qwen3_moe",
                    "hidden_size": 4,
                    "intermediate_size": 3 * train.tp,
                    "moe_intermediate_size": 2 * train.tp,
                    "num_experts": 2 * ep,
                    "num_hidden_layers": train.pp,
                    "num_attention_heads": 2 * train.tp,
                    "num_key_value_heads": train.tp,
                    "head_dim": 2,
                    "vocab_size": 64 * train.tp,
                }
            )
            plans = [
                make_plan(
                    train_layout(shape, each.train, "bfloat16"),
                    generate_layout(shape, each, "bfloat16"),
                )
                for each in (shared, layout)
            ]
            experts = sum(
                num_elements(one.box)
                for name, one in shape.manifest("bfloat16").items()
                if is_stack(shape, name)
            )
            wanted = experts // (layout.generate.tp * layout.generate.pp)
            slices = train.tp * train.pp
            for rank in range(layout.world_size):
                more = wanted - experts // (slices * ep) - (wanted - experts // slices)
                received = [planned_received(plan, rank) for plan in plans]
                assert received[0] - received[1] == 2 * more, (shared, rank)
                local = sum(num_elements(copy.box) for copy in plans[0].local[rank])
                shard = plans[0].target.ranks[rank]
                held = sum(num_elements(piece.box) for piece in shard.pieces)
                assert local + received[0] // 2 == held
                assert not plans[0].duplicates[rank]


def cut_bytes_received(shape: DecoderShape, plan: Plan) -> dict[int, dict[str, int]]:
    """By rank: bytes of layers' cut parameters, and of embedding and head."""
    received: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for bucket in plan.buckets:
        for copy in bucket.copies:
            if cut_of(shape, copy.parameter) != "whole":
                group = "ends" if copy.parameter in (EMBEDDING, LM_HEAD) else "layers"
                received[copy.target][group] += plan.wire_bytes(copy)
    return received


@pytest.mark.parametrize("model", [*list(FIG_14)[:-1], pytest.param("70B", marks=pytest.mark.slow)])
def test_the_papers_settings_receive_what_table_2_says(model: str) -> None:
    (hidden, inner, layers, heads, kv_heads), (p, t, d), (p_g, t_g) = FIG_14[model]
    shape = DecoderShape.from_config(
        {
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": 32000,
        }
    )
    layout = HybridLayout(TrainLayout(pp=p, tp=t, dp=d), GenerateLayout(pp=p_g, tp=t_g))
    plan = make_plan(
        train_layout(shape, layout.train, "bfloat16"), generate_layout(shape, layout, "bfloat16")
    )
    sizes = sizes_by_group(shape, plan.source.manifest)
    received = cut_bytes_received(shape, plan)
    world = layout.world_size
    for rank in range(world):
        assert received[rank]["layers"] * t * p == (layout.micro_dp - 1) * 2 * sizes["cut"]
    ends = sum(received[rank]["ends"] for rank in range(world))
    both = 2 * (sizes["embedding"] + sizes["head"])
    assert ends * t * p == world * (layout.micro_dp - 1) * both
    sent = [planned_sent(plan, rank) for rank in range(world)]
    assert max(sent) <= SENDER_SLACK * sum(sent) / world


def test_baselines_receive_what_their_formulas_say() -> None:
    # HybridFlow-V gathers over the training TP x PP group: (tp-1)/(tp) M. DS-Chat gathers over all
    # ranks: (tpd-1)/(tpd) M. Norms are cut by the latter only.
    train = TrainLayout(tp=2, pp=2, dp=2)
    shape = dividing_shape(train, is_tied=False)
    sizes = sizes_by_group(shape, shape.manifest("bfloat16"))
    whole = whole_layout(shape.manifest("bfloat16"), 8)
    total = 0
    plan = make_plan(train_layout(shape, train, "bfloat16"), whole)
    for rank in range(8):
        total += planned_received(plan, rank)
    cut = sizes["cut"] + sizes["embedding"] + sizes["head"]
    stages = sizes["whole"] + sizes["norm"]
    assert total == 8 * 2 * (cut * 3 // 4 + stages // 2)
    data = make_plan(train_layout(shape, TrainLayout(dp=8, fsdp=8), "bfloat16"), whole)
    assert sum(planned_received(data, rank) for rank in range(8)) == 8 * 2 * (cut + stages) * 7 // 8
