"""Tests of a coordinator's answers about a real run, and of a run that a client drives."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fake_roles import until
from support.fake_runs import Recorder
from support.learning_runs import service_processes
from support.mesh_runs import tiny_model

from rolemesh.coordinator import sdk
from rolemesh.coordinator.api.doors.coordinator_service import serve_coordinator
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.sections.run_section import EvaluationSpec
from rolemesh.coordinator.run.results.samples_file import read_samples
from rolemesh.coordinator.run.services.watcher import WatchSettings
from rolemesh.coordinator.run.training_run import TrainingRun
from rolemesh.coordinator.sdk import AsyncClient, AsyncMesh
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunState
from rolemesh.rpc.errors import InvalidRequestError, PreconditionError
from rolemesh.rpc.samples.rows import MAX_TEXT_BYTES
from rolemesh.v1 import coordinator_pb2

STEPS = 3
PROMPTS = 4
# The run takes a second.
OFTEN = WatchSettings(interval_s=0.1)
GROUP = 2
MEAN_TOLERANCE = 1e-6
"""Rewards are float32, and their mean is taken in another order."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("services")
    with service_processes(folder, ("actor", "reward")) as addresses:
        yield addresses


def recipe_of(model: Path, addresses: dict[str, str], **changes: Any) -> Recipe:
    data = {"type": "reasoning_gym", "task": "chain_sum", "train_size": 16, "held_out_size": 4}
    values: dict[str, Any] = {
        "run": {
            "name": "shown",
            "steps": STEPS,
            "prompts_per_step": PROMPTS,
            "evaluation": {"num_prompts": 0},
            # Every row, so that the mean of what is shown is the mean of the step.
            "samples": PROMPTS * GROUP,
        },
        "algorithm": {
            "type": "grpo",
            "sampling": {"samples_per_prompt": GROUP, "max_new_tokens": 6},
            "mini_batch_rows": 4,
        },
        "actor": {
            "model": {"path": str(model), "compute_dtype": "float32"},
            "optimizer": {"learning_rate": 1e-4},
            "rollout": {"type": "hf", "max_model_len": 256},
            "data": data,
        },
        "reward": {"source": {"type": "arithmetic"}},
        "services": {role: {"address": address} for role, address in addresses.items()},
        "store": {"type": "memory"},
    }
    return Recipe.model_validate({**values, **changes})


async def test_samples_and_device_use_are_those_of_the_run(
    model: Path, addresses: dict[str, str], tmp_path: Path
) -> None:
    store = MemoryStateStore()
    operations = StoreOperations(store)
    run = TrainingRun(
        recipe_of(model, addresses),
        directory=tmp_path,
        addresses=addresses,
        store=store,
        watch=OFTEN,
    )
    await run.execute()
    record = await store.get_run(run.run_id)
    told = await operations.list_samples(run.run_id)
    assert (told.step, list(told.steps)) == (STEPS, list(range(1, STEPS + 1)))
    assert [sample.row for sample in told.samples] == list(range(PROMPTS * GROUP))
    rewards = [sample.reward for sample in told.samples]
    assert math.fsum(rewards) / len(rewards) == pytest.approx(
        record.metrics["reward/mean"], abs=MEAN_TOLERANCE
    )
    lengths = [len(sample.token_ids) for sample in told.samples]
    assert sum(lengths) / len(lengths) == record.metrics["completion_length/mean"]
    for sample in told.samples:
        per_token = (sample.logprobs, sample.loss_mask, sample.advantages)
        assert {len(values) for values in per_token} == {len(sample.token_ids)}
        assert all(value <= 0 for value in sample.logprobs)
        assert sample.prompt
        assert len(sample.prompt.encode()) <= MAX_TEXT_BYTES
        assert sample.answer.lstrip("-").isdigit()
        assert sample.policy_version == record.metrics["policy_version/max"]
    # The rows of a group answer one prompt.
    prompts = [sample.prompt for sample in told.samples]
    assert prompts[0::GROUP] == prompts[1::GROUP]
    assert len(set(prompts)) == PROMPTS
    notes = [
        event.note.text
        async for event in operations.watch_run(run.run_id)
        if event.HasField("note")
    ]
    assert not [note for note in notes if "samples" in note]

    use = await operations.get_device_use(run.run_id)
    assert [(one.service, one.device) for one in use.devices] == [
        ("actor", "cpu"),
        ("reward", "cpu"),
    ]
    assert all(0 <= busy <= 1 for one in use.devices for busy in one.busy)
    assert max(use.devices[0].busy) > 0
    assert set(record.services) == {"actor", "reward"}
    # Samples are not traffic of the step.
    assert record.metrics["coordinator/calls"] < 10


async def test_samples_outlive_the_store_and_some_of_an_evaluation_are_told(
    model: Path, addresses: dict[str, str], tmp_path: Path
) -> None:
    store, recorder = MemoryStateStore(), Recorder()
    recipe = recipe_of(model, addresses)
    evaluation = EvaluationSpec(num_prompts=4)
    recipe = recipe.model_copy(
        update={"run": recipe.run.model_copy(update={"evaluation": evaluation})}
    )
    run = TrainingRun(
        recipe, directory=tmp_path, addresses=addresses, store=store, observer=recorder
    )
    summary = await run.execute()
    kept = read_samples(tmp_path)
    for step in range(1, STEPS + 1):
        told = await StoreOperations(store).list_samples(run.run_id, step)
        rows = [one for one in kept if one.step == step and not one.held_out]
        assert [
            (one.row, one.prompt, one.completion, one.answer, one.reward, one.num_tokens)
            for one in rows
        ] == [
            (s.row, s.prompt, s.completion, s.answer, s.reward, len(s.token_ids))
            for s in told.samples
        ]
    # All held-out prompts are among the samples, so that their mean is the score.
    for score in (summary.held_out_before, summary.held_out_after):
        assert score is not None
        rows = [one for one in kept if one.step == score.step and one.held_out]
        rewards = [one.reward for one in rows if one.reward is not None]
        assert len(rewards) == 4
        assert math.fsum(rewards) / 4 == pytest.approx(score.score, abs=MEAN_TOLERANCE)
    lines = [text for text in recorder.events if text.startswith("held-out sample: ")]
    # The same prompts before and after.
    assert [text.partition(" -> ")[0] for text in lines[:2]] == [
        text.partition(" -> ")[0] for text in lines[2:]
    ]
    assert len(lines) == 4
    assert "(reward " in lines[0]


