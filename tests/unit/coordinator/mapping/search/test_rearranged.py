"""Tests of a recorded step that is rearranged, beside steps that can be counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.fake_recipes import GRPO, PPO_ROLES, fake_recipe, split_pools
from support.mapping_jobs import LLAMAS
from support.mesh_runs import tiny_recipe
from support.simulated import ROLES as SIMULATED_ROLES

from rolemesh.coordinator.dataflow.futures import Node, NodeKind, NodeState
from rolemesh.coordinator.mapping.machines.coefficients import Coefficients
from rolemesh.coordinator.mapping.machines.devices import device_of
from rolemesh.coordinator.mapping.search.rearranged import RecordedStep
from rolemesh.coordinator.mapping.search.resized import Resized
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.sections.tuning import with_settings

ROWS = 8
JUDGE = {"type": "python", "function": "f.py:g", "batch_size": 1}
BLOCK_ROWS = "schedule.sampler.block_rows"


def node(
    node_id: int,
    service: str,
    method: str,
    seconds: float,
    inputs: tuple[int, ...] = (),
    *,
    started_at: float = 0.0,
    rows: int = ROWS,
    **fields: Any,
) -> Node:
    return Node(
        node_id=node_id,
        step=1,
        kind=NodeKind.INFER,
        service=service,
        method=method,
        pool="main",
        sequence=0,
        inputs=inputs,
        queued_at=0.0,
        num_rows=rows,
        started_at=started_at,
        ended_at=started_at + seconds,
        state=NodeState.DONE,
        **fields,
    )


def judged(concurrency: int = 1, **settings: Any) -> Recipe:
    recipe = fake_recipe(
        roles=("actor", "reward"),
        algorithm=GRPO,
        prompts_per_step=4,
        reward={"source": {**JUDGE, "concurrency": concurrency}},
    )
    return with_settings(recipe, settings) if settings else recipe


NODES = [
    node(0, "actor", "generate", 4.0),
    node(1, "reward", "compute_reward", 4.0, (0,)),
    node(2, "actor", "compute_advantages", 0.5, (1,)),
    node(3, "actor", "update", 2.0, (2,)),
]
SPLIT = split_pools(("actor", "reward"))


def test_a_step_that_is_left_as_it_was_takes_what_it_took() -> None:
    assert RecordedStep(judged(), NODES).seconds(judged()) == 10.5


def test_pools_decide_what_can_run_at_once() -> None:
    # Reference and reward may judge at once; values, too, where the critic has a pool of its own.
    nodes = [
        node(0, "actor", "generate", 4.0),
        node(1, "critic", "compute_values", 1.0, (0,)),
        node(2, "reference", "compute_logprobs", 2.0, (0,)),
        node(3, "reward", "compute_reward", 3.0, (0,)),
        node(4, "actor", "compute_advantages", 0.5, (1, 2, 3)),
        node(5, "critic", "update", 5.0, (4,)),
        node(6, "actor", "update", 2.0, (4,)),
    ]
    recipe = fake_recipe()
    step = RecordedStep(recipe, nodes)
    assert step.seconds(recipe) == 17.5
    assert step.seconds(with_settings(recipe, {"pools": split_pools(PPO_ROLES)})) == 12.5
    halves = {"a": {"roles": ["actor", "reward"]}, "b": {"roles": ["critic", "reference"]}}
    assert step.seconds(with_settings(recipe, {"pools": halves})) == 4 + 3 + 0.5 + 5


def test_blocks_hide_judging_behind_sampling_where_pools_are_apart() -> None:
    recipe = judged()
    recipe = with_settings(recipe, {"actor.rollout.max_num_seqs": 2})
    step = RecordedStep(recipe, NODES)
    blocks = {BLOCK_ROWS: 2}
    # In one pool the judge waits for the sampler; apart, it has judged all blocks but the last.
    assert step.seconds(with_settings(recipe, blocks)) == 10.5
    assert step.seconds(with_settings(recipe, {"pools": SPLIT})) == 10.5
    assert step.seconds(with_settings(recipe, {**blocks, "pools": SPLIT})) == 4 + 1 + 2.5
    # Blocks of four come after half of the time, and take twice as long to judge.
    apart = with_settings(recipe, {BLOCK_ROWS: 4, "pools": SPLIT})
    assert step.seconds(apart) == 4 + 2 + 2.5


def test_rows_that_are_decoded_together_come_together() -> None:
    recipe = with_settings(judged(), {BLOCK_ROWS: 2, "pools": SPLIT})
    assert RecordedStep(judged(), NODES).seconds(recipe) == 10.5


def test_blocks_that_were_recorded_say_when_rows_come() -> None:
    recorded = with_settings(judged(), {BLOCK_ROWS: 4, "pools": SPLIT})
    nodes = [
        node(0, "actor", "generate", 4.0),
        node(1, "reward", "compute_reward", 2.0, (0,), rows=4, block=0, ready_at=1.0),
        node(2, "reward", "compute_reward", 2.0, (0,), rows=4, block=1, ready_at=4.0),
        node(3, "actor", "compute_advantages", 0.5, (1, 2)),
        node(4, "actor", "update", 2.0, (3,)),
    ]
    step = RecordedStep(recorded, nodes)
    assert step.seconds(recorded) == 4 + 2 + 2.5
    whole = with_settings(judged(), {"pools": SPLIT})
    assert step.seconds(whole) == 4 + 4 + 2.5
    # The first four rows are there after 1 s, the others on a line to 4 s: those of the second
    # block of two after 1 s, of the third after 2.5 s.
    finer = with_settings(judged(), {BLOCK_ROWS: 2, "pools": SPLIT})
    assert step.seconds(finer) == 4 + 1 + 2.5


@pytest.mark.parametrize(
    ("concurrency", "judging"), [(1, 4.0), (2, 2.0), (3, 1.5), (8, 0.5), (9, 0.5)]
)
def test_requests_in_flight_divide_the_rounds_of_a_judge(concurrency: int, judging: float) -> None:
    step = RecordedStep(judged(), NODES)
    assert step.seconds(judged(concurrency)) == 6.5 + judging


def test_blocks_have_rounds_of_their_own() -> None:
    # Two blocks of four rows, three in flight: four rounds in place of three.
    step = RecordedStep(judged(3), NODES)
    assert step.seconds(with_settings(judged(3), {BLOCK_ROWS: 4})) == 6.5 + 4.0 * 4 / 3


def test_a_sampler_that_is_ahead_counts_where_it_is_the_slower_one() -> None:
    roles = ("actor", "reward", "rollout")
    recipe = fake_recipe(
        roles=roles,
        algorithm=GRPO,
        sampler={"type": "one_step_ahead"},
        pools={"main": {"roles": ["actor", "reward"]}, "rollout": {"roles": ["rollout"]}},
    )
    nodes = [node(0, "rollout", "generate", 4.0), *NODES[1:]]
    assert RecordedStep(recipe, nodes).seconds(recipe) == 6.5
    nodes[0] = node(0, "rollout", "generate", 9.0)
    assert RecordedStep(recipe, nodes).seconds(recipe) == 9.0


def test_services_of_one_role_work_side_by_side() -> None:
    roles = ("actor", "reward", "rollout")
    recipe = fake_recipe(
        roles=roles,
        algorithm=GRPO,
        pools={"main": {"roles": ["actor", "reward"]}, "rollout": {"roles": ["rollout"]}},
        services={"rollout": {"replicas": 2}},
    )
    nodes = [
        node(0, "rollout-0", "generate", 4.0, rows=4),
        node(1, "rollout-1", "generate", 3.0, rows=4),
        node(2, "reward", "compute_reward", 1.0, (0,), rows=4, block=0),
        node(3, "reward", "compute_reward", 1.0, (1,), rows=4, block=1),
        node(4, "actor", "compute_advantages", 0.5, (2, 3)),
    ]
    # The second half is judged while the first one is still sampled.
    assert RecordedStep(recipe, nodes).seconds(recipe) == 4 + 1 + 0.5


def test_factors_lengthen_the_calls_of_their_role() -> None:
    step = RecordedStep(judged(), NODES)
    factor = lambda role, method: 2.0 if (role, method) == ("actor", "update") else 1.0  # noqa: E731
    assert step.seconds(judged(), factor) == 12.5


def test_smaller_passes_take_longer_for_the_models_that_make_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMAS["tiny"]))
    recipe = Recipe.model_validate(tiny_recipe(tmp_path))
    nodes = [
        node(0, "actor", "generate", 4.0),
        node(1, "critic", "compute_values", 1.0, (0,)),
        node(2, "actor", "update", 2.0, (1,)),
        node(3, "critic", "update", 2.0, (1,)),
    ]
    resized = Resized(recipe, nodes, device_of("cpu"), Coefficients(pass_s=0.1))
    smaller = with_settings(recipe, {"critic.model.micro_batch_tokens": 300})
    factor = resized.factor(smaller)
    # Each pass takes some time beside its products.
    assert factor("critic", "update") > 1
    assert factor("critic", "compute_values") > 1
    assert factor("actor", "update") == factor("actor", "generate") == 1.0


def test_nothing_is_said_of_sizes_of_models_that_cannot_be_read() -> None:
    recipe = fake_recipe(roles=SIMULATED_ROLES)
    resized = Resized(recipe, NODES, device_of("cpu"), Coefficients())
    assert resized.factor(recipe)("actor", "update") == 1.0
