"""The last checkpoint of a run that failed: of a trained reward, and of roles that sleep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.fake_recipes import PPO_ROLES, TRAINED_REWARD
from support.fake_roles import FakeMesh, fake_mesh, fake_recipe
from support.fake_runs import Recorder, make_run

from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.rpc.errors import PreconditionError

NEWEST = 2


async def failed_in(
    mesh: FakeMesh, recipe: Recipe, method: str, directory: Path
) -> tuple[list[str], list[str]]:
    """What the run told, and what the services did, once a method of step 3 had been refused."""

    def reported(name: str, key: Any) -> dict[str, float]:
        if name == method and key.step == NEWEST + 1:
            raise PreconditionError("it has another version", reason="VERSION_MISMATCH")
        return {}

    mesh.reported = reported
    recorder = Recorder()
    with pytest.raises(RunError, match="it has another version"):
        await make_run(mesh, directory, recipe, MemoryStateStore(), observer=recorder).execute()
    begun = max(at for at, entry in enumerate(mesh.log) if entry == f"{method} begins")
    return recorder.events, mesh.log[begun:]


def check_saved(directory: Path, events: list[str]) -> None:
    assert any(f"step {NEWEST} was saved before the end" in text for text in events), events
    assert (directory / f"checkpoints/step-{NEWEST:08d}").is_dir()


async def test_a_reward_that_is_trained_is_saved(tmp_path: Path) -> None:
    recipe = fake_recipe(
        roles=("reward",),
        algorithm={"type": "reward_model", "mini_batch_rows": 4},
        reward=TRAINED_REWARD,
        evaluation={"num_prompts": 0},
    )
    async with fake_mesh(("reward",), has_cuts=True) as mesh:
        events, _ = await failed_in(mesh, recipe, "reward.Update", tmp_path)
    check_saved(tmp_path, events)


async def test_of_roles_that_sleep_at_most_one_is_awake(tmp_path: Path) -> None:
    recipe = fake_recipe(
        pools={"all": {"roles": list(PPO_ROLES), "sleep": "always"}},
        evaluation={"num_prompts": 0},
    )
    async with fake_mesh(has_cuts=True) as mesh:
        # The reference is awake when the run fails.
        events, done = await failed_in(mesh, recipe, "reference.ComputeLogprobs", tmp_path)
    check_saved(tmp_path, events)
    awake = {"reference"}
    for entry in done:
        service, _, move = entry.partition(".")
        if move == "Sleep":
            awake.discard(service)
        elif move == "Wake":
            awake.add(service)
            assert len(awake) == 1, done
