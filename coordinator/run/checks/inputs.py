"""Checks of the files that a recipe names, before a service is started that needs them."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from rolemesh.coordinator.recipe.role_names import field_of
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.checks.model_folders import model_folders
from rolemesh.engine.model_folders.model_files import CONFIG_FILE
from rolemesh.engine.model_folders.vocabularies import check_same_vocabulary
from rolemesh.engine.specs import (
    DataSpec,
    HfDatasetSpec,
    JsonlSpec,
    MixtureSpec,
    ParquetSpec,
)

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""What may be meant as ORG/NAME of the hub."""


def check_paths(recipe: Recipe, roles: Collection[str]) -> None:
    """Raises ValueError when a service that we start would not find or read a file of the recipe.

    Services that run elsewhere see other disks, and check by themselves.
    """
    roles = sorted(roles)  # of two faults, every run names the same one first
    for model in model_folders(recipe, roles):
        path = model.path
        if not (path / CONFIG_FILE).is_file():
            what = f"has no {CONFIG_FILE}" if path.is_dir() else "is not a folder"
            raise ValueError(
                f"{model.field} is {str(path)!r}, which {what}: give a local Hugging Face model "
                f"folder, or hf:ORG/NAME for one of the hub{_maker_hint(path)} ({_where()})"
            )
        model.check()
    for role, teacher in recipe.teachers.items():
        if teacher.model is not None and recipe.actor is not None and {"actor", role} <= {*roles}:
            field = f"{field_of(role)}.model.path"
            check_same_vocabulary(recipe.actor.model.path, teacher.model.path, field=field)
    for role in roles:
        section = recipe.section(role)
        for name in ("data", "pretraining_data"):
            data: DataSpec | None = getattr(section, name, None)
            if data is not None:
                _check_data(f"{role}.{name}", data)


def _check_data(field: str, data: DataSpec) -> None:
    """Raises ValueError when a file or folder of a source is missing; does not read them."""
    where = f"({_where()})"
    if isinstance(data, MixtureSpec):
        for number, source in enumerate(data.sources):
            _check_data(f"{field}.sources.{number}.data", source.data)
    elif isinstance(data, HfDatasetSpec):
        folder = data.path if data.name is None else data.path / data.name
        if not folder.is_dir():
            named = f"{field}.path" if data.name is None else f"{field}.path with {field}.name"
            raise ValueError(
                f"{named} is {str(folder)!r}, which is no folder: give one that save_to_disk "
                f"wrote, or a copy of a data set's repository {where}"
            )
    elif isinstance(data, JsonlSpec | ParquetSpec):
        for name, path in (("path", data.path), ("held_out_path", data.held_out_path)):
            if path is None or path.is_file():
                continue
            if isinstance(data, JsonlSpec):
                raise ValueError(
                    f"{field}.{name} is {str(path)!r}, which is no file: give JSON lines, one "
                    f"object each{_maker_hint(path.parent)} {where}"
                )
            if not path.is_dir() or next(path.rglob("*.parquet"), None) is None:
                raise ValueError(
                    f"{field}.{name} is {str(path)!r}, which is neither a file nor a folder of "
                    f".parquet files: give one of them {where}"
                )


def _where() -> str:
    """Where relative paths start: at the folder of the process that makes the run."""
    return f"relative paths start at {Path.cwd()}"


def _maker_hint(path: Path) -> str:
    """How to get what a path may be meant to be: a folder of our recipes, or a model of the hub."""
    if _HUB_NAME.fullmatch(str(path)) and not path.parent.exists():
        return f"; did you mean hf:{path}?"
    if path.name == "SmolLM2-135M-Instruct":
        return f"; `python -m rolemesh.quickstart.smollm2 --out {path}` writes this one"
    if path.name == "form-judge":
        return "; `make judge` writes .models/form-judge"
    if path.parts[-2:] == ("teacher", "model"):
        return "; `make teacher` writes runs/teacher/model"
    if path.name == "teacher":
        return "; `make teacher-answers` writes .data/teacher"
    if path.name == "sums":
        return "; `make sums` writes .data/sums"
    return ""
