"""Lengths of learning-rate schedules in recipes, and what recipes of them are refused."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_recipes import GRPO, PPO, TRAINED_REWARD, fake_recipe

from rolemesh.coordinator.recipe.algorithm.rates import planned_updates, schedule_length
from rolemesh.coordinator.recipe.schema import Recipe

COSINE = {"schedule": {"type": "cosine"}}


def recipe(optimizer: dict[str, Any], **changes: Any) -> Recipe:
    """Four steps of 3 prompts with 2 completions each, in mini-batches of 4 rows."""
    values = fake_recipe().model_dump(mode="json")
    values["actor"]["optimizer"] = optimizer
    for name, section in changes.items():
        values[name] = section if not isinstance(values[name], dict) else values[name] | section
    return Recipe.model_validate(values)


def test_a_schedule_lasts_for_the_run_unless_it_says_how_long() -> None:
    assert schedule_length(recipe(COSINE).sent_section("actor")) == 4 * 2
    assert schedule_length(recipe(COSINE).sent_section("critic")) is None
    longer = recipe(COSINE, run={"steps": 10})
    assert schedule_length(longer.sent_section("actor")) == 10 * 2
    given = recipe({"schedule": {"type": "linear", "optimizer_steps": 5}}, run={"steps": 10})
    assert schedule_length(given.sent_section("actor")) == 5
    # The recipe itself stays as it was given, so that a longer run is another schedule.
    assert recipe(COSINE).actor.optimizer.schedule.optimizer_steps is None  # type: ignore[union-attr]


def test_what_has_no_optimizer_is_sent_as_it_is() -> None:
    plain = recipe(COSINE)
    assert plain.sent_section("reference") == plain.reference
    assert plain.sent_section("reward") == plain.reward


@pytest.mark.parametrize(
    ("algorithm", "prompts", "updates"),
    [
        (PPO, 3, 2),
        ({**PPO, "epochs": 3}, 3, 6),
        (GRPO, 2, 1),
        ({"type": "sft", "mini_batch_rows": 4}, 9, 3),
        ({"type": "dpo", "mini_batch_rows": 4}, 9, 5),
        ({"type": "kto", "mini_batch_rows": 4}, 8, 4),
    ],
)
def test_updates_of_a_step_follow_from_its_rows(
    algorithm: dict[str, Any], prompts: int, updates: int
) -> None:
    assert planned_updates(fake_recipe(algorithm=algorithm).algorithm, prompts) == updates


def test_a_reward_model_has_a_schedule_too() -> None:
    values = {
        "run": {"name": "scores", "steps": 5, "prompts_per_step": 6},
        "algorithm": {"type": "reward_model", "mini_batch_rows": 4},
        "reward": {**TRAINED_REWARD, "optimizer": COSINE},
    }
    assert schedule_length(Recipe.model_validate(values).sent_section("reward")) == 5 * 3


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (
            {"learning_rate": 1e-6, "schedule": {"type": "cosine", "min_learning_rate": 1e-5}},
            r"schedule\.min_learning_rate is 1e-05, but learning_rate, from which it falls, is "
            r"1e-06: give less",
        ),
        (
            {"warmup_steps": 5, "schedule": {"type": "linear", "optimizer_steps": 5}},
            r"schedule\.optimizer_steps is 5 and warmup_steps is 5.*give fewer",
        ),
        (
            {"warmup_steps": 8, **COSINE},
            r"actor\.optimizer\.warmup_steps is 8, but the run makes 8 optimizer steps "
            r"\(run\.steps is 4, with 2 each\).*give fewer warmup_steps",
        ),
        (
            {"schedule": {"type": "constant", "min_learning_rate": 1e-7}},
            r"min_learning_rate",
        ),
    ],
)
def test_schedules_that_cannot_be_are_refused(optimizer: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        recipe(optimizer)


@pytest.mark.parametrize(
    "algorithm", [{"type": "custom", "function": "mine.py:step"}, {"type": "external"}]
)
def test_steps_that_are_not_ours_need_a_length(algorithm: dict[str, Any]) -> None:
    values = fake_recipe().model_dump(mode="json") | {"algorithm": algorithm}
    values["actor"]["optimizer"] = COSINE
    with pytest.raises(ValueError, match=r"a function of yours or a client.*optimizer_steps"):
        Recipe.model_validate(values)
    values["actor"]["optimizer"] = {"schedule": {"type": "cosine", "optimizer_steps": 9}}
    assert schedule_length(Recipe.model_validate(values).sent_section("actor")) == 9
