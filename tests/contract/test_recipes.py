"""Every recipe of the repository loads, and survives being written and read."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.model_files import write_empty_model

from rolemesh.coordinator.algorithms.registry import ALGORITHMS
from rolemesh.coordinator.recipe.algorithm.policy_gradients import POLICY_GRADIENTS
from rolemesh.coordinator.recipe.loading import dump_recipe, load_recipe
from rolemesh.coordinator.run.checks.inputs import check_paths
from rolemesh.engine.specs import JsonlSpec, ModelSpec
from rolemesh.quickstart.form_judge import PROMPTS
from rolemesh.quickstart.sum_examples import FILES
from rolemesh.quickstart.teacher_answers import FILE

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPES = sorted((REPOSITORY / "recipes").glob("*.yaml"))
MODEL_TARGETS = ("model", "judge", "teacher")
"""Targets of the Makefile that write a model folder, or a run with one."""


def test_there_are_recipes() -> None:
    assert {"quickstart-ppo", "classifier-reward-ppo"} <= {path.stem for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_loads_and_is_named_like_its_file(path: Path) -> None:
    assert load_recipe([path]).run.name == path.stem


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_resolved_recipe_loads_to_an_equal_one(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe([path])
    written = tmp_path / "config.yaml"
    written.write_text(dump_recipe(recipe))
    assert load_recipe([written]) == recipe


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_evaluation_asks_for_no_more_prompts_than_are_held_out(path: Path) -> None:
    recipe = load_recipe([path])
    # A reward model is trained without a policy to evaluate.
    held_out = None if recipe.actor is None else getattr(recipe.actor.data, "held_out_size", None)
    assert held_out is None or recipe.run.evaluation.num_prompts <= held_out


def model_paths(section: Any) -> Iterator[Path]:
    """Folders of all models that a recipe names, however deep."""
    if isinstance(section, ModelSpec):
        yield section.path
    elif hasattr(section, "model_fields_set"):
        for name in type(section).model_fields:
            yield from model_paths(getattr(section, name))


def written_by(targets: Iterable[str]) -> set[Path]:
    """Folders that make targets write."""
    dry_run = subprocess.run(
        ["make", "--dry-run", *targets],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return {Path(folder) for folder in re.findall(r"--out (\S+)", dry_run.stdout)}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_model_of_a_recipe_is_written_by_a_make_target(path: Path) -> None:
    named = set(model_paths(load_recipe([path])))
    assert len(named) > 0
    written = written_by(MODEL_TARGETS)
    assert named <= written | {folder / "model" for folder in written}


def test_the_data_of_recipes_is_written_by_a_make_target_and_its_absence_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes = {path.stem: load_recipe([path]) for path in RECIPES}
    sources = {
        name: recipe.section(role).data
        for name, recipe in recipes.items()
        for role in ("actor", "reward")
        if getattr(getattr(recipe, role), "data", None) is not None
    }
    stored = {name: data for name, data in sources.items() if isinstance(data, JsonlSpec)}
    assert stored.keys() == {"sft", "dpo", "kto", "reward-model", "sequence-distillation"}
    answers = stored.pop("sequence-distillation").path
    assert answers.parent in written_by(["teacher-answers"])
    assert answers.name == FILE
    (folder,) = written_by(["sums"])
    for data in stored.values():
        assert data.path.parent == folder
        assert data.path.name in FILES
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"reward\.data\.path is .*`make sums` writes \.data/sums"):
        check_paths(without_models(recipes["reward-model"], tmp_path), ["reward"])


def without_models(recipe: Any, folder: Path) -> Any:
    """The recipe over a model folder that is there."""
    write_empty_model(folder)
    source = recipe.reward.source.model_copy(update={"model": ModelSpec(path=folder)})
    return recipe.model_copy(update={"reward": recipe.reward.model_copy(update={"source": source})})


def test_every_algorithm_has_a_recipe_or_a_sibling_that_has() -> None:
    """Siblings differ from an algorithm that has one in their parts alone."""
    # The steps of an external one are a client's.
    have_one = {load_recipe([path]).algorithm.type for path in RECIPES} - {"external"}
    assert have_one | set(POLICY_GRADIENTS) == set(ALGORITHMS)


def test_a_missing_judge_is_named_with_the_command_that_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe([REPOSITORY / "recipes" / "classifier-reward-ppo.yaml"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"reward\.source\.model\.path is") as caught:
        check_paths(recipe, ["reward"])
    assert "'.models/form-judge'" in str(caught.value)
    assert "`make judge` writes .models/form-judge" in str(caught.value)


def test_the_classifier_recipe_asks_what_its_judge_was_trained_on() -> None:
    data = load_recipe([REPOSITORY / "recipes" / "classifier-reward-ppo.yaml"]).actor.data
    sizes = {"train_size": data.train_size, "held_out_size": data.held_out_size}
    assert data == PROMPTS.model_copy(update=sizes)
