"""What `rolemesh init` is given as model and data: paths of this machine, or names at the hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rolemesh.coordinator.recipe.hub.hf_files import data_folder, model_folder
from rolemesh.coordinator.recipe.hub.hf_names import is_hf_name
from rolemesh.engine.specs import HELD_OUT_SPLITS

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?", re.ASCII)
"""ORG/NAME, with a revision or without."""


@dataclass(frozen=True, slots=True)
class GivenInput:
    """A model or data."""

    text: str
    """As a recipe names it."""
    path: Path
    """Where it lies here."""
    split: str | None = None
    """Split of the training rows, where the name says another one than `train`."""


def given_model(text: str) -> GivenInput:
    """A folder, or a model of the hub, which is fetched.

    A path that is there wins over a name that reads alike.

    Raises:
        RecipeError: The hub has no such model, or it cannot be had.
    """
    path = Path(text)
    if _HUB_NAME.fullmatch(text) and not path.exists() and not path.parent.exists():
        text = f"hf:{text}"
    if not is_hf_name(text):
        return GivenInput(str(path), path)
    return GivenInput(text, model_folder(text, "--model")[1])


def given_data(text: str) -> GivenInput:
    """A file or folder, or a data set of the hub, of which training and held-out rows are fetched.

    Raises:
        RecipeError: The hub has no such data set, or it cannot be had.
    """
    if not is_hf_name(text):
        return GivenInput(str(Path(text)), Path(text))
    name, path = data_folder(text, "--from", HELD_OUT_SPLITS)
    return GivenInput(text, path, None if name.split == "train" else name.split)
