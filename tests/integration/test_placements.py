"""Tests of placements and schedules of a recipe: what comes out, and what may differ."""

from __future__ import annotations

import functools
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.lasting_services import LastingServices, MadeRun, lasting_services
from support.mesh_runs import tiny_model
from support.rollout_services import shards_of
from support.tiny_models import write_tiny_classifier

from rolemesh.coordinator.algorithms import registry
from rolemesh.coordinator.dataflow.roles import ExperienceFuture, PromptBatch
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.engine.experience import Experience
from rolemesh.services.actor.servicers import ActorRole
from rolemesh.services.critic.servicers import CriticRole
from rolemesh.services.reference.servicers import ReferenceRole
from rolemesh.services.reward.servicers import RewardRole
from rolemesh.services.rollout.servicers import RolloutRole
from rolemesh.v1 import experience_pb2

STEPS = 2
UPDATES_PER_STEP = 2
SYNC = {"type": "sync", "block_rows": 4}
"""Two blocks of the eight trajectories of a step."""

ONE_POOL = ("actor", "critic", "reference", "reward")
PLACEMENTS: dict[str, dict[str, Any]] = {
    "colocated": {"one": {"roles": ONE_POOL}},
    "taking turns on the device": {"one": {"roles": ONE_POOL, "sleep": "always"}},
    "split": {
        "policy": {"roles": ["actor", "reference"]},
        "values": {"roles": ["critic", "reward"]},
    },
    "stand-alone": {role: {"roles": [role]} for role in ONE_POOL},
    "a rollout service": {role: {"roles": [role]} for role in (*ONE_POOL, "rollout")},
}


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[LastingServices]:
    write_tiny_classifier(tmp_path / "judge", seed=4)
    roles = (ActorRole(), CriticRole(), ReferenceRole(), RewardRole(), RolloutRole())
    async with lasting_services(roles, tiny_model(tmp_path / "tiny"), tmp_path) as running:
        yield running


def recipe_of(services: LastingServices, pools: dict[str, Any], **changes: Any) -> Recipe:
    """PPO with a judge whose rewards differ; each step makes two optimizer steps."""
    judge = {"path": str(services.folder / "judge"), "compute_dtype": "float32"}
    changes = {
        "run__steps": STEPS,
        "run__evaluation__num_prompts": 0,
        "algorithm__sampling__max_new_tokens": 12,
        "actor__optimizer__learning_rate": 1e-3,
        "reward__source": {"type": "classifier", "model": judge},
        "schedule__sampler": SYNC,
        "pools": pools,
        **changes,
    }
    return services.recipe(**changes)


def differing(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {
        name: (one.get(name), other.get(name))
        for name in one.keys() | other.keys()
        if one.get(name) != other.get(name)
    }


def assert_same(one: MadeRun, other: MadeRun) -> None:
    """Bit for bit: metrics of each step, checkpoints of both models, the exported model."""
    for ours, theirs in zip(one.numbers, other.numbers, strict=True):
        assert differing(ours, theirs) == {}
    assert one.weights == other.weights


async def test_placements_of_a_synchronous_run_give_the_same_weights_and_metrics(
    services: LastingServices,
) -> None:
    runs = {}
    for name, pools in PLACEMENTS.items():
        runs[name] = await services.train(recipe_of(services, pools))
    for name, run in runs.items():
        pools = {node["pool"] for node in run.graphs[-1]}
        assert pools == set(PLACEMENTS[name]), name
        assert_same(runs["colocated"], run)
    # Weights did change, and rewards were not all one number.
    assert all(step["reward/max"] > step["reward/min"] for step in runs["split"].numbers)
    assert runs["split"].records[-1]["sampler_logprob_diff_mean"] < 1e-5


@pytest.mark.slow
async def test_trajectories_that_go_on_together_give_the_same_run_twice(
    services: LastingServices,
) -> None:
    recipe = recipe_of(
        services, PLACEMENTS["split"], schedule__sampler={"type": "sync", "block_rows": 0}
    )
    first, second = [await services.train(recipe) for _ in range(2)]
    assert all(node["block"] is None for node in first.graphs[-1])
    assert_same(first, second)


@pytest.mark.slow
async def test_evaluation_leaves_training_as_it_is(services: LastingServices) -> None:
    pools = PLACEMENTS["a rollout service"]
    quiet = await services.train(recipe_of(services, pools))
    examined = await services.train(
        recipe_of(
            services,
            pools,
            run__evaluation={"num_prompts": 4, "every_steps": 1, "samples_per_prompt": 2},
        )
    )
    assert quiet.weights == examined.weights
    for ours, theirs in zip(quiet.numbers, examined.numbers, strict=True):
        assert "held_out/score" in theirs
        trained = {name: v for name, v in theirs.items() if not name.startswith("held_out/")}
        assert differing(ours, trained) == {}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["sync", "one_step_ahead"])
