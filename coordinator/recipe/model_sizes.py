"""Sizes of the models that a recipe names, from the headers of their files: no weight is read."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.engine.model_files import read_header
from rolemesh.engine.specs import ClassifierRewardSpec, ModelSpec, RewardSpec, named_sources

_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")


def models_of(recipe: Recipe) -> dict[str, list[ModelSpec]]:
    """The models that each role loads into the memory of its ranks, beside its sampler."""
    found: dict[str, list[ModelSpec]] = {}
    for role in recipe.roles:
        section = recipe.section(role)
        if isinstance(section, RewardSpec):
            sources = [one.source for one in named_sources(section.source)]
            found[role] = [one.model for one in sources if isinstance(one, ClassifierRewardSpec)]
        else:
            model = getattr(section, "model", None)
            found[role] = [model] if isinstance(model, ModelSpec) else []
    return found


def trained_models(recipe: Recipe) -> dict[str, ModelSpec]:
    """The model of each role whose weights change."""
    models = models_of(recipe)
    return {
        role: models[role][0]
        for role in recipe.roles
        if models[role] and getattr(recipe.section(role), "optimizer", None) is not None
    }


def num_parameters(folder: Path, num_layers: int | None = None) -> int | None:
    """Parameters of a model.

    Args:
        folder: Its Hugging Face folder.
        num_layers: Layers that are kept; None for all.

    Returns:
        Their number; None where the folder has no safetensors that can be read.
    """
    try:
        headers = [read_header(file) for file in sorted(folder.glob("*.safetensors"))]
        return sum(_elements(header, num_layers) for header in headers) if headers else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # What is wrong with it, the role says when it loads it.
        return None


def _elements(header: Mapping[str, Any], num_layers: int | None) -> int:
    total = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        layer = _LAYER.search(name)
        if num_layers is None or layer is None or int(layer[1]) < num_layers:
            total += math.prod(tensor["shape"])
    return total
