"""A whole run against four fake roles on loopback."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.fake_recipes import PPO
from support.fake_roles import (
    completion,
    expected_weight,
    fake_mesh,
    fake_recipe,
    reward_of,
    until,
)
from support.fake_runs import SPLIT_POOLS, Recorder, make_run, read_lines
from support.mapping_jobs import LLAMAS

from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.dataflow.errors import RunAbortedError, RunError
from rolemesh.coordinator.mapping.job.models import Model
from rolemesh.coordinator.recipe.schema import Recipe, TracingSpec
from rolemesh.coordinator.run.training_run import TrainingRun
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunState, RunStream

PHASES = (
    "generate",
    "weight_sync",
    "values",
    "reference",
    "reward",
    "advantages",
    "update_critic",
    "update_actor",
    "step",
)


async def test_a_run_trains_and_writes_everything(tmp_path: Path) -> None:
    store, recorder = MemoryStateStore(), Recorder()
    async with fake_mesh() as mesh:
        run = make_run(mesh, tmp_path, fake_recipe(), store, observer=recorder)
        summary = await run.execute()
        assert mesh.roles["actor"].weight == expected_weight(4)
        assert mesh.roles["actor"].policy_version == 4 * 2  # 6 rows in mini-batches of 4
        assert mesh.roles["critic"].policy_version == 4 * 2
        assert all(fake.released_through == 4 for fake in mesh.roles.values())
        assert mesh.roles["reward"].spec["source"] == pytest.approx(mesh_reward_spec())

    records = read_lines(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert records == recorder.records
    for number, record in enumerate(records):
        rewards = [
            reward_of(completion(expected_weight(number), prompt, sample))
            for prompt in range(number * 3, number * 3 + 3)
            for sample in range(2)
        ]
        assert record["reward/mean"] == pytest.approx(statistics.fmean(rewards))
        assert record["tokens"] == 6 * 12
        for phase in PHASES:
            assert record[f"time/{phase}"] >= 0
        assert (record["kl/mean"], record["entropy"]) == (0.25, 1.5)
        assert (record["actor/grad_norm"], record["critic/grad_norm"]) == (0.5, 0.5)
        assert record["coordinator/calls"] == 7 + 4  # seven nodes, four releases
        assert all(math.isfinite(value) for value in record.values())

    held_out = [reward_of(completion(0.0, prompt, 0)) for prompt in range(8)]
    assert summary.held_out_before is not None
    assert summary.held_out_after is not None
    assert summary.held_out_before.score == pytest.approx(statistics.fmean(held_out))
    assert summary.held_out_before.standard_error == pytest.approx(
        statistics.stdev(held_out) / math.sqrt(8)
    )
    assert summary.held_out_after.score == pytest.approx(
        summary.held_out_before.score + expected_weight(4)
    )
    assert records[-1]["held_out/score"] == pytest.approx(summary.held_out_after.score)

    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["state"] == "succeeded"
    assert written["held_out"]["after"]["num_prompts"] == 8
    assert written["reward"]["mean_first_steps"] == pytest.approx(
        statistics.fmean(record["reward/mean"] for record in records[:2])
    )
    assert written["versions"]["critic"] == {"fake": "1"}
    assert written["coordinator_traffic"]["calls"] > 0
    assert set(written["seconds_by_phase"]) >= {"initialize", "evaluate", "generate", "export"}

    assert Recipe.model_validate(yaml.safe_load((tmp_path / "config.yaml").read_text()))
    marker = json.loads((tmp_path / "checkpoints/step-00000004/COMMITTED").read_text())
    assert (marker["step"], marker["next_prompt"]) == (4, 12)
    assert marker["roles"]["actor"]["policy_version"] == 8
    assert (tmp_path / "checkpoints/step-00000004/critic/weight.json").is_file()
    assert json.loads((tmp_path / "model/weight.json").read_text())["weight"] == 0.5
    assert list((tmp_path / "tensorboard").iterdir())
    graphs = read_lines(tmp_path / "dataflow.jsonl")
    assert [len(graph["nodes"]) for graph in graphs] == [7, 7, 7, 7]

    record = await store.get_run(run.run_id)
    assert (record.state, record.step, record.failure) == (RunState.SUCCEEDED, 4, "")
    before, *others = [entry.values for entry in await store.read_metrics(run.run_id)]
    # The curve of the held-out score begins before the first step; other metrics have no step 0.
    assert before == {"step": 0.0, **summary.held_out_before.scalars()}
    assert [values["step"] for values in others] == [1, 2, 3, 4]
    operations = StoreOperations(store)
    curve = await operations.get_metrics(run.run_id, ["held_out/score"])
    assert list(curve.steps) == [0, 1, 2, 3, 4]
    assert curve.series[0].values[0] == summary.held_out_before.score
    assert list((await operations.get_metrics(run.run_id, ["reward/*"])).steps) == [1, 2, 3, 4]
    kept = await store.read_entries(run.run_id, RunStream.GRAPHS)
    assert [json.loads(one.payload) for one in kept] == graphs
    assert await store.list_services() == []


async def test_a_run_begins_with_its_cautions(tmp_path: Path) -> None:
    recorder = Recorder()
    algorithm = {**PPO, "mini_batch_rows": 3}
    async with fake_mesh() as mesh:
        recipe = fake_recipe(steps=1, algorithm=algorithm)
        await make_run(mesh, tmp_path, recipe, MemoryStateStore(), observer=recorder).execute()
    told = [text for text in recorder.events if text.startswith("caution: ")]
    assert len(told) == 1
    assert "algorithm.mini_batch_rows is 3 and" in told[0]
    assert "give mini_batch_rows as a multiple of 2" in told[0]


async def test_the_first_step_is_estimated_before_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    tiny = partial(Model.from_config, LLAMAS["tiny"])
    monkeypatch.setattr(Model, "from_folder", lambda _, **how: tiny(**how))
    async with fake_mesh() as mesh:
        recipe = fake_recipe(steps=2, evaluation={"num_prompts": 8, "every_steps": 1})
        await make_run(mesh, tmp_path, recipe, MemoryStateStore(), observer=recorder).execute()
    assert recorder.estimates
    # Of the first step alone, and of nothing that is evaluated before or after it.
    for step, seconds, gone_s in recorder.estimates:
        assert (step, 0 < gone_s <= seconds) == (1, True)
    assert recorder.estimates[-1][2] <= recorder.records[0]["time/step"]


def mesh_reward_spec() -> dict[str, Any]:
    return {"type": "arithmetic", "exact": 1.0, "contained": 0.2, "form": 0.1}


async def test_a_url_s_password_is_written_where_its_owner_alone_reads_it(tmp_path: Path) -> None:
    secret = TracingSpec(endpoint="http://me:s3cret@127.0.0.1:1")
    for name, update in (("open", {}), ("closed", {"tracing": secret})):
        recipe = fake_recipe(steps=1).model_copy(update=update)
        async with fake_mesh() as mesh:
            await make_run(mesh, tmp_path / name, recipe, MemoryStateStore()).execute()
    assert "s3cret" in (tmp_path / "closed/config.yaml").read_text()
    assert (tmp_path / "closed/config.yaml").stat().st_mode & 0o077 == 0
    assert (tmp_path / "open/config.yaml").stat().st_mode & 0o077 != 0


async def test_the_journal_has_every_operation_once_and_a_commit_a_step(tmp_path: Path) -> None:
    store = MemoryStateStore()
    async with fake_mesh() as mesh:
        run = make_run(mesh, tmp_path, fake_recipe(steps=2), store)
        await run.execute()
        keys = [call.key for call in mesh.calls]
    assert len(set(keys)) == len(keys)
    assert {key[:2] for key in keys} == {(run.run_id, 1)}
    entries = await store.read_journal(run.run_id)
    acknowledged = [(e.step, e.operation, e.sequence) for e in entries]
    assert sorted(acknowledged) == sorted(
        [key[2:] for key in keys]
        + [(step, "step.commit", 0) for step in (0, 1, 2)]
        + [(step, "step.record", 0) for step in (1, 2)]
        + [(step, "run.evaluate", 0) for step in (0, 2)]
    )
    commit = next(e for e in entries if (e.step, e.operation) == (2, "step.commit"))
    assert commit.result["policy_versions"]["actor"] == 4


async def test_evaluation_operations_have_names_of_their_own(tmp_path: Path) -> None:
    async with fake_mesh() as mesh:
        await make_run(mesh, tmp_path, fake_recipe(steps=1), MemoryStateStore()).execute()
        of_evaluation = [call for call in mesh.calls if call.key[3].startswith("evaluate.")]
        generated = [call for call in of_evaluation if call.method == "Generate"]
    assert [call.key[2] for call in generated] == [0, 1]
    assert all(call.request.sampling.greedy for call in generated)
    assert all(call.request.prompts.split == 2 for call in generated)  # SPLIT_HELD_OUT


async def test_pools_run_side_by_side_and_roles_of_one_pool_in_turn(tmp_path: Path) -> None:
    shared: dict[str, Any] = {}
    for name, sections, together in (("split", {"pools": SPLIT_POOLS}, 3), ("shared", shared, 1)):
        async with fake_mesh() as mesh:
            gates = {
                "critic": "ComputeValues",
                "reference": "ComputeLogprobs",
                "reward": "ComputeReward",
            }
            for role, method in gates.items():
                mesh.roles[role].gates[method] = asyncio.Event()
            recipe = fake_recipe(steps=1, evaluation={"num_prompts": 0}, **sections)
            run = make_run(mesh, tmp_path / name, recipe, MemoryStateStore())
            task = asyncio.create_task(run.execute())
            await until(lambda: len(mesh.running) == together)  # noqa: B023
            # Once they wait in turn, nothing else may start before the first gate opens.
            await asyncio.sleep(0.05)
            assert len(mesh.running) == together
            for role, method in gates.items():
                mesh.roles[role].gates[method].set()
            await task
            # Update of critic and actor may meet as well, but no more than the three.
            assert mesh.most_together == together
            first, *following = mesh.methods(1)[:4]
            assert first == "actor.Generate"
            in_turn = [f"{role}.{method}" for role, method in gates.items()]
            # Calls that run side by side arrive in any order, those of one pool in the graph's.
            assert (following if together == 1 else sorted(following)) == in_turn


async def test_a_wish_to_stop_ends_after_the_step_with_everything_saved(tmp_path: Path) -> None:
    store = MemoryStateStore()
    async with fake_mesh() as mesh:
        gate = mesh.roles["actor"].gates["Update"] = asyncio.Event()
        run = make_run(mesh, tmp_path, fake_recipe(steps=100), store)
        task = asyncio.create_task(run.execute())
        await until(lambda: "actor.Update" in mesh.running)
        await store.update_run(run.run_id, stop_requested=True)
        await until(lambda: run.wishes.is_stop_wanted)
        gate.set()
        summary = await task
    assert (summary.state, summary.steps) == (RunState.STOPPED, 1)
    assert summary.held_out_after is None
    assert (tmp_path / "model/weight.json").is_file()
    assert (tmp_path / "checkpoints/step-00000001/COMMITTED").is_file()
    assert (await store.get_run(run.run_id)).state is RunState.STOPPED


async def test_where_the_policy_answers_is_known_while_the_run_goes_on(tmp_path: Path) -> None:
    store = MemoryStateStore()
    operations = StoreOperations(store)
    async with fake_mesh() as mesh:
        mesh.endpoint = "http://127.0.0.1:8000"
        gate = mesh.roles["actor"].gates["Update"] = asyncio.Event()
        run = make_run(mesh, tmp_path, fake_recipe(steps=1), store)
        task = asyncio.create_task(run.execute())
        await until(lambda: "actor.Update" in mesh.running)
        told = await operations.get_run(run.run_id)
        assert dict(told.endpoints) == {"actor": "http://127.0.0.1:8000/v1"}
        gate.set()
        await task
    assert dict((await operations.get_run(run.run_id)).endpoints) == {}


async def test_a_second_wish_aborts_at_once(tmp_path: Path) -> None:
    async with fake_mesh() as mesh:
        mesh.roles["actor"].gates["Update"] = asyncio.Event()
        run = make_run(mesh, tmp_path, fake_recipe(), MemoryStateStore())
        task = asyncio.create_task(run.execute())
        await until(lambda: "actor.Update" in mesh.running)
        run.request_stop()
        run.request_stop()
        with pytest.raises(RunAbortedError, match="aborted during step 1; steps made before: 0"):
            await task
        await until(lambda: mesh.roles["actor"].cancelled == ["Update"])
    assert json.loads((tmp_path / "summary.json").read_text())["state"] == "stopped"


async def test_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    async with fake_mesh() as mesh:
        recipe = fake_recipe(steps=5, checkpoint={"every_steps": 2, "keep": 2})
        await make_run(mesh, tmp_path, recipe, MemoryStateStore()).execute()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000005"]


async def test_a_hundred_times_the_tokens_leave_the_coordinators_traffic_alone(
    tmp_path: Path,
) -> None:
    moved = {}
    for tokens in (8, 800):
        async with fake_mesh(tokens_per_completion=tokens) as mesh:
            run = make_run(mesh, tmp_path / str(tokens), fake_recipe(), MemoryStateStore())
            await run.execute()
        records = read_lines(tmp_path / str(tokens) / "metrics.jsonl")
        moved[tokens] = sum(
            record["coordinator/sent_bytes"] + record["coordinator/received_bytes"]
            for record in records
        )
        assert records[0]["tokens"] == 6 * (4 + tokens)
    assert abs(moved[800] / moved[8] - 1) < 0.1


async def test_a_service_that_outlives_the_run_is_given_back(tmp_path: Path) -> None:
    async with fake_mesh() as mesh:
        recipe = fake_recipe(services={"reward": {"address": mesh.addresses["reward"]}})
        run = make_run(mesh, tmp_path, recipe, MemoryStateStore())
        await run.execute()
        held_by = {role: fake.run_id for role, fake in mesh.roles.items()}
    assert held_by == {
        "actor": run.run_id,
        "critic": run.run_id,
        "reference": run.run_id,
        "reward": "",
    }


async def test_another_role_at_the_address_is_refused(tmp_path: Path) -> None:
    async with fake_mesh() as mesh:
        addresses = {**mesh.addresses, "critic": mesh.addresses["reward"]}
        run = TrainingRun(
            fake_recipe(), directory=tmp_path, addresses=addresses, store=MemoryStateStore()
        )
        with pytest.raises(RunError, match=r"services\.critic: .* is a 'reward', not a 'critic'"):
            await run.execute()


async def test_a_service_that_never_answers_is_named(tmp_path: Path) -> None:
    async with fake_mesh() as mesh:
        await mesh.roles["reward"].stop()
        run = TrainingRun(
            fake_recipe(),
            directory=tmp_path,
            addresses=mesh.addresses,
            store=MemoryStateStore(),
            start_deadline_s=0.5,
            loss_grace_s=0.1,
        )
        with pytest.raises(RunError, match=r"reward at .* did not become healthy within 0 s"):
            await run.execute()


async def test_more_held_out_prompts_than_there_are_is_refused(tmp_path: Path) -> None:
    async with fake_mesh(num_held_out=4) as mesh:
        run = make_run(mesh, tmp_path, fake_recipe(), MemoryStateStore())
        with pytest.raises(RunError, match=r"run\.evaluation\.num_prompts is 8, .* 4 held-out"):
            await run.execute()


async def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    addresses = dict.fromkeys(("actor", "critic", "reference", "reward"), "127.0.0.1:1")
    with pytest.raises(ValueError, match=r"run\.directory: .* holds a run already"):
        TrainingRun(
            fake_recipe(), directory=tmp_path, addresses=addresses, store=MemoryStateStore()
        )
