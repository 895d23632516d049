"""What a scripted teacher among several makes of its route, right but for the faults it has."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rolemesh.rpc.errors import InvalidRequestError
from rolemesh.rpc.experience.columns import ColumnData, Columns

Has = Callable[[str], bool]
"""Whether the server has a fault."""


def weights_of(route: Any, metadata: Sequence[str], has: Has) -> dict[int, float]:
    """The rows that are not left to others, and what the teacher counts for in each."""
    said: dict[Any, Any] = {**dict.fromkeys(route.left), **route.weights}
    others = route.WhichOneof("others")
    weights = {}
    for row, text in enumerate(metadata):
        value = json.loads(text).get(route.field) if route.field else None
        weight = said.get(value, route.others_weight if others == "others_weight" else None)
        if value not in said and others is None and not has("takes_unknown"):
            raise InvalidRequestError("no teacher takes the row", reason="DATA_INVALID")
        if weight is not None:
            weights[row] = weight
    if not weights and has("refuses_nothing"):
        raise InvalidRequestError("no row to score", reason="DATA_INVALID")
    return weights


def routed(request: Any, columns: Columns, weights: Mapping[int, float], has: Has) -> Columns:
    """The columns of all rows as the rows that have a weight get them."""
    every = np.array([weights.get(row, 0.0) for row in range(columns.num_rows)], np.float32)
    factors = every if has("scales_by_weight") else every > 0
    if has("keeps_weight_zero"):
        factors = np.ones(len(every), np.bool_)
    made = {}
    for name, column in columns.items():
        values = (column.values.T * np.repeat(factors, column.lengths())).T
        made[name] = ColumnData(column.kind, values.astype(column.values.dtype), column.offsets)
    if request.route.with_weights and not has("no_weights"):
        told = every > 0 if has("weights_of_one") else every
        made[f"{request.column}_weights"] = ColumnData.row(told, np.float32)
    return Columns(made)
