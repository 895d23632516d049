"""Synthetic measurements: what machines of known coefficients would show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from support.mapping_jobs import job, llama

from rolemesh.coordinator.mapping.calibration.calibration import Machine
from rolemesh.coordinator.mapping.calibration.primitives import Primitive
from rolemesh.coordinator.mapping.calibration.recorded import RecordedRun
from rolemesh.coordinator.mapping.job.layouts import Layout
from rolemesh.coordinator.mapping.job.systems import ROLEMESH
from rolemesh.coordinator.mapping.job.work import Lengths, Work
from rolemesh.coordinator.mapping.machines.coefficients import Coefficients
from rolemesh.coordinator.mapping.machines.devices import Device, device_of

MACHINE = Machine(name="a machine", threads=1, versions={"torch": "2.13.0+cpu"}, date="2026-11-23")
GPU = device_of("a100-80")
KNOWN = Coefficients(
    matmul=0.4, memory=0.6, link=0.5, host=0.7, link_latency_s=3e-4, decode_step_s=4e-4,
    decode_row_s=2e-5, call_s=7e-3, stream_bandwidth=2e8, judge_row_s=3e-4, layer_s=2e-4,
    pass_s=9e-4, touched=300.0, optimizer_s=5e-3, row_s=1e-4, crowd=0.3, step_s=0.02,
)  # fmt: skip
"""None of them is what a fit begins with."""


def primitives(device: Device, coefficients: Coefficients) -> list[Primitive]:
    """What `rolemesh calibrate` would measure there."""
    asked: list[tuple[Any, dict[str, int], dict[str, Any] | None]] = [
        ("matmul", {"rows": 4096, "inner": 1024, "columns": 1024}, None),
        ("memory", {"bytes": 1 << 28}, None),
        ("host", {"bytes": 1 << 28}, None),
        ("reduce", {"bytes": 1 << 12, "ranks": 2}, None),
        ("reduce", {"bytes": 1 << 26, "ranks": 2}, None),
    ]
    for width, layers in ((64, 2), (64, 8), (512, 4)):
        config = llama(width, 2 * width, layers, 4, 4, 512)
        for rows in (4, 32):
            sizes = {"rows": rows, "prompt_tokens": 48, "completion_tokens": 16}
            asked += [(kind, sizes, config) for kind in ("score", "update", "decode")]
    found = []
    for kind, sizes, config in asked:
        one = Primitive(kind=kind, sizes=sizes, config=config, seconds=1.0)
        seconds = one.observation(device).predict(coefficients)
        found.append(replace(one, seconds=seconds))
    return found


def recorded(
    device: Device, coefficients: Coefficients, name: str = "a run", **changes: Any
) -> RecordedRun:
    """A run that took what the simulators say of it.

    Args:
        device: What it ran on.
        coefficients: Of that machine.
        name: Of the run.
        changes: `prompts`, `tokens`, `layout` of the actor, `pools`, `algorithm`.
    """
    work = Work(
        prompts=changes.pop("prompts", 8),
        prompt_tokens=48,
        completions=Lengths.fixed(changes.pop("tokens", 16)),
        mini_batch_rows=8,
    )
    layout = changes.pop("layout", Layout())
    placed = job(changes.pop("algorithm", "ppo"), "tiny", system=ROLEMESH, work=work)
    # A reward by rules has no model.
    placed = replace(placed, roles=tuple(one for one in placed.roles if one.name != "reward"))
    pools = changes.pop("pools", dict.fromkeys(placed.step.roles, "one"))
    assert not changes
    layouts = {one.name: Layout() for one in placed.roles} | {"actor": layout}
    run = RecordedRun(
        name=name,
        job=placed,
        layouts=layouts,
        pools=pools,
        seconds=(0.0,),
        step_s=1.0,
        beside_s=coefficients.step_s,
    )
    predicted = run.predicted(device, coefficients)
    return replace(run, seconds=predicted.seconds, step_s=predicted.period)
