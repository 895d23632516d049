"""The policy as its own teacher, in a recipe: who answers, what is sent, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from support.fake_recipes import SECTIONS, fake_recipe

from rolemesh.coordinator.algorithms.registry import roles_in, unused_roles
from rolemesh.coordinator.recipe.loading import dump_recipe, read_recipe
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.sections.tuning import with_settings
from rolemesh.coordinator.run.checks.planning import plan_step

DISTILLATION = {
    "type": "on_policy_distillation",
    "sampling": {"samples_per_prompt": 2},
    "mini_batch_rows": 4,
}
MODEL = SECTIONS["reference"]["model"]
HINT = {"template": "{prompt} (It is {answer}.)"}
OWN = {"of": "actor", "average": 0.99, "prompt": HINT}


def recipe(
    teacher: dict[str, Any], algorithm: Any = DISTILLATION, actor: Any = (), **sections: Any
) -> Recipe:
    values = fake_recipe(roles=("actor",), algorithm={"type": "sft"}).model_dump(mode="json")
    values |= {"algorithm": algorithm, "teacher": teacher, "pools": {}, **sections}
    values["actor"] |= dict(actor)
    values["run"]["evaluation"]["num_prompts"] = 0
    return Recipe.model_validate(values)


def test_the_actor_answers_for_a_teacher_that_is_itself() -> None:
    own = recipe(OWN)
    assert own.roles == ("actor",)
    assert own.served_by_actor == {"teacher"}
    assert roles_in(own) == ("actor",)
    assert unused_roles(own) == ()
    sent = own.sent_spec("actor")
    assert sent["teacher"] == {"average": 0.99, "prompt": HINT}
    assert own.actor is not None
    assert own.actor.teacher is None
    # What it says of itself survives a file, and other settings.
    assert read_recipe(dump_recipe(own), "saved") == own
    assert with_settings(own, {"actor.model.micro_batch_tokens": 64}).teacher == own.teacher


@pytest.mark.parametrize("teacher", [{"of": "actor"}, {"model": MODEL}])
def test_an_actor_is_told_nothing_that_it_need_not_know(teacher: dict[str, Any]) -> None:
    made = recipe(teacher)
    assert "teacher" not in made.sent_spec("actor")
    assert made.actor_average is None
    if "model" in teacher:
        assert made.roles == ("actor", "teacher")
        assert made.sent_spec("teacher").keys() == {"model", "layout"}
        told = recipe({**teacher, "prompt": HINT}).sent_spec("teacher")
        assert told["prompt"] == HINT


@pytest.mark.parametrize(
    ("teacher", "expected"),
    [
        ({"of": "actor"}, ("actor.compute_teacher_logprobs",)),
        (OWN, ("actor.compute_teacher_logprobs",)),
        ({"model": MODEL, "prompt": HINT}, ("teacher.compute_logprobs",)),
    ],
    ids=["now", "average", "model"],
)
async def test_the_graph_says_which_service_answered(
    teacher: dict[str, Any], expected: tuple[str, ...]
) -> None:
    nodes = await plan_step(recipe(teacher))
    names = [node.name for node in nodes]
    assert names == [
        "actor.generate", *expected, "actor.compute_advantages", "actor.update",
    ]  # fmt: skip


async def test_a_kl_to_itself_is_the_teachers_where_there_is_no_reference() -> None:
    grpo = {**DISTILLATION, "type": "grpo", "policy_loss": {"kl_in_loss": 0.1}}
    made = recipe(OWN, grpo, reward=SECTIONS["reward"])
    assert unused_roles(made) == ()
    names = [node.name for node in await plan_step(made)]
    assert names[:2] == ["actor.generate", "actor.compute_teacher_logprobs"]


def test_a_teacher_that_no_step_asks_is_named() -> None:
    assert unused_roles(recipe(OWN, {"type": "sft"})) == ("teacher",)


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ({}, "no holder given: give one of model"),
        ({"of": "actor", "model": MODEL}, "model and of given: give one of model"),
        ({"of": "actor", "layout": {"tp": 2}}, "layout is given, but of is 'actor'"),
        ({"of": "actor", "numerics": "fast"}, "numerics is given, but of is 'actor'"),
        ({"model": MODEL, "average": 0.9}, r"average is 0\.9, but this teacher is a model of its"),
        ({"of": "actor", "average": 0.0}, "greater than 0"),
        ({"of": "actor", "average": 1.0}, "less than 1"),
        ({"of": "critic"}, "'actor'"),
        ({"of": "actor", "prompt": {"template": "{feedback}"}}, r"the field \{feedback\} is none"),
    ],
)  # fmt: skip
def test_a_teacher_that_cannot_be_is_refused(teacher: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        recipe(teacher)


def test_what_a_run_says_by_itself_is_no_key_of_the_actor() -> None:
    with pytest.raises(ValidationError, match=r"actor\.teacher is given, .* with of: actor"):
        recipe({"of": "actor"}, actor={"teacher": {"average": 0.9}})


def test_a_teacher_needs_the_actor_that_it_is() -> None:
    values = fake_recipe(roles=("reward",), algorithm={"type": "external"}).model_dump(mode="json")
    with pytest.raises(ValidationError, match=r"teacher\.of is 'actor', but the recipe has no"):
        Recipe.model_validate({**values, "teacher": {"of": "actor"}, "pools": {}})
