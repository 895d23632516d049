"""Recipes whose sampler are stock servers: what they may say, name and need."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.mapping_jobs import LLAMAS

from rolemesh.coordinator.commands.findings.device_settings import device_settings
from rolemesh.coordinator.commands.recipes.memory_question import question_of
from rolemesh.coordinator.mapping.job.from_recipe import job_of, one_call_a_role, work_of
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.service_flags import named_variables, service_flags
from rolemesh.coordinator.run.checks.footprint import footprint_of
from rolemesh.coordinator.run.checks.planning import plan_step
from rolemesh.engine.granted.grants import Grant, NotGrantedError
from rolemesh.engine.specs import VllmServerSpec
from rolemesh.engine.specs.by_device import Device

RECIPE = Path(__file__).resolve().parents[4] / "recipes" / "vllm-servers-lora.yaml"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMAS["tiny"]))
    return tmp_path


def recipe_of(model: Path, *settings: str) -> Recipe:
    return load_recipe([RECIPE], overrides=[f"actor.model.path={model}", *settings])


def test_a_url_without_a_list_is_a_list_of_one() -> None:
    assert VllmServerSpec.model_validate({"urls": "http://h:8000"}).urls == ("http://h:8000",)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"urls": []}, "at least 1 item"),
        ({"urls": ["ftp://h"]}, r"give http://host:port or https://host:port"),
        ({"urls": ["http://user:word@h"]}, "would be logged"),
        ({"urls": ["http://h:1", "http://h:1/"]}, "give each server once"),
        ({"token_variable": "FLEET_KEY", "urls": ["http://far:1"]}, "not encrypted"),
        ({"token_variable": "ROLEMESH_KEY"}, "variable of rolemesh itself"),
        ({"server_folder": "/elsewhere"}, "without shared_folder"),
        ({"max_num_seqs": 0}, "greater than or equal to 1"),
    ],
)
def test_what_the_section_refuses(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        VllmServerSpec.model_validate({"urls": ["http://127.0.0.1:1"], **fields})


def test_what_it_names_has_to_be_granted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(
        model, "actor.rollout.token_variable=FLEET_KEY", "actor.rollout.shared_folder=/far/away"
    )
    section = recipe.sent_section("actor")
    granted = {"variables": ("FLEET_KEY",), "hosts": ("127.0.0.1",)}
    folders = (model, Path("/far"))
    Grant(folders=folders, **granted).check(section, "actor.")
    for changed, field in (
        ({"folders": (model,)}, r"actor\.rollout\.shared_folder"),
        ({"variables": ()}, r"actor\.rollout\.token_variable"),
        # Its key would go to whoever a recipe names.
        ({"hosts": ()}, r"actor\.rollout\.urls\.0"),
    ):
        with pytest.raises(NotGrantedError, match=field):
            Grant(**{"folders": folders, **granted, **changed}).check(section, "actor.")
    assert "--folder=/far/away" in service_flags(recipe, "actor")
    assert "FLEET_KEY" in named_variables(recipe, "actor")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["actor.rollout.shared_folder=null"], r"actor\.rollout\.shared_folder is not given"),
        (["actor.model.adapter=null"], "by NCCL, from a GPU alone; give actor.model.adapter"),
        (["actor.model.adapter.targets=[q_proj, experts]"], "name targets without experts"),
        (["actor.train={tp: 2}", "actor.generate={tp: 2}"], "--tensor-parallel-size"),
    ],
)
def test_weights_need_a_way_to_the_servers(model: Path, settings: list[str], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        recipe_of(model, *settings)


def test_on_gpus_whole_weights_have_one(model: Path) -> None:
    gpus = "pools={main: {devices: ['cuda:0'], roles: [actor, reward]}}"
    recipe = recipe_of(model, "actor.model.adapter=null", gpus)
    assert isinstance(recipe.sampler, VllmServerSpec)


def test_a_rollout_role_is_held_to_the_same(model: Path) -> None:
    recipe = recipe_of(model)
    values = recipe.model_dump(mode="json", exclude_unset=True)
    values["rollout"] = {
        "model": {"path": str(model)},
        "rollout": values["actor"].pop("rollout"),
        "data": values["actor"]["data"],
    }
    values["pools"] = {
        "a": {"devices": ["cpu"], "roles": ["actor", "reward"]},
        "b": {"devices": ["cpu"], "roles": ["rollout"]},
    }
    assert Recipe.model_validate(values).sampler == recipe.sampler
    del values["rollout"]["rollout"]["shared_folder"]
    with pytest.raises(ValidationError, match=r"rollout\.rollout\.shared_folder is not given"):
        Recipe.model_validate(values)


def test_it_takes_no_memory_of_ours_and_is_told_where_it_samples(model: Path) -> None:
    recipe = recipe_of(model)
    services = dict.fromkeys(("actor", "reward"))
    found = footprint_of(recipe, services).memory["actor"]
    own = footprint_of(
        recipe_of(model, "actor.rollout={type: vllm, max_model_len: 128}"), services
    ).memory["actor"]
    assert found < own
    assert question_of(recipe)["samplers"] == []
    (told,) = [one.text for one in device_settings(recipe, Device("cpu")) if one.what == "actor"]
    assert "samples at http://127.0.0.1:8101, http://127.0.0.1:8102" in told


def test_a_plan_does_not_guess_what_servers_compute_on(model: Path) -> None:
    recipe = one_call_a_role(recipe_of(model))
    nodes = asyncio.run(plan_step(recipe))
    with pytest.raises(RecipeError, match=r"actor\.rollout\.type is 'vllm_server'"):
        job_of(recipe, nodes, work_of(recipe), on_gpus=False)
