"""Resumption of a run: what it has reached, and which fields of its recipe may change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.hub.hf_names import named_values
from rolemesh.coordinator.recipe.loading import leaves, load_recipe
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.saving.checkpoints import (
    COMMITTED,
    NoWholeCheckpointError,
    checkpoint_folder,
    committed_steps,
    read_marker,
)
from rolemesh.coordinator.run.saving.progress import RunProgress
from rolemesh.coordinator.state.store import StateStore
from rolemesh.coordinator.trackers.files import METRICS_FILE

RUN_FILE = "run.json"
"""In a run's folder: its id."""

CONFIG_FILE = "config.yaml"
"""In a run's folder: its recipe with all defaults."""

CHECKPOINTS_FOLDER = "checkpoints"
"""In a run's folder: its checkpoints."""

_CHANGEABLE = (
    "run.steps",
    "run.evaluation",
    "run.checkpoint",
    "run.early_stopping",
    "run.recovery",
    "run.health",
    "run.samples",
    "run.tuning",
    "run.directory",
    "pools",
    "services",
    "store",
    "api",
    "certificates",
    "trackers",
    "tracing",
    "actor.train",
    "actor.generate",
    "critic.train",
    "reward.train",
    "reference.layout",
    "rollout.layout",
    "reward.layout",
    "cost.layout",
    "actor.optimizer.learning_rate",
    "actor.optimizer.schedule",
    "critic.optimizer.learning_rate",
    "critic.optimizer.schedule",
    "reward.optimizer.learning_rate",
    "reward.optimizer.schedule",
)
"""Fields that may differ from those that a run began with: how long it goes on, where and on how
many ranks it computes, how fast it learns. Any other field says what is learnt from what, and with
another value the run would be another one."""


class ResumeError(ValueError):
    """A run cannot be resumed. The text says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Resumable:
    """A run that may go on."""

    run_id: str
    recipe: Recipe
    """What it began with."""


def holds_run(directory: Path) -> bool:
    """Whether a folder holds a run that has got as far as services."""
    return (directory / CONFIG_FILE).is_file() and (directory / RUN_FILE).is_file()


def open_run(directory: Path) -> Resumable:
    """Reads which run a folder holds.

    Raises:
        ResumeError: It holds none, or a file of it cannot be read.
    """
    if not holds_run(directory):
        raise ResumeError(
            f"{directory} holds no run that could be resumed: there is no {CONFIG_FILE} or no "
            f"{RUN_FILE}; name the folder of a run, or start one with `rolemesh train RECIPE`"
        )
    try:
        run_id = str(json.loads((directory / RUN_FILE).read_text())["run_id"])
        recipe = load_recipe([directory / CONFIG_FILE])
    except (OSError, ValueError, KeyError, TypeError, RecipeError) as error:
        raise ResumeError(f"{directory} cannot be resumed: {error}") from error
    return Resumable(run_id, recipe)


def check_changes(began_with: Recipe, wanted: Recipe) -> list[str]:
    """Compares the recipe that a run began with and the one that it is to go on with.

    Returns:
        The fields that differ and may do so, each with both values.

    Raises:
        ResumeError: Others differ; names each.
    """
    recipes = (began_with, wanted)
    # By their names at the hub: a model may lie in other folders of another host.
    changed = differences(*({**named_values(one), "plan": None} for one in recipes))
    told = {name: f"{name} was {old!r}, is {new!r}" for name, (old, new) in changed.items()}
    refused = [told[name] for name in changed if not _is_changeable(name)]
    if refused:
        raise ResumeError(
            "the recipe is not the one that the run began with, in fields that decide what it "
            f"learns: {'; '.join(refused)}. Give these their old values, or start another run"
        )
    if began_with.plan != wanted.plan:
        # Field by field it would be many lines.
        old, new = (None if one.plan is None else one.plan.told for one in recipes)
        told["plan"] = f"plan was {old!r}, is {new!r}"
    return list(told.values())


def differences(*recipes: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The fields in which recipes differ, by name, each with its value in every recipe.

    Args:
        recipes: As plain JSON values. A field that a recipe lacks counts as None.
    """
    flat = [{".".join(where): value for where, value in leaves(one)} for one in recipes]
    found = {name: [one.get(name) for one in flat] for name in sorted(set().union(*flat))}
    return {
        name: values
        for name, values in found.items()
        if any(value != values[0] for value in values)
    }


def _is_changeable(name: str) -> bool:
    return any(name == field or name.startswith(f"{field}.") for field in _CHANGEABLE)


async def reached(
    store: StateStore, run_id: str, directory: Path, *, is_external: bool = False
) -> tuple[RunProgress, str]:
    """What a run has reached, from the journal or, where the store has lost it, from a checkpoint.

    Args:
        store: Store of the run.
        run_id: Its id.
        directory: Its folder.
        is_external: Whether a client makes its steps, which has no checkpoints here: what it logged
            is then read from the file of metrics.

    Returns:
        The progress, and where it was read, for people.

    Raises:
        NoWholeCheckpointError: The journal has no step, and no checkpoint can be read.
    """
    folder = directory / CHECKPOINTS_FOLDER
    of_journal = RunProgress.of_journal(await store.read_journal(run_id))
    steps = committed_steps(folder)
    if of_journal is not None and (not steps or steps[-1] <= of_journal.step):
        return of_journal, f"its journal: {of_journal.step} steps"
    refused: dict[int, str] = {}
    for step in reversed(steps):
        try:
            progress = RunProgress.of_marker(read_marker(folder, step), read_records(directory))
        except (OSError, ValueError, KeyError, TypeError) as error:
            # Where the run goes on, it is told of when the roles are to load it.
            refused[step] = (
                f"{checkpoint_folder(folder, step) / COMMITTED} cannot be read "
                f"({type(error).__name__}: {error})"
            )
            continue
        return progress, (
            f"the checkpoint of step {step}, since the store has lost the run's journal (a Redis "
            "keeps it through a restart with `appendonly yes`)"
        )
    if refused and (of_journal is None or of_journal.step == 0):
        raise NoWholeCheckpointError(directory, refused)
    if of_journal is None and is_external:
        progress = RunProgress()
        for record in read_records(directory):
            progress.logged(record)
        return progress, f"its file of metrics: {progress.step} steps"
    if of_journal is not None:
        return of_journal, f"its journal: {of_journal.step} steps"
    if read_records(directory):
        return (
            RunProgress(),
            "its recipe: the store has lost its journal, and no checkpoint is there",
        )
    return RunProgress(), "its recipe: it has made no step"


def read_records(directory: Path) -> list[dict[str, float]]:
    """Records of the steps of the run in a folder, as far as its file has them."""
    path, records = directory / METRICS_FILE, []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            # The last line of a process that was killed.
            continue
    return records
