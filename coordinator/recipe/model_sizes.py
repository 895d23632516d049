"""Sizes of the models that a recipe names, from the headers of their files: no weight is read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.engine.layout.matrices import num_matrix_parameters
from rolemesh.engine.model_folders.adapter_config import adapted_shape, num_trained
from rolemesh.engine.model_folders.model_files import read_header
from rolemesh.engine.specs import (
    ClassifierRewardSpec,
    ModelSpec,
    MuonSpec,
    RewardSpec,
    named_sources,
)

_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
_MATRIX = re.compile(r".*\.(?:layers|h|blocks)\.\d+\.(.*\.)?(\w+)\.weight")


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


def num_trained_parameters(model: ModelSpec) -> int | None:
    """Parameters of a trained model that change: all, or with an adapter its factors.

    Returns:
        Their number; None where the folder has no safetensors that can be read. A score head beside
        an adapter, which has some thousands, is not among them.
    """
    adapter = model.adapter
    if adapter is None:
        return num_parameters(model.path, model.num_layers)
    try:
        shape = adapted_shape(model.path, adapter, num_layers=model.num_layers)
        if shape is not None:
            return num_trained(shape)
        headers = [read_header(file) for file in sorted(model.path.glob("*.safetensors"))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not headers:
        return None
    # Of a family that is not known here, every matrix of a layer may be a linear one.
    sides: Iterator[int] = (
        sum(tensor["shape"])
        for header in headers
        for name, tensor in header.items()
        if (matrix := _MATRIX.fullmatch(name)) is not None
        and len(tensor["shape"]) == 2
        and _is_kept(name, model.num_layers)
        and (adapter.targets == "all_linear" or matrix[2] in adapter.targets)
    )
    return adapter.rank * sum(sides)


def num_orthogonalised(recipe: Recipe, role: str) -> int:
    """Parameters of a role that Muon steps, and which have one moment in place of two.

    Of a family that is not known here, and whose matrices are found when it is loaded, none.
    """
    model = trained_models(recipe).get(role)
    if model is None or not isinstance(getattr(recipe.section(role), "optimizer", None), MuonSpec):
        return 0
    try:
        config = json.loads((model.path / "config.json").read_text())
        if model.num_layers is not None:
            config["num_hidden_layers"] = model.num_layers
        return num_matrix_parameters(config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0


def _is_kept(name: str, num_layers: int | None) -> bool:
    layer = _LAYER.search(name)
    return num_layers is None or layer is None or int(layer[1]) < num_layers


def _elements(header: Mapping[str, Any], num_layers: int | None) -> int:
    total = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        if _is_kept(name, num_layers):
            total += math.prod(tensor["shape"])
    return total
