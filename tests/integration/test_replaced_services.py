"""Services that are only read from: replaced while the others go on, and asked again."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.fake_recipes import split_pools
from support.fake_roles import FakeMesh, expected_weight, fake_mesh, fake_recipe, until
from support.fake_runs import Recorder, kill_during, make_run, read_lines

from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.run.folders.summary import RunSummary
from rolemesh.coordinator.run.services.launch import LaunchError
from rolemesh.coordinator.run.training_run import TrainingRun
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunState

ROLES = ("actor", "critic", "reference", "reward")
STEPS = 3
VICTIMS = ("reference", "reward")


def run_of(mesh: FakeMesh, directory: Path, *, restart: Any = None, **settings: Any) -> TrainingRun:
    # No pause: a new attempt follows at once.
    recovery = {"attempts": 3, "pause_s": 0.0}
    recipe = fake_recipe(
        **{"recovery": recovery, "steps": STEPS, "evaluation": {"num_prompts": 4}},
        pools=split_pools(ROLES),
    )
    run = make_run(
        mesh, directory, recipe, MemoryStateStore(), restart=restart or mesh.restart, **settings
    )
    run._loss_grace_s = 0.2
    return run


def answered(mesh: FakeMesh, step: int) -> Counter[str]:
    """Calls of training in a step that were answered, by name."""
    others = ("evaluate.", "reference.replace", "reward.replace")
    return Counter(
        call.name
        for call in mesh.calls
        if call.step == step and call.state == "done" and not call.key[3].startswith(others)
    )


def check_goes_on(mesh: FakeMesh, summary: RunSummary, victim: str) -> None:
    """The run never went back: one epoch, nothing attached or restored."""
    assert summary.state is RunState.SUCCEEDED
    assert mesh.restarted == [victim]
    assert mesh.roles["actor"].weight == expected_weight(STEPS)
    assert {call.key[1] for call in mesh.calls} == {1}
    assert not {"Attach", "RestoreCut"} & {call.method for call in mesh.calls}
    (recovered,) = summary.recoveries
    assert (recovered.restarted, recovered.lost_steps) == ((victim,), 0)
    assert victim in recovered.cause


@pytest.mark.parametrize("victim", VICTIMS)
async def test_a_call_that_loses_its_service_is_made_by_the_next_process(
    victim: str, tmp_path: Path
) -> None:
    method = {"reference": "ComputeLogprobs", "reward": "ComputeReward"}[victim]
    recorder = Recorder()
    async with fake_mesh(has_cuts=True) as mesh:
        run = run_of(mesh, tmp_path, observer=recorder)
        summary = await kill_during(run, mesh, victim, method, victim, 2)
        check_goes_on(mesh, summary, victim)
        # Nothing else was asked for twice.
        assert answered(mesh, 2) == answered(mesh, 1)
    assert [record["step"] for record in recorder.records] == [1, 2, 3]
    assert any(f"{victim} is replaced while the step goes on" in text for text in recorder.events)
    assert any("was replaced, the step goes on" in text for text in recorder.events)


async def test_what_a_lost_service_had_answered_is_asked_for_again_where_it_is_read(
    tmp_path: Path,
) -> None:
    async with fake_mesh(has_cuts=True) as mesh:
        # Advantages read the rewards; they wait while the reward, which has answered, is killed.
        summary = await kill_during(
            run_of(mesh, tmp_path), mesh, "actor", "ComputeAdvantages", "reward", 2
        )
        check_goes_on(mesh, summary, "reward")
        again = answered(mesh, 2) - answered(mesh, 1)
        assert again == {"reward.ComputeReward": 1}
    assert learnt(tmp_path) == await undisturbed(tmp_path / "undisturbed")


async def test_what_no_later_call_reads_is_not_asked_for_again(tmp_path: Path) -> None:
    async with fake_mesh(has_cuts=True) as mesh:
        summary = await kill_during(run_of(mesh, tmp_path), mesh, "actor", "Update", "reward", 2)
        check_goes_on(mesh, summary, "reward")
        assert answered(mesh, 2) == answered(mesh, 1)


async def test_two_lost_services_are_replaced_side_by_side(tmp_path: Path) -> None:
    async with fake_mesh(has_cuts=True) as mesh:
        gate = mesh.roles["actor"].gates["ComputeAdvantages"] = asyncio.Event()
        run = run_of(mesh, tmp_path)
        task = asyncio.create_task(run.execute())
        await until(lambda: "actor.ComputeAdvantages" in mesh.running)
        for victim in VICTIMS:
            await mesh.roles[victim].stop()
            run.service_lost(victim, f"{victim} was killed by signal 9")
        gate.set()
        summary = await task
        assert sorted(mesh.restarted) == sorted(VICTIMS)
        assert mesh.roles["actor"].weight == expected_weight(STEPS)
        assert {call.key[1] for call in mesh.calls} == {1}
    assert sorted(one.restarted for one in summary.recoveries) == [("reference",), ("reward",)]


async def test_a_trained_role_that_is_lost_meanwhile_begins_a_new_attempt(tmp_path: Path) -> None:
    async with fake_mesh(has_cuts=True) as mesh:
        is_free = asyncio.Event()

        async def restart(service: str) -> str:
            if service == "reward" and not mesh.restarted:
                await is_free.wait()
            return await mesh.restart(service)

        gate = mesh.roles["reward"].gates["ComputeReward"] = asyncio.Event()
        run = run_of(mesh, tmp_path, restart=restart)
        task = asyncio.create_task(run.execute())
        await until(lambda: "reward.ComputeReward" in mesh.running)
        await mesh.roles["reward"].stop()
        run.service_lost("reward", "reward was killed by signal 9")
        await asyncio.sleep(0)
        await mesh.roles["critic"].stop()
        run.service_lost("critic", "critic was killed by signal 9")
        is_free.set()
        gate.set()
        summary = await task
        assert sorted(mesh.restarted) == ["critic", "reward"]
        assert mesh.roles["actor"].weight == expected_weight(STEPS)
    (recovered,) = summary.recoveries
    assert recovered.restarted == ("critic", "reward")
    assert learnt(tmp_path) == await undisturbed(tmp_path / "undisturbed")


# Of the one that is replaced, too, each start is one attempt, and what it replaces is no other.
@pytest.mark.parametrize(("victim", "method"), [("reward", "ComputeReward"), ("actor", "Update")])
async def test_a_service_that_cannot_be_started_again_ends_the_run_after_its_attempts(
    victim: str, method: str, tmp_path: Path
) -> None:
    async with fake_mesh(has_cuts=True) as mesh:

        async def restart(service: str) -> str:
            mesh.restarted.append(service)
            raise LaunchError(f"{service} ended while starting")

        run = run_of(mesh, tmp_path, restart=restart)
        with pytest.raises((RunError, LaunchError), match=f"{victim} ended while starting"):
            await kill_during(run, mesh, victim, method, victim, 2)
    assert mesh.restarted == [victim] * 3


async def test_a_service_that_ends_before_it_releases_a_step_is_replaced(tmp_path: Path) -> None:
    async with fake_mesh(has_cuts=True) as mesh:
        gate = mesh.roles["actor"].gates["SaveCut 2"] = asyncio.Event()
        task = asyncio.create_task(run_of(mesh, tmp_path).execute())
        await until(lambda: any(c.method == "SaveCut" and c.step == 2 for c in mesh.calls))
        # The watcher alone can tell of it: the service belongs to others.
        await mesh.roles["reward"].stop()
        gate.set()
        check_goes_on(mesh, await task, "reward")


async def test_a_service_that_ends_during_the_export_is_left_alone(tmp_path: Path) -> None:
    recorder = Recorder()
    async with fake_mesh(has_cuts=True) as mesh:
        gate = mesh.roles["actor"].gates["Export"] = asyncio.Event()
        run = run_of(mesh, tmp_path, observer=recorder)
        task = asyncio.create_task(run.execute())
        await until(lambda: "actor.Export" in mesh.running)
        await mesh.roles["reward"].stop()
        run.service_lost("reward", "reward was killed by signal 9")
        gate.set()
        summary = await task
        assert mesh.restarted == []
    assert (summary.state, summary.recoveries) == (RunState.SUCCEEDED, ())
    assert {call.key[1] for call in mesh.calls} == {1}
    assert any("the export does without it" in text for text in recorder.events)


async def test_each_replacement_has_a_key_of_its_own(tmp_path: Path) -> None:
    async with fake_mesh(has_cuts=True) as mesh:

        async def restart(service: str) -> str:
            # The process of others still lives; it only refuses to go on.
            mesh.restarted.append(service)
            return mesh.roles[service].address

        run = run_of(mesh, tmp_path, restart=restart)
        gate = mesh.roles["reward"].gates["ComputeReward 2"] = asyncio.Event()
        task = asyncio.create_task(run.execute())
        for number in (1, 2):
            await until(lambda: "reward.ComputeReward" in mesh.running)
            run.service_lost("reward", "reward is broken: work failed")
            await until(lambda count=number: count < len(initialized(mesh)))  # type: ignore[misc]
            await until(lambda: run._attempt.mesh.connections["reward"].is_present)  # type: ignore[union-attr]
            await asyncio.sleep(0.05)
        gate.set()
        await task
        keys = initialized(mesh)
    assert len(keys) == len(set(keys)) == 3


async def test_the_first_step_that_is_made_again_finds_what_was_kept_of_it(tmp_path: Path) -> None:
    async with fake_mesh(has_cuts=True) as mesh:
        run = run_of(mesh, tmp_path)
        await kill_during(run, mesh, "actor", "Update", "actor", 1)
        done = [entry for entry in mesh.log if entry.startswith("reward.")]
    # It drops what it kept before the run and after it, and not between.
    drops = [at for at, entry in enumerate(done) if entry == "reward.DropCuts"]
    rewards = [at for at, entry in enumerate(done) if entry == "reward.ComputeReward ends"]
    assert len(rewards) >= STEPS + 1
    assert [drops[0] < rewards[0], rewards[-1] < drops[1], len(drops)] == [True, True, 2]


async def test_weights_that_are_replaced_before_a_new_process_has_them_are_not_missed(
    tmp_path: Path,
) -> None:
    """It was to have those of the step, but the next step has published others by then."""
    victim, roles = "rollout-1", (*ROLES, "rollout")
    recipe = fake_recipe(
        roles=roles,
        pools=split_pools(roles),
        services={"rollout": {"replicas": 2}},
        sampler={"type": "sync"},
        steps=STEPS,
        recovery={"attempts": 3, "pause_s": 0.0},
    )
    late = asyncio.Event()
    async with fake_mesh(roles, replicas=2, has_cuts=True) as mesh:

        async def restart(service: str) -> str:
            address = await mesh.restart(service)
            mesh.roles[service].gates["UpdateWeights 2"] = late
            return address

        run = make_run(mesh, tmp_path, recipe, MemoryStateStore(), restart=restart)
        run._loss_grace_s = 0.2
        cut = mesh.roles["actor"].gates["SaveCut 2"] = asyncio.Event()
        task = asyncio.create_task(run.execute())

        def states(name: str, step: int) -> list[str]:
            return [call.state for call in mesh.calls if call.name == name and call.step == step]

        await until(lambda: states("actor.SaveCut", 2) == ["running"])
        run.service_lost(victim, f"{victim} was killed by signal 9")
        await until(lambda: states(f"{victim}.UpdateWeights", 2) == ["done", "running"])
        cut.set()
        await until(lambda: states("actor.PublishWeights", 3) == ["done"])
        late.set()
        check_goes_on(mesh, await task, victim)
        assert states(f"{victim}.UpdateWeights", 2) == ["done", "failed"]
        assert set(states(f"{victim}.Generate", 3)) == {"done"}


def initialized(mesh: FakeMesh) -> list[tuple[Any, ...]]:
    return [call.key for call in mesh.calls if call.name == "reward.Initialize"]


def learnt(directory: Path) -> list[dict[str, float]]:
    return [
        {name: value for name, value in record.items() if name in ("step", "kl/mean", "score")}
        for record in read_lines(directory / "metrics.jsonl")
    ]


async def undisturbed(directory: Path) -> list[dict[str, float]]:
    async with fake_mesh(has_cuts=True) as mesh:
        await run_of(mesh, directory).execute()
    return learnt(directory)
