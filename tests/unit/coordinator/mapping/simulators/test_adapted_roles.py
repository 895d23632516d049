"""Simulators of roles with adapters, against closed forms and what `fit` counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.mapping_jobs import LLAMAS
from support.public_models import CONFIGS

from rolemesh.coordinator.mapping.job.layouts import Layout
from rolemesh.coordinator.mapping.job.models import Model
from rolemesh.coordinator.mapping.job.systems import ROLEMESH, ROLEMESH_FAST, System
from rolemesh.coordinator.mapping.job.work import Lengths, Work
from rolemesh.coordinator.mapping.machines.cluster import DeviceGroup, group_of
from rolemesh.coordinator.mapping.machines.coefficients import Coefficients
from rolemesh.coordinator.mapping.machines.devices import GB, device_of
from rolemesh.coordinator.mapping.simulators.generation import sampler_bytes
from rolemesh.coordinator.mapping.simulators.memory import trained_bytes
from rolemesh.coordinator.mapping.simulators.moves import (
    publish_seconds,
    received_bytes,
    reshard_seconds,
    take_seconds,
)
from rolemesh.coordinator.mapping.simulators.passes import update_seconds
from rolemesh.engine.fit.sampler import sampler_memory
from rolemesh.engine.specs import AdapterSpec, ModelSpec, VllmSpec
from rolemesh.engine.specs.by_device import ModelSizes, activation_bytes

PERFECT = Coefficients(
    matmul=1, memory=1, link=1, network=1, host=1, hidden=1, link_latency_s=0, network_latency_s=0,
    decode_step_s=0, decode_row_s=0, call_s=0,
)  # fmt: skip
SEVEN = Model.from_config(LLAMAS["7B"])
WORK = Work(prompts=64, prompt_tokens=96, completions=Lengths.fixed(32), mini_batch_rows=16)
ADAPTED = Model.from_config(LLAMAS["7B"], adapter=AdapterSpec(rank=16))
FACTORS = 32 * 16 * (4 * (4096 + 4096) + 3 * (4096 + 11008))


def perfect() -> DeviceGroup:
    return group_of(device_of("a100-80"), 16, coefficients=PERFECT)


def test_an_update_of_an_adapter_multiplies_with_the_base_twice() -> None:
    layout = Layout(micro_batch_tokens=2048)
    seconds = update_seconds(ADAPTED, layout, WORK, perfect(), ROLEMESH)
    scores = 4 * 32 * 4096 * 64
    flops = 64 * 128 * (4 * SEVEN.active_parameters + 6 * FACTORS + 3 * scores)
    assert seconds.compute == pytest.approx(flops / 312e12)
    assert seconds.optimizer == pytest.approx(4 * 28 * FACTORS / 2.039e12)
    again = update_seconds(ADAPTED, replace(layout, recompute="full"), WORK, perfect(), ROLEMESH)
    once_more = 64 * 128 * (2 * (SEVEN.active_parameters + FACTORS) + scores) / 312e12
    assert again.compute - seconds.compute == pytest.approx(once_more)


def test_replicas_sum_the_gradients_of_factors_alone() -> None:
    seconds = update_seconds(ADAPTED, Layout(dp=8), WORK, perfect(), ROLEMESH)
    assert seconds.gradients == pytest.approx(4 * 2 * 7 / 8 * 4 * FACTORS / (300 * GB))


def test_an_adapter_holds_its_base_once() -> None:
    held = trained_bytes(ADAPTED, Layout(), ROLEMESH)
    assert held.rest == 2 * SEVEN.num_parameters + 12 * FACTORS
    wide = trained_bytes(ADAPTED, Layout(), replace(ROLEMESH, frozen_bytes=4))
    assert wide.rest == 4 * SEVEN.num_parameters + 12 * FACTORS
    cut = trained_bytes(ADAPTED, Layout(dp=8, fsdp=8), ROLEMESH)
    assert cut.rest == held.rest // 8
    # Slices hold the factors on the side on which their matrix is whole.
    slices = trained_bytes(ADAPTED, Layout(tp=8), ROLEMESH).rest - 2 * SEVEN.num_parameters / 8
    whole_sides = 16 * (3 * 4096 + 4096 + 2 * 4096 + 4096) * 32
    factors = whole_sides + (FACTORS - whole_sides) / 8
    assert slices == pytest.approx(12 * factors, rel=0.01)


def test_an_update_brings_samplers_factors_alone() -> None:
    group = perfect()
    layout = Layout(tp=8, generate_tp=8)
    # Each rank of the actor writes its part, and each of the service takes all.
    assert publish_seconds(ADAPTED, Layout(dp=8, fsdp=8), group, ROLEMESH) == pytest.approx(
        group.host_s(4 * FACTORS / 8)
    )
    taken = 4 * FACTORS / group.coefficients.stream_bandwidth + group.host_s(4 * FACTORS)
    assert take_seconds(ADAPTED, layout, group, ROLEMESH) == pytest.approx(taken)
    assert received_bytes(ADAPTED, Layout(dp=8, fsdp=8)) == pytest.approx(4 * FACTORS * 7 / 8)
    assert received_bytes(ADAPTED, Layout(dp=8)) == 0
    small, large = (reshard_seconds(one, layout, group, ROLEMESH) for one in (ADAPTED, SEVEN))
    assert small < large


@pytest.mark.parametrize("tp", [1, 4])
def test_a_sampler_has_a_slot_for_an_adapter(tp: int) -> None:
    spec = VllmSpec(max_model_len=1024, max_num_seqs=256)
    found = [
        (
            sampler_memory(model.shape, spec, tp),
            sampler_bytes(model, Layout(tp=tp, generate_tp=tp), ROLEMESH, 256),
        )
        for model in (SEVEN, ADAPTED)
    ]
    (bare, ours_bare), (adapted, ours) = found
    assert adapted.arriving == 4 * FACTORS
    assert bare.arriving == bare.weights
    assert ours.fixed - ours_bare.fixed == adapted.weights - bare.weights
    if tp == 1:
        assert adapted.weights - bare.weights == 2 * FACTORS
        # The next rank that vLLM has a slot for.
        odd = Model.from_config(LLAMAS["7B"], adapter=AdapterSpec(rank=9))
        assert sampler_memory(odd.shape, spec, 1).weights == adapted.weights


def test_the_slot_of_a_slice_has_its_part_of_each_fused_projection() -> None:
    """Phi 3 holds queries, keys and values in one tensor, and gate and up in another."""
    hidden, inner, rank, slices = 3072, 8192, 16, 2
    config = {
        "model_type": "phi3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32064,
    }
    spec = VllmSpec(max_model_len=1024)
    bare, adapted = (
        sampler_memory(Model.from_config(config, adapter=adapter).shape, spec, slices).weights
        for adapter in (None, AdapterSpec(rank=rank))
    )
    # A and B of the four matrices; each is cut on one side.
    whole = 4 * hidden
    cut = 3 * hidden + hidden + 2 * inner + inner
    assert adapted - bare == 2 * 2 * rank * (whole + cut // slices)


def test_the_planner_counts_the_activations_by_which_a_service_chooses_recomputation() -> None:
    layout, tokens = Layout(micro_batch_tokens=4096), 32 * 4096 * 4096
    kept, inputs = (
        trained_bytes(ADAPTED, replace(layout, recompute=recompute), ROLEMESH_FAST).peak
        for recompute in ("none", "full")
    )
    # The head takes more than one layer, so that it is the peak of both.
    counted = kept - inputs + ROLEMESH_FAST.activation_bytes * tokens
    spec = ModelSpec.model_validate({"path": "none", "adapter": {"rank": 16}})
    sizes = ModelSizes.of_config(LLAMAS["7B"])
    assert spec.micro_batch_tokens == 4096
    assert counted == pytest.approx(activation_bytes(spec, sizes, is_narrow=True), rel=1e-6)


# Counted by `fit`, rank 16 beside all matrices.
@pytest.mark.parametrize(
    ("system", "layout", "peak_gib", "rest_gib"),
    [
        (ROLEMESH, Layout(micro_batch_tokens=4096, recompute="full"), 19.22, 14.64),
        (ROLEMESH_FAST, Layout(micro_batch_tokens=4096), 40.28, 14.64),
        (ROLEMESH, Layout(dp=8, fsdp=8, micro_batch_tokens=4096, recompute="full"), 8.75, 1.83),
        (ROLEMESH, Layout(tp=4, micro_batch_tokens=4096), 16.23, 3.75),
    ],
)
def test_memory_of_an_adapter_is_what_fit_counts(
    system: System, layout: Layout, peak_gib: float, rest_gib: float
) -> None:
    held = trained_bytes(
        Model.from_config(CONFIGS["Qwen2.5-7B-Instruct"], adapter=AdapterSpec()), layout, system
    )
    assert held.rest / 2**30 == pytest.approx(rest_gib, rel=0.02)
    assert held.peak / 2**30 == pytest.approx(peak_gib, rel=0.08)
