"""Which parameters of a decoder are matrices of its layers, and which matrices lie in each.

Pure: no torch. Optimizers that orthogonalise ask it (`engine/train/optimizers/muon.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rolemesh.engine.layout.adapters import is_factor
from rolemesh.engine.layout.families import (
    ROUTER_WEIGHT,
    DecoderShape,
    parameter_shape,
    part_of_layer,
    projection_rows,
)
from rolemesh.engine.layout.family_records import FUSED_CUTS


def is_layer_matrix(shape: DecoderShape, name: str) -> bool:
    """Whether a parameter is the matrix of a linear map within a layer.

    Embedding and head are none, though they have two dimensions: what they look up or give is a
    row for each token. Nor is a router, whose rows are scores, each of one expert. Factors of an
    adapter are none either: their product is.
    """
    part = None if is_factor(name) else part_of_layer(shape, name)
    if part is None or part.suffix == ROUTER_WEIGHT:
        return False
    return len(parameter_shape(shape, name)) >= 2


def stacked_rows(shape: DecoderShape, name: str) -> tuple[tuple[int, int], ...]:
    """Rows [start, stop) of each projection that a matrix of a layer holds, in global coordinates.

    A stack of experts counts as one matrix [experts * rows, columns], of which each expert's
    projections are rows.

    Example: a qkv_proj of 4 query heads and 2 key-value heads of width 8 has (0, 32), (32, 48) and
    (48, 64); an o_proj of 32 rows has (0, 32).
    """
    found, start = [], 0
    part = part_of_layer(shape, name)
    assert part is not None  # else it is no matrix of a layer
    sizes = parameter_shape(shape, name)
    rows = projection_rows(shape, part) if part.cut in FUSED_CUTS else sizes[-2:-1]
    for number in rows * (sizes[0] if len(sizes) == 3 else 1):
        found.append((start, start + number))
        start += number
    return tuple(found)


def num_matrix_parameters(config: Mapping[str, Any]) -> int:
    """Numbers in all matrices of the layers.

    Args:
        config: config.json as a dict; num_hidden_layers already cut.

    Raises:
        UnsupportedFamilyError, ValueError: As `DecoderShape.from_config`.
    """
    shape = DecoderShape.from_config(config)
    return sum(
        math.prod(parameter.shape)
        for name, parameter in shape.manifest("float32").items()
        if is_layer_matrix(shape, name)
    )
