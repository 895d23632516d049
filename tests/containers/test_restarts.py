"""Tests of a mesh that is restarted, or stopped and started, as a whole in the middle of a run."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from support.container_mesh import (
    HEALTHY_TIMEOUT_S,
    RECIPE,
    RUN_TIMEOUT_S,
    SMALL_STEPS,
    ContainerMesh,
    container_log,
    wait_until,
)

pytestmark = [pytest.mark.containers, pytest.mark.timeout(2400)]

STEPS = 6
STOP_TIMEOUT_S = 300.0
"""The coordinator makes its step before it ends, and roles that go first have to come back."""


@pytest.fixture
def run_id(request: pytest.FixtureRequest) -> str:
    return "killed" if "killed" in request.node.name else "restarted"


@pytest.fixture
def coordinator(mesh: ContainerMesh, run_id: str, tmp_path: Path) -> Iterator[str]:
    """Container of a run of six steps that `up` has started."""
    command = [
        *("train", "--restartable", RECIPE, f"--run-id={run_id}", f"--out=runs/{run_id}"),
        *(f"--set={text}" for text in (*SMALL_STEPS, f"run.steps={STEPS}")),
    ]
    # In place of the short run of compose.tests.yaml.
    longer = tmp_path / "longer.yaml"
    longer.write_text(yaml.safe_dump({"services": {"coordinator": {"command": command}}}))
    mesh.compose(
        *("--file", str(longer), "up", "--detach", "coordinator"), timeout_s=HEALTHY_TIMEOUT_S
    )
    try:
        yield mesh.container("coordinator")
    finally:
        mesh.compose("rm", "--stop", "--force", "coordinator", timeout_s=STOP_TIMEOUT_S)


def steps_of(container: str) -> list[int]:
    """Steps that the coordinator has told of, in the order in which it did."""
    return [int(step) for step in re.findall(r"step (\d+) reward", container_log(container))]


@pytest.fixture
def makes(coordinator: str) -> Callable[[int], None]:
    """Waits until the run has told of a step."""

    def wait(step: int) -> None:
        wait_until(
            lambda: step in steps_of(coordinator),
            f"the run makes step {step}",
            RUN_TIMEOUT_S,
            lambda: container_log(coordinator),
        )

    return wait


def check_made_once(mesh: ContainerMesh, run_id: str, folder: Path) -> None:
    """Waits for the end of the run, which has every step once."""
    coordinator = mesh.container("coordinator")
    wait_until(
        lambda: mesh.state("coordinator")["Status"] == "exited",
        "the run ends",
        RUN_TIMEOUT_S,
        lambda: container_log(coordinator),
    )
    log = container_log(coordinator)
    assert mesh.state("coordinator")["ExitCode"] == 0, log
    assert "Traceback" not in log
    mesh.compose("cp", f"coordinator:/mesh/runs/{run_id}/metrics.jsonl", str(folder))
    records = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(record)["step"] for record in records] == list(range(1, STEPS + 1))


def test_a_run_goes_on_by_itself_when_the_process_of_any_container_is_killed(
    mesh: ContainerMesh,
    coordinator: str,
    run_id: str,
    makes: Callable[[int], None],
    tmp_path: Path,
) -> None:
    makes(1)
    for role in ("actor", "reward", "reference"):
        mesh.signal(role, signal.SIGKILL)
        makes(max(steps_of(coordinator)) + 1)
    # All processes of the user in the container but its init and this shell.
    mesh.compose("exec", "--no-TTY", "store", "sh", "-c", "kill -9 -1", check=False)
    makes(max(steps_of(coordinator)) + 1)
    check_made_once(mesh, run_id, tmp_path)


def test_a_mesh_that_is_restarted_and_stopped_and_started_makes_every_step_once(
    mesh: ContainerMesh,
    coordinator: str,
    run_id: str,
    makes: Callable[[int], None],
    tmp_path: Path,
) -> None:
    makes(1)
    mesh.compose("restart", timeout_s=STOP_TIMEOUT_S)
    makes(max(steps_of(coordinator)) + 1)
    mesh.compose("stop", timeout_s=STOP_TIMEOUT_S)
    assert max(steps_of(coordinator)) < STEPS, "the run had ended before: give it more steps"
    mesh.compose("start", timeout_s=HEALTHY_TIMEOUT_S)
    check_made_once(mesh, run_id, tmp_path)
    assert container_log(coordinator).count("resuming restarted from") == 2
