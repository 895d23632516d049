"""Runs that sample ahead, and algorithms on given data, over gRPC."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support.fake_models import STRIDE, expected_weight
from support.fake_recipes import PPO_ROLES, TRAINED_REWARD, fake_recipe, split_pools
from support.fake_roles import fake_mesh, until
from support.fake_runs import make_run, read_lines

from rolemesh.coordinator.dataflow.errors import RunAbortedError, ServiceLostError
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunState

ROLES = (*PPO_ROLES, "rollout")
AHEAD = ({"type": "one_step_ahead"}, {"type": "async", "max_staleness": 2})
IDS = ("one_step_ahead", "async")


def recipe_with(sampler: dict[str, Any], **run: Any) -> Any:
    return fake_recipe(
        roles=ROLES, sampler=sampler, pools=split_pools(ROLES),
        services={"rollout": {"replicas": 2}}, **run,
    )  # fmt: skip


@pytest.mark.parametrize("sampler", AHEAD, ids=IDS)
async def test_a_run_that_samples_ahead_trains_to_the_end(
    sampler: dict[str, Any], tmp_path: Path
) -> None:
    async with fake_mesh(ROLES, replicas=2) as mesh:
        summary = await make_run(mesh, tmp_path, recipe_with(sampler), MemoryStateStore()).execute()
        assert summary.state is RunState.SUCCEEDED
        assert mesh.roles["actor"].weight == expected_weight(4)
        assert {call.state for call in mesh.calls} == {"done"}
        assert all(fake.released_through == 4 for fake in mesh.roles.values())
    bound = sampler.get("max_staleness", 1)
    records = read_lines(tmp_path / "metrics.jsonl")
    assert all(0 <= record["staleness/max"] <= bound for record in records)
    assert all(record["tokens"] == 6 * 12 for record in records)
    marker = json.loads((tmp_path / "checkpoints/step-00000004/COMMITTED").read_text())
    assert marker["next_prompt"] == 12


@pytest.mark.parametrize("sampler", AHEAD, ids=IDS)
async def test_an_abort_reaches_what_is_sampled_ahead(
    sampler: dict[str, Any], tmp_path: Path
) -> None:
    before = asyncio.all_tasks()
    async with fake_mesh(ROLES, replicas=2) as mesh:
        mesh.roles["actor"].gates["Update"] = asyncio.Event()
        run = make_run(
            mesh, tmp_path, recipe_with(sampler, evaluation={"num_prompts": 0}), MemoryStateStore()
        )
        task = asyncio.create_task(run.execute())
        await until(lambda: "actor.Update" in mesh.running)
        # Step 1 is sampled: what the rollout services are asked for from now on is ahead.
        for service in ("rollout-0", "rollout-1"):
            mesh.roles[service].gates["Generate"] = asyncio.Event()
        run.abort()
        with pytest.raises(RunAbortedError):
            await task
        await until(lambda: all(call.state != "running" for call in mesh.calls))
        assert mesh.roles["actor"].cancelled == ["Update"]
    # The servers are gone too: what is left belongs to the test.
    assert {t for t in asyncio.all_tasks() - before if "step" in t.get_name()} == set()


@pytest.mark.parametrize("sampler", AHEAD, ids=IDS)
async def test_a_service_lost_while_it_samples_ahead_is_named_with_its_call(
    sampler: dict[str, Any], tmp_path: Path
) -> None:
    async with fake_mesh(ROLES, replicas=2) as mesh:

        def delay(service: str, method: str) -> float:
            # The second call, which is ahead, outlasts the test.
            asked = [call for call in mesh.of("rollout.Generate") if call.service == service]
            is_ahead = (service, method) == ("rollout-1", "Generate") and len(asked) > 1
            return 3600.0 if is_ahead else 0.0

        mesh.delay = delay
        recipe = recipe_with(sampler, evaluation={"num_prompts": 0})
        run = make_run(mesh, tmp_path, recipe, MemoryStateStore())
        task = asyncio.create_task(run.execute())
        await until(lambda: delay("rollout-1", "Generate") > 0)
        run.service_lost("rollout-1", "was killed by signal 9")
        with pytest.raises(ServiceLostError) as lost:
            await task
        await until(lambda: all(call.state != "running" for call in mesh.calls))
    assert str(lost.value) == "step 2, rollout-1.generate: was killed by signal 9"


GIVEN: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "sft": ({"type": "sft"}, ("actor",)),
    "dpo": ({"type": "dpo"}, ("actor", "reference")),
    "kto": ({"type": "kto"}, ("actor", "reference")),
    "reward_model": ({"type": "reward_model"}, ("reward",)),
    "dapo": ({"type": "dapo", "sampling": {"samples_per_prompt": 2}}, ("actor", "reward")),
    "remax": ({"type": "remax"}, ("actor", "reward")),
    "safe_rlhf": ({"type": "safe_rlhf", "pretraining_weight": 0.5}, (*PPO_ROLES, "cost")),
}


@pytest.mark.parametrize("name", GIVEN)
async def test_an_algorithm_trains_over_the_wire(name: str, tmp_path: Path) -> None:
    algorithm, roles = GIVEN[name]
    async with fake_mesh(roles) as mesh:
        recipe = fake_recipe(
            roles=roles, algorithm=algorithm, steps=2,
            reward=TRAINED_REWARD if name == "reward_model" else None,
        )  # fmt: skip
        summary = await make_run(mesh, tmp_path, recipe, MemoryStateStore()).execute()
        assert summary.state is RunState.SUCCEEDED
        trained = "reward" if name == "reward_model" else "actor"
        assert mesh.roles[trained].weight == 2 * STRIDE
    assert summary.held_out_after is not None
    is_judged = {"actor", "reward"} <= set(roles)
    assert (summary.held_out_after.score is not None) == is_judged
    assert ("loss" in summary.held_out_after.metrics) != is_judged
    saved = json.loads((tmp_path / "checkpoints/step-00000002/COMMITTED").read_text())["roles"]
    assert set(saved) == {trained} | ({"critic"} & set(roles))
    assert json.loads((tmp_path / "model/weight.json").read_text())["weight"] == 2 * STRIDE