async def test_weights_that_go_by_exchanges_make_the_same_run(
    services: LastingServices, schedule: str
) -> None:
    """Over shared memory here, which takes the place of NCCL where there is no GPU."""
    runs = [
        await services.train(
            recipe_of(
                services,
                PLACEMENTS["a rollout service"],
                schedule__sampler={"type": schedule, "block_rows": 4, "weights": weights},
            )
        )
        for weights in ("grpc", "nccl", "nccl")
    ]
    for run in runs[1:]:
        assert_same(runs[0], run)
        taken = sum(
            node["num_bytes"]
            for graph in run.graphs
            for node in graph
            if node["method"] == "update_weights"
        )
        assert taken == sum(step.get("weights_sent_bytes", 0) for step in run.records) > 0
    assert all("weights_sent_bytes" not in step for step in runs[0].records)


@pytest.mark.slow
async def test_one_step_ahead_is_the_same_twice_and_one_step_old(
    services: LastingServices,
) -> None:
    sampler = {"type": "one_step_ahead", "block_rows": 4}
    recipe = recipe_of(
        services, PLACEMENTS["a rollout service"], schedule__sampler=sampler, run__steps=4
    )
    first, second = [await services.train(recipe) for _ in range(2)]
    assert_same(first, second)
    for number, step in enumerate(first.numbers, start=1):
        sampled_with = UPDATES_PER_STEP * max(0, number - 2)
        assert step["policy_version/min"] == step["policy_version/max"] == sampled_with


async def test_weights_come_inside_completions_and_never_too_late(
    services: LastingServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_rollouts(monkeypatch)
    max_staleness = 2
    recipe = recipe_of(
        services,
        PLACEMENTS["a rollout service"],
        run__steps=6,
        schedule__sampler={
            "type": "async",
            "max_staleness": max_staleness,
            "partial_rollouts": True,
            "block_rows": 4,
        },
        algorithm__sampling__max_new_tokens=100,
        algorithm__off_policy={"type": "token_truncation", "cap": 2.0},
        actor__optimizer__learning_rate=1e-4,
    )
    run = await services.train(recipe)
    assert [step["step"] for step in run.records] == [1, 2, 3, 4, 5, 6]
    for record in run.records:
        assert all(math.isfinite(value) for value in record.values())
    assert sorted(seen) == [1, 2, 3, 4, 5, 6]
    num_changes = 0
    for step, rows in seen.items():
        versions, mask = rows["policy_versions"], rows["loss_mask"]
        assert versions.values.numel() == mask.values.numel()
        assert UPDATES_PER_STEP * (step - 1 - max_staleness) <= versions.values.min()
        assert versions.values.max() <= UPDATES_PER_STEP * (step - 1)
        for of_row in versions.rows():
            # New weights come, old ones never come back.
            assert bool((of_row.diff() >= 0).all())
            num_changes += int((of_row.diff() > 0).sum())
    assert num_changes > 0
    # The loss weighs tokens by the weights that a step begins with: these were computed.
    assert all(
        any(node["method"] == "compute_logprobs" and node["role"] == "actor" for node in nodes)
        for nodes in run.graphs
    )


def watch_rollouts(monkeypatch: pytest.MonkeyPatch) -> dict[int, Experience]:
    """Rows that each step of PPO trained on, fetched before the step ends."""
    seen: dict[int, Experience] = {}
    ppo = registry.ALGORITHMS["ppo"]

    @functools.wraps(ppo)
    def watched(prompts: PromptBatch, actor: Any, **others: Any) -> None:
        context, generate = actor.context, actor.generate

        def generate_and_watch(wanted: PromptBatch) -> ExperienceFuture:
            rollouts: ExperienceFuture = generate(wanted)

            async def fetch() -> experience_pb2.ExperienceRef:
                reference = await rollouts.result()
                seen[context.step] = await shards_of(reference)
                return reference

            context.dataflow.defer(fetch, ())
            return rollouts

        actor.generate = generate_and_watch
        ppo(prompts, actor=actor, **others)

    monkeypatch.setitem(registry.ALGORITHMS, "ppo", watched)
    return seen
