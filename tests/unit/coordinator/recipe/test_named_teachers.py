"""Several teachers in a recipe: roles of their own, in pools, services and the graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.fake_recipes import SECTIONS, fake_recipe

from rolemesh.coordinator.algorithms.registry import roles_in, unused_roles
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.loading import dump_recipe, load_recipe, read_recipe
from rolemesh.coordinator.recipe.role_names import field_of, kind_of, role_of, service_names
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.render.compose import compose_file
from rolemesh.coordinator.run.checks.model_folders import model_folders
from rolemesh.coordinator.run.checks.planning import plan_step
from rolemesh.coordinator.run.services.commands import service_commands
from rolemesh.engine.specs import DistillationLossSpec

MODEL = SECTIONS["reference"]["model"]
NAMED = {"one": {"model": MODEL}, "two": {"model": MODEL, "layout": {"tp": 2}}}
SHARED = {"by": "metadata.domain", "to": {"math": "one"}, "default": {"one": 1.0, "two": 1.0}}
APART = {"by": "metadata.domain", "to": {"math": "one"}, "default": "two"}
DISTILLATION = {
    "type": "on_policy_distillation",
    "sampling": {"samples_per_prompt": 2},
    "mini_batch_rows": 4,
    "policy_loss": {"type": "distillation"},
}


def recipe(route: Any = SHARED, named: Any = NAMED, **sections: Any) -> Recipe:
    values = fake_recipe(roles=("actor",), algorithm={"type": "sft"}).model_dump(mode="json")
    values |= {"algorithm": DISTILLATION, "pools": {}, "services": {}}
    values |= {"teacher": {"named": named, "route": route}, **sections}
    values["run"]["evaluation"]["num_prompts"] = 0
    return Recipe.model_validate(values)


@pytest.mark.parametrize(
    ("service", "role", "kind", "field"),
    [
        ("actor", "actor", "actor", "actor"),
        ("rollout-11", "rollout", "rollout", "rollout"),
        ("teacher-math", "teacher-math", "teacher", "teacher.named.math"),
        ("teacher-math-0", "teacher-math", "teacher", "teacher.named.math"),
        ("teacher-t1", "teacher-t1", "teacher", "teacher.named.t1"),
        ("teacher-0", "teacher", "teacher", "teacher"),
    ],
)
def test_names_of_services_say_role_and_kind(
    service: str, role: str, kind: str, field: str
) -> None:
    assert (role_of(service), kind_of(service), field_of(role)) == (role, kind, field)
    assert service in (*service_names(role, 1), *service_names(role, 12))


def test_each_of_several_teachers_is_a_role() -> None:
    made = recipe()
    assert made.roles == ("actor", "teacher-one", "teacher-two")
    assert made.pools["main"].roles == made.roles
    assert roles_in(made) == made.roles
    assert unused_roles(made) == ()
    assert made.layout("teacher-two").tp == 2
    assert made.sent_spec("teacher-one").keys() == {"model", "layout"}
    loss = made.algorithm.parts.policy_loss  # type: ignore[union-attr]
    assert isinstance(loss, DistillationLossSpec)
    assert loss.teachers == 2
    assert recipe(APART).algorithm.parts.policy_loss.teachers == 1  # type: ignore[union-attr]
    assert [one.field for one in model_folders(made, made.roles)] == [
        "actor.model.path", "teacher.named.one.model.path", "teacher.named.two.model.path",
    ]  # fmt: skip
    assert read_recipe(dump_recipe(made), "saved") == made
    command = service_commands(made, Path("run"))("teacher-two", Path("announce"))
    assert "rolemesh.services.teacher" in command.arguments
    assert command.num_ranks == 2


def test_each_stands_in_a_pool_and_may_have_services_of_its_own() -> None:
    pools = {
        "all": {"roles": ["actor", "teacher-one"]},
        "apart": {"devices": ["cuda:0", "cuda:1"], "roles": ["teacher-two"]},
    }
    services = {"teacher-one": {"address": "h:1"}, "teacher": {"address": "h:2"}}
    made = recipe(pools=pools, services=services)
    assert made.address("teacher-one") == "h:1"
    assert made.pool_name("teacher-two") == "apart"
    with pytest.raises(ValidationError, match="role 'teacher-two' stands in 0 pools"):
        recipe(pools={"all": pools["all"]})
    with pytest.raises(ValidationError, match=r"no role 'teacher'; roles are .*teacher-one"):
        recipe(pools={"all": {"roles": ["actor", "teacher"]}})
    with pytest.raises(ValidationError, match=r"services\.teacher-three: no such role"):
        recipe(services={"teacher-three": {"address": "h:1"}})
    with pytest.raises(ValidationError, match=r"services\.teacher-one\.registers is true"):
        recipe(services={"teacher-one": {"registers": True}}, certificates="certs")


def test_a_variable_names_a_service_without_a_hyphen(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(recipe()))
    given = {"ROLEMESH_SERVICES__TEACHER_TWO__ADDRESS": "h:1"}
    assert load_recipe([path], environment=given).address("teacher-two") == "h:1"


async def test_the_graph_asks_each_for_its_rows() -> None:
    names = [node.name for node in await plan_step(recipe())]
    # A row of two teachers has two voices, and "two" also gives those of one a second, of weight 0.
    assert names == [
        "actor.generate",
        *("teacher-one.compute_logprobs", "teacher-two.compute_logprobs"),
        *("actor.compute_advantages", "actor.update"),
    ]
    nodes = await plan_step(recipe(APART))
    assert [node.name for node in nodes][1:3] == [
        "teacher-one.compute_logprobs", "teacher-two.compute_logprobs",
    ]  # fmt: skip
    assert nodes[3].inputs == (0, 1, 2)


async def test_one_of_several_may_be_the_policy_itself() -> None:
    own = {"one": {"of": "actor", "average": 0.9}, "two": {"model": MODEL}}
    made = recipe(APART, own)
    assert made.roles == ("actor", "teacher-two")
    assert made.served_by_actor == {"teacher-one"}
    assert made.actor_average == 0.9
    names = [node.name for node in await plan_step(made)]
    assert {"actor.compute_teacher_logprobs", "teacher-two.compute_logprobs"} <= {*names}


@pytest.mark.parametrize(
    ("algorithm", "told"),
    [
        ({"type": "grpo", "policy_loss": {"kl_in_loss": 0.1}}, r"'grpo' does not: give one"),
        (
            {**DISTILLATION, "policy_loss": {"type": "python", "function": "mine.py:loss"}},
            r"algorithm\.policy_loss is a function of yours",
        ),
    ],
)
def test_what_reads_one_teacher_a_row_is_given_one(algorithm: Any, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        recipe(algorithm=algorithm, reward=SECTIONS["reward"])


async def test_a_kl_may_be_to_the_teacher_of_each_row() -> None:
    grpo = {**DISTILLATION, "type": "grpo", "policy_loss": {"kl_in_loss": 0.1}}
    made = recipe(APART, algorithm=grpo, reward=SECTIONS["reward"])
    assert unused_roles(made) == ()
    names = [node.name for node in await plan_step(made)]
    assert {"teacher-one.compute_logprobs", "teacher-two.compute_logprobs"} <= {*names}


def test_the_mesh_of_one_host_has_one_container_of_a_kind() -> None:
    with pytest.raises(RecipeError, match=r"teacher\.named\.one is one of several teachers"):
        compose_file(recipe(), ["train"], None, "")
    elsewhere = {f"teacher-{name}": {"address": f"{name}:1"} for name in NAMED}
    assert "teacher-" not in compose_file(recipe(services=elsewhere), ["train"], None, "")
