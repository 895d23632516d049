"""Estimators make new columns of a batch without a model; `estimate_advantages` finds one.

An estimator is a function registered for its spec. What it carries from step to step lies in
`Controllers`, which are part of the trainer's checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rolemesh.engine.algorithms.judged import judged_rows, with_absent_rows
from rolemesh.engine.algorithms.kl import KlController
from rolemesh.engine.algorithms.lagrange import LagrangeMultiplier
from rolemesh.engine.algorithms.moving_mean import MovingMean
from rolemesh.engine.experience import Experience
from rolemesh.engine.granted.own_functions import OwnFunction, OwnFunctions
from rolemesh.engine.specs import (
    EstimatorPartSpec,
    KlPenaltySpec,
    OwnFunctionSpec,
    RunningBaselineSpec,
    SafeRlhfSpec,
)

KL_CONTROLLER = "kl_controller"
"""Key of the KL controller's state."""

LAGRANGE_MULTIPLIER = "lagrange_multiplier"
"""Key of the Lagrange multiplier's state."""

RUNNING_BASELINE = "running_baseline"
"""Key of the running baseline's state."""


@dataclass(slots=True)
class Controllers:
    """What moves once with every estimate: part of the trainer's state.

    Example: `Controllers.from_spec(spec)`, `load_state_dict(saved)`, one `estimate_advantages`,
    then `saved.update(controllers.state_dict())`.
    """

    kl: KlController | None = None
    """Weight of the KL in the reward; None exactly if the spec has no kl_in_reward."""
    multiplier: LagrangeMultiplier | None = None
    """Weight of the cost; None exactly if the spec has no cost limit."""
    baseline: MovingMean | None = None
    """Mean score of the steps before; None exactly if the spec compares with none."""

    @staticmethod
    def from_spec(spec: EstimatorPartSpec) -> Controllers:
        """Those that the estimator needs, as they are at the start of a run."""
        kl_spec = spec.kl_in_reward if isinstance(spec, KlPenaltySpec) else None
        return Controllers(
            kl=None if kl_spec is None else KlController(kl_spec),
            multiplier=LagrangeMultiplier(spec) if isinstance(spec, SafeRlhfSpec) else None,
            baseline=MovingMean(spec) if isinstance(spec, RunningBaselineSpec) else None,
        )

    def check_fit(self, spec: EstimatorPartSpec) -> None:
        """Raises ValueError unless these are exactly the controllers that the spec needs."""
        kl_spec = spec.kl_in_reward if isinstance(spec, KlPenaltySpec) else None
        if (self.kl is None) != (kl_spec is None):
            have = "no controller" if self.kl is None else "a controller"
            raise ValueError(
                f"kl_in_reward is {kl_spec!r}, but there is {have}: make it with "
                "Controllers.from_spec(spec)"
            )
        for what, held, spec_class in (
            ("Lagrange multiplier", self.multiplier, SafeRlhfSpec),
            ("running baseline", self.baseline, RunningBaselineSpec),
        ):
            if (held is None) == isinstance(spec, spec_class):
                raise ValueError(
                    f"the estimator is {type(spec).__name__}, but there is "
                    f"{'no' if held is None else 'a'} {what}: make it with "
                    "Controllers.from_spec(spec)"
                )

    def state_dict(self) -> dict[str, Any]:
        """State by key, of those that there are: JSON-able."""
        state: dict[str, Any] = {}
        if self.kl is not None:
            state[KL_CONTROLLER] = self.kl.state_dict()
        if self.multiplier is not None:
            state[LAGRANGE_MULTIPLIER] = self.multiplier.state_dict()
        if self.baseline is not None:
            state[RUNNING_BASELINE] = self.baseline.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores those whose key is there; raises ValueError if a state does not fit."""
        if self.kl is not None and KL_CONTROLLER in state:
            self.kl.load_state_dict(state[KL_CONTROLLER])
        if self.multiplier is not None and LAGRANGE_MULTIPLIER in state:
            self.multiplier.load_state_dict(state[LAGRANGE_MULTIPLIER])
        if self.baseline is not None and RUNNING_BASELINE in state:
            self.baseline.load_state_dict(state[RUNNING_BASELINE])


@dataclass(frozen=True, slots=True)
class EstimatorInput:
    """What an estimator works on."""

    experience: Experience
    """The batch, with the columns of the spec."""
    controllers: Controllers
    """Those of the spec. An estimator moves them once, after everything that may fail."""
    baseline: Experience | None
    """The batch to compare with, of the spec's baseline_columns; None where it has none."""
    function: OwnFunction | None = None
    """The user's; None exactly if the spec names none."""


