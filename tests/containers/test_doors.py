"""Test of a run in containers that asks a reward from outside, driven from this host by a token."""

from __future__ import annotations

import json
import secrets
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from support.container_mesh import (
    COMMAND_TIMEOUT_S,
    HEALTHY_TIMEOUT_S,
    RUN_TIMEOUT_S,
    SMALL_STEPS,
    ContainerMesh,
    container_log,
    published_port,
    wait_until,
)

from rolemesh.coordinator.sdk import Client, RetryPolicy, RunState, StateChanged, StepMade
from rolemesh.rpc.errors import ForbiddenError

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1200)]

RUN = "driven"
JUDGE = "grpc://judge:50061"
MORE_STEPS_THAN_ARE_MADE = 500

TOKENS = pytest.mark.parametrize("kind", ["none", "wrong"])


@dataclass(frozen=True)
class Doors:
    """Where the coordinator of the driven run answers on this host, and the token it asks for."""

    grpc: str
    http: str
    token: str

    def client(self, token: str | None) -> Client:
        return Client(self.grpc, token=token, retry=RetryPolicy(budget_s=COMMAND_TIMEOUT_S))

    def get(self, path: str, token: str | None) -> tuple[int, bytes]:
        """Status and body of an answer over HTTP."""
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        request = urllib.request.Request(f"http://{self.http}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=COMMAND_TIMEOUT_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()


@pytest.fixture(scope="module")
def doors(mesh: ContainerMesh) -> Iterator[Doors]:
    """Of a run that goes on until it is stopped."""
    mesh.compose("up", "--detach", "--no-deps", "judge")
    judge = mesh.container("judge")
    wait_until(
        lambda: "grpc://" in container_log(judge),
        "the judge listens",
        HEALTHY_TIMEOUT_S,
        lambda: container_log(judge),
    )
    steps = f"run.steps={MORE_STEPS_THAN_ARE_MADE}"
    try:
        container = mesh.begin(RUN, *SMALL_STEPS, steps, f"reward={JUDGE}")
        mesh.wait_for_line(RUN, "dashboard and REST")
        yield Doors(
            grpc=published_port(container, 50050),
            http=published_port(container, 8321),
            token=mesh.token,
        )
    finally:
        mesh.end(RUN)


def shown(doors: Doors, kind: str) -> str | None:
    """A token that does not open the doors."""
    return None if kind == "none" else secrets.token_hex(len(doors.token) // 2)


def first_step(client: Client) -> StepMade:
    """The first step of the driven run, as its watch tells of it."""
    for event in client.watch_run(RUN):
        if isinstance(event, StepMade):
            return event
        if isinstance(event, StateChanged) and event.state.is_final:
            raise AssertionError(f"the run ended before its first step: {event.failure}")
    raise AssertionError("the watch ended before the first step")


@TOKENS
def test_the_sdk_without_the_token_is_refused(doors: Doors, kind: str) -> None:
    with doors.client(shown(doors, kind)) as client:
        with pytest.raises(ForbiddenError, match="the token of this coordinator"):
            client.get_run(RUN)
        with pytest.raises(ForbiddenError, match="the token of this coordinator"):
            client.stop_run(RUN)


@TOKENS
def test_rest_without_the_token_is_refused(doors: Doors, kind: str) -> None:
    status, body = doors.get(f"/api/v1/runs/{RUN}", shown(doors, kind))
    assert status == 401
    assert RUN.encode() not in body.replace(f"/api/v1/runs/{RUN}".encode(), b"")


def test_rest_with_the_token_shows_the_run(doors: Doors) -> None:
    status, body = doors.get(f"/api/v1/runs/{RUN}", doors.token)
    assert status == 200
    assert json.loads(body)["run_id"] == RUN


def test_the_sdk_shows_the_run_to_this_host(doors: Doors) -> None:
    with doors.client(doors.token) as client:
        run = client.get_run(RUN)
        assert (run.run_id, run.num_steps) == (RUN, MORE_STEPS_THAN_ARE_MADE)
        assert run.directory == f"/mesh/runs/{RUN}"
        assert not run.state.is_final
        assert [one.run_id for one in client.list_runs()].count(RUN) == 1


def test_rewards_come_from_the_server_in_its_own_container(doors: Doors) -> None:
    with doors.client(doors.token) as client:
        made = first_step(client)
        wait_until(lambda: client.list_samples(RUN).step > 0, "samples", COMMAND_TIMEOUT_S)
        samples = client.list_samples(RUN).rows
    assert made.metrics["reward/grpc/latency_p50_seconds"] > 0.0
    assert made.metrics["reward/grpc/errors"] == 0.0
    assert len(samples) == 16
    # The recipe's own reward gives parts of a point to what is nearly right; this one never does.
    for sample in samples:
        assert sample.reward == float(sample.completion.strip() == sample.answer), sample


def test_a_run_is_paused_and_resumed_from_this_host(doors: Doors) -> None:
    with doors.client(doors.token) as client:
        client.pause_run(RUN)
        wait_until(lambda: client.get_run(RUN).state is RunState.PAUSED, "the pause", RUN_TIMEOUT_S)
        paused_at = client.get_run(RUN).step
        client.resume_run(RUN)
        wait_until(
            lambda: client.get_run(RUN).step > paused_at, "a step after the pause", RUN_TIMEOUT_S
        )
        assert client.get_run(RUN).state is RunState.RUNNING


def test_a_run_is_stopped_from_this_host(mesh: ContainerMesh, doors: Doors) -> None:
    # The last test of this file: the coordinator ends with its run.
    with doors.client(doors.token) as client:
        client.stop_run(RUN)
        ended = mesh.finish(RUN)
    assert ended.exit_status == 0, ended.log
    assert "stopped" in ended.log
