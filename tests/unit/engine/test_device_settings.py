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

GPU = Device("cuda")
CPU = Device("cpu")
OLD_CPU = Device("cpu", multiplies_bfloat16=False)

SMALL = ModelSizes(num_layers=28, hidden_size=1536)
"""A model of 1.5 billion parameters: 28 * 4096 * 1536 * 34 bytes are 5.6 GiB."""
LARGE = ModelSizes(num_layers=32, hidden_size=4096)
"""One of 7 billion: 17 GiB."""


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


def test_a_large_model_is_recomputed_on_a_gpu() -> None:
    assert activation_bytes(_model(), LARGE) == 32 * 4096 * 4096 * 34
    assert _values(model_choices(_model(), GPU, LARGE))["recompute"] == "full"
    assert _values(model_choices(_model(), GPU, SMALL))["recompute"] == "none"
    longer = _model(micro_batch_tokens=16384)
    assert _values(model_choices(longer, GPU, SMALL))["recompute"] == "full"
    # Slices and stages share the activations: (10 + 24 / 8) of 34 bytes, and 8 of 32 layers.
    cut = ModelSizes(num_layers=32, hidden_size=4096, num_stages=4, num_slices=8)
    assert activation_bytes(_model(), cut) == 8 * 4096 * 4096 * 13
    assert _values(model_choices(_model(), GPU, cut))["recompute"] == "none"
    assert _values(model_choices(_model(), CPU, LARGE))["recompute"] == "none"


def test_slices_that_share_tokens_need_less_recomputation() -> None:
    half, shared = (
        _model(micro_batch_tokens=8192, sequence_parallel=shares) for shares in (False, True)
    )
    cut = replace(LARGE, num_slices=8)
    # (10 + 24 / 8) and (4 + 30 / 8) of 34 bytes: 13 and 7.75 GiB.
    assert activation_bytes(half, cut) == 32 * 8192 * 4096 * 13
    assert activation_bytes(half, cut, shares_tokens=True) == 32 * 8192 * 4096 * 7.75
    assert _values(model_choices(half, GPU, cut))["recompute"] == "full"
    assert _values(model_choices(shared, GPU, cut))["recompute"] == "none"


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