async def test_a_loop_over_real_services_logs_its_steps_and_samples(
    model: Path, addresses: dict[str, str], tmp_path: Path
) -> None:
    store = MemoryStateStore()
    operations = StoreOperations(store)
    recipe = recipe_of(model, addresses, algorithm={"type": "external"}, run={"name": "driven"})
    run = TrainingRun(recipe, directory=tmp_path, addresses=addresses, store=store)
    server, port = await serve_coordinator(operations)
    task = asyncio.create_task(run.execute())
    async with AsyncClient(f"127.0.0.1:{port}") as client:

        async def is_running() -> bool:
            return bool(store._runs) and (
                (await client.get_run(run.run_id)).state is sdk.RunState.RUNNING
            )

        await until(is_running)
        async with await client.attach(run.run_id) as mesh:
            batch = await mesh["actor"].sample(
                ["1 + 1 =", "1 + 2 ="], samples_per_prompt=GROUP, max_new_tokens=2
            )
            metrics = {"reward/mean": np.float32(0.5), "count": 3}
            for _ in range(2):
                await mesh.log(1, metrics, batch, num_samples=3)
            await mesh.release()
            own = [sdk.Sample(row=0, prompt="1 + 1 =", completion="2", reward=1.0)]
            await mesh.log(2, {"reward/mean": 1.0}, own)
            with pytest.raises(ValueError, match=r"metrics\['text'\] is 'x': give one number"):
                await mesh.log(3, {"text": "x"})  # type: ignore[dict-item]
            with pytest.raises(ValueError, match="num_samples is 65: give 1 to 64"):
                await mesh.log(3, metrics, batch, num_samples=65)
            with pytest.raises(InvalidRequestError, match=r"metrics\['loss'\] is nan"):
                await mesh.log(3, {"loss": math.nan})
            await client.stop_run(run.run_id)
            await task
        table = await client.get_metrics(run.run_id)
        listed = await client.list_samples(run.run_id, 1)
    await server.stop(None)
    async with AsyncMesh(addresses, run_id="lonely") as lonely:
        with pytest.raises(ValueError, match="no coordinator to tell"):
            await lonely.log(1, metrics)
    assert list(table.steps) == [1, 2]
    assert list(table["reward/mean"]) == [0.5, 1.0]
    kept = read_samples(tmp_path)
    # Three of the four rows, spread over them.
    assert [(one.step, one.row) for one in kept] == [(1, 0), (1, 1), (1, 2), (2, 0)]
    assert ["1 + 1 =" in one.prompt for one in kept[:3]] == [True, True, False]
    assert "1 + 2 =" in kept[2].prompt
    assert [one.completion for one in listed.rows] == [one.completion for one in kept[:3]]
    assert all(len(one.logprobs) == len(one.token_ids) > 0 for one in listed.rows)
    assert (kept[3].completion, kept[3].reward, kept[0].reward) == ("2", 1.0, None)


async def test_a_client_that_attaches_later_fences_off_the_one_before(
    model: Path, addresses: dict[str, str], tmp_path: Path
) -> None:
    store = MemoryStateStore()
    operations = StoreOperations(store)
    recipe = recipe_of(model, addresses, algorithm={"type": "external"}, run={"name": "driven"})
    run = TrainingRun(recipe, directory=tmp_path / "1", addresses=addresses, store=store)
    task = asyncio.create_task(run.execute())

    async def is_running() -> bool:
        return bool(store._runs) and (
            (await operations.get_run(run.run_id)).state == coordinator_pb2.RUN_STATE_RUNNING
        )

    async def attached() -> AsyncMesh:
        told = await operations.attach_run(run.run_id)
        return AsyncMesh(
            {service.name: service.address for service in told.services},
            run_id=run.run_id,
            epoch=told.fencing_epoch,
            step=1,
        )

    await until(is_running)
    async with await attached() as first:
        await first["actor"].sample(["1 + 1 ="], max_new_tokens=2)
        async with await attached() as second:
            await second["actor"].sample(["1 + 2 ="], max_new_tokens=2)
            with pytest.raises(PreconditionError) as fenced:
                await first["actor"].sample(["1 + 3 ="], max_new_tokens=2)
            assert fenced.value.reason == "STALE_EPOCH"
            await operations.stop_run(run.run_id)
            summary = await task
            with pytest.raises(PreconditionError):
                await second["actor"].sample(["1 + 4 ="], max_new_tokens=2)
    assert summary.state is RunState.STOPPED
    assert (await store.get_run(run.run_id)).state is RunState.STOPPED
    # The services are free at once for another run.
    other = TrainingRun(
        recipe_of(model, addresses), directory=tmp_path / "2", addresses=addresses, store=store
    )
    assert (await other.execute()).state is RunState.SUCCEEDED
