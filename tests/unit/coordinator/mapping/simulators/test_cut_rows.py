"""Tests of layouts whose ranks cut packed rows: what is tried, sent and held."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.public_models import CONFIGS

from rolemesh.coordinator.mapping.job.layouts import Freedom, Layout, layouts
from rolemesh.coordinator.mapping.job.models import Model
from rolemesh.coordinator.mapping.job.systems import ROLEMESH, ROLEMESH_FAST
from rolemesh.coordinator.mapping.job.work import Lengths, Work
from rolemesh.coordinator.mapping.machines.cluster import Coefficients, DeviceGroup, group_of
from rolemesh.coordinator.mapping.machines.devices import GB, device_of
from rolemesh.coordinator.mapping.simulators.memory import scored_bytes, trained_bytes
from rolemesh.coordinator.mapping.simulators.passes import scoring_seconds, update_seconds

QWEN = Model.from_config(CONFIGS["Qwen2.5-7B-Instruct"])
"""28 query heads, 4 key-value heads."""
LONG = 131072
PERFECT = Coefficients(
    matmul=1, memory=1, link=1, network=1, host=1, hidden=1e-12, link_latency_s=0,
    network_latency_s=0, decode_step_s=0, decode_row_s=0, call_s=0,
)  # fmt: skip


def perfect(gpus: int = 8) -> DeviceGroup:
    return group_of(device_of("a100-80"), gpus, coefficients=PERFECT)


def long_rows(prompts: int) -> Work:
    completions = Lengths.fixed(LONG - 2048)
    return Work(
        prompts=prompts, prompt_tokens=2048, completions=completions, mini_batch_rows=prompts
    )


def _tried(freedom: Freedom, **role: bool) -> set[tuple[int, int, int, int]]:
    found = layouts(QWEN, 8, freedom, **{"trains": True, "samples": False, **role})
    return {(one.tp, one.dp, one.cp, one.micro_batch_tokens) for one in found if one.pp == 1}


def test_rows_are_cut_where_heads_divide_and_passes_are_short() -> None:
    freedom = Freedom(micro_batch_tokens=(4096, 8192), offload=(False,), cuts_rows=True)
    tried = _tried(freedom)
    assert {cp for tp, dp, cp, _ in tried if (tp, dp) == (1, 8)} == {1, 2, 4}
    # A slice has 14 heads, and 2 that they attend to.
    assert {cp for tp, dp, cp, _ in tried if (tp, dp) == (2, 4)} == {1, 2}
    # 7 divides the 28 heads, but stands in no relation to the 4 that they attend to.
    assert {cp for tp, dp, cp, _ in tried if (tp, dp) == (1, 7)} == {1}
    assert {tokens for *_, cp, tokens in tried if cp > 1} == {4096}
    assert {cp for *_, cp, _ in _tried(freedom, trains=False, samples=True)} == {1}
    whole = Freedom(micro_batch_tokens=(4096,), offload=(False,))
    assert {cp for *_, cp, _ in _tried(whole)} == {1}


def test_heads_travel_there_and_back_in_each_direction() -> None:
    layout = Layout(dp=8, fsdp=8, cp=4, micro_batch_tokens=LONG)
    # Two replicas have two rows each. Of each row a rank has a fourth of the tokens, and sends
    # three fourths of their queries, keys, values and of as much as queries that is attended.
    numbers = (2 * 28 + 2 * 4) * 128
    once = 2 * 28 * (LONG / 4) * numbers * 2 * 3 / 4 / (300 * GB)
    work = long_rows(4)
    scored = scoring_seconds(QWEN, layout, work, perfect(), ROLEMESH)
    assert scored.heads == pytest.approx(once)
    again = Layout(dp=8, fsdp=8, cp=4, micro_batch_tokens=LONG, recompute="full")
    assert update_seconds(QWEN, again, work, perfect(), ROLEMESH).heads == pytest.approx(3 * once)
    whole = scoring_seconds(
        QWEN, Layout(dp=8, fsdp=8, micro_batch_tokens=LONG), long_rows(8), perfect(), ROLEMESH
    )
    assert whole.heads == 0
    # Eight whole rows on eight ranks are as much to compute as four that are cut.
    assert whole.compute == pytest.approx(2 * scored.compute, rel=0.01)


# What `fit` counted of Qwen2.5-7B on rows of 131,072 tokens (docs/measurements.md).
@pytest.mark.parametrize(
    ("layout", "peak_gib"),
    [
        (Layout(dp=8, fsdp=8), 83.4),
        (Layout(tp=4, dp=2, fsdp=2), 55.9),
        (Layout(dp=8, fsdp=8, cp=4), 37.7),
        (Layout(tp=2, dp=4, fsdp=4, cp=2), 41.6),
    ],
    ids=lambda value: value.described() if isinstance(value, Layout) else "",
)
def test_memory_is_what_fit_counts(layout: Layout, peak_gib: float) -> None:
    long = replace(layout, recompute="full", micro_batch_tokens=LONG)
    held = trained_bytes(QWEN, long, ROLEMESH_FAST)
    assert held.rest / 2**30 == pytest.approx(10.64, rel=0.02)
    assert held.peak / 2**30 == pytest.approx(peak_gib, rel=0.02)


def test_scoring_holds_a_part_of_a_row() -> None:
    whole = scored_bytes(QWEN, Layout(dp=4, micro_batch_tokens=LONG), ROLEMESH)
    cut = scored_bytes(QWEN, Layout(dp=4, cp=4, micro_batch_tokens=LONG), ROLEMESH)
    assert cut.rest == whole.rest
    assert cut.peak - cut.rest == pytest.approx((whole.peak - whole.rest) / 4, rel=0.2)


def test_the_fastest_layout_of_long_rows_cuts_them() -> None:
    freedom = Freedom(micro_batch_tokens=(LONG,), offload=(False,), cuts_rows=True)
    group, work = group_of(device_of("h100"), 8), long_rows(16)
    fitting = [
        one
        for one in layouts(QWEN, 8, freedom, trains=True, samples=False)
        if trained_bytes(QWEN, one, ROLEMESH_FAST).peak < 0.9 * group.device.memory_bytes
    ]
    assert not any(one.tp == one.pp == one.cp == 1 for one in fitting)
    best = min(fitting, key=lambda one: update_seconds(QWEN, one, work, group, ROLEMESH_FAST).total)
    assert best.cp > 1
