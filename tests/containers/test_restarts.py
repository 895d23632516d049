"""Tests of a mesh that is restarted, or stopped and started, as a whole in the middle of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.container_mesh import (
    HEALTHY_TIMEOUT_S,
    RUN_TIMEOUT_S,
    ContainerMesh,
    container_log,
    wait_until,
)

pytestmark = [pytest.mark.containers, pytest.mark.timeout(2400)]

LONGER = str(Path(__file__).with_name("compose.restarts.yaml"))
STEPS = 6
STOP_TIMEOUT_S = 300.0
"""The coordinator makes its step before it ends, and roles that go first have to come back."""


@pytest.fixture
def coordinator(mesh: ContainerMesh) -> Iterator[str]:
    """Container of a run of six steps that `up` has started."""
    mesh.compose("--file", LONGER, "up", "--detach", "coordinator", timeout_s=HEALTHY_TIMEOUT_S)
    try:
        yield mesh.container("coordinator")
    finally:
        mesh.compose("rm", "--stop", "--force", "coordinator", timeout_s=STOP_TIMEOUT_S)


def steps_of(container: str) -> list[int]:
    """Steps that the coordinator has told of, in the order in which it did."""
    return [int(step) for step in re.findall(r"step (\d+) reward", container_log(container))]


def test_a_mesh_that_is_restarted_and_stopped_and_started_makes_every_step_once(
    mesh: ContainerMesh, coordinator: str, tmp_path: Path
) -> None:
    def makes(step: int) -> None:
        wait_until(
            lambda: step in steps_of(coordinator),
            f"the run makes step {step}",
            RUN_TIMEOUT_S,
            lambda: container_log(coordinator),
        )

    makes(1)
    mesh.compose("restart", timeout_s=STOP_TIMEOUT_S)
    makes(max(steps_of(coordinator)) + 1)
    mesh.compose("stop", timeout_s=STOP_TIMEOUT_S)
    assert max(steps_of(coordinator)) < STEPS, "the run had ended before: give it more steps"
    mesh.compose("start", timeout_s=HEALTHY_TIMEOUT_S)
    wait_until(
        lambda: mesh.state("coordinator")["Status"] == "exited",
        "the run ends",
        RUN_TIMEOUT_S,
        lambda: container_log(coordinator),
    )
    log = container_log(coordinator)
    assert mesh.state("coordinator")["ExitCode"] == 0, log
    assert log.count("resuming restarted from") == 2
    assert "Traceback" not in log
    mesh.compose("cp", "coordinator:/mesh/runs/restarted/metrics.jsonl", str(tmp_path))
    records = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(record)["step"] for record in records] == list(range(1, STEPS + 1))
