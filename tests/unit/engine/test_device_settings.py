"""What devices decide where a recipe leaves a setting out, and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolemesh.engine.specs import ModelSpec, VllmSpec
from rolemesh.engine.specs.by_device import (
    Choices,
    Device,
    ModelSizes,
    activation_bytes,
    cpu_of,
    described,
    model_choices,
    sampler_choices,
)
from rolemesh.engine.specs.models.activations import LayerWidths

GPU = Device("cuda")
CPU = Device("cpu")
OLD_CPU = Device("cpu", multiplies_bfloat16=False)

SMALL = ModelSizes(
    num_layers=28, widths=LayerWidths(hidden=1536, query=1536, key_value=256, inner=8960)
)
"""Qwen2.5-1.5B: exact, of 4,096 tokens 15.1 GiB of activations, and 5.2 in bfloat16 of 1,024."""
LARGE = ModelSizes(
    num_layers=32, widths=LayerWidths(hidden=4096, query=4096, key_value=1024, inner=14336)
)
"""Llama-3.1-8B: exact, of 4,096 tokens 42 GiB."""
GIB = 2**30


def _values(choices: Choices) -> dict[str, Any]:
    return {name: choice.value for name, choice in choices.items()}


def _model(**fields: Any) -> ModelSpec:
    return ModelSpec(path=Path("none"), **fields)


SAMPLERS: dict[str, tuple[Device, dict[str, Any], dict[str, Any]]] = {
    # What a CPU did before there was a choice.
    "exact on a CPU": (CPU, {}, dict(_S := {
        "max_num_seqs": 64, "enforce_eager": True,
        "async_scheduling": False, "activations": "float32",
    })),
    "fast on a CPU": (
        *(CPU, {"numerics": "fast"}), {**_S, "activations": "bfloat16"},
    ),
    "fast on a CPU without bfloat16": (OLD_CPU, {"numerics": "fast"}, _S),
    "on a GPU": (GPU, {}, dict(_G := {
        "max_num_seqs": 256, "enforce_eager": False,
        "async_scheduling": True, "activations": "bfloat16",
    })),
    "on a GPU, with updates in flight": (
        *(GPU, {"updates_between_steps": True}), {**_G, "async_scheduling": False},
    ),
    "on several GPUs": (GPU, {"num_slices": 2}, {**_G, "async_scheduling": False}),
    "with an adapter on a CPU": (CPU, {"has_adapter": True}, {**_S, "adapters": "merged"}),
    "with an adapter, fast on a CPU": (
        *(CPU, {"has_adapter": True, "numerics": "fast"}),
        {**_S, "activations": "bfloat16", "adapters": "slots"},
    ),
    "with an adapter, fast on a CPU without bfloat16": (
        *(OLD_CPU, {"has_adapter": True, "numerics": "fast"}), {**_S, "adapters": "merged"},
    ),
    "with an adapter on a GPU": (GPU, {"has_adapter": True}, {**_G, "adapters": "slots"}),
}  # fmt: skip


@pytest.mark.parametrize("case", SAMPLERS)
def test_a_sampler_is_set_for_its_device(case: str) -> None:
    device, arguments, expected = SAMPLERS[case]
    choices = sampler_choices(VllmSpec(), device, **arguments)
    assert _values(choices) == expected
    assert all(choice.reason for choice in choices.values())


def test_what_a_recipe_gives_stands_on_every_device() -> None:
    given: dict[str, Any] = {
        "max_num_seqs": 7,
        "enforce_eager": True,
        "async_scheduling": False,
        "activations": "float32",
    }
    for device in (GPU, CPU):
        choices = sampler_choices(VllmSpec(**given), device, numerics="fast")
        assert _values(choices) == given
        assert {choice.reason for choice in choices.values()} == {"given by the recipe"}
    model = _model(
        recompute="selective",
        activations="float32",
        frozen_dtype="float32",
    )
    for trains in (True, False):
        choices = model_choices(
            model, GPU, replace(LARGE, num_slices=2), numerics="fast", trains=trains
        )
        assert {choice.reason for choice in choices.values()} == {"given by the recipe"}


@pytest.mark.parametrize("arguments", [{"updates_between_steps": True}, {"num_slices": 2}], ids=str)
def test_async_scheduling_is_refused_where_it_cannot_be(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"async_scheduling is true, but .*: leave it out"):
        sampler_choices(VllmSpec(async_scheduling=True), GPU, **arguments)


@pytest.mark.parametrize(
    ("device", "fields", "expected"),
    [
        (CPU, {"adapters": "slots"}, "slots"),
        (CPU, {"adapters": "merged"}, "merged"),
        (GPU, {"adapters": "merged", "activations": "float32"}, "merged"),
        (GPU, {"activations": "float32"}, "merged"),
        (CPU, {"activations": "bfloat16"}, "slots"),
    ],
    ids=str,
)
def test_how_an_adapter_is_sampled_with_may_be_given(
    device: Device, fields: dict[str, Any], expected: str
) -> None:
    choices = sampler_choices(VllmSpec(**fields), device, has_adapter=True)
    assert choices["adapters"].value == expected
    assert (choices["adapters"].reason == "given by the recipe") == ("adapters" in fields)
    # Without an adapter there is nothing to choose.
    assert "adapters" not in sampler_choices(VllmSpec(**fields), device)


@pytest.mark.parametrize(
    ("device", "numerics", "fields", "reason"),
    [
        (GPU, "exact", {}, "as rollout.dtype says"),
        (CPU, "fast", {}, "fast numerics: as rollout.dtype says"),
        (CPU, "exact", {"activations": "bfloat16"}, "given by the recipe"),
    ],
    ids=str,
)
def test_merging_is_refused_where_sums_would_be_rounded(
    device: Device, numerics: Any, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match="is merged, but the sampler computes in bf") as caught:
        sampler_choices(
            VllmSpec(adapters="merged", **fields), device, numerics=numerics, has_adapter=True
        )
    assert f"computes in bfloat16 ({reason}), and sums rounded to bfloat16 would lose small" in str(
        caught.value
    )
    assert str(caught.value).endswith("give slots, or rollout.activations float32")


@pytest.mark.parametrize(
    ("device", "fields"),
    [(GPU, {}), (CPU, {"adapters": "slots"})],
    ids=["on a GPU", "by the recipe"],
)
def test_slots_are_refused_for_experts(device: Device, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"adapter\.targets has experts") as caught:
        sampler_choices(VllmSpec(**fields), device, has_adapter=True, adapts_experts=True)
    assert "give rollout.activations float32 and rollout.adapters merged" in str(caught.value)
    merged = VllmSpec(dtype="float32")
    choices = sampler_choices(merged, device, has_adapter=True, adapts_experts=True)
    assert choices["adapters"].value == "merged"


def test_slots_are_refused_where_a_gpu_has_no_kernel_for_them() -> None:
    with pytest.raises(ValueError, match="is slots, but the sampler computes in float32") as caught:
        sampler_choices(VllmSpec(adapters="slots", dtype="float32"), GPU, has_adapter=True)
    assert str(caught.value).endswith("give merged, or rollout.activations bfloat16")


def test_a_model_is_recomputed_where_its_activations_take_half_of_the_room() -> None:
    size = activation_bytes(_model(), LARGE, is_narrow=False)
    # A token keeps 26 bytes a hidden number, 4 a number of heads, 8 of the MLP; and 2 a weight.
    per_token = 26 * 4096 + 4 * (4096 + 1024) + 8 * 14336
    weights = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336
    assert size == 32 * (4096 * per_token + 2 * weights)
    for room, expected in ((3 * size, "none"), (2 * size - 1, "full"), (-GIB, "full")):
        choices = model_choices(_model(), GPU, LARGE, room_bytes=room)
        assert choices["recompute"].value == expected
        assert f"{max(0, room) / GIB:.1f} GiB" in choices["recompute"].reason
    assert _values(model_choices(_model(), CPU, LARGE))["recompute"] == "none"


def test_a_gpu_that_was_not_asked_has_a_fifth_of_80_gb() -> None:
    assert _values(model_choices(_model(), GPU, SMALL))["recompute"] == "full"
    shorter = _model(micro_batch_tokens=1024)
    found = model_choices(shorter, GPU, SMALL, numerics="fast")
    assert found["recompute"].value == "none"
    assert "room for passes is taken to be 16.0 GiB" in found["recompute"].reason
    # Families that do not say their sizes go on without.
    assert _values(model_choices(_model(), GPU, None))["recompute"] == "none"


def test_cut_models_and_those_that_share_tokens_keep_less() -> None:
    whole = activation_bytes(_model(), LARGE, is_narrow=True)
    cut = activation_bytes(_model(), replace(LARGE, num_slices=8), is_narrow=True)
    shared = activation_bytes(
        _model(sequence_parallel=True), replace(LARGE, num_slices=8), is_narrow=True
    )
    hidden = 32 * 4096 * 4096
    assert cut == whole / 8 + hidden * 16 * 7 / 8
    assert cut - shared == hidden * 12 * 7 / 8
    # Of a row that four ranks cut, one keeps what it would of a fourth.
    of_row = activation_bytes(_model(), replace(LARGE, num_cuts=4), is_narrow=True)
    assert of_row == activation_bytes(_model(micro_batch_tokens=1024), LARGE, is_narrow=True)
    # A stage keeps the passes of all stages.
    stages = replace(LARGE, num_stages=4)
    assert activation_bytes(_model(), stages, is_narrow=True) == whole
    wide = activation_bytes(_model(compute_dtype="float32"), LARGE, is_narrow=False)
    assert wide == 32 * 4096 * (24 * 4096 + 8 * (4096 + 1024) + 16 * 14336)


@pytest.mark.parametrize("num_slices", [1, 8])
def test_a_layer_with_an_adapter_counts_as_one(num_slices: int) -> None:
    sizes = replace(LARGE, num_slices=num_slices)
    model = _model(adapter={"rank": 16})
    size = activation_bytes(model, sizes, is_narrow=True)
    # A token keeps 8 bytes a hidden number of norms, and one rounded input each of attention and
    # MLP; 2 x 2 a number of heads, 4 x 2 of the MLP; 7 narrow rows; and the rounded factors.
    inside = 4 * (4096 + 1024) + 8 * 14336
    factors = 16 * (4096 * 7 + 2 * 4096 + 2 * 1024 + 3 * 14336)
    per_token = (8 + 2 * 2) * 4096 + 7 * 2 * 16 + inside / num_slices
    assert size == int(32 * (4096 * per_token + 2 * factors / num_slices))
    shares = _model(adapter={"rank": 16}, sequence_parallel=True)
    saved = 32 * 4096 * 8 * 4096 * (1 - 1 / num_slices)
    assert activation_bytes(shares, sizes, is_narrow=True) == int(size - saved)


def test_an_adapter_is_not_recomputed_where_the_whole_model_would_be() -> None:
    whole = activation_bytes(_model(), LARGE, is_narrow=False)
    size = activation_bytes(_model(adapter={}), LARGE, is_narrow=False)
    # The base is held rounded, so that no layer keeps rounded copies of it.
    assert size / whole == pytest.approx(0.60, abs=0.01)
    room = 2 * size + GIB
    assert model_choices(_model(), GPU, LARGE, room_bytes=room)["recompute"].value == "full"
    found = model_choices(_model(adapter={}), GPU, LARGE, room_bytes=room)
    assert found["recompute"].value == "none"
    assert f"about {size / GIB:.1f} GiB of activations" in found["recompute"].reason


def test_what_an_adapter_keeps_follows_its_targets_and_the_type_of_its_base() -> None:
    def chosen(**fields: Any) -> str:
        reason = model_choices(_model(**fields), GPU, LARGE)["recompute"].reason
        return reason.partition(" GiB")[0].removeprefix("about ")

    everything = float(chosen(adapter={}))
    some = float(chosen(adapter={"targets": ["q_proj", "mlp.down_proj"]}))
    assert some < everything
    # Rounded for a pass, the base is kept once more: 218 million numbers of 2 bytes a layer.
    wide = float(chosen(adapter={}, frozen_dtype="float32"))
    assert wide - everything == pytest.approx(32 * 2 * LARGE.widths.weights / GIB, abs=0.1)
    # A family whose matrices have other names is not taken for one with fewer.
    assert float(chosen(adapter={"targets": ["qkv_proj"]})) == everything


def test_sizes_are_read_from_a_config() -> None:
    config = {
        "model_type": "qwen3",
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
    }
    assert ModelSizes.of_config(config, num_slices=2) == ModelSizes(
        num_layers=28,
        widths=LayerWidths(hidden=1024, query=2048, key_value=1024, inner=3072, norms_queries=True),
        num_slices=2,
    )
    assert ModelSizes.of_config({"hidden_size": 8}) is None
    bare = ModelSizes.of_config({"hidden_size": 8, "num_hidden_layers": 4}, num_layers=2)
    assert bare == ModelSizes(
        num_layers=2, widths=LayerWidths(hidden=8, query=8, key_value=8, inner=32)
    )


def test_one_slice_cannot_share_tokens() -> None:
    with pytest.raises(ValueError, match="sequence_parallel is true, but the layout has tp 1"):
        model_choices(_model(sequence_parallel=True), GPU, LARGE)


@pytest.mark.parametrize(
    ("device", "numerics", "compute", "activations", "frozen"),
    [
        (CPU, "exact", "bfloat16", "float32", "float32"),
        (CPU, "fast", "bfloat16", "bfloat16", "bfloat16"),
        (OLD_CPU, "fast", "bfloat16", "float32", "float32"),
        (GPU, "exact", "bfloat16", "float32", "bfloat16"),
        (GPU, "fast", "bfloat16", "bfloat16", "bfloat16"),
        (GPU, "fast", "float32", "float32", "float32"),
    ],
)
def test_types_follow_numerics_and_device(
    device: Device, numerics: Any, compute: Any, activations: str, frozen: str
) -> None:
    spec = _model(compute_dtype=compute)
    choices = model_choices(spec, device, SMALL, numerics=numerics, trains=False)
    assert _values(choices) == {"activations": activations, "frozen_dtype": frozen}


def test_a_choice_is_told_with_its_reason() -> None:
    lines = list(described(sampler_choices(VllmSpec(max_num_seqs=3), CPU)))
    assert lines[0] == "max_num_seqs 3 (given by the recipe)"
    assert lines[1] == "enforce_eager true (on a CPU there are no graphs to capture)"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, True),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, True),
        ({"ONEDNN_MAX_CPU_ISA": "avx512_core"}, False),
        ({"DNNL_MAX_CPU_ISA": "AVX2"}, False),
        # oneDNN reads its newer name first.
        ({"ONEDNN_MAX_CPU_ISA": "ALL", "DNNL_MAX_CPU_ISA": "AVX2"}, True),
    ],
)
def test_what_a_cpu_is_fast_in_is_what_variables_leave_of_it(
    variables: dict[str, str], expected: bool
) -> None:
    assert cpu_of({"avx512_bf16"}, variables).multiplies_bfloat16 is expected
    assert not cpu_of({"avx512_f"}, variables).multiplies_bfloat16
