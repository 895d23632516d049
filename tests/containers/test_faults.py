"""Tests of a mesh whose containers hang or are killed."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from support.container_mesh import (
    ROLES,
    SMALL_STEPS,
    ContainerMesh,
    ContainerRun,
    container_log,
    docker,
    is_running,
    wait_until,
)

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1200)]

FIRST_STEP = "step 1 reward"
REFUSED = "ALREADY_INITIALIZED"
MOST_REFUSALS = 15
"""A refused run takes 4 s at least, from its container's start to its end."""
UNHEALTHY_TIMEOUT_S = 120.0
"""Twice what three checks in a row take, each 10 s after the last and up to 10 s long."""


@pytest.fixture(scope="module")
def with_a_killed_critic(mesh: ContainerMesh) -> ContainerRun:
    """A run of three steps whose critic was killed after its first one."""
    try:
        mesh.begin("critic-killed", *SMALL_STEPS, "run.steps=3")
        mesh.wait_for_line("critic-killed", FIRST_STEP)
        mesh.signal("critic", signal.SIGKILL)
        return mesh.finish("critic-killed")
    finally:
        mesh.end("critic-killed")


@pytest.fixture(scope="module")
def next_run(mesh: ContainerMesh, with_a_killed_critic: ContainerRun) -> Iterator[str]:
    """Container of a run on the same mesh that has made a step and goes on."""
    mesh.wait_healthy("critic")
    try:
        container = mesh.begin("next", *SMALL_STEPS, "run.steps=500")
        mesh.wait_for_line("next", FIRST_STEP)
        yield container
    finally:
        mesh.end("next")


def test_roles_that_are_called_healthy_serve(mesh: ContainerMesh) -> None:
    for role in ROLES:
        mesh.wait_healthy(role)
    assert {role: mesh.answer_of_health(role) for role in ROLES} == dict.fromkeys(ROLES, "SERVING")


def test_a_role_that_does_not_answer_is_unhealthy_until_it_does(mesh: ContainerMesh) -> None:
    mesh.wait_healthy("reference")
    try:
        mesh.signal("reference", signal.SIGSTOP)
        wait_until(
            lambda: mesh.health("reference") == "unhealthy",
            "a stopped process makes its container unhealthy",
            UNHEALTHY_TIMEOUT_S,
            lambda: str(mesh.state("reference")),
        )
        reasons = [one["Output"] for one in mesh.state("reference")["Health"]["Log"]]
        assert any("DEADLINE_EXCEEDED" in reason for reason in reasons), reasons
    finally:
        mesh.signal("reference", signal.SIGCONT)
    mesh.wait_healthy("reference")


def test_a_health_check_of_a_port_where_nobody_serves_fails(mesh: ContainerMesh) -> None:
    check = ("python", "/mesh/deploy/health_check.py", "127.0.0.1:1")
    completed = mesh.compose("exec", "--no-TTY", "critic", *check, check=False)
    assert completed.returncode == 1
    assert "127.0.0.1:1: UNAVAILABLE" in completed.stderr


def test_a_run_whose_role_is_killed_goes_on_by_itself(with_a_killed_critic: ContainerRun) -> None:
    log = with_a_killed_critic.log
    assert with_a_killed_critic.exit_status == 0, log
    assert "recovering after 1 steps: " in log
    assert "critic" in log[log.index("recovering after") :].partition("\n")[0]
    assert log.count("recovered in") == 1
    assert "loaded anew: critic" in log
    assert [f"step {step} reward" in log for step in (1, 2, 3)] == [True] * 3
    assert "Traceback" not in log


def test_a_killed_role_comes_back_and_serves_the_next_run(
    mesh: ContainerMesh, next_run: str
) -> None:
    restarts = docker("inspect", "--format", "{{.RestartCount}}", mesh.container("critic")).stdout
    assert int(restarts) == 1
    assert mesh.health("critic") == "healthy"
    assert is_running(next_run)


def test_a_killed_coordinator_goes_on_with_its_run_when_it_is_started_again(
    mesh: ContainerMesh, next_run: str
) -> None:
    docker("kill", next_run)
    made = container_log(next_run).count(" reward ")
    docker("start", next_run)
    mesh.wait_for_line("next", "resuming next from its journal")
    mesh.wait_for_line("next", f"step {made + 1} reward")
    assert "loaded anew" not in container_log(next_run)


def test_roles_are_free_again_after_a_killed_coordinator(
    mesh: ContainerMesh, next_run: str
) -> None:
    docker("kill", next_run)
    # Until it has been silent for 30 s it may be alive, and roles refuse others.
    for number in range(MOST_REFUSALS + 1):
        ended = mesh.train(f"after-{number}", *SMALL_STEPS, "run.steps=1")
        if REFUSED not in ended.log:
            break
    assert ended.exit_status == 0, ended.log
