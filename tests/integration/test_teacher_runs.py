"""Runs whose teacher is at servers, and what rows without its say leave of a step."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_teacher import NAME, FakeTeacher, fake_teacher
from support.lasting_services import LastingServices, MadeRun, lasting_services
from support.mesh_runs import tiny_model

from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.services.actor.servicers import ActorRole
from rolemesh.services.reward.servicers import RewardRole
from rolemesh.services.teacher.servicers import TeacherRole

NUM_ROWS = 8
"""Of a step: 4 prompts of 2 completions."""

LOSSES = {
    "of tokens": {"type": "ppo_policy"},
    "of distributions": {"type": "distillation", "top_k": 5},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def services(model: Path, tmp_path: Path) -> AsyncIterator[LastingServices]:
    async with lasting_services([ActorRole(), TeacherRole(), RewardRole()], model, tmp_path) as up:
        yield up


@pytest.fixture
def server() -> Iterator[FakeTeacher]:
    with fake_teacher() as served:
        yield served


async def train(
    services: LastingServices, server: FakeTeacher, loss: str, **fields: Any
) -> MadeRun:
    changes = {
        "algorithm": {
            "type": "on_policy_distillation",
            "sampling": {"samples_per_prompt": 2, "max_new_tokens": 6},
            "mini_batch_rows": 2,
            "policy_loss": LOSSES[loss],
        },
        "teacher": {
            "server": {
                "urls": [server.url],
                "model": NAME,
                "policy_folder": str(services.model),
                **fields,
            }
        },
        "run__evaluation": {"num_prompts": 0},
        "critic": None,
        "reference": None,
    }
    return await services.train(services.recipe(**changes))


@pytest.mark.parametrize("loss", LOSSES)
async def test_a_run_learns_from_a_teacher_at_a_server(
    services: LastingServices, server: FakeTeacher, loss: str
) -> None:
    run = await train(services, server, loss)
    assert len(server.rows) == 2 * NUM_ROWS
    for record in run.records:
        assert record["kl/teacher"] > 0.1
        assert "teacher/dropped_rows" not in record
        if loss == "of distributions":
            assert 0 < record["teacher_mass"] < 1


@pytest.mark.parametrize("loss", LOSSES)
async def test_rows_without_scores_leave_the_step_with_their_groups(
    services: LastingServices, server: FakeTeacher, loss: str
) -> None:
    # A row of each step; its group is left out, and the numbers are of the others.
    server.fault_of = lambda row: 400 if len(server.rows) % NUM_ROWS == 3 else None
    run = await train(services, server, loss, on_failure={"type": "drop_group"})
    for record in run.records:
        assert record["teacher/failed_rows"] == 1.0
        assert record["teacher/dropped_rows"] == 2.0
        assert all(value == value for value in record.values())
        # Mini-batches of 2 of the 6 rows that are left.
        assert record["optimizer_steps"] == 3.0
    notes = [note for nodes in run.graphs for node in nodes for note in node.get("notes", ())]
    assert len(notes) == 2
    assert all("1 of 8 rows have no scores" in note for note in notes)


async def test_without_that_policy_the_run_ends_and_says_why(
    services: LastingServices, server: FakeTeacher
) -> None:
    server.max_logprobs = 3
    with pytest.raises(RunError, match="--max-logprobs 5") as raised:
        await train(services, server, "of distributions")
    assert "TEACHER_FAILED" in str(raised.value)
