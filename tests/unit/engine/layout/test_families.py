"""Decoder families: names and shapes against transformers, cuts against their definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.slices import slice_box
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from rolemesh.engine.layout.families import (
    EMBEDDING,
    LM_HEAD,
    DecoderShape,
    UnsupportedFamilyError,
    cut_of,
    stage_layers,
    stage_tensors,
)
from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, LayoutError, TrainLayout
from rolemesh.engine.layout.slices import check_layout, replica_ranks_of_kv

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-head-dim": {"model_type": "llama", "head_dim": 20, "num_key_value_heads": 1},
    "llama-all-kv-heads": {"model_type": "llama", "num_key_value_heads": None},
    "mistral": {"model_type": "mistral", "sliding_window": 8},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "qwen3-biases": {"model_type": "qwen3", "attention_bias": True, "head_dim": 16},
}


def parameters(auto_class: Any, config: Any) -> list[tuple[str, tuple[int, ...]]]:
    with torch.device("meta"):
        model = auto_class.from_config(config)
    model.tie_weights()
    return [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]


def decoder(**changes: Any) -> DecoderShape:
    return DecoderShape.from_config({"model_type": "llama", **SIZES, **changes})


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["lm", "tokens", "sequence"])
def test_manifest_has_the_parameters_of_transformers(
    variant: str, is_tied: bool, kind: str
) -> None:
    raw = {**SIZES, **VARIANTS[variant], "tie_word_embeddings": is_tied, "num_labels": 3}
    config = AutoConfig.for_model(**raw)
    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        "lm": (AutoModelForCausalLM, {}),
        "tokens": (
            AutoModelForTokenClassification,
            {"head": "score", "num_labels": 3, "has_head_bias": True},
        ),
        "sequence": (AutoModelForSequenceClassification, {"head": "score", "num_labels": 3}),
    }
    auto_class, options = ways[kind]
    expected = parameters(auto_class, config)
    for given in (raw, config.to_dict()):
        shape = DecoderShape.from_config(given, **options)
        manifest = shape.manifest("bfloat16")
        assert {name: held.shape for name, held in manifest.items()} == dict(expected)
        assert {held.dtype for held in manifest.values()} == {"bfloat16"}
        for name in manifest:
            cut_of(shape, name)


def test_a_config_that_leaves_sizes_out_means_what_transformers_means() -> None:
    for family in ("llama", "mistral", "qwen2", "qwen3"):
        raw = {"model_type": family, **SIZES, "num_attention_heads": 32, "hidden_size": 64}
        del raw["num_key_value_heads"]
        expected = dict(parameters(AutoModelForCausalLM, AutoConfig.for_model(**raw)))
        manifest = DecoderShape.from_config(raw).manifest("float32")
        assert {name: held.shape for name, held in manifest.items()} == expected


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model_type": "gpt2"}, UnsupportedFamilyError, "gpt2.*llama.*pp=1, tp=1, dp=1"),
        ({"quantization_config": {}}, UnsupportedFamilyError, "quantization_config"),
        ({"hidden_size": None}, ValueError, "hidden_size is None"),
        ({"num_hidden_layers": 0}, ValueError, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, ValueError, "num_key_value_heads 3 .* 4"),
    ],
    ids=["family", "quantized", "missing", "zero", "kv-heads"],
)
def test_a_model_without_a_plan_is_refused(
    changes: dict[str, Any], error: type[ValueError], words: str
) -> None:
    with pytest.raises(error, match=words):
        decoder(**changes)


def test_a_parameter_of_no_family_is_refused() -> None:
    for name in ("model.layers.0.self_attn.qkv_proj.weight", "transformer.wte.weight"):
        with pytest.raises(UnsupportedFamilyError, match=name):
            cut_of(decoder(), name)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (TrainLayout(pp=4), "pp 4 .* 3 layers"),
        (TrainLayout(tp=3), "tp 3 .* num_attention_heads 8"),
        (HybridLayout(TrainLayout(tp=8), GenerateLayout(tp=8)), None),
        (TrainLayout(tp=8), None),
    ],
    ids=["layers", "heads", "both-fit", "fits"],
)
def test_sizes_that_do_not_divide_are_refused(
    layout: TrainLayout | HybridLayout, words: str | None
) -> None:
    shape = decoder(num_attention_heads=8, num_key_value_heads=2)
    if words is None:
        check_layout(shape, layout)
        return
    with pytest.raises(LayoutError, match=words):
        check_layout(shape, layout)


def test_layers_that_images_enter_must_be_on_the_first_stage() -> None:
    shape = replace(decoder(), num_deepstack_levels=2)
    check_layout(shape, TrainLayout(pp=1))
    assert shape.num_layers == 3
    with pytest.raises(LayoutError, match="pp 3 leaves the first stage 1 of 3 layers"):
        check_layout(shape, TrainLayout(pp=3))


@pytest.mark.parametrize(
    ("changes", "tp", "words"),
    [
        ({"intermediate_size": 81}, 2, "intermediate_size 81"),
        ({"num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 12}, 3, "128"),
        (
            {
                "num_attention_heads": 12,
                "num_key_value_heads": 4,
                "intermediate_size": 12,
                "vocab_size": 192,
            },
            6,
            "tp 6 neither divides num_key_value_heads 4 .* multiple",
        ),
    ],
    ids=["inner-width", "padded-vocabulary", "kv-heads"],
)
def test_a_slice_that_does_not_fit_names_both_sizes(
    changes: dict[str, Any], tp: int, words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        check_layout(decoder(**changes), TrainLayout(tp=tp))


def test_generation_slices_are_checked_too() -> None:
    # 4 key-value heads: 12 training slices fit (three share a head), 6 generation slices do not.
    shape = decoder(
        hidden_size=96,
        num_attention_heads=12,
        num_key_value_heads=4,
        intermediate_size=24,
        vocab_size=192,
    )
    check_layout(shape, TrainLayout(tp=12))
    with pytest.raises(LayoutError, match=r"generate\.tp 6 neither divides"):
        check_layout(shape, HybridLayout(TrainLayout(tp=12), GenerateLayout(tp=6)))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_slices_cover_each_parameter_and_overlap_only_where_they_share(size: int) -> None:
    shape = decoder(num_attention_heads=8, num_key_value_heads=2, attention_bias=True)
    for name, parameter in shape.manifest("float32").items():
        counts = torch.zeros(parameter.shape, dtype=torch.int64)
        for tp in range(size):
            box = slice_box(shape, name, tp=tp, size=size)
            counts[tuple(slice(*extent) for extent in box)] += 1
        shared = {"whole": size, "kv_heads": replica_ranks_of_kv(shape, size)}
        assert (counts == shared.get(cut_of(shape, name), 1)).all(), name


def test_vocabulary_slices_are_blocks_of_the_padded_vocabulary() -> None:
    shape = decoder(num_attention_heads=16, num_key_value_heads=16)
    rows = [slice_box(shape, EMBEDDING, tp=tp, size=4)[0] for tp in range(4)]
    assert rows == [(0, 32), (32, 64), (64, 96), (96, 100)]
    assert slice_box(shape, LM_HEAD, tp=13, size=16)[0] == (100, 100)


def test_query_heads_of_a_slice_read_its_own_kv_heads() -> None:
    shape = decoder(num_attention_heads=16, num_key_value_heads=4)
    share = shape.num_heads // shape.num_kv_heads
    for size in (1, 2, 4, 8, 16):
        for tp in range(size):
            heads, kv_heads = (
                {
                    row // shape.head_dim
                    for row in range(*slice_box(shape, f"{at}.weight", tp=tp, size=size)[0])
                }
                for at in ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj")
            )
            assert kv_heads == {head // share for head in heads}


def test_stages_are_runs_of_layers_with_the_larger_first() -> None:
    shape = decoder(num_hidden_layers=7)
    layers = [stage_layers(shape, pp=pp, size=3) for pp in range(3)]
    assert layers == [range(3), range(3, 5), range(5, 7)]
    with pytest.raises(LayoutError, match="8 stages"):
        stage_layers(shape, pp=0, size=8)
    with pytest.raises(LayoutError, match="stage is 3"):
        stage_layers(shape, pp=3, size=3)


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_stages_hold_each_parameter_once_but_a_tied_embedding_at_both_ends(
    is_tied: bool, size: int
) -> None:
    shape = decoder(tie_word_embeddings=is_tied)
    held = [entry for pp in range(size) for entry in stage_tensors(shape, pp=pp, size=size)]
    extra = [(LM_HEAD, EMBEDDING)] if is_tied and size > 1 else []
    assert held == [(name, name) for name in shape.manifest("float32")] + extra
