"""Recipes with a teacher that servers hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.mesh_runs import tiny_recipe

from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.service_flags import service_flags
from rolemesh.coordinator.run.checks.model_folders import model_folders
from rolemesh.engine.specs import TeacherSpec, named_in

SERVER = {"urls": "http://h:8000", "model": "big"}
SAMPLING = {"samples_per_prompt": 2, "max_new_tokens": 6}


def recipe(server: Any = None, **changes: Any) -> Recipe:
    values = tiny_recipe(
        Path("/models/policy"),
        **{
            "algorithm": {"type": "on_policy_distillation", "sampling": SAMPLING},
            "teacher": {"server": {**SERVER, **(server or {})}},
            "services": {},
            **changes,
        },
    )
    for role in ("critic", "reference"):
        del values[role]
    return Recipe.model_validate(values)


@pytest.mark.parametrize(
    ("teacher", "told"),
    [
        ({}, "no holder given"),
        ({"model": {"path": "/m"}, "server": SERVER}, "model and server given: give one of"),
        ({"server": SERVER, "layout": {"tp": 2}}, "layout has 2 ranks"),
        ({"server": {"urls": "http://h:1"}}, "model"),
        ({"server": {**SERVER, "urls": "grpc://h:1"}}, "give http://host:port"),
        ({"server": {**SERVER, "on_failure": {"type": "value", "value": 0}}}, "on_failure"),
        ({"server": {**SERVER, "token_variable": "A_TOKEN"}}, "not encrypted"),
    ],
)
def test_a_teacher_is_a_model_or_servers(teacher: Any, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        TeacherSpec.model_validate(teacher)


def test_what_servers_cannot_be_asked_for_is_refused_with_its_field() -> None:
    algorithm = {"type": "on_policy_distillation", "sampling": {**SAMPLING, "temperature": 0.8}}
    with pytest.raises(ValidationError, match=r"temperature 1 alone.*teacher\.model") as raised:
        recipe(algorithm=algorithm)
    assert "algorithm.policy_loss.temperature is 0.8" in str(raised.value)
    recipe(algorithm=algorithm, teacher={"model": {"path": "/models/teacher"}})


def test_the_tokens_are_held_against_the_policys_where_a_run_starts_both() -> None:
    sent = recipe().sent_section("teacher")
    assert isinstance(sent, TeacherSpec)
    assert sent.server is not None
    assert sent.server.policy_folder == Path("/models/policy")
    assert "--folder=/models/policy" in service_flags(recipe(), "teacher")
    for role in ("actor", "teacher"):
        apart = recipe(services={role: {"address": "h:1"}})
        assert apart.sent_spec("teacher")["server"]["policy_folder"] is None
    given = recipe({"policy_folder": "/own"}, services={"teacher": {"address": "h:1"}})
    assert given.sent_spec("teacher")["server"]["policy_folder"] == "/own"


def test_another_prompt_takes_the_policys_tokenizer() -> None:
    teacher = {"server": SERVER, "prompt": {"template": "{prompt} {answer}"}}
    assert recipe(teacher=teacher).sent_spec("teacher")["prompt"] == teacher["prompt"]
    apart = {"teacher": {"address": "h:1"}}
    with pytest.raises(ValidationError, match=r"teacher\.server\.policy_folder is not"):
        recipe(teacher=teacher, services=apart)
    given = {**teacher, "server": {**SERVER, "policy_folder": "/own"}}
    recipe(teacher=given, services=apart)


def test_a_service_of_another_make_is_not_told_of_servers() -> None:
    held = recipe(teacher={"model": {"path": "/models/teacher"}})
    assert set(held.sent_spec("teacher")) == {"model", "layout"}
    assert recipe().sent_spec("teacher")["server"]["model"] == "big"


def test_a_teacher_at_servers_has_no_model_here() -> None:
    asking = recipe()
    assert not asking.has_model("teacher")
    assert [one.field for one in model_folders(asking, ("actor", "teacher"))] == [
        "actor.model.path"
    ]
    assert {(one.field, one.kind) for one in named_in(asking.section("teacher"))} == {
        ("server.urls.0", "url")
    }


def test_rows_may_be_dropped_by_a_teacher() -> None:
    assert recipe().may_drop == frozenset()
    assert recipe({"on_failure": {"type": "drop_group"}}).may_drop == {"teacher"}
