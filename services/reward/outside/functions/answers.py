"""Checks of what a reward function returned: it is a user's code, so it may be anything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rolemesh.services.reward.outside.base import MAX_FLOAT32
from rolemesh.services.reward.outside.parts import PartsFaultError, split

_SHOWN_CHARACTERS = 80


class FunctionFaultError(ValueError):
    """A function cannot be called, or it returned no list of rewards."""

    def __init__(self, found: str, remedy: str) -> None:
        """Takes the fault and the remedy."""
        super().__init__(f"{found}; {remedy}")
        self.found = found
        self.remedy = remedy


def rewards(
    value: Any, num_rows: int, what: str, *, may_be_none: bool
) -> tuple[list[float | None], list[dict[str, float]]]:
    """Reads a value as a list of rewards, of which each may be an object with its parts.

    Args:
        value: As of `numbers`; an entry may also be {"score": reward, <part>: number, ...}.
        num_rows: Number of entries that it must have.
        what: Name of the value in messages.
        may_be_none: Whether None (does not apply to this row) is allowed as a reward.

    Returns:
        The rewards, and the parts of each row.

    Raises:
        FunctionFaultError: It is no such list; the text names row and value.
    """
    if not isinstance(value, list | tuple) or not any(isinstance(one, Mapping) for one in value):
        return numbers(value, num_rows, what, may_be_none=may_be_none), [{}] * num_rows
    plain, parts = [], []
    for row, one in enumerate(value):
        found: dict[str, float] = {}
        if isinstance(one, Mapping):
            try:
                one, found = split(one, f"{what} at row {row}")
            except PartsFaultError as error:
                raise FunctionFaultError(error.found, error.remedy) from error
        plain.append(one)
        parts.append(found)
    return numbers(plain, num_rows, what, may_be_none=may_be_none), parts


def numbers(value: Any, num_rows: int, what: str, *, may_be_none: bool) -> list[float | None]:
    """Reads a value as a list of numbers.

    Args:
        value: A list or tuple, or a tensor or array of one dimension; its numbers may be 0-d.
        num_rows: Number of entries that it must have.
        what: Name of the value in messages, e.g. "the function's list".
        may_be_none: Whether None (does not apply to this row) is allowed.

    Raises:
        FunctionFaultError: It is no such list; the text names row and value.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise FunctionFaultError(
            f"{what} is {_shown(value)} of type {type(value).__name__}",
            "give a list with a number, or an object with 'score', for each completion",
        )
    if len(value) != num_rows:
        raise FunctionFaultError(
            f"{what} has {len(value)} entries for {num_rows} completions",
            "give exactly one number a completion, in their order",
        )
    found: list[float | None] = []
    for row, entry in enumerate(value):
        if entry is None and may_be_none:
            found.append(None)
        else:
            found.append(number(entry, f"{what} at row {row}", may_be_none=may_be_none))
    return found


def number(value: Any, what: str, *, may_be_none: bool = False) -> float:
    """Reads a value as a finite number; raises FunctionFaultError if it is none."""
    or_none = ", or None where the reward does not apply" if may_be_none else ""
    if hasattr(value, "item"):
        # 0-d tensors, and the scalars of numpy.
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError) as error:
            raise FunctionFaultError(
                f"{what} is no single number ({error})", "give a number"
            ) from error
    # bool is an int: True is 1.
    if not isinstance(value, int | float):
        raise FunctionFaultError(
            f"{what} is {_shown(value)} of type {type(value).__name__}", f"give a number{or_none}"
        )
    if not abs(value) <= MAX_FLOAT32:  # also NaN
        shown = value if isinstance(value, float) and not math.isfinite(value) else "too large"
        raise FunctionFaultError(
            f"{what} is {shown}",
            f"give a finite float32{or_none} (a judgement that failed must raise)",
        )
    return float(value)


def openrlhf(
    value: Any, num_rows: int
) -> tuple[list[float | None], list[dict[str, float]], dict[str, float]]:
    """Reads rewards, their parts and metrics from the answer of a function in OpenRLHF's form.

    The form is {"rewards": ..., "scores": ..., "extra_logs": {name: ...}}, each a list or tensor.
    Only rewards are required; older files return the rewards alone. Metrics are means over rows.

    Raises:
        FunctionFaultError: The answer has another form.
    """
    if not isinstance(value, Mapping):
        return *rewards(value, num_rows, "what the function gave", may_be_none=False), {}
    if "rewards" not in value:
        raise FunctionFaultError(
            f"the function gave an object with the keys {sorted(map(str, value))}",
            "it needs 'rewards', one number a completion",
        )
    found, parts = rewards(value["rewards"], num_rows, "'rewards'", may_be_none=False)
    metrics = {}
    if value.get("scores") is not None:
        scores = numbers(value["scores"], num_rows, "'scores'", may_be_none=False)
        metrics["scores"] = mean(scores)
    logs = value.get("extra_logs") or {}
    if not isinstance(logs, Mapping):
        raise FunctionFaultError(
            f"'extra_logs' is {_shown(logs)}", "give an object that holds a list by name"
        )
    for name, column in logs.items():
        what = f"'extra_logs' {name!r}"
        metrics[str(name)] = mean(numbers(column, num_rows, what, may_be_none=False))
    return found, parts, metrics


def mean(values: list[float | None]) -> float:
    """Mean of the values that are not None; at least one must not be None."""
    present = [value for value in values if value is not None]
    return math.fsum(present) / len(present)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
