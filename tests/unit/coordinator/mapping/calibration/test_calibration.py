"""Calibration: the fit, its record, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.calibrations import GPU, KNOWN, MACHINE, primitives, recorded
from support.mapping_jobs import job

from rolemesh.coordinator.mapping.calibration.calibration import (
    NOT_MEASURED_HERE,
    Calibration,
    CalibrationError,
    calibrated,
    read_calibration,
)
from rolemesh.coordinator.mapping.calibration.fitting import FITTABLE, Observation, fitted
from rolemesh.coordinator.mapping.calibration.primitives import Primitive, measured_peaks
from rolemesh.coordinator.mapping.job.layouts import Freedom, Layout
from rolemesh.coordinator.mapping.job.systems import HYBRIDFLOW
from rolemesh.coordinator.mapping.job.tasks import Step, Task, TaskKind, Timeline
from rolemesh.coordinator.mapping.machines.cluster import group_of
from rolemesh.coordinator.mapping.machines.coefficients import Coefficients
from rolemesh.coordinator.mapping.machines.devices import device_of
from rolemesh.coordinator.mapping.search.placed import placed_step
from rolemesh.coordinator.mapping.search.search import Search

CPU = device_of("cpu")
EXACT = 1e-5
"""Of a fit to rows without noise: its rounds end when no coefficient moves by 1e-10 of its size,
and slopes across logarithms are differences of 1e-4."""
SPLIT = {"actor": "a", "reference": "a", "critic": "b", "reward": "b"}


def runs(device: Any, coefficients: Coefficients) -> list[Any]:
    return [
        recorded(device, coefficients, "small"),
        recorded(device, coefficients, "more rows", prompts=48, tokens=64),
        recorded(device, coefficients, "side by side", prompts=32, tokens=128, pools=SPLIT),
        recorded(device, coefficients, "ranks", prompts=32, layout=Layout(dp=2)),
    ]


def test_a_line_through_two_reduces_has_their_bandwidth_and_latency() -> None:
    # A ring of 2 sends half of the bytes twice, and waits twice.
    seconds = {1 << 20: 0.010, 3 << 20: 0.018}
    rows = [
        Primitive(kind="reduce", sizes={"bytes": size, "ranks": 2}, seconds=took).observation(GPU)
        for size, took in seconds.items()
    ]
    found = fitted(rows, Coefficients(), {"link", "link_latency_s"})
    assert found.link * GPU.link_bandwidth == pytest.approx((2 << 20) / 0.008, rel=EXACT)
    assert 2 * found.link_latency_s == pytest.approx(0.006, rel=EXACT)


def test_rows_of_a_known_machine_give_its_coefficients_back() -> None:
    # A GPU keeps its peaks, so that shares are told apart from them; crowding is a CPU's.
    known = replace(KNOWN, crowd=0.0)
    rows = [one.observation(GPU) for one in primitives(GPU, known)]
    rows += [row for run in runs(GPU, known) for row in run.observations(GPU)]
    found = fitted(rows, Coefficients(), FITTABLE - NOT_MEASURED_HERE - {"crowd"})
    for name, value in known.to_dict().items():
        expected = getattr(Coefficients(), name) if name in NOT_MEASURED_HERE else value
        assert getattr(found, name) == pytest.approx(expected, rel=EXACT), name


def test_runs_alone_show_how_ranks_on_the_same_cpus_slow_each_other() -> None:
    made = runs(CPU, KNOWN)
    rows = [row for run in made for row in run.observations(CPU)]
    start = replace(KNOWN, crowd=0.0, step_s=0.0, call_s=0.0)
    found = fitted(rows, start, {"crowd", "step_s", "call_s"})
    assert found.crowd == pytest.approx(0.3, rel=EXACT)
    assert found.step_s == pytest.approx(0.02, rel=EXACT)
    assert found.call_s == pytest.approx(7e-3, rel=EXACT)


def test_no_coefficient_leaves_its_bounds() -> None:
    # Products at twice the peak, and less than no time for a call: what fits best cannot be.
    def products(one: Coefficients) -> float:
        return group_of(GPU, 1, coefficients=one).compute_s(1e14)

    peak_s = products(replace(KNOWN, matmul=1.0))
    rows = [
        Observation("products", peak_s / 2, products),
        Observation("with a call", 3 * peak_s, lambda one: products(one) + one.call_s),
    ]
    found = fitted(rows, Coefficients(), {"matmul", "call_s"})
    assert found.matmul == 1.0
    # What is left for the call is what products at their peak leave.
    assert found.call_s == pytest.approx(2 * peak_s, rel=EXACT)
    calls = [Observation(str(n), 0.01 * n, lambda one, n=n: one.call_s + 0.02 * n) for n in (1, 2)]
    assert fitted(calls, Coefficients(), {"call_s"}).call_s == 0.0


def test_seconds_of_primitives_are_those_of_their_units() -> None:
    bare = Coefficients(matmul=0.5, memory=0.25, host=0.5, link=0.1, link_latency_s=1e-3)

    def seconds(kind: Any, **sizes: int) -> float:
        one = Primitive(kind=kind, sizes=sizes, seconds=1.0)
        return one.observation(GPU).predict(bare)

    assert seconds("matmul", rows=100, inner=200, columns=300) == pytest.approx(
        2 * 100 * 200 * 300 / (312e12 * 0.5)
    )
    assert seconds("memory", bytes=1 << 30) == pytest.approx((1 << 30) / (2.039e12 * 0.25))
    assert seconds("host", bytes=1 << 30) == pytest.approx((1 << 30) / (32e9 * 0.5))
    ring = 2 * (3 / 4 * (1 << 30) / (300e9 * 0.1) + 1e-3)
    assert seconds("reduce", bytes=1 << 30, ranks=4) == pytest.approx(ring)


def test_a_cpu_has_the_best_that_was_measured_as_its_peaks_and_a_gpu_its_data_sheet() -> None:
    some = [
        Primitive(kind="matmul", sizes={"rows": 10, "inner": 10, "columns": 10}, seconds=1e-6),
        Primitive(kind="matmul", sizes={"rows": 20, "inner": 10, "columns": 10}, seconds=1e-6),
        Primitive(kind="reduce", sizes={"bytes": 4000, "ranks": 2}, seconds=1e-3),
    ]
    found = measured_peaks(CPU, some)
    assert found.flops == 4000 / 1e-6
    assert found.link_bandwidth == 4000 / 1e-3
    assert found.memory_bandwidth == CPU.memory_bandwidth
    assert measured_peaks(GPU, some) is GPU


def test_runs_that_are_kept_out_are_predicted_and_change_nothing() -> None:
    some, fit = primitives(CPU, KNOWN), runs(CPU, KNOWN)
    kept = recorded(CPU, replace(KNOWN, layer_s=0.1), "apart", algorithm="grpo")
    without = calibrated(CPU, some, fit, [], MACHINE)
    found = calibrated(CPU, some, fit, [kept], MACHINE)
    assert found.coefficients == without.coefficients
    assert found.residual == without.residual
    assert without.held_out_steps is None
    assert found.held_out_steps is not None
    error = kept.predicted(found.described_device, found.coefficients).period / kept.step_s - 1
    assert found.held_out_steps.worst == pytest.approx(abs(error))
    assert found.held_out_steps.worst > 0.5
    apart = [row for row in found.rows if row.name.startswith("apart")]
    assert apart
    assert not any(row.is_fitted for row in apart)


def test_models_in_a_loop_of_their_own_count_only_where_no_run_shows_them_in_place() -> None:
    slow = [replace(one, seconds=9 * one.seconds) for one in primitives(CPU, KNOWN)]
    alone = calibrated(CPU, slow, [], [], MACHINE)
    assert all(row.is_fitted for row in alone.rows)
    assert "no step of a run is among them" in alone.basis()
    made = runs(CPU, KNOWN)
    both = calibrated(CPU, slow, made, [], MACHINE)
    loops = [row for row in both.rows if row.name.startswith(("score", "update", "decode"))]
    assert len(loops) == 18
    assert not any(row.is_fitted for row in loops)


def test_a_record_reads_as_it_was_written(tmp_path: Path) -> None:
    found = calibrated(CPU, primitives(CPU, KNOWN), runs(CPU, KNOWN), [], MACHINE)
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(found.to_dict()))
    assert read_calibration(file) == found
    assert read_calibration(file).described_device.flops == found.peaks["flops"]


def test_the_basis_says_where_when_how_far_off_and_what_is_assumed() -> None:
    kept = recorded(CPU, KNOWN, "apart", algorithm="grpo")
    told = calibrated(CPU, primitives(CPU, KNOWN), runs(CPU, KNOWN), [kept], MACHINE).basis()
    assert "measured on a machine (cpu) on 2026-11-23: 5 primitives and 28 calls of 4 runs" in told
    assert "steps of 1 runs that were kept out by" in told
    assert told.endswith("assumed still: network, network_latency_s, hidden")


def whole(tmp_path: Path) -> dict[str, Any]:
    return calibrated(CPU, primitives(CPU, KNOWN), [], [], MACHINE).to_dict()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rolemesh_calibration": 7}, "rolemesh_calibration is 7, but 1 is read here"),
        ({"device": "h900"}, "device is \"h900\", which cannot be ('h900' is no device"),
        ({"coefficients": {"matmul": 1.5}}, "matmul is 1.5: give a number above 0 and at most 1"),
        ({"coefficients": {"matmul": "fast"}}, "matmul is 'fast': give a number"),
        ({"coefficients": {"speed": 1}}, "'speed' is no coefficient"),
        ({"peaks": {"flops": -1}}, "flops is -1: give a number above 0"),
        ({"measured": ["speed"]}, 'measured is ["speed"]'),
        ({"residual": None}, "residual is null"),
        ({"primitives": [{"kind": "sort", "sizes": {}, "seconds": 1}]}, "kind is 'sort'"),
        ({"machine": {"name": "x"}}, 'machine is {"name": "x"}'),
    ],
)
def test_a_bad_file_is_refused_by_field_value_and_remedy(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(whole(tmp_path) | change))
    with pytest.raises(CalibrationError) as refused:
        read_calibration(file)
    assert words in str(refused.value)
    assert str(refused.value).startswith(str(file))
    assert str(refused.value).endswith("write it anew with `rolemesh calibrate`")


def test_a_file_that_lacks_a_field_or_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    told = whole(tmp_path)
    del told["coefficients"]
    file.write_text(json.dumps(told))
    with pytest.raises(CalibrationError, match="the field coefficients is missing"):
        read_calibration(file)
    file.write_text("{")
    with pytest.raises(CalibrationError, match="cannot be read"):
        read_calibration(file)
    file.write_text("[]")
    with pytest.raises(CalibrationError, match="rolemesh_calibration is None"):
        read_calibration(file)
    with pytest.raises(CalibrationError, match="cannot be read"):
        read_calibration(tmp_path / "absent.json")


def test_nothing_measured_is_no_calibration() -> None:
    with pytest.raises(CalibrationError, match="nothing was measured"):
        calibrated(CPU, [], [], [], MACHINE)


@pytest.mark.parametrize(
    ("one", "words"),
    [
        ({"kind": "matmul", "sizes": {"rows": 1}, "seconds": 1.0}, "sizes of matmul are rows"),
        ({"kind": "host", "sizes": {"bytes": 0}, "seconds": 1.0}, "bytes of host is 0"),
        ({"kind": "host", "sizes": {"bytes": 1}, "seconds": -1.0}, r"seconds of host is -1\.0"),
        ({"kind": "host", "sizes": {"bytes": 1}, "seconds": 1.0, "config": {}}, "config of host"),
    ],
)
def test_a_primitive_that_cannot_be_is_refused(one: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Primitive(**one)


def test_tasks_that_share_cpus_slow_each_other_for_as_long_as_they_overlap() -> None:
    tasks = tuple(
        Task(index=index, role=role, kind=TaskKind.SCORE, method="x", after=after)
        for index, (role, after) in enumerate([("a", ()), ("b", (0,)), ("c", (0,)), ("d", (1, 2))])
    )
    timeline = Timeline(Step(tasks), {})
    # b and c run side by side for 1 s of work, then c is alone for one more.
    found = timeline.crowded([1.0, 1.0, 2.0, 1.0], [1, 1, 1, 1], 0.5)
    assert found == pytest.approx([1.0, 1.5, 2.5, 1.0])
    # Ranks of one task crowd too.
    assert timeline.crowded([1.0, 1.0, 2.0, 1.0], [3, 0, 1, 1], 0.5)[0] == pytest.approx(2.0)
    assert timeline.crowded([1.0, 1.0, 2.0, 1.0], [1, 1, 1, 1], 0.0) == [1.0, 1.0, 2.0, 1.0]


def test_a_step_as_it_is_placed_is_the_one_that_the_search_finds_there() -> None:
    freedom = Freedom(
        cuts_over_data=(False,), micro_batch_tokens=(4096,), recompute=("none",), offload=(False,)
    )
    coefficients = Coefficients(step_s=0.5)
    group = group_of(GPU, 2, coefficients=coefficients)
    placed = job("grpo", "tiny", system=HYBRIDFLOW, freedom=freedom)
    best = Search(placed, [group]).run().placements[0]
    layouts = {
        role: option.layout
        for roles, options in zip(best.sets, best.options, strict=True)
        for role, option in zip(roles, options, strict=True)
    }
    pools = {role: str(number) for number, roles in enumerate(best.sets) for role in roles}
    found = placed_step(placed, layouts, pools, group)
    assert found.seconds == pytest.approx(best.seconds)
    assert found.period == pytest.approx(best.period)
    without = Search(placed, [replace(group, coefficients=Coefficients())]).run().placements[0]
    assert best.period == pytest.approx(without.period + 0.5)


def test_the_record_names_what_was_measured() -> None:
    found: Calibration = calibrated(CPU, primitives(CPU, KNOWN)[:2], [], [], MACHINE)
    assert found.measured == ("matmul", "memory")
    assert found.coefficients.call_s == Coefficients().call_s
    assert set(found.peaks) == {"flops", "memory_bandwidth"}
