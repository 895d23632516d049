"""Losses that clients bring as graphs, and the columns that these read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from rolemesh.coordinator.tinker.bodies import CreateCustomLoss
from rolemesh.coordinator.tinker.forms.forms import Datum, GradientCall, Ints, WireError
from rolemesh.engine.specs import TracedLossSpec
from rolemesh.engine.specs.columns import MAX_WIDTH
from rolemesh.engine.specs.losses.traced_losses import input_column
from rolemesh.rpc.experience.columns import ColumnData

MOST_LOSSES = 256
"""Of a session."""


@dataclass(frozen=True, slots=True)
class OwnLoss:
    """A loss that a client has brought."""

    section: Mapping[str, Any]
    """The loss `traced`, as a service takes it."""
    inputs: Mapping[str, int]
    """Ranks of what it reads of each datum, `logprobs` first."""
    metrics: tuple[str, ...]
    """What it tells, by `NAME:REDUCTION`."""


def loss_of(asked: CreateCustomLoss) -> OwnLoss:
    """The loss of a graph.

    Raises:
        WireError: No loss may be that; names the node.
    """
    section = {"type": "traced", "inputs": asked.inputs, "nodes": asked.graph.nodes}
    try:
        spec = TracedLossSpec.model_validate(section)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("graph", *first["loc"])))
        raise WireError(where, asked.name, first["msg"].removeprefix("Value error, ")) from error
    inputs = {one.name: one.rank for one in spec.inputs}
    return OwnLoss(section, inputs, tuple(spec.metrics))


def own_columns(
    call: GradientCall, targets: Sequence[Ints], inputs: Mapping[str, int]
) -> dict[str, ColumnData]:
    """Columns of what a graph reads of each datum.

    Args:
        call: Of a client.
        targets: int64 [T] or [T, K] of each datum.
        inputs: As `OwnLoss.inputs`.

    Raises:
        WireError: A datum lacks one, or has it of another shape.
    """
    rank = inputs["logprobs"]
    if any(target.ndim != rank for target in targets):
        raise WireError(
            "data.loss_fn_inputs.target_tokens",
            [list(target.shape) for target in targets][:3],
            f"the loss takes logprobs of rank {rank}",
        )
    return {
        input_column(name): ColumnData.completion(
            [
                _input(place, datum, len(target), name, wanted)
                for place, (datum, target) in enumerate(zip(call.data, targets, strict=True))
            ],
            _dtype(call, name),
        )
        for name, wanted in inputs.items()
        if name != "logprobs"
    }


def _dtype(call: GradientCall, name: str) -> Any:
    """int64 where all data have whole numbers, else float32."""
    found = [datum.inputs.get(name) for datum in call.data]
    is_whole = all(one is not None and one.dtype == np.int64 for one in found)
    return np.int64 if is_whole else np.float32


def _input(place: int, datum: Datum, length: int, name: str, rank: int) -> npt.NDArray[Any]:
    field, values = f"data.{place}.loss_fn_inputs.{name}", datum.inputs.get(name)
    if values is None:
        raise WireError(field, "none", "the loss reads it")
    if rank == 0 and values.size == 1:
        # A form on the wire does not tell [] from [1].
        values = values.reshape(())
    wanted = {0: "[]", 1: f"[{length}]", 2: f"[{length}, K], K up to {MAX_WIDTH}"}[rank]
    if (
        values.ndim != rank
        or (rank and len(values) != length)
        or (rank == 2 and not 1 <= values.shape[1] <= MAX_WIDTH)
    ):
        raise WireError(field, list(values.shape), f"the loss reads it in the shape {wanted}")
    if values.dtype != np.int64 and not np.isfinite(values).all():
        raise WireError(field, "NaN or infinite", "give finite numbers")
    # A number stands at each token.
    return np.full(length, values) if rank == 0 else values
