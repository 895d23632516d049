"""Spaces of self-tuning: what may be declared, and that applying settings changes nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from support.fake_recipes import GRPO, PPO_ROLES, SECTIONS, fake_recipe, split_pools

from rolemesh.coordinator.recipe.loading import read_recipe
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.sections.tuning import candidates, space_of, with_settings

JUDGED = ("actor", "reward")
BLOCK_ROWS = "schedule.sampler.block_rows"
JUDGE = {"source": {"type": "python", "function": "f.py:g", "batch_size": 1}}
CLASSIFIER = {"source": {"type": "classifier", "model": {"path": "/models/none"}}}


def recipe_with(
    space: dict[str, Any], *, tuning: dict[str, Any] | None = None, **changes: Any
) -> Recipe:
    given = {
        "roles": JUDGED,
        "algorithm": GRPO,
        "recovery": {"attempts": 3},
        "tuning": {"space": space, **(tuning or {})},
    }
    return fake_recipe(**(given | changes))


def test_the_own_value_comes_first_and_each_once() -> None:
    one = {"main": {"roles": list(JUDGED)}}
    recipe = recipe_with({"pools": [split_pools(JUDGED), one], BLOCK_ROWS: [4, 2, 4, 0]})
    space = space_of(recipe)
    assert space[BLOCK_ROWS] == [0, 4, 2]
    # A pool that leaves its defaults out is the same pool.
    assert len(space["pools"]) == 2
    every = list(candidates(space))
    assert len(every) == 6
    assert with_settings(recipe, every[0]) == recipe


def test_settings_change_their_keys_and_nothing_else() -> None:
    space = {BLOCK_ROWS: [2], "reward.source.concurrency": [4]}
    recipe = recipe_with(space, reward=JUDGE)
    changed = with_settings(recipe, {BLOCK_ROWS: 2, "reward.source.concurrency": 4})
    assert changed.schedule.sampler.block_rows == 2
    assert changed.reward is not None
    assert changed.reward.source.concurrency == 4  # type: ignore[union-attr]
    # So a service whose section stays keeps its models.
    assert changed.sent_spec("actor") == recipe.sent_spec("actor")
    assert changed.run == recipe.run
    assert with_settings(changed, {BLOCK_ROWS: 0, "reward.source.concurrency": 1}) == recipe


@pytest.mark.parametrize(
    ("space", "changes", "message"),
    [
        ({"actor.optimizer.learning_rate": [1e-5]}, {},
         r"run\.tuning\.space\.actor\.optimizer\.learning_rate: no run can tune it .* keys are "),
        ({"run.seed": [1]}, {}, "no run can tune it"),
        ({BLOCK_ROWS: [3]}, {}, r"has 3, which the recipe refuses: .*give a multiple"),
        ({BLOCK_ROWS: ["many"]}, {}, r'has "many", which the recipe refuses'),
        ({BLOCK_ROWS: []}, {}, "has no values: give some"),
        ({BLOCK_ROWS: [0]}, {}, "has 1 combinations, .* give 2 to 256"),
        ({BLOCK_ROWS: [2 * rows for rows in range(300)]}, {}, "has 300 combinations"),
        ({"reward.source.concurrency": [2]}, {}, "the recipe has no such key"),
        ({"critic.model.micro_batch_tokens": [2]}, {}, "the recipe has no such key"),
        ({"actor.model.micro_batch_tokens": [2]}, {}, "differ by rounding: set run.tuning"),
        ({"actor.rollout.max_num_seqs": [2]}, {}, "differ by rounding"),
        ({BLOCK_ROWS: [2]}, {"roles": PPO_ROLES}, r"computed together \(reference\)"),
        ({BLOCK_ROWS: [2]}, {"reward": CLASSIFIER}, r"the classifier of a reward"),
        ({BLOCK_ROWS: [2]}, {"algorithm": {**GRPO, "off_policy": {"type": "token_truncation"}}},
         r"actor\.compute_logprobs"),
        ({BLOCK_ROWS: [2]}, {"reward": {"source": {**JUDGE["source"], "batch_size": 4}}},
         r"has 2, which is no multiple of the batch_size of reward\.source \(4\)"),
        ({BLOCK_ROWS: [2]}, {"roles": ("actor",), "algorithm": {"type": "sft"}},
         "algorithm 'sft' samples nothing"),
        ({"pools": [{"a": {"roles": ["actor"]}}]}, {}, "must stand in exactly one"),
        ({"pools": [{"a": {"roles": ["actor"], "devices": ["cuda:0"]},
                     "b": {"roles": ["reward"]}}]}, {}, "pools are tuned on CPUs alone"),
        ({"pools": [{"a": {"roles": list(JUDGED), "sleep": "always"}}]}, {}, "on CPUs alone"),
        ({BLOCK_ROWS: [2]}, {"recovery": {"cuts": False}}, r"recovery\.cuts is false"),
        ({BLOCK_ROWS: [2]}, {"roles": (*JUDGED, "rollout"), "sampler": {"type": "async"},
                             "pools": split_pools((*JUDGED, "rollout"))},
         "schedule.sampler.type is 'async'"),
        ({}, {}, "at least 1 item"),
    ],
    ids=str,
)  # fmt: skip
def test_a_space_that_cannot_be_or_would_change_what_is_learnt_is_refused(
    space: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        recipe_with(space, **changes)


def test_rounding_may_be_allowed() -> None:
    space = {BLOCK_ROWS: [2], "critic.model.micro_batch_tokens": [512]}
    recipe = recipe_with(space, roles=PPO_ROLES, tuning={"rounding": True})
    changed = with_settings(recipe, {"critic.model.micro_batch_tokens": 512})
    assert changed.critic is not None
    assert changed.critic.model.micro_batch_tokens == 512


def test_a_client_that_makes_the_steps_tunes_by_itself() -> None:
    text = f"""
    run: {{name: theirs, tuning: {{space: {{{BLOCK_ROWS}: [2]}}}}}}
    algorithm: {{type: external}}
    actor: {SECTIONS["actor"]}
    """
    with pytest.raises(ValueError, match="a client makes the steps of algorithm 'external'"):
        read_recipe(text, "recipe")
