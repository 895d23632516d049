"""Least squares: the coefficients with which the simulators come closest to what was measured.

Each coefficient enters seconds linearly, or as its reciprocal (shares and bandwidths), but for the
larger one of two terms that a roofline takes. So the fit goes over reciprocals: Gauss-Newton, each
round of it linear least squares within physical bounds. The simulators themselves are the model:
there is no second set of formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rolemesh.coordinator.mapping.machines.coefficients import RATES, SHARES, Coefficients

_Vector = NDArray[np.float64]

_ROUNDS = 60
_LEAST_S = 1e-9
"""A prediction of nothing at all counts as this, so that it has a logarithm."""
_SETTLED = 1e-10
_DAMPING = 1e-9
"""Of a round, against its largest column: it keeps a coefficient that no row depends on where it
was, and where rows tell two apart the rounds come to the same as without it."""

_USUAL: Mapping[str, float] = {
    "link_latency_s": 1e-4,
    "network_latency_s": 1e-4,
    "decode_step_s": 1e-3,
    "decode_row_s": 1e-5,
    "call_s": 1e-2,
    "judge_row_s": 1e-4,
    "layer_s": 1e-4,
    "pass_s": 1e-3,
    "touched": 100.0,
    "optimizer_s": 1e-3,
    "crowd": 0.1,
    "row_s": 1e-4,
    "step_s": 1e-2,
}
"""Sizes in which changes are counted, so that all have about the same weight in a damped round."""


FITTABLE = RATES | frozenset(_USUAL)
"""Names of the coefficients that can be fitted."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Seconds that were measured, and how the simulators predict them."""

    name: str
    seconds: float
    predict: Callable[[Coefficients], float]
    weight: float = 1.0
    """Of the square of its error."""

    def error(self, coefficients: Coefficients) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predict(coefficients) / self.seconds - 1


def fitted(
    observations: Sequence[Observation], start: Coefficients, free: Collection[str]
) -> Coefficients:
    """The coefficients with the least weighted sum of squares of log(predicted / measured).

    Ratios, since seconds reach over five orders; their logarithms, since half and twice as much are
    equally wrong.

    Example: rows of seconds that the simulators have made give their coefficients back, where the
    rows tell all of them apart.

    Args:
        observations: What was measured.
        start: Where the search begins, and what stays where nothing depends on it.
        free: Names of those that may change. Shares stay in (0, 1], the others at 0 or above.

    Raises:
        ValueError: There is nothing to fit to, or no such coefficient.
    """
    names = sorted(free)
    unknown = set(names) - FITTABLE
    if unknown or not names or not observations:
        raise ValueError(
            f"{len(observations)} observations and the coefficients {', '.join(names) or 'none'} "
            f"(unknown: {', '.join(sorted(unknown)) or 'none'}): give some of each that exist"
        )
    measured = np.log([one.seconds for one in observations])
    weights = np.sqrt([one.weight for one in observations])
    sizes = np.array([_size(name, getattr(start, name)) for name in names])
    low = np.array([_lowest(name) for name in names]) / sizes

    def at(point: _Vector) -> Coefficients:
        values = {n: _value(n, x) for n, x in zip(names, point * sizes, strict=True)}
        return replace(start, **values)

    def predicted(point: _Vector) -> _Vector:
        coefficients = at(point)
        seconds = np.array([one.predict(coefficients) for one in observations])
        errors: _Vector = weights * (np.log(np.maximum(seconds, _LEAST_S)) - measured)
        return errors

    point = np.array([_linear(name, getattr(start, name)) for name in names]) / sizes
    here = predicted(point)
    best = float(np.sum(here**2))
    for _ in range(_ROUNDS):
        slopes = np.empty((len(observations), len(names)))
        for column in range(len(names)):
            moved = point.copy()
            moved[column] += 1e-4 * max(1.0, moved[column])
            slopes[:, column] = (predicted(moved) - here) / (moved[column] - point[column])
        target = _bounded(slopes, slopes @ point - here, point, low)
        # Slopes change on the way: a part of it may be better than all.
        for share in (1.0, 0.5, 0.25, 0.1, 0.02):
            tried = point + share * (target - point)
            there = predicted(tried)
            error = float(np.sum(there**2))
            if error < best:
                break
        else:
            break
        settled = bool(np.max(np.abs(tried - point)) < _SETTLED)
        point, here, best = tried, there, error
        if settled:
            break
    return at(point)


def _bounded(slopes: _Vector, wanted: _Vector, point: _Vector, low: _Vector) -> _Vector:
    """Least squares of slopes x = wanted near a point, x at least `low` (Lawson and Hanson)."""
    largest = float(np.max(np.abs(slopes), initial=1e-300))
    damping = _DAMPING**0.5 * largest * np.eye(len(point))
    matrix = np.vstack([slopes, damping])
    goal = np.concatenate([wanted, damping @ point]) - matrix @ low
    found = np.zeros(len(point))
    is_free = np.zeros(len(point), dtype=bool)
    for _ in range(10 * len(point)):
        pull = matrix.T @ (goal - matrix @ found)
        pull[is_free] = 0.0
        if is_free.all() or pull.max() <= 1e-12 * largest:
            break
        is_free[int(np.argmax(pull))] = True
        while True:
            solved = np.zeros(len(point))
            solved[is_free] = np.linalg.lstsq(matrix[:, is_free], goal, rcond=None)[0]
            below = is_free & (solved <= 0)
            if not below.any():
                found = solved
                break
            steps = found[below] / (found[below] - solved[below])
            found = found + float(steps.min()) * (solved - found)
            is_free &= found > 1e-14
    return found + low


def _linear(name: str, value: float) -> float:
    """In what seconds are linear."""
    return 1 / value if name in RATES else value


def _value(name: str, linear: float) -> float:
    if name not in RATES:
        return max(0.0, linear)
    return min(1.0, 1 / linear) if name in SHARES else 1 / linear


def _lowest(name: str) -> float:
    if name not in RATES:
        return 0.0
    # A bandwidth of 100 TB/s is as good as none.
    return 1.0 if name in SHARES else 1e-14


def _size(name: str, value: float) -> float:
    return 1 / value if name in RATES else _USUAL[name]
