"""Tests of what each rank holds: coverage, nesting, FSDP2's chunks and vLLM's tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.weight_shards import PADDING, numbered, shards

from rolemesh.engine.layout.boxes import (
    generate_layers,
    generate_layout,
    train_layout,
    whole_layout,
)
from rolemesh.engine.layout.families import (
    EMBEDDING,
    LM_HEAD,
    DecoderShape,
    UnsupportedFamilyError,
)
from rolemesh.engine.layout.manifest import ManifestError, WeightLayout, num_elements
from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, LayoutError, TrainLayout
from rolemesh.engine.layout.slices import check_layout

QKV = "model.layers.0.self_attn.qkv_proj.weight"


def decoder(**changes: Any) -> DecoderShape:
    sizes = {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 48,
        "num_hidden_layers": 5,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 2,
        "vocab_size": 100,
    }
    return DecoderShape.from_config({**sizes, **changes})


NESTING_SHAPES = {
    "kv-heads-shared": decoder(num_hidden_layers=17, vocab_size=1000),
    "thirds": decoder(
        model_type="qwen2",
        tie_word_embeddings=True,
        num_attention_heads=12,
        num_key_value_heads=3,
        vocab_size=130,
        num_hidden_layers=16,
    ),
    "fused": decoder(model_type="phi3", num_hidden_layers=16, num_key_value_heads=16),
    "one-kv-head": decoder(num_key_value_heads=1, num_hidden_layers=16, tie_word_embeddings=True),
}


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def hybrids(most_ranks: int) -> Iterator[HybridLayout]:
    for pp in range(1, most_ranks + 1):
        for tp in range(1, most_ranks // pp + 1):
            for dp in range(1, most_ranks // (pp * tp) + 1):
                for pp_g in divisors(pp):
                    for tp_g in divisors(tp):
                        yield HybridLayout(
                            TrainLayout(pp=pp, tp=tp, dp=dp), GenerateLayout(pp=pp_g, tp=tp_g)
                        )


@pytest.mark.parametrize(
    "shape",
    [
        # Of these, the one that no number of slices but 3 divides.
        pytest.param(shape, id=name, marks=[] if name == "thirds" else pytest.mark.slow)
        for name, shape in NESTING_SHAPES.items()
    ],
)
def test_training_shards_lie_inside_generation_shards(shape: DecoderShape) -> None:
    checked = 0
    for layout in hybrids(16):
        try:
            check_layout(shape, layout)
        except LayoutError:
            continue
        checked += 1
        held = train_layout(shape, layout.train)
        wanted = generate_layout(shape, layout, "bfloat16")
        # Replicas share the very same shard object: each pair once.
        pairs = zip(held.ranks, wanted.ranks, strict=True)
        for own, generated in {(id(own), id(gen)): (own, gen) for own, gen in pairs}.values():
            boxes = defaultdict(list)
            for piece in generated.pieces:
                boxes[piece.parameter].append(piece.box)
            for piece in own.pieces:
                assert any(
                    all(
                        outer_start <= start and stop <= outer_stop
                        for (start, stop), (outer_start, outer_stop) in zip(
                            piece.box, outer, strict=True
                        )
                    )
                    for outer in boxes[piece.parameter]
                ), (layout, piece)
    assert checked > 50


def test_tensors_are_covered_without_overlap_but_for_the_padded_vocabulary() -> None:
    for shape in (
        decoder(),
        decoder(model_type="qwen2", tie_word_embeddings=True),
        # One tensor of several projections, of each of which a slice has a part.
        decoder(model_type="phi3"),
    ):
        train = TrainLayout(pp=2, tp=2, dp=4, fsdp=2)
        for layout in (
            train_layout(shape, train),
            whole_layout(shape.manifest("float32"), ranks=2),
            generate_layout(shape, HybridLayout(train, GenerateLayout(pp=2)), "bfloat16"),
        ):
            whole = numbered(layout.manifest)
            seen = {name: np.zeros(weight.shape, bool) for name, weight in whole.items()}
            for shard, tensors in zip(layout.ranks, shards(layout, whole), strict=True):
                for name, tensor in tensors.items():
                    covered = sum(
                        num_elements(piece.box) for piece in shard.pieces if piece.tensor == name
                    )
                    assert covered == (tensor != PADDING).sum()
                    if layout.dtype == "float32":
                        assert covered == tensor.size
                for piece in shard.pieces:
                    seen[piece.parameter][tuple(slice(*extent) for extent in piece.box)] = True
            assert all(mask.all() for mask in seen.values())


def test_fsdp_cuts_local_tensors_as_torch_chunks_them() -> None:
    # 5 real rows of a slice of the vocabulary over 4 ranks: 2, 2, 1 and 0.
    shape = decoder(vocab_size=37, num_attention_heads=16)
    train = TrainLayout(tp=2, dp=4, fsdp=4)
    layout = train_layout(shape, train)
    replicated = train_layout(shape, TrainLayout(tp=2))
    whole = numbered(layout.manifest)
    plain = shards(replicated, whole)
    for rank, tensors in enumerate(shards(layout, whole)):
        at = train.coordinates(rank)
        for name, tensor in tensors.items():
            chunks = torch.chunk(torch.from_numpy(plain[at.tp][name]), 4, dim=0)
            if at.dp < len(chunks):
                assert np.array_equal(tensor, chunks[at.dp].numpy())
            else:
                assert tensor.shape == (0, *plain[at.tp][name].shape[1:])
    assert [layout.ranks[2 * dp + 1].shapes[EMBEDDING] for dp in range(4)] == [
        (2, 16),
        (2, 16),
        (1, 16),
        (0, 16),
    ]


def test_replicas_of_hsdp_hold_the_same() -> None:
    train = TrainLayout(tp=2, dp=4, fsdp=2)
    layout = train_layout(decoder(), train)
    for group in train.replicate_groups():
        assert len({layout.ranks[rank].pieces for rank in group}) == 1


def test_a_layout_of_some_parameters_leaves_the_others_out() -> None:
    train = TrainLayout(tp=2, dp=4, fsdp=2)
    whole = train_layout(decoder(), train)
    some = whole.of(lambda name: "q_proj" in name)
    assert len(some.manifest) == 5
    for before, after in zip(whole.ranks, some.ranks, strict=True):
        assert set(after.shapes) == set(some.manifest)
        assert after.pieces == tuple(one for one in before.pieces if "q_proj" in one.parameter)
    first, second = train.replicate_groups()[0]
    assert some.ranks[first] is some.ranks[second], "replicas share a shard"


def test_fused_tensors_hold_their_parts_one_below_the_other() -> None:
    shape = decoder(model_type="qwen2")
    layout = generate_layout(
        shape, HybridLayout(TrainLayout(tp=8), GenerateLayout(tp=8)), "float32"
    )
    whole = numbered(layout.manifest)
    q, k, v = (whole[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv")
    # 16 query heads of width 2 over 8 ranks; ranks 4 and 5 share key-value head 2 of 4.
    for rank in (4, 5):
        expected = np.concatenate([q[4 * rank : 4 * rank + 4], k[4:6], v[4:6]])
        assert np.array_equal(shards(layout, whole)[rank][QKV], expected)
    assert layout.ranks[0].shapes[QKV.replace(".weight", ".bias")] == (8,)


def test_a_padded_vocabulary_has_rows_without_a_piece() -> None:
    shape = decoder()
    layout = generate_layout(
        shape, HybridLayout(TrainLayout(tp=4), GenerateLayout(tp=4)), "float32"
    )
    tensors = shards(layout, numbered(layout.manifest))
    for name in (EMBEDDING, LM_HEAD):
        assert [tensors[rank][name].shape for rank in range(4)] == [(32, 16)] * 4
        assert (tensors[3][name][4:] == PADDING).all()
        assert (tensors[3][name][:4] != PADDING).all()


def holders(layout: WeightLayout, tensor: str) -> list[int]:
    return [rank for rank, shard in enumerate(layout.ranks) if tensor in shard.shapes]


def test_a_tied_embedding_stands_at_both_ends() -> None:
    shape = decoder(tie_word_embeddings=True)
    two = train_layout(shape, TrainLayout(pp=2))
    assert (holders(two, EMBEDDING), holders(two, LM_HEAD)) == ([0], [1])
    assert LM_HEAD not in two.manifest
    one = train_layout(shape, TrainLayout(dp=2))
    assert (holders(one, EMBEDDING), holders(one, LM_HEAD)) == ([0, 1], [])
    stages = HybridLayout(TrainLayout(pp=4), GenerateLayout(pp=4))
    generated = generate_layout(shape, stages, "bfloat16")
    assert (holders(generated, EMBEDDING), holders(generated, LM_HEAD)) == ([0, 3], [])


def test_generation_stages_join_training_stages() -> None:
    shape = decoder(num_hidden_layers=6)
    layout = HybridLayout(TrainLayout(pp=4), GenerateLayout(pp=2))
    assert [generate_layers(shape, layout, pp=pp) for pp in range(2)] == [range(4), range(4, 6)]
    with pytest.raises(LayoutError):
        generate_layers(shape, layout, pp=2)


def test_what_vllm_cannot_hold_is_refused() -> None:
    config = {
        "model_type": "qwen3",
        "hidden_size": 16,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 64,
        "attention_bias": True,
    }
    one = HybridLayout(TrainLayout())
    with pytest.raises(UnsupportedFamilyError, match=r"qwen3 .* o_proj\.bias"):
        generate_layout(DecoderShape.from_config(config), one, "float32")
    score = DecoderShape.from_config({**config, "attention_bias": False}, head="score")
    with pytest.raises(UnsupportedFamilyError, match="lm_head"):
        generate_layout(score, one, "float32")


def test_layouts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"pp 6 .* 5 layers"):
        train_layout(decoder(), TrainLayout(pp=6))
    with pytest.raises(LayoutError, match="tp 5"):
        generate_layout(decoder(), HybridLayout(TrainLayout(tp=5)), "float32")
    with pytest.raises(ManifestError, match="ranks is 0"):
        whole_layout(decoder().manifest("float32"), ranks=0)
