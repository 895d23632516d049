"""Curricula: the order of an epoch as a pure function of (metadata of the rows, epoch, seed)."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rolemesh.engine.data.orders.by_seed import EpochOrder, shuffled
from rolemesh.engine.data.rows import DataInvalidError, PromptRow
from rolemesh.engine.granted.user_code import UserCodeError, load_named, raised_at
from rolemesh.engine.specs import CurriculumSpec, PythonCurriculumSpec, SortedCurriculumSpec

CurriculumFunction = Callable[[Sequence[Mapping[str, Any]], int, int], Sequence[int]]
"""(metadata of each row, epoch from 0, seed of the run) -> every row number once."""


def epoch_order(
    curriculum: CurriculumSpec | None,
    rows: Sequence[PromptRow],
    values: Sequence[Any] | None = None,
    *,
    seed: int,
    shuffle_seed: str,
    field: str,
) -> EpochOrder:
    """The order of each epoch of a source.

    Args:
        curriculum: Curriculum of the recipe; None shuffles.
        rows: Training rows of the source.
        values: What `sorting_values` found of them; None: not looked yet.
        seed: Seed of the run, for the user's function.
        shuffle_seed: Seed of the shuffle.
        field: Field of the source in the recipe, e.g. "data".

    Returns:
        A function that raises DataInvalidError when a user's function fails or gives no order.

    Raises:
        DataInvalidError: A row lacks the key to sort by, or the function cannot be loaded.
    """
    shuffle = shuffled(len(rows), shuffle_seed)
    if curriculum is None:
        return shuffle
    if isinstance(curriculum, SortedCurriculumSpec):
        found = sorting_values(curriculum, rows, field) if values is None else values
        return _sorted(curriculum, found or (), shuffle)
    return _called(curriculum, rows, seed, f"{field}.curriculum.function")


def sorting_values(
    curriculum: CurriculumSpec | None, rows: Sequence[PromptRow], field: str
) -> list[Any] | None:
    """What a curriculum sorts rows by, all numbers or all texts; None if it sorts by nothing.

    Raises:
        DataInvalidError: A row lacks the key to sort by, or the values have no order.
    """
    if not isinstance(curriculum, SortedCurriculumSpec):
        return None
    field = f"{field}.curriculum.by"
    values = [_value(row, curriculum.by, field) for row in rows]
    if len({isinstance(value, str) for value in values}) > 1:
        raise DataInvalidError(
            f"{field} is {curriculum.by!r}, which is a number in some rows and text in others: "
            "they have no common order"
        )
    return values


def _sorted(
    curriculum: SortedCurriculumSpec, values: Sequence[Any], shuffle: EpochOrder
) -> EpochOrder:
    def order(epoch: int) -> Sequence[int]:
        # sorted keeps rows with equal values in their shuffled order, also in reverse.
        order = sorted(shuffle(epoch), key=values.__getitem__, reverse=not curriculum.ascending)
        return array("i", order)

    return order


def _value(row: PromptRow, key: str, field: str) -> Any:
    value: Any = json.loads(row.metadata)
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            known = ", ".join(value) if isinstance(value, dict) else ""
            raise DataInvalidError(
                f"{field} is {key!r}, but the metadata of {row.where} has no {part!r}; it has "
                f"{known or 'nothing'}"
            )
        value = value[part]
    if isinstance(value, str) or (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    ):
        return value
    raise DataInvalidError(
        f"{field} is {key!r}, which is {value!r} in {row.where}: only numbers and texts have an "
        "order"
    )


def _called(
    curriculum: PythonCurriculumSpec, rows: Sequence[PromptRow], seed: int, field: str
) -> EpochOrder:
    function = _load_function(curriculum.function, field)
    metadata = [json.loads(row.metadata) for row in rows]

    def order(epoch: int) -> list[int]:
        try:
            order = [int(row) for row in function(metadata, epoch, seed)]
        except Exception as error:
            # Any error of the user's function is reported with its epoch.
            raise DataInvalidError(
                f"{field} {curriculum.function!r} failed for epoch {epoch}: "
                f"{type(error).__name__}: {error}{raised_at(error)}"
            ) from error
        if sorted(order) != list(range(len(rows))):
            raise DataInvalidError(
                f"{field} {curriculum.function!r} gave {len(order)} row numbers for epoch {epoch}, "
                f"which are not 0 to {len(rows) - 1} once each: return a permutation"
            )
        return order

    return order


def _load_function(name: str, field: str) -> CurriculumFunction:
    try:
        function = load_named(name, field)
    except UserCodeError as error:
        raise DataInvalidError(str(error)) from error
    if not callable(function):
        raise DataInvalidError(f"{field} is {name!r}, which is no function: name another")
    loaded: CurriculumFunction = function
    return loaded
