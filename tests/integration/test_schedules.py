"""Schedules: which weights sample which tokens, whatever the timing, and how a run ends ahead.

The runs are made within one process on a clock that jumps, so that hundreds of timings can be
tried, and a run that cannot go on is an error at once.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_in_process import InProcessRun, made, run_jumping
from support.fake_models import expected_weight
from support.fake_recipes import GRPO, PPO, PPO_ROLES, fake_recipe, split_pools
from support.slow_cases import mostly_slow

from rolemesh.coordinator.dataflow.calls.role_calls import PromptBatch
from rolemesh.coordinator.dataflow.errors import NodeFailedError, RunError
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.rpc.errors import PreconditionError

ROLES = (*PPO_ROLES, "rollout")
STEPS = 5
UPDATES_A_STEP = 2  # 6 rows in mini-batches of 4: the version grows by 2 a step
EXAMPLES = 15  # a run takes about 50 ms

Delay = Callable[[str, str], float]


def recipe_with(sampler: dict[str, Any], *, replicas: int = 1, **run: Any) -> Recipe:
    run = {"steps": STEPS, "evaluation": {"num_prompts": 0}, **run}
    return fake_recipe(
        roles=ROLES,
        sampler=sampler,
        pools=split_pools(ROLES),
        services={"rollout": {"replicas": replicas}},
        **run,
    )


def random_delays(seed: int) -> Delay:
    """Calls take between nothing and a hundred times as long as others, without any order."""
    draw = random.Random(seed)
    return lambda service, method: draw.choice((0.0, 0.01, 0.1, 1.0)) * draw.random()


@functools.cache
def undelayed(sampler_type: str, replicas: int, **sampler: Any) -> InProcessRun:
    """The run whose calls take no time, which many others are compared with."""
    return made(recipe_with({"type": sampler_type, **sampler}, replicas=replicas))


def trained_on(run: InProcessRun, column: str) -> list[list[Any]]:
    """A column of what each step's update of the actor read, step by step."""
    updates = run.mesh.of("actor.Update")
    assert [update.step for update in updates] == list(range(1, run.loop.step + 1))
    return [run.mesh.values(update.request.experience, column) for update in updates]  # type: ignore[attr-defined]


def staleness(run: InProcessRun) -> list[set[int]]:
    """By how many steps the weights of each token were behind, for each step."""
    return [
        {
            step - version // UPDATES_A_STEP
            for versions in trained
            for version in versions
        }
        for step, trained in enumerate(trained_on(run, "policy_versions"))
    ]  # fmt: skip


def keys(run: InProcessRun) -> list[tuple[Any, ...]]:
    """What training was asked, without the transport of weights: where, key, rows, prompts."""
    asked = []
    for call in run.mesh.calls:
        request: Any = call.request
        if call.method in ("PublishWeights", "UpdateWeights") or call.key[3].startswith("eval"):
            continue
        rows = request.experience.num_rows if hasattr(request, "experience") else 0
        prompts = ()
        if call.method == "Generate":
            prompts = (request.prompts.split, request.prompts.start, request.prompts.count)
        asked.append((call.name, *call.key[2:], rows, prompts))
    return sorted(asked)


def test_a_synchronous_step_samples_with_the_weights_of_the_step_before() -> None:
    run = made(recipe_with({"type": "sync"}, replicas=2))
    assert staleness(run) == [{0}] * STEPS
    assert run.mesh.roles["actor"].weight == expected_weight(STEPS)
    # Every version is published once, and taken once by each of the two services.
    assert [call.step for call in run.mesh.of("actor.PublishWeights")] == list(range(1, STEPS + 1))
    assert len(run.mesh.of("rollout.UpdateWeights")) == 2 * STEPS


def test_prompts_are_dealt_out_evenly_over_the_services() -> None:
    run = made(recipe_with({"type": "sync"}, replicas=4, prompts_per_step=6, steps=1))
    requests: list[Any] = [call.request for call in run.mesh.of("rollout.Generate")]
    assert sorted((r.prompts.start, r.prompts.count) for r in requests) == [
        (0, 2), (2, 1), (3, 2), (5, 1),
    ]  # fmt: skip
    assert {call.service for call in run.mesh.of("rollout.Generate")} == {
        f"rollout-{index}" for index in range(4)
    }


def test_calls_of_a_batch_size_go_round_the_services() -> None:
    run = made(recipe_with({"type": "sync", "batch_size": 2}, replicas=2, prompts_per_step=5))
    first = [call for call in run.mesh.of("rollout.Generate") if call.step == 1]
    requests: list[Any] = [call.request for call in first]
    dealt = {(c.service, r.prompts.start, r.prompts.count) for c, r in zip(first, requests)}  # noqa: B905
    assert dealt == {("rollout-0", 0, 2), ("rollout-1", 2, 2), ("rollout-0", 4, 1)}


