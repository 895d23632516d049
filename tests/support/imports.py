"""Recipes made of settings of other systems, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from rolemesh.coordinator.imports.forms.hydra import interpolated, overridden
from rolemesh.coordinator.imports.forms.reading import read_openrlhf
from rolemesh.coordinator.imports.recipe import Imported, imported
from rolemesh.coordinator.imports.source import Source, known
from rolemesh.coordinator.imports.values.trl_trainers import trl_trainer
from rolemesh.coordinator.recipe.loading import read_recipe
from rolemesh.coordinator.recipe.schema import Recipe

PREFIX = "actor_rollout_ref"


def of_verl(*overrides: str, rows: int | None = None) -> Imported:
    """What becomes of GRPO with verl and further overrides, on one GPU unless these say more."""
    given = (
        *("algorithm.adv_estimator=grpo", f"{PREFIX}.rollout.n=4", "trainer.n_gpus_per_node=1"),
        *(f"{PREFIX}.model.path=/models/mine", f"{PREFIX}.rollout.tensor_model_parallel_size=1"),
        *("trainer.total_training_steps=50", *overrides),
    )
    values = interpolated(overridden({}, list(given)), known("verl").defaults)
    return imported(Source("verl", values, options=_rows(rows)), "a test")


def of_openrlhf(arguments: str, rows: int | None = None) -> Imported:
    """What becomes of arguments of train_ppo_ray."""
    return imported(read_openrlhf([arguments], _rows(rows)), "a test")


def of_trl(values: Mapping[str, Any], *, rows: int | None = None, gpus: int = 1) -> Imported:
    """What becomes of a configuration of TRL."""
    source = Source("trl", values, options={**_rows(rows), "gpus": gpus})
    source.known = known("trl", trl_trainer(source))
    return imported(source, "a test")


def _rows(rows: int | None) -> dict[str, int]:
    return {} if rows is None else {"rows": rows}


def recipe_of(made: Imported) -> Recipe:
    """The recipe, validated."""
    return read_recipe(made.text, "the import")


def tree_of(made: Imported) -> dict[str, Any]:
    """The recipe as it is written."""
    tree: dict[str, Any] = yaml.safe_load(made.text)
    return tree
