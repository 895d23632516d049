"""Tests that docs/algorithms.md is true of each algorithm, and that its example runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel, TypeAdapter
from support.fake_in_process import InProcessRun, run_jumping
from support.fake_recipes import fake_recipe

from rolemesh.coordinator.algorithms.registry import ALGORITHMS, roles_of
from rolemesh.coordinator.dataflow.roles import ROLE_HANDLES
from rolemesh.coordinator.recipe.algorithm import algorithms as algorithm_specs
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.recipe.role_names import ROLES
from rolemesh.engine.specs import EstimatorSpec, LossSpec, OwnFunctionSpec, PolicyTermsSpec

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "algorithms.md").read_text()
ROWS = {
    cells[0].strip("`"): cells
    for line in PAGE.splitlines()
    if line.count("|") == 7 and line.startswith("| `") and "algorithm.type" not in line
    for cells in [[cell.strip() for cell in line[1:-1].split("|")]]
}


LOSS_ROWS = {
    cells[0].strip("`"): cells
    for line in PAGE.split("\n## Policy losses\n")[1].split("\n## ")[0].splitlines()
    if line.startswith("| `") and "policy_loss.type" not in line
    for cells in [[cell.strip() for cell in line[1:-1].split("|")]]
}
"""Of the table of policy losses."""


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def spec_of(name: str) -> type[BaseModel]:
    union = get_args(algorithm_specs.AlgorithmSpec)[0]
    (found,) = [spec for spec in get_args(union) if spec.model_fields["type"].default == name]
    assert issubclass(found, BaseModel)
    return found


def default_part(name: str, field: str) -> list[str]:
    """The type of the part that the algorithm has where a recipe says nothing."""
    info = spec_of(name).model_fields.get(field)
    if info is None:
        return []
    # Of several, one without a type is of the first.
    first, *_ = get_args(info.annotation) or (info.annotation,)
    part: Any = first if info.is_required() else info.default
    assert info.is_required() or isinstance(part, first)
    return [str(part.model_fields["type"].default if isinstance(part, type) else part.type)]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_the_table_has_every_algorithm() -> None:
    assert ROWS.keys() == ALGORITHMS.keys()


def test_the_table_of_estimators_has_each_of_them() -> None:
    (table,) = re.findall(r"^\| `advantages\.type` .*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    named = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    members = get_args(get_args(EstimatorSpec)[0])
    assert sorted(named) == sorted(one.model_fields["type"].default for one in members)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_row_tells_roles_and_parts(name: str) -> None:
    _, _, roles, estimator, loss, _ = ROWS[name]
    wanted = roles_of(ALGORITHMS[name])
    said = {role.strip() for role in roles.split(",")}
    assert said == {*wanted.required, *(f"({role})" for role in wanted.optional)}
    assert names_in(estimator) == default_part(name, "advantages")
    losses = default_part(name, "policy_loss") or default_part(name, "reward_loss")
    assert names_in(loss) == losses


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_row_names_the_recipes_of_its_algorithm(name: str) -> None:
    recipes = {path.stem: path for path in (REPOSITORY / "recipes").glob("*.yaml")}
    of_algorithm = {
        stem for stem, path in recipes.items() if load_recipe([path]).algorithm.type == name
    }
    assert set(names_in(ROWS[name][5])) == of_algorithm


def test_the_table_of_losses_has_every_policy_loss_and_its_defaults() -> None:
    specs = {
        spec.model_fields["type"].default: spec
        for spec in get_args(get_args(LossSpec)[0])
        if issubclass(spec, PolicyTermsSpec) and not issubclass(spec, OwnFunctionSpec)
    }
    assert LOSS_ROWS.keys() == specs.keys()
    for name, (_, _, _, defaults) in LOSS_ROWS.items():
        said = re.findall(r"`(\w+)` ([\w.]+)", defaults)
        assert said
        for field, default in said:
            assert str(specs[name].model_fields[field].default) == default, (name, field)


def test_the_sections_of_the_page_are_valid() -> None:
    adapter: Any = TypeAdapter(algorithm_specs.AlgorithmSpec)
    kinds = [adapter.validate_python(yaml.safe_load(text)["algorithm"]).type
             for text in blocks("yaml")]  # fmt: skip
    assert kinds == ["dr_grpo", "dapo", "grpo", "custom"]


def test_the_handles_of_the_page_exist() -> None:
    (line,) = [line for line in PAGE.splitlines() if line.startswith("- Handles:")]
    role, named = "", set()
    for name in names_in(line.split("`coordinator/")[0]):
        role, _, method = name.rpartition(".") if "." in name else (role, "", name)
        if "=" in method:
            continue
        assert hasattr(ROLE_HANDLES[role], method), name
        named.add((role, method))
    public = {
        (role, method)
        for role, handle in ROLE_HANDLES.items()
        for method, value in vars(handle).items()
        if callable(value) and not method.startswith("_") and role in ROLES
    }
    assert public <= named


def test_the_algorithm_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my").mkdir()
    (code,) = blocks("python")
    (tmp_path / "my" / "selected_rloo.py").write_text(code)
    assert len(code.splitlines()) <= 10
    algorithm = yaml.safe_load(blocks("yaml")[-1])["algorithm"]
    recipe = fake_recipe(
        roles=("actor", "reference", "reward"),
        algorithm=algorithm,
        steps=2,
        evaluation={"num_prompts": 0},
    )

    async def work() -> InProcessRun:
        run = InProcessRun(recipe, tmp_path / "run")
        await run.execute()
        return run

    run = run_jumping(work())
    assert run.loop.step == 2
    called = run.mesh.methods(1)
    assert set(called) == {
        "actor.Generate",
        "reward.ComputeReward",
        "actor.SelectGroups",
        "reference.ComputeLogprobs",
        "actor.ComputeAdvantages",
        "actor.Update",
    }
    assert called[-2:] == ["actor.ComputeAdvantages", "actor.Update"]