@given(
    seed=st.integers(0, 2**32),
    replicas=st.integers(1, 2),
    block_rows=st.sampled_from([0, 2]),
    batch_size=st.sampled_from([None, 1]),
    evaluate=st.booleans(),
)
@settings(max_examples=EXAMPLES, deadline=None)
def test_one_step_ahead_is_one_step_behind_whatever_the_timing(
    seed: int, replicas: int, block_rows: int, batch_size: int | None, evaluate: bool
) -> None:
    sampler = {"type": "one_step_ahead", "block_rows": block_rows, "batch_size": batch_size}
    evaluation = {"num_prompts": 4, "every_steps": 1} if evaluate else {"num_prompts": 0}
    recipe = recipe_with(sampler, replicas=replicas, evaluation=evaluation)
    run = made(recipe, delay=random_delays(seed), decode_turns=2)
    # The first step has nothing before it, every other one samples while one trains.
    assert staleness(run) == [{0}, *[{1}] * (STEPS - 1)]
    assert [max(record["staleness/max"], 0) for record in run.written.records] == [0, 1, 1, 1, 1]
    plain = undelayed("one_step_ahead", replicas, block_rows=block_rows, batch_size=batch_size)
    assert keys(run) == keys(plain)
    assert run.mesh.roles["actor"].weight == plain.mesh.roles["actor"].weight
    assert trained_on(run, "tokens") == trained_on(plain, "tokens")


def test_one_step_ahead_samples_while_the_step_trains() -> None:
    run = made(recipe_with({"type": "one_step_ahead"}), delay=lambda service, method: 1.0)
    log = run.mesh.log
    second = [place for place, event in enumerate(log) if event == "rollout.Generate begins"][1]
    assert second < log.index("actor.Update begins")


@given(
    seed=st.integers(0, 2**32),
    max_staleness=st.integers(1, 3),
    replicas=st.integers(1, 2),
    partial=st.booleans(),
    block_rows=st.sampled_from([0, 2]),
    evaluate=st.booleans(),
)
@settings(max_examples=2 * EXAMPLES, deadline=None)
def test_staleness_keeps_its_bound_whatever_the_timing(
    seed: int, max_staleness: int, replicas: int, partial: bool, block_rows: int, evaluate: bool
) -> None:
    sampler = {
        "type": "async",
        "max_staleness": max_staleness,
        "partial_rollouts": partial,
        "block_rows": block_rows,
    }
    evaluation = {"num_prompts": 4, "every_steps": 2} if evaluate else {"num_prompts": 0}
    recipe = recipe_with(sampler, replicas=replicas, evaluation=evaluation)
    # A deadlock would be a DeadlockError of the loop.
    run = made(recipe, delay=random_delays(seed), decode_turns=4)
    behind = staleness(run)
    assert all(min(steps) >= 0 and max(steps) <= max_staleness for steps in behind)
    # What the coordinator records of itself says the same.
    assert [record["staleness/max"] for record in run.written.records] == [
        max(steps) for steps in behind
    ]
    if not partial and block_rows == 0:
        # Weights wait until what runs is finished: a row was sampled by one version.
        assert all(
            len(set(row)) == 1 for step in trained_on(run, "policy_versions") for row in step
        )
    sync = undelayed("sync", replicas)
    assert trained_on(run, "prompt_ids") == trained_on(sync, "prompt_ids")
    assert trained_on(run, "sample_indexes") == trained_on(sync, "sample_indexes")


def test_partial_rollouts_go_on_under_new_weights() -> None:
    sampler = {"type": "async", "max_staleness": 2, "partial_rollouts": True}
    slow = {"Generate": 1.0, "Update": 2.5}
    run = made(
        recipe_with(sampler), delay=lambda service, method: slow.get(method, 0.0), decode_turns=4
    )
    rows = [set(row) for step in trained_on(run, "policy_versions") for row in step]
    assert any(len(versions) > 1 for versions in rows)


def test_the_bound_is_used_and_not_only_kept() -> None:
    # Sampling costs nothing beside training: so steps are sampled as early as the bound allows.
    sampler = {"type": "async", "max_staleness": 3}
    run = made(
        recipe_with(sampler), delay=lambda service, method: 1.0 if method == "Update" else 0.0
    )
    assert staleness(run) == [{0}, {1}, {2}, {3}, {3}]


AHEAD = ({"type": "one_step_ahead"}, {"type": "async", "max_staleness": 2})
IDS = ("one_step_ahead", "async")


def seeds(fast: int, number: int) -> list[Any]:
    """Timings that differ in nothing that has a name: a few are tried each time."""
    return mostly_slow(range(fast), [(seed,) for seed in range(number)])


