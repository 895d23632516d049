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
    docker,
    is_running,
    wait_until,
)

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1200)]

FIRST_STEP = "step 1 "
REFUSED = "ALREADY_INITIALIZED"
MOST_REFUSALS = 15
"""A refused run takes 4 s at least, from its container's start to its end."""
UNHEALTHY_TIMEOUT_S = 120.0
"""Twice what three checks in a row take, each 10 s after the last and up to 10 s long."""


@pytest.fixture(scope="module")
def after_a_killed_critic(mesh: ContainerMesh) -> ContainerRun:
    """A run whose critic was killed after its first step."""
    try:
        mesh.begin("critic-killed", *SMALL_STEPS, "run.steps=500")
        mesh.wait_for_line("critic-killed", FIRST_STEP)
        mesh.signal("critic", signal.SIGKILL)
        return mesh.finish("critic-killed")
    finally:
        mesh.end("critic-killed")


@pytest.fixture(scope="module")
def next_run(mesh: ContainerMesh, after_a_killed_critic: ContainerRun) -> Iterator[str]:
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


def test_a_run_whose_role_is_killed_names_it_and_fails(
    after_a_killed_critic: ContainerRun,
) -> None:
    assert after_a_killed_critic.exit_status not in (0, 137), after_a_killed_critic.log
    (*_, reason) = [line for line in after_a_killed_critic.log.splitlines() if line.strip()]
    assert "critic" in reason, after_a_killed_critic.log
    assert "Traceback" not in after_a_killed_critic.log


def test_a_killed_role_comes_back_and_serves_the_next_run(
    mesh: ContainerMesh, next_run: str
) -> None:
    restarts = docker("inspect", "--format", "{{.RestartCount}}", mesh.container("critic")).stdout
    assert int(restarts) == 1
    assert mesh.health("critic") == "healthy"
    assert is_running(next_run)


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
