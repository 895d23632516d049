"""What `rolemesh evaluate --tasks` names: held-out rows, reasoning-gym tasks, suites in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.hub.hf_files import model_folder, with_files
from rolemesh.coordinator.recipe.loading import load_recipe, read_yaml
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.checks.model_folders import judge_folders
from rolemesh.coordinator.run.saving.resume import CONFIG_FILE
from rolemesh.engine.messages import on_one_line
from rolemesh.engine.specs import AgentSpec, RewardSpec
from rolemesh.engine.specs.evaluation import EvaluatedTaskSpec, GymTaskSpec, RowsTaskSpec

HELD_OUT = "held_out"
"""Names the run's own held-out rows, with the run's own reward."""

SUITE_ENDS = (".yaml", ".yml")


def run_recipe(run: Path) -> Recipe:
    """The recipe of a run, with folders where it names models and data at the hub."""
    return with_files(load_recipe([run / CONFIG_FILE]), weights=False)


def tasks_of(
    words: Sequence[str],
    recipe: Recipe | None,
    *,
    size: int | None = None,
    answer_tag: str | None = None,
) -> list[EvaluatedTaskSpec]:
    """The tasks that words of the command line name.

    Args:
        words: Each HELD_OUT, NAME, NAME:SIZE or NAME:SIZE:SEED of a reasoning-gym task, or a file
            in YAML; several may stand in one, with commas between.
        recipe: That of the run, which HELD_OUT needs.
        size: Prompts of a task that gives no number of its own; None: the usual one.
        answer_tag: For tasks that are named by a word.

    Raises:
        RecipeError: One is wrong, or two have the same name; the text says what to give.
    """
    listed = [one.strip() for word in words for one in word.split(",") if one.strip()]
    found: dict[str, EvaluatedTaskSpec] = {}
    for word in listed:
        for task in _named(word, recipe, size, answer_tag):
            if task.name in found:
                raise RecipeError(f"--tasks: two tasks are called {task.name!r}: rename one")
            _check_folders(task)
            found[task.name] = task
    if not found:
        raise RecipeError(
            f"--tasks is missing: name reasoning-gym tasks, e.g. chain_sum:200, a suite in YAML, "
            f"or {HELD_OUT} for the held-out rows of a run"
        )
    return list(found.values())


def _check_folders(task: EvaluatedTaskSpec) -> None:
    """Refuses a classifier that could not be loaded, before the policy is."""
    try:
        for folder in judge_folders("reward", task.reward) if task.reward is not None else ():
            folder.check()
    except ValueError as error:
        raise RecipeError(f"--tasks: task {task.name}: {error}") from error


def _named(
    word: str, recipe: Recipe | None, size: int | None, answer_tag: str | None
) -> list[EvaluatedTaskSpec]:
    if word == HELD_OUT:
        task = _held_out(recipe, size)
        return [task.model_copy(update={"answer_tag": answer_tag})]
    if word.endswith(SUITE_ENDS):
        return _suite(Path(word), size)
    name, *numbers = word.split(":")
    given: dict[str, Any] = dict(zip(("size", "seed"), numbers, strict=False))
    if len(numbers) > 2:
        raise RecipeError(f"--tasks {word}: give NAME, NAME:SIZE or NAME:SIZE:SEED")
    if size is not None:
        given.setdefault("size", size)
    try:
        gym = GymTaskSpec.model_validate({"task": name, "answer_tag": answer_tag, **given})
        return [gym.evaluated(name)]
    except ValidationError as error:
        raise RecipeError(f"--tasks {word}: {_told(error)}") from error


def _held_out(recipe: Recipe | None, size: int | None) -> EvaluatedTaskSpec:
    if recipe is None:
        raise RecipeError(
            f"--tasks {HELD_OUT} is about the held-out rows of a run, but no run is named: name "
            "one, or another task"
        )
    actor, reward, sampler = recipe.actor, recipe.reward, recipe.sampler
    if actor is None or recipe.sampling is None or reward is None or sampler is None:
        raise RecipeError(
            f"--tasks {HELD_OUT}: run {recipe.run.name} samples nothing that a reward judges, so "
            "that its held-out rows have no score: name another task"
        )
    given: dict[str, Any]
    if isinstance(actor.environment, AgentSpec):
        if not actor.environment.gives_reward:
            raise RecipeError(
                f"--tasks {HELD_OUT}: the agent of run {recipe.run.name} gives no reward "
                "(actor.environment.gives_reward): its own evaluation scores that "
                "(run.evaluation); name another task"
            )
        given = {"agent": actor.environment.model_dump(mode="json")}
    else:
        _check_reward(recipe, reward)
        given = {"reward": reward.source.model_dump(mode="json")}
        if actor.environment is not None:
            given["environment"] = actor.environment.model_dump(mode="json")
            given["max_model_len"] = sampler.max_model_len
    num_prompts = size or recipe.run.evaluation.num_prompts or None
    data = actor.data.model_dump(mode="json")
    try:
        # What is passed on: the recipe's sections, read again by the schema that both ends have.
        return EvaluatedTaskSpec.model_validate(
            {"name": HELD_OUT, "data": data, "num_prompts": num_prompts, **given}
        )
    except ValidationError as error:
        raise RecipeError(f"--tasks {HELD_OUT}: {_told(error)}") from error


def _check_reward(recipe: Recipe, reward: RewardSpec) -> None:
    """Refuses a reward that learns, and brings the weights of one that is named at the hub."""
    if reward.optimizer is not None:
        raise RecipeError(
            f"--tasks {HELD_OUT}: run {recipe.run.name} trains its reward model "
            "(reward.optimizer), whose weights change with each step: take a suite whose reward "
            "names the folder of those that you mean"
        )
    for field, name in recipe.hf_names.items():
        if field.startswith("reward.source."):
            model_folder(name, field)


def _suite(path: Path, size: int | None) -> list[EvaluatedTaskSpec]:
    """A file whose keys are names of tasks.

    Example::

        sums: {task: chain_sum, size: 200, seed: 7, config: {max_terms: 3}}
        mine: {data: {type: jsonl, path: a.jsonl, held_out_size: 50}, reward: {type: arithmetic}}
    """
    given = read_yaml(path)
    if not isinstance(given, Mapping) or not given:
        raise RecipeError(f"--tasks {path}: give a mapping of names to tasks")
    found = []
    for name, section in given.items():
        if not isinstance(section, Mapping):
            raise RecipeError(
                f"--tasks {path}: {name} is no mapping: give task, or data and reward"
            )
        try:
            if "data" in section:
                filled = {"num_prompts": size, **section} if size is not None else section
                rows = RowsTaskSpec.model_validate(filled)
                task = EvaluatedTaskSpec.model_validate({"name": name, **rows.model_dump()})
            else:
                filled = {"size": size, **section} if size is not None else section
                task = GymTaskSpec.model_validate({"task": str(name), **filled}).evaluated(name)
        except ValidationError as error:
            raise RecipeError(f"--tasks {path}: {name}: {_told(error)}") from error
        found.append(task)
    return found


def _told(error: ValidationError) -> str:
    problem = error.errors()[0]
    where = ".".join(map(str, problem["loc"]))
    return on_one_line(f"{where}: {problem['msg']}" if where else problem["msg"])