Estimator = Callable[[EstimatorInput, Any], tuple[Experience, dict[str, float]]]
"""Gives the columns that the spec makes, over the same rows, and metrics."""

_ESTIMATORS: dict[type[EstimatorPartSpec], Estimator] = {}


def estimator_for(spec_class: type[EstimatorPartSpec]) -> Callable[[Estimator], Estimator]:
    """Registers the decorated function as the estimator of a spec."""

    def register(estimator: Estimator) -> Estimator:
        if spec_class in _ESTIMATORS:
            raise ValueError(
                f"{spec_class.__name__} has an estimator already: {_ESTIMATORS[spec_class]}"
            )
        _ESTIMATORS[spec_class] = estimator
        return estimator

    return register


def estimate_advantages(
    experience: Experience,
    spec: EstimatorPartSpec,
    controllers: Controllers | None = None,
    baseline: Experience | None = None,
    own_functions: OwnFunctions | None = None,
) -> tuple[Experience, dict[str, float]]:
    """Computes what an update needs from rewards, values and log-probs. No model takes part.

    A row's reward falls on its last unmasked token. Where the spec sets `kl_in_reward`, each
    unmasked token loses coefficient * KL(policy || reference), and the controller then moves
    once, with the mean KL per row. A row without unmasked tokens has no place for its reward and
    takes no part; "advantages/rows_without_tokens" counts such rows.

    Rows that the column is_judged, where present, has False for are as if they were not there.

    Args:
        experience: With `spec.columns()`. The columns logprobs and reference_logprobs, where
            present, also give KL metrics without a penalty.
        spec: The estimator.
        controllers: Of this spec; None where it needs none.
        baseline: The batch to compare with, with `spec.baseline_columns()`; None exactly if there
            are none of these.
        own_functions: Those of the user; None: there are none.

    Returns:
        The columns `spec.makes()`: completion columns are float32 and 0 at masked tokens; and
        metrics. "kl/mean" is a token's, "kl/per_row" a row's; "advantages/mean" and "/std" are
        taken before any scaling over the batch; a standard deviation of fewer than two numbers,
        and the explained variance of returns that do not vary, are 0.

    Raises:
        ColumnMissingError: A column is missing; names it.
        ValueError: A number that counts is NaN or infinite (names column and row); no row is
            judged; controllers or baseline do not fit the spec; nothing is registered for the
            spec; or the user's function is not there, fails, or gives something else
            (UserCodeError).
    """
    estimator = _ESTIMATORS.get(type(spec))
    if estimator is None:
        known = sorted(spec_class.__name__ for spec_class in _ESTIMATORS)
        raise ValueError(f"no estimator for {type(spec).__name__}: give one of {known}")
    controllers = Controllers() if controllers is None else controllers
    controllers.check_fit(spec)
    check_baseline(spec, has_baseline=baseline is not None)
    function = None
    if isinstance(spec, OwnFunctionSpec):
        function = (own_functions or OwnFunctions()).of(spec)
    rows_J = judged_rows(experience)
    if rows_J is None:
        return estimator(EstimatorInput(experience, controllers, baseline, function), spec)
    if not len(rows_J):
        raise ValueError(
            f"is_judged is False in all {experience.num_rows} rows: no reward could be had, and "
            "nothing is left to learn from; look into the log of the reward service"
        )
    judged = experience.select(rows_J)
    columns, metrics = estimator(EstimatorInput(judged, controllers, baseline, function), spec)
    return with_absent_rows(columns, rows_J, experience), metrics


def check_baseline(spec: EstimatorPartSpec, *, has_baseline: bool) -> None:
    """Raises ValueError unless a baseline is there exactly if the estimator reads one."""
    needed = spec.baseline_columns()
    if needed and not has_baseline:
        raise ValueError(
            f"baseline is missing: {type(spec).__name__} compares with a second experience that "
            f"has the columns {list(needed)}; give one greedy row a prompt"
        )
    if has_baseline and not needed:
        raise ValueError(
            f"baseline is given, but {type(spec).__name__} compares with no second experience: "
            "leave it out, or take an estimator that reads it"
        )
