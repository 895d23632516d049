"""Simulators against closed forms, the weight planner, vLLM's arithmetic and what `fit` counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.mapping_jobs import LLAMAS, llama, paper_group
from support.planned_bytes import planned_received
from support.public_models import CONFIGS

from rolemesh.coordinator.mapping.errors import PlanError
from rolemesh.coordinator.mapping.job.layouts import Freedom, Layout, data_sizes, layouts
from rolemesh.coordinator.mapping.job.models import Model
from rolemesh.coordinator.mapping.job.systems import HYBRIDFLOW, ROLEMESH, ROLEMESH_FAST, System
from rolemesh.coordinator.mapping.job.work import Lengths, Work
from rolemesh.coordinator.mapping.machines.cluster import DeviceGroup, group_of
from rolemesh.coordinator.mapping.machines.coefficients import Coefficients
from rolemesh.coordinator.mapping.machines.devices import GB, device_of
from rolemesh.coordinator.mapping.simulators.generation import (
    GRAPH_BYTES,
    NoRoomError,
    Sampling,
    _slots,
    sampler_bytes,
)
from rolemesh.coordinator.mapping.simulators.memory import scored_bytes, trained_bytes
from rolemesh.coordinator.mapping.simulators.moves import (
    received_bytes,
    reshard_seconds,
    switch_seconds,
)
from rolemesh.coordinator.mapping.simulators.passes import scoring_seconds, update_seconds
from rolemesh.engine.fit.sampler import sampler_memory
from rolemesh.engine.layout.boxes import generate_layout, train_layout
from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, TrainLayout
from rolemesh.engine.specs import VllmSpec
from rolemesh.engine.weights.plan import make_plan

PERFECT = Coefficients(
    matmul=1, memory=1, link=1, network=1, host=1, hidden=1, link_latency_s=0, network_latency_s=0,
    decode_step_s=0, decode_row_s=0, call_s=0,
)  # fmt: skip
TINY = Model.from_config(LLAMAS["tiny"])
SEVEN = Model.from_config(LLAMAS["7B"])
WORK = Work(prompts=64, prompt_tokens=96, completions=Lengths.fixed(32), mini_batch_rows=16)


def perfect(gpus: int = 16, **changes: Any) -> DeviceGroup:
    return group_of(device_of("a100-80"), gpus, coefficients=PERFECT, **changes)


def test_a_gather_within_a_machine_takes_the_ring_of_its_links() -> None:
    group = perfect()
    assert group.gather_s(300 * GB, 4, 1) == pytest.approx(3 / 4)
    assert group.reduce_s(300 * GB, 4, 1) == pytest.approx(2 * 3 / 4)
    assert group.gather_s(300 * GB, 1, 1) == 0


def test_rings_that_leave_a_machine_share_its_network() -> None:
    group = perfect(network_bandwidth=25 * GB)
    # One ring over all 16 crosses once; eight rings of stride 8 cross eight times.
    assert group.gather_s(25 * GB, 16, 1) == pytest.approx(15 / 16)
    assert group.gather_s(25 * GB, 2, 8) == pytest.approx(8 * 1 / 2)
    assert group.inside(16, 1) == 8
    assert group.inside(2, 8) == 1


def test_latency_is_added_once() -> None:
    slow = Coefficients(**{**PERFECT.to_dict(), "link_latency_s": 1.0, "network_latency_s": 5.0})
    group = group_of(device_of("a100-80"), 16, coefficients=slow)
    assert group.gather_s(0, 8, 1) == 1.0
    assert group.gather_s(0, 16, 1) == 5.0


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PlanError, match="count of h100 is 0"):
        group_of(device_of("h100"), 0)
    with pytest.raises(ValueError, match=r"matmul is 1\.5: give a number above 0 and at most 1"):
        Coefficients(matmul=1.5)
    with pytest.raises(ValueError, match="'matmull' is no coefficient"):
        Coefficients.from_dict({"matmull": 0.5})
    assert Coefficients.from_dict(PERFECT.to_dict()) == PERFECT
    with pytest.raises(ValueError, match="mini_batch_rows is 0"):
        Work(prompts=1, prompt_tokens=1, completions=Lengths.fixed(1), mini_batch_rows=0)


def test_an_update_takes_three_passes_of_products() -> None:
    seconds = update_seconds(SEVEN, Layout(micro_batch_tokens=2048), WORK, perfect(), HYBRIDFLOW)
    tokens = 64 * 128
    products = 3 * SEVEN.forward_flops(tokens, 64) / 312e12
    assert seconds.compute == pytest.approx(products)
    # Four optimizer steps read and write 28 bytes a parameter.
    assert seconds.optimizer == pytest.approx(4 * 28 * SEVEN.num_parameters / 2.039e12)
    assert seconds.total == pytest.approx(products + seconds.optimizer)


def test_recomputing_is_a_pass_more() -> None:
    def compute(recompute: Any) -> float:
        layout = Layout(micro_batch_tokens=2048, recompute=recompute)
        return update_seconds(SEVEN, layout, WORK, perfect(), HYBRIDFLOW).compute

    assert compute("full") / compute("none") == pytest.approx(4 / 3)


def test_a_pipeline_fills_and_drains() -> None:
    # 16 rows of 128 tokens in passes of 256: 8 micro-batches over 4 stages.
    layout = Layout(pp=4, micro_batch_tokens=256)
    free_sends = perfect(network_bandwidth=1e30)
    seconds = update_seconds(SEVEN, layout, WORK, free_sends, HYBRIDFLOW)
    busy = seconds.compute + seconds.slices
    assert seconds.bubble / busy == pytest.approx(3 / 8)


def test_replicas_sum_their_gradients_once_an_optimizer_step() -> None:
    seconds = update_seconds(SEVEN, Layout(dp=8), WORK, perfect(), HYBRIDFLOW)
    ring = 2 * 7 / 8 * 4 * SEVEN.num_parameters / (300 * GB)
    assert seconds.gradients == pytest.approx(4 * ring)
    assert seconds.gathers == 0


def test_cut_parameters_are_gathered_for_each_pass_and_hide_behind_products() -> None:
    def gathers(hidden: float, tokens: int) -> float:
        coefficients = Coefficients(**{**PERFECT.to_dict(), "hidden": hidden})
        group = group_of(device_of("a100-80"), 8, coefficients=coefficients)
        layout = Layout(dp=8, fsdp=8, micro_batch_tokens=tokens)
        return update_seconds(SEVEN, layout, WORK, group, ROLEMESH_FAST).gathers

    ring = 7 / 8 * SEVEN.num_parameters / (300 * GB)
    # Two rows a replica and optimizer step: one pass, two gathers in bfloat16, one sum in float32.
    exposed = 4 * (2 * 2 + 4) * ring
    least = 1e-12
    assert gathers(least, 256) == pytest.approx(exposed, rel=1e-6)
    assert gathers(least, 128) == pytest.approx(2 * exposed, rel=1e-6)
    assert gathers(1.0, 256) < exposed


def test_slices_reduce_twice_a_layer_in_each_direction() -> None:
    seconds = scoring_seconds(SEVEN, Layout(tp=8), WORK, perfect(), HYBRIDFLOW)
    ring = 2 * 7 / 8 * 64 * 128 * 4096 * 2 / (300 * GB)
    assert seconds.slices == pytest.approx(2 * 32 * ring)
    trained = update_seconds(SEVEN, Layout(tp=8), WORK, perfect(), HYBRIDFLOW)
    assert trained.slices == pytest.approx(4 * 32 * ring)


def test_a_small_pass_takes_as_long_as_its_weights() -> None:
    work = Work(prompts=1, prompt_tokens=1, completions=Lengths.fixed(1), mini_batch_rows=1)
    seconds = scoring_seconds(SEVEN, Layout(), work, perfect(), HYBRIDFLOW)
    assert seconds.compute == pytest.approx(2 * SEVEN.active_parameters / 2.039e12)


def test_a_shared_prompt_is_computed_once() -> None:
    shared = Work(
        prompts=8, samples=8, prompt_tokens=96, completions=Lengths.fixed(32), mini_batch_rows=64
    )
    assert shared.computed_tokens(64) == 64 * 32 + 8 * 96
    assert shared.computed_tokens(3) == 3 * 32 + 96
    apart = Work(prompts=64, prompt_tokens=96, completions=Lengths.fixed(32), mini_batch_rows=64)
    assert apart.computed_tokens(64) == 64 * 128


def generated(layout: Layout, budget: float, work: Work = WORK, most_rows: int = 256) -> Any:
    return Sampling(SEVEN, layout, work, perfect(), HYBRIDFLOW, most_rows).seconds(budget)


def test_memory_for_keys_and_values_decides_how_many_rows_run() -> None:
    fixed = sampler_bytes(SEVEN, Layout(), HYBRIDFLOW, 256).fixed
    # Llama-7B: 524,288 bytes a token.
    row = 128 * 524_288
    assert generated(Layout(), fixed + 10 * row + 1).together == 10
    # 64 rows, ten at a time, of 32 tokens each: seven waves.
    assert generated(Layout(), fixed + 10 * row + 1).steps == 7 * 32
    assert generated(Layout(), fixed + 1000 * row).steps == 32
    assert generated(Layout(), fixed + 1000 * row, most_rows=16).steps == 4 * 32
    with pytest.raises(NoRoomError, match="GiB too little for one row") as error:
        generated(Layout(), fixed + row - 1000)
    assert error.value.missing == 1000


def test_a_decoding_step_reads_weights_keys_and_values() -> None:
    seconds = generated(Layout(), 80 * GB)
    weights = 2 * (SEVEN.num_parameters - 32_000 * 4096)
    keys = 64 * (96 + 16) * 524_288
    assert seconds.reads == pytest.approx(32 * (weights + keys) / 2.039e12)
    halved = generated(Layout(tp=2, generate_tp=2), 80 * GB)
    assert halved.reads == pytest.approx(seconds.reads / 2)
    assert halved.slices > 0


def test_without_keys_and_values_each_step_computes_whole_rows() -> None:
    bare = System(has_kv_cache=False)
    plain = Sampling(SEVEN, Layout(), WORK, perfect(), bare, 256).seconds(80 * GB)
    assert plain.total > 10 * generated(Layout(), 80 * GB).total


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    rows=st.integers(1, 40),
    together=st.integers(1, 12),
)
def test_slots_take_the_next_row_when_one_ends(
    lengths: list[int], rows: int, together: int
) -> None:
    given_lengths = Lengths(tuple(float(one) for one in sorted(lengths)))
    drawn = given_lengths.drawn(rows)
    waiting, running, steps = list(drawn), [], 0
    while waiting or running:
        while waiting and len(running) < together:
            running.append(waiting.pop(0))
        running = [left - 1 for left in running if left > 1]
        steps += 1
    assert _slots(given_lengths, rows, together) == (steps, sum(drawn))


def test_lengths_have_the_mean_and_the_longest_that_are_asked_for() -> None:
    for mean, longest in ((100, 400), (300, 400), (10, 4000)):
        lengths = Lengths.spread(mean, longest)
        assert lengths.mean == pytest.approx(mean, rel=0.02)
        assert lengths.longest <= longest
        assert max(lengths.drawn(7)) == lengths.longest
        assert lengths.drawn(64) == lengths.drawn(64)
        assert sum(lengths.drawn(640)) / 640 == pytest.approx(mean, rel=0.05)
    with pytest.raises(ValueError, match="mean above 0 that is not more than the most"):
        Lengths.spread(500, 400)


SHAPES = {
    "plain": llama(64, 128, 4, 8, 8, 512),
    "few kv heads": llama(64, 128, 4, 8, 4, 512),
    "tied": {**llama(64, 128, 4, 8, 8, 512), "tie_word_embeddings": True},
    "norms of heads": {**llama(64, 128, 4, 8, 8, 512), "model_type": "qwen3", "head_dim": 8},
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("p", "t", "d", "f", "p_g", "t_g"),
    [
        (1, 4, 2, 1, 1, 2),
        (1, 4, 1, 1, 1, 4),
        (2, 4, 1, 1, 1, 2),
        (4, 2, 1, 1, 2, 2),
        (1, 2, 4, 4, 1, 1),
        (1, 1, 4, 4, 1, 1),
        (2, 2, 2, 2, 1, 2),
    ],
)
def test_received_bytes_are_those_of_the_weight_planner(
    name: str, p: int, t: int, d: int, f: int, p_g: int, t_g: int
) -> None:
    model = Model.from_config(SHAPES[name])
    hybrid = HybridLayout(TrainLayout(pp=p, tp=t, dp=d, fsdp=f), GenerateLayout(pp=p_g, tp=t_g))
    plan = make_plan(
        train_layout(model.shape, hybrid.train), generate_layout(model.shape, hybrid, "bfloat16")
    )
    received = (
        sum(planned_received(plan, rank) for rank in range(plan.world_size)) / plan.world_size
    )
    layout = Layout(pp=p, tp=t, dp=d, fsdp=f, generate_pp=p_g, generate_tp=t_g)
    ours = received_bytes(model, layout)
    assert ours == pytest.approx(received, rel=1e-6)


@pytest.mark.parametrize(
    ("size", "layout", "share"),
    [
        pytest.param("7B", Layout(tp=8, generate_tp=2), 3 / 8, id="7B"),
        pytest.param("13B", Layout(tp=8, generate_tp=4), 1 / 8, id="13B"),
        pytest.param("34B", Layout(pp=4, tp=8, generate_tp=8), 3 / 32, id="34B"),
        pytest.param("70B", Layout(pp=8, tp=8, generate_tp=8), 7 / 64, id="70B"),
    ],
)
def test_transitions_of_figure_14_move_table_2(size: str, layout: Layout, share: float) -> None:
    model = Model.from_config(LLAMAS[size])
    assert received_bytes(model, layout) / (2 * model.num_parameters) == pytest.approx(
        share, rel=0.001
    )


def test_a_transition_between_machines_is_bound_by_their_network() -> None:
    model = Model.from_config(LLAMAS["70B"])
    group = paper_group(128, PERFECT)
    seconds = reshard_seconds(model, Layout(pp=8, tp=8, generate_tp=8), group, HYBRIDFLOW)
    network = 8 * received_bytes(model, Layout(pp=8, tp=8, generate_tp=8)) / (25 * GB)
    assert seconds == pytest.approx(network, rel=0.05)
    near = reshard_seconds(SEVEN, Layout(tp=8, generate_tp=2), group, HYBRIDFLOW)
    assert near < 0.1


def test_a_role_sleeps_at_the_speed_of_the_host() -> None:
    assert switch_seconds(64 * GB, group_of(device_of("h100"), 8, coefficients=PERFECT)) == 1.0


QWEN_7B = CONFIGS["Qwen2.5-7B-Instruct"]


def whole(dp: int, tokens: int, **changes: Any) -> Layout:
    return Layout(dp=dp, fsdp=dp, micro_batch_tokens=tokens, recompute="full", **changes)


# Peaks that `fit` counted (tests/benchmarks/fit_tables.py, docs/sizing.md). Left out is 70B
# with 4,096 tokens, which a line through 2 and 4 layers gave 9 GiB of gathers, many times as much
# as 32,768 tokens have.
@pytest.mark.parametrize(
    ("name", "system", "layout", "peak_gib", "rest_gib"),
    [
        ("Qwen2.5-7B-Instruct", ROLEMESH, whole(8, 4096), 25.9, 10.6),
        ("Qwen2.5-7B-Instruct", ROLEMESH, whole(8, 32768), 44.2, 10.6),
        ("Qwen2.5-32B-Instruct", ROLEMESH, whole(16, 4096), 49.9, 22.9),
        ("Qwen2.5-32B-Instruct", ROLEMESH, whole(16, 32768), 97.4, 22.9),
        ("Meta-Llama-3-70B-Instruct", ROLEMESH, whole(8, 32768, tp=8), 107.3, 12.3),
        ("Qwen2.5-7B-Instruct", ROLEMESH_FAST, whole(2, 4096, tp=4), 17.69, 10.64),
        ("Qwen2.5-7B-Instruct", ROLEMESH_FAST, whole(2, 32768, tp=4), 26.06, 10.64),
        (
            "Qwen2.5-7B-Instruct",
            ROLEMESH_FAST,
            Layout(tp=4, dp=2, fsdp=2, micro_batch_tokens=4096),
            27.54,
            10.64,
        ),
    ],
)
def test_memory_is_what_fit_counts(
    name: str, system: System, layout: Layout, peak_gib: float, rest_gib: float
) -> None:
    held = trained_bytes(Model.from_config(CONFIGS[name]), layout, system)
    assert held.rest / 2**30 == pytest.approx(rest_gib, rel=0.02)
    # A plan leaves a tenth of a device free, and `fit` has the last word.
    assert held.peak / 2**30 == pytest.approx(peak_gib, rel=0.12)


def test_moments_on_the_host_are_not_on_the_device() -> None:
    model = Model.from_config(QWEN_7B)
    here = trained_bytes(model, Layout(dp=8, fsdp=8), ROLEMESH)
    away = trained_bytes(model, Layout(dp=8, fsdp=8, offload=True), ROLEMESH)
    assert here.rest - away.rest == pytest.approx(8 * model.num_parameters / 8, rel=1e-6)
    averaged = trained_bytes(model, Layout(dp=8, fsdp=8), ROLEMESH, averages=True)
    assert averaged.rest - here.rest == pytest.approx(4 * model.num_parameters / 8, rel=1e-6)
    assert averaged.peak - here.peak == averaged.rest - here.rest
    frozen = scored_bytes(model, Layout(dp=8, fsdp=8), ROLEMESH)
    assert frozen.rest == pytest.approx(2 * model.num_parameters / 8, rel=1e-6)


@pytest.mark.parametrize("name", [*SHAPES, "7B"])
@pytest.mark.parametrize("tp", [1, 4])
def test_a_sampler_takes_what_vllm_does(name: str, tp: int) -> None:
    config = {**SHAPES, "7B": QWEN_7B}[name]
    model = Model.from_config(config)
    engine = sampler_memory(model.shape, VllmSpec(max_model_len=1024, max_num_seqs=256), tp)
    ours = sampler_bytes(model, Layout(tp=tp, generate_tp=tp), ROLEMESH, 256)
    assert engine.graphs == GRAPH_BYTES
    assert ours.fixed == pytest.approx(engine.weights + engine.passes + engine.graphs, rel=1e-6)
    assert ours.token == engine.token


def test_layouts_are_those_that_the_engine_cuts() -> None:
    free = Freedom(micro_batch_tokens=(4096,), recompute=("none",), offload=(False,))
    found = list(layouts(TINY, 8, free, trains=True, samples=True))
    sizes = {(one.pp, one.tp, one.dp) for one in found}
    # 4 heads: no slices of 3 or 8; 4 layers: three stages are as slow as two.
    assert sizes == {
        (pp, tp, dp)
        for pp in (1, 2, 4)
        for tp in (1, 2, 4)
        for dp in range(1, 9)
        if pp * tp * dp <= 8
    }
    assert all(one.tp % one.generate_tp == 0 and one.generate_pp == 1 for one in found)
    assert len(set(found)) == len(found)
    assert {one.generate_tp for one in found if one.tp == 4} == {1, 2, 4}
    for one in found:
        HybridLayout(
            TrainLayout(pp=one.pp, tp=one.tp, dp=one.dp, fsdp=one.fsdp),
            GenerateLayout(pp=one.generate_pp, tp=one.generate_tp),
        )


def test_a_role_that_only_samples_has_slices_and_no_stages() -> None:
    free = Freedom(same_generation=True, micro_batch_tokens=(64,))
    found = list(layouts(TINY, 8, free, trains=False, samples=True))
    assert {(one.pp, one.generate_pp) for one in found} == {(1, 1)}
    assert {one.tp for one in found} == {1, 2, 4}
    assert all(one.tp == one.generate_tp for one in found)


def test_a_head_that_slices_share_is_kept_and_read_by_each() -> None:
    few = Model.from_config(llama(64, 128, 4, 8, 2, 512))
    room = 10 * GB
    four, eight = (
        Sampling(few, Layout(tp=tp, generate_tp=tp), WORK, perfect(), HYBRIDFLOW, 256)
        .seconds(room)
        .reads
        for tp in (4, 8)
    )
    # Two for keys and values, of 4 layers with 2 heads, each 8 wide, in bfloat16.
    token_bytes = 2 * 4 * 2 * 8 * 2
    keys = 32 * 64 * (96 + 16) * token_bytes / 2 / 2.039e12
    assert four > keys
    assert eight > keys


def test_sizes_of_a_data_axis_are_close_to_any_other() -> None:
    for most in (1, 16, 100, 128, 1000):
        sizes = list(data_sizes(most))
        for size in range(1, most + 1):
            nearest = max(one for one in sizes if one <= size)
            assert size / nearest <= 1.5 or size - nearest < 8
    assert math.isclose(max(data_sizes(1024)), 1024)
