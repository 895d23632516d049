"""Mixtures of experts in the simulators: what a rank holds of them, and rows that travel."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from support.mapping_jobs import llama
from support.planned_bytes import planned_received
from support.public_models import CONFIGS

from rolemesh.coordinator.mapping.job.layouts import Freedom, Layout, layouts
from rolemesh.coordinator.mapping.job.models import Model
from rolemesh.coordinator.mapping.job.systems import ROLEMESH, ROLEMESH_FAST, System
from rolemesh.coordinator.mapping.job.work import Lengths, Work
from rolemesh.coordinator.mapping.machines.cluster import DeviceGroup, group_of
from rolemesh.coordinator.mapping.machines.coefficients import Coefficients
from rolemesh.coordinator.mapping.machines.devices import GB, device_of
from rolemesh.coordinator.mapping.simulators.generation import sampler_bytes, sampler_weights
from rolemesh.coordinator.mapping.simulators.memory import scored_bytes, trained_bytes
from rolemesh.coordinator.mapping.simulators.moves import received_bytes
from rolemesh.coordinator.mapping.simulators.passes import scoring_seconds, update_seconds
from rolemesh.engine.fit.sampler import sampler_memory
from rolemesh.engine.layout.boxes import generate_layout, train_layout
from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout
from rolemesh.engine.layout.slices import check_layout
from rolemesh.engine.specs import AdapterSpec, VllmSpec
from rolemesh.engine.weights.plan import make_plan

QWEN = CONFIGS["Qwen3-30B-A3B"]
_SIZES = {**llama(64, 128, 4, 8, 4, 512), "head_dim": 8, "num_experts_per_tok": 2}
CASES: dict[str, dict[str, Any]] = {
    "mixtral": {**_SIZES, "model_type": "mixtral", "num_local_experts": 8},
    "a dense layer": {
        **_SIZES,
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [0],
    },
    "experts for all": {
        **_SIZES,
        "model_type": "glm4_moe",
        "n_routed_experts": 8,
        "moe_intermediate_size": 32,
    },
}
WORK = Work(prompts=64, prompt_tokens=96, completions=Lengths.fixed(32), mini_batch_rows=16)
PERFECT = Coefficients(
    matmul=1, memory=1, link=1, network=1, host=1, hidden=1e-12, link_latency_s=0,
    network_latency_s=0, decode_step_s=0, decode_row_s=0, call_s=0,
)  # fmt: skip


def perfect(gpus: int = 16, **changes: Any) -> DeviceGroup:
    return group_of(device_of("a100-80"), gpus, coefficients=PERFECT, **changes)


LAYOUTS = [
    Layout(),
    Layout(tp=2, dp=2, ep=2),
    Layout(dp=4, fsdp=4),
    Layout(dp=4, fsdp=4, ep=2),
    Layout(dp=4, fsdp=4, ep=4),
    Layout(pp=2, tp=2, dp=2, fsdp=2, ep=2),
    Layout(dp=8, fsdp=2, ep=4),
]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.described)
def test_a_rank_holds_its_part_of_the_experts_and_of_the_rest(name: str, layout: Layout) -> None:
    model = Model.from_config(CASES[name], head="score")
    shards = train_layout(model.shape, layout.train).ranks
    held = [
        sum(
            math.prod(sizes)
            for tensor, sizes in shard.shapes.items()
            if not tensor.endswith("correction_bias")
        )
        for shard in shards
    ]
    found = trained_bytes(model, layout, ROLEMESH)
    if layout.pp == 1:
        # Norms of heads are no multiple of the ranks that cut them.
        assert found.rest / 12 == pytest.approx(max(held), rel=0.003)
    else:
        assert found.rest / 12 >= max(held)
    frozen = scored_bytes(model, layout, ROLEMESH)
    assert frozen.rest == pytest.approx(found.rest / 6, abs=1)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("layout", "generate_tp"),
    [
        (Layout(dp=4, fsdp=4, ep=4), 1),
        (Layout(dp=4, fsdp=4, ep=2), 1),
        (Layout(dp=4, ep=2), 1),
        (Layout(tp=2, dp=2, ep=2), 2),
        (Layout(tp=4, dp=2, fsdp=2, ep=2), 2),
        (Layout(pp=2, tp=2, dp=2, fsdp=2, ep=2), 1),
    ],
)
def test_received_bytes_are_those_of_the_weight_planner(
    name: str, layout: Layout, generate_tp: int
) -> None:
    model = Model.from_config(CASES[name])
    hybrid = HybridLayout(layout.train, GenerateLayout(tp=generate_tp))
    plan = make_plan(
        train_layout(model.shape, layout.train), generate_layout(model.shape, hybrid, "bfloat16")
    )
    received = [planned_received(plan, rank) for rank in range(plan.world_size)]
    sampled = replace(layout, generate_tp=generate_tp)
    assert received_bytes(model, sampled) == pytest.approx(sum(received) / len(received), rel=1e-3)


def test_rows_go_to_their_experts_and_back_in_each_direction() -> None:
    model = Model.from_config(QWEN)
    layout = Layout(dp=8, fsdp=8, ep=8, micro_batch_tokens=1024)
    # 64 rows of 128 tokens over 8 ranks; of each 8 rows, in bfloat16, 7 of 8 go elsewhere.
    once = 48 * 2 * 1024 * 8 * 2048 * 2 * 7 / 8 / (300 * GB)
    scored = scoring_seconds(model, layout, WORK, perfect(), ROLEMESH)
    assert scored.experts == pytest.approx(once)
    trained = update_seconds(model, layout, WORK, perfect(), ROLEMESH)
    assert trained.experts == pytest.approx(2 * once)
    again = Layout(dp=8, fsdp=8, ep=8, micro_batch_tokens=1024, recompute="full")
    seconds = update_seconds(model, again, WORK, perfect(), ROLEMESH)
    assert seconds.experts == pytest.approx(3 * once)
    assert seconds.total == pytest.approx(
        seconds.compute + seconds.experts + seconds.gathers + seconds.optimizer
    )
    alone = Layout(dp=8, fsdp=8, micro_batch_tokens=1024)
    assert update_seconds(model, alone, WORK, perfect(), ROLEMESH).experts == 0


def test_rows_that_leave_a_machine_share_its_network() -> None:
    model = Model.from_config(QWEN)
    layout = Layout(tp=8, dp=2, ep=2, micro_batch_tokens=4096)
    group = perfect(network_bandwidth=25 * GB)
    # Each slice has all rows: of 32 rows a rank half go to the other machine, from 8 ranks at once.
    rows = 32 * 128 * 8 * 2048 * 2
    seconds = scoring_seconds(model, layout, WORK, group, ROLEMESH)
    assert seconds.experts == pytest.approx(48 * 2 * 8 * rows / 2 / (25 * GB))


def test_experts_with_owners_are_gathered_and_summed_over_fewer_ranks() -> None:
    model = Model.from_config(QWEN)
    experts = model.in_layers.experts
    rest = model.num_parameters - experts

    def update(**sizes: int) -> Any:
        layout = Layout(dp=8, micro_batch_tokens=1024, **sizes)
        return update_seconds(model, layout, WORK, perfect(), ROLEMESH_FAST)

    # Four optimizer steps of one pass: two gathers in bfloat16, and a sum in float32.
    for ep, among in ((1, 8), (2, 4), (8, 1)):
        ring = 7 / 8 * rest + (among - 1) / among * experts / ep
        expected = 4 * (2 * 2 + 4) * ring / (300 * GB)
        found = update(fsdp=8, ep=ep)
        assert found.gathers == pytest.approx(expected, rel=1e-6)
        assert found.gradients == 0
    # Without a cut, replicas of the experts are fewer than those of the rest.
    ring = 2 * 4 * (7 / 8 * rest + 3 / 4 * experts / 2) / (300 * GB)
    assert update(ep=2).gradients == pytest.approx(4 * ring)


def test_layouts_of_a_mixture_are_those_that_the_engine_cuts() -> None:
    model = Model.from_config(CASES["mixtral"])
    free = Freedom(
        cuts_over_data=(True, False),
        micro_batch_tokens=(4096,),
        recompute=("none",),
        offload=(False,),
    )
    found = list(layouts(model, 12, free, trains=True, samples=False))
    for one in found:
        check_layout(model.shape, one.train)
    sizes = {(one.dp, one.ep) for one in found if one.pp == one.tp == 1 and one.fsdp == one.dp}
    assert sizes == {(dp, ep) for dp in range(1, 13) for ep in (1, 2, 4, 8) if dp % ep == 0}
    assert {one.ep for one in found if one.fsdp == 1} == {1, 2, 4, 8}
    assert len(set(found)) == len(found)
    kept = Freedom(shares_experts=False)
    assert {one.ep for one in layouts(model, 8, kept, trains=True, samples=False)} == {1}
    dense = Model.from_config(llama(64, 128, 4, 8, 4, 512))
    assert {one.ep for one in layouts(dense, 8, free, trains=True, samples=False)} == {1}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("adapter", [None, AdapterSpec(rank=8)])
def test_a_sampler_takes_what_vllm_does(name: str, tp: int, adapter: AdapterSpec | None) -> None:
    model = Model.from_config(CASES[name], adapter=adapter)
    spec = VllmSpec(max_model_len=1024, max_num_seqs=256)
    engine = sampler_memory(model.shape, spec, tp, model.chosen)
    ours = sampler_bytes(model, Layout(tp=tp, generate_tp=tp), ROLEMESH, 256)
    # Buffers are no parameters.
    assert ours.fixed == pytest.approx(engine.weights + engine.passes + engine.graphs, rel=1e-6)


def test_few_rows_read_few_experts() -> None:
    model = Model.from_config(QWEN)
    embedding, expert = 151936 * 2048, 48 * 3 * 2048 * 768
    every = model.num_parameters - embedding
    assert sampler_weights(model, ROLEMESH, 64) == 2 * every
    assert sampler_weights(model, ROLEMESH, 4) == 2 * (every - (128 - 4 * 8) * expert)


# What `fit` counted of Qwen3-30B-A3B on 2026-11-30, in rows of 1,024 tokens.
@pytest.mark.parametrize(
    ("system", "layout", "peak_gib", "rest_gib"),
    [
        (ROLEMESH_FAST, Layout(tp=4, dp=2, fsdp=2, micro_batch_tokens=8192), 61.91, 42.71),
        (ROLEMESH_FAST, Layout(tp=4, dp=2, fsdp=2, ep=2, micro_batch_tokens=8192), 61.47, 42.71),
        (ROLEMESH_FAST, Layout(dp=8, fsdp=8), 67.51, 42.65),
        (ROLEMESH_FAST, Layout(dp=8, fsdp=8, ep=8), 62.64, 42.65),
        (ROLEMESH, Layout(dp=8, fsdp=8, ep=8), 63.47, 42.65),
    ],
)
def test_memory_is_what_fit_counts(
    system: System, layout: Layout, peak_gib: float, rest_gib: float
) -> None:
    held = trained_bytes(Model.from_config(QWEN), replace(layout, recompute="full"), system)
    assert held.rest / 2**30 == pytest.approx(rest_gib, rel=0.02)
    assert held.peak / 2**30 == pytest.approx(peak_gib, rel=0.05)
