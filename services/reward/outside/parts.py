"""Rewards that come in parts: {"score": 1.0, "acc": 1} is the reward 1.0 with a part `acc` of 1.

`score` is the reward in every form. Each other number is a part: a metric of the step, and a number
beside the reward in samples. What is no number, such as a text or None, is left out of both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rolemesh.services.reward.outside.base import MAX_FLOAT32

SCORE = "score"
"""Key of the reward in an object."""

MAX_PARTS = 32
"""Most parts of a row's reward; more are refused."""

OWN_METRICS = frozenset(
    {
        *("mean", "std", "absent_rows", "failed_rows", "dropped_rows"),
        *("latency_p50_seconds", "latency_p99_seconds", "errors", "retries", "hedged"),
        *("cache_hits", "queue_peak"),
    }
)
"""Metrics that each source has by itself, so that no part is called so."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class PartsFaultError(ValueError):
    """An object is no reward with parts."""

    def __init__(self, found: str, remedy: str) -> None:
        """Takes the fault, which names the key, and the remedy."""
        super().__init__(f"{found}; {remedy}")
        self.found = found
        self.remedy = remedy


def split(value: Mapping[Any, Any], what: str, key: str = SCORE) -> tuple[Any, dict[str, float]]:
    """The reward in an object, as it stands there, and its parts.

    Example: {"score": 0.5, "acc": True, "pred": "42"} -> (0.5, {"acc": 1.0}).

    Args:
        value: The object.
        what: Name of it in messages, e.g. "the function's list at row 3".
        key: Key of the reward.

    Raises:
        PartsFaultError: It has no reward, or a number that can be no part.
    """
    if key not in value:
        raise PartsFaultError(
            f"{what} is an object with the keys {_shown(sorted(map(str, value)))}",
            f"give the reward as {key!r}, or a number alone",
        )
    parts = {}
    for name, part in value.items():
        number = _number(part)
        if name == key or number is None:
            continue
        shown = f"{what} has the part {_shown(name)}"
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise PartsFaultError(
                shown, "name it with 1 to 64 letters, digits and characters of '_.-'"
            )
        if name in OWN_METRICS:
            raise PartsFaultError(f"{shown}, a metric of every source", "give it another name")
        if not abs(number) <= MAX_FLOAT32:  # also NaN
            raise PartsFaultError(
                f"{shown}, which is {_shown(part)}", "give a finite float32, or leave the part out"
            )
        parts[str(name)] = float(number)
    if len(parts) > MAX_PARTS:
        raise PartsFaultError(f"{what} has {len(parts)} parts", f"give at most {MAX_PARTS}")
    return value[key], parts


def checked(given: Any, num_rows: int) -> list[dict[str, float]]:
    """Parts of rows that another process sent: one object a row, of numbers.

    Raises:
        ValueError: They are something else.
    """
    if (
        not isinstance(given, list)
        or len(given) != num_rows
        or not all(isinstance(one, Mapping) for one in given)
    ):
        raise ValueError(f"no {num_rows} objects of parts")
    return [split({**one, SCORE: 0.0}, "a row")[1] for one in given]


def means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each part over the rows that have it.

    Example: [{"acc": 1.0}, {"acc": 0.0, "form": 1.0}, {}] -> {"acc": 0.5, "form": 1.0}.
    """
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def _number(value: Any) -> float | None:
    """The value as a number, True as 1; None if it is none."""
    if hasattr(value, "item"):
        # 0-d tensors, and the scalars of numpy.
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError):
            return None
    return value if isinstance(value, int | float) else None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
