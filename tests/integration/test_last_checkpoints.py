"""The end of a run that failed: its last checkpoint, and all else that is done then."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.fake_recipes import PPO_ROLES, TRAINED_REWARD
from support.fake_roles import FakeMesh, fake_mesh, fake_recipe, until
from support.fake_runs import Recorder, make_run

from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.attempts import last_checkpoint
from rolemesh.coordinator.run.saving.checkpoints import Checkpoints
from rolemesh.coordinator.run.steps.told_steps import ToldSteps
from rolemesh.coordinator.run.training_run import TrainingRun
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.rpc.errors import PreconditionError

NEWEST = 2
SOON_S = 20.0
"""Far less than LAST_CHECKPOINT_DEADLINE_S."""


async def failed_in(
    mesh: FakeMesh,
    recipe: Recipe,
    method: str,
    directory: Path,
    meanwhile: Callable[[TrainingRun], Awaitable[None]] | None = None,
) -> tuple[list[str], list[str]]:
    """What the run told, and what the services did, once a method of step 3 had been refused."""

    def reported(name: str, key: Any) -> dict[str, float]:
        if name == method and key.step == NEWEST + 1:
            raise PreconditionError("it has another version", reason="VERSION_MISMATCH")
        return {}

    mesh.reported = reported
    recorder = Recorder()
    run = make_run(mesh, directory, recipe, MemoryStateStore(), observer=recorder)
    task = asyncio.create_task(run.execute())
    if meanwhile is not None:
        await meanwhile(run)
    with pytest.raises(RunError, match="it has another version"):
        await asyncio.wait_for(task, SOON_S)
    begun = max(at for at, entry in enumerate(mesh.log) if entry == f"{method} begins")
    return recorder.events, mesh.log[begun:]


def check_saved(directory: Path, events: list[str]) -> None:
    (told,) = (text for text in events if f"step {NEWEST} was saved before the end" in text)
    assert told.endswith(f"`rolemesh train --resume {directory}` goes on from it")
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


def plain_recipe(**settings: Any) -> Recipe:
    return fake_recipe(evaluation={"num_prompts": 0}, **settings)


async def test_a_newest_step_that_had_been_saved_is_what_the_run_goes_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A step is made while its predecessor is written, so that the order of the two is by chance.
    monkeypatch.setattr(Checkpoints, "committed", lambda _: [1, NEWEST])
    async with fake_mesh(has_cuts=True) as mesh:
        events, _ = await failed_in(mesh, plain_recipe(), "actor.Update", tmp_path)
    assert (
        f"step {NEWEST} is saved as a checkpoint; `rolemesh train --resume {tmp_path}` goes on "
        "from it"
    ) in events


async def test_a_second_signal_ends_the_run_while_its_last_checkpoint_is_saved(
    tmp_path: Path,
) -> None:
    async with fake_mesh(has_cuts=True) as mesh:
        mesh.roles["actor"].gates["RestoreCut"] = asyncio.Event()

        async def signals(run: TrainingRun) -> None:
            await until(lambda: "actor.RestoreCut" in mesh.running)
            run.request_stop()
            await asyncio.sleep(0.05)
            assert "actor.RestoreCut" in mesh.running
            run.request_stop()

        events, _ = await failed_in(mesh, plain_recipe(), "actor.Update", tmp_path, signals)
    assert any("the end of the run is not whole: aborted" in text for text in events)


async def test_a_last_checkpoint_that_takes_too_long_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_checkpoint, "LAST_CHECKPOINT_DEADLINE_S", 1.0)
    async with fake_mesh(has_cuts=True) as mesh:
        mesh.roles["actor"].gates["RestoreCut"] = asyncio.Event()
        events, _ = await failed_in(mesh, plain_recipe(), "actor.Update", tmp_path)
    assert f"step {NEWEST} could not be saved as a checkpoint: not within 1 s" in events


@pytest.mark.parametrize("part", ["record", "checkpoint"])
async def test_a_full_disk_keeps_no_other_part_of_the_end_from_being_done(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = ToldSteps.tell

    async def is_full(told: ToldSteps, *, is_whole: bool = True) -> None:
        if not is_whole:
            raise OSError(28, "No space left on device")
        await tell(told)

    async def takes_room(*given: Any, **named: Any) -> Path:
        raise OSError(28, "No space left on device")

    if part == "record":
        monkeypatch.setattr(ToldSteps, "tell", is_full)
    else:
        monkeypatch.setattr(Checkpoints, "save", takes_room)
    async with fake_mesh(has_cuts=True) as mesh:
        recipe = plain_recipe(services={"reward": {"address": mesh.addresses["reward"]}})
        events, _ = await failed_in(mesh, recipe, "actor.Update", tmp_path)
        # The service of others is free for another run.
        assert mesh.roles["reward"].drained_epoch > 0
    assert any("not whole: [Errno 28] No space left on device" in text for text in events)
    if part == "record":
        check_saved(tmp_path, events)
