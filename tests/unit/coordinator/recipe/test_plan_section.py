"""Tests of the section `plan`: what it refuses, and that it decides nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.fake_recipes import fake_recipe
from support.planned_runs import PLAN

from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.loading import read_recipe
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.sections.plan_section import MAX_TASKS
from rolemesh.coordinator.run.reporting.records import enter_again, enter_run
from rolemesh.coordinator.run.saving.resume import check_changes
from rolemesh.coordinator.state.memory import MemoryStateStore

TASK = PLAN["tasks"][0]


def with_plan(**changes: Any) -> Recipe:
    values = fake_recipe().model_dump(mode="json") | {"plan": {**PLAN, **changes}}
    return read_recipe(yaml.safe_dump(values), "recipe.yaml")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"step_s": 0}, r"plan\.step_s is 0"),
        ({"step_s": float("inf")}, r"plan\.step_s is inf"),
        ({"tokens": -1}, r"plan\.tokens is -1"),
        ({"basis": ""}, r"plan\.basis"),
        ({"rows": "x" * 5000}, r"plan\.rows"),
        ({"pools": {}}, r"plan\.pools"),
        ({"tasks": []}, r"plan\.tasks"),
        ({"tasks": [TASK] * (MAX_TASKS + 1)}, r"plan\.tasks"),
        ({"tasks": [{**TASK, "name": "generate"}]}, r"plan\.tasks\.0\.name is 'generate'"),
        ({"tasks": [{**TASK, "end_s": -1.0}]}, r"plan\.tasks\.0\.end_s is -1"),
        ({"tasks": [{**TASK, "start_s": 9.0}]}, r"end_s 3, which is before its start_s 9: .*anew"),
        ({"tasks": [{**TASK, "pool": "gone"}]}, r"pool 'gone', but plan\.pools has actor, critic"),
        ({"pools": {"actor": {"devices": "2 h100", "roles": {}}}}, r"plan\.pools\.actor\.roles"),
        ({"seconds": 1.0}, r"plan\.seconds"),
    ],
)
def test_what_cannot_be_a_plan_is_refused_by_name(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        with_plan(**changes)


def test_a_plan_decides_nothing() -> None:
    planned, bare = with_plan(), fake_recipe()
    assert planned.plan is not None
    assert planned.model_copy(update={"plan": None}) == bare
    for role in planned.roles:
        assert planned.sent_spec(role) == bare.sent_spec(role)


def test_a_run_may_go_on_with_another_plan_and_says_so_in_one_line() -> None:
    planned, again, bare = with_plan(), with_plan(step_s=4.0), fake_recipe()
    assert check_changes(planned, planned) == []
    (line,) = check_changes(planned, again)
    assert line.startswith("plan was '6 s a step; a calibration of h100")
    assert "is '4 s a step;" in line
    assert check_changes(bare, planned)[0].startswith("plan was None, is '6 s a step;")


async def test_the_record_has_the_plan_that_the_run_goes_on_with(tmp_path: Path) -> None:
    store = MemoryStateStore()
    await enter_run(store, with_plan(), "r", tmp_path)
    assert (await store.get_run("r")).plan["predicted"]["step_s"] == PLAN["step_s"]
    await enter_again(store, with_plan(step_s=4.0), "r", tmp_path)
    assert (await store.get_run("r")).plan["predicted"]["step_s"] == 4.0
    await enter_again(store, fake_recipe(), "r", tmp_path)
    assert (await store.get_run("r")).plan == {}