@pytest.mark.parametrize("sampler", AHEAD, ids=IDS)
@pytest.mark.parametrize("seed", seeds(3, 8))
def test_a_stop_while_steps_are_ahead_leaves_nothing_running(
    sampler: dict[str, Any], seed: int, tmp_path: Path
) -> None:
    async def work() -> InProcessRun:
        recipe = recipe_with(sampler, steps=50, replicas=2)
        run = InProcessRun(recipe, tmp_path, delay=random_delays(seed), decode_turns=3)

        def stop() -> None:
            run.wishes.stop()

        asyncio.get_running_loop().call_later(2.0, stop)
        await run.execute()
        assert run.left_running() == []
        return run

    run = run_jumping(work())
    assert 0 < run.loop.step < 50
    assert {call.state for call in run.mesh.calls} <= {"done", "cancelled"}
    # Only what was sampled for steps that are not made was given up.
    assert all(call.step > run.loop.step for call in run.mesh.calls if call.state == "cancelled")
    # The next run begins with the first prompt that no step has trained on.
    marker = next(tmp_path.glob("checkpoints/*/COMMITTED")).read_text()
    assert f'"next_prompt": {3 * run.loop.step}' in marker
    assert (tmp_path / "model/weight.json").is_file()


@pytest.mark.parametrize("sampler", AHEAD, ids=IDS)
@pytest.mark.parametrize(
    ("service", "method"),
    [
        ("reward", "ComputeReward"),
        ("actor", "Update"),
        ("actor", "PublishWeights"),
        ("rollout-0", "Generate"),
        ("rollout-1", "Generate"),
        ("rollout-0", "UpdateWeights"),
        ("rollout-1", "UpdateWeights"),
    ],
)
@pytest.mark.parametrize("seed", seeds(1, 4))
def test_a_failure_while_steps_are_ahead_is_named_and_leaves_nothing_running(
    sampler: dict[str, Any], service: str, method: str, seed: int, tmp_path: Path
) -> None:
    failure = PreconditionError("out of order", reason="BROKEN")

    async def work() -> BaseException:
        recipe = recipe_with(sampler, steps=50, replicas=2)
        run = InProcessRun(recipe, tmp_path, delay=random_delays(seed), decode_turns=3)

        def fail() -> None:
            run.mesh.roles[service].failures[method] = failure

        asyncio.get_running_loop().call_later(2.0, fail)
        with pytest.raises(RunError) as failed:
            await run.execute()
        assert run.left_running() == []
        assert {call.state for call in run.mesh.calls} <= {"done", "failed", "cancelled"}
        return failed.value

    error = run_jumping(work())
    assert isinstance(error, NodeFailedError), error
    assert (error.role, error.rank, error.reason) == (service.partition("-")[0], 0, "BROKEN")
    assert "out of order" in str(error)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("algorithm", [PPO, GRPO], ids=["ppo", "grpo"])
@pytest.mark.parametrize(
    "sampler",
    [{"type": "sync"}, {"type": "sync", "block_rows": 2}, *AHEAD],
    ids=["sync", "blocks", *IDS],
)
def test_evaluation_leaves_training_alone(
    algorithm: dict[str, Any], sampler: dict[str, Any]
) -> None:
    def run_with(evaluation: dict[str, Any]) -> InProcessRun:
        return made(
            fake_recipe(
                roles=ROLES,
                algorithm=algorithm,
                sampler=sampler,
                pools=split_pools(ROLES),
                evaluation=evaluation,
            )
        )

    plain = run_with({"num_prompts": 0})
    evaluated = run_with(
        {"num_prompts": 5, "every_steps": 1, "samples_per_prompt": 4, "pass_at": [1, 4]}
    )
    assert keys(evaluated) == keys(plain)
    assert trained_on(evaluated, "tokens") == trained_on(plain, "tokens")
    assert evaluated.mesh.roles["actor"].weight == plain.mesh.roles["actor"].weight
    asked: list[Any] = [
        call.request
        for call in evaluated.mesh.calls
        if call.key[3] == "evaluate.reward.compute_reward"
    ]
    assert len(asked) == 1 + 4
    assert all((list(r.pass_at), r.experience.num_rows) == ([1, 4], 20) for r in asked)
    assert evaluated.written.records[-1]["held_out/pass/4"] == 0.5


def test_an_algorithm_that_samples_nothing_cannot_be_begun_ahead() -> None:
    with pytest.raises(ValueError, match="'one_step_ahead', which algorithm 'sft' cannot be run"):
        fake_recipe(
            roles=("actor", "rollout"),
            algorithm={"type": "sft"},
            sampler={"type": "one_step_ahead"},
            pools=split_pools(("actor", "rollout")),
        )


def test_held_out_prompts_have_no_more_behind_them() -> None:
    with pytest.raises(ValueError, match="no further prompts beside 0 to 4"):
        PromptBatch(0, 4, is_held_out=True).more(2)
