"""Estimators of the user: a function gives the advantages of a batch, the rest is as for ours.

Shape letters: B rows, N packed completion tokens. Everything is on the CPU, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rolemesh.engine.algorithms.estimators.estimation import EstimatorInput, estimator_for
from rolemesh.engine.algorithms.estimators.token_rewards import (
    BatchTokens,
    advantage_metrics,
    estimate,
    read_rows,
    shaped_rewards,
    token_rewards,
)
from rolemesh.engine.algorithms.groups import Groups
from rolemesh.engine.experience import ColumnKind, Experience
from rolemesh.engine.granted.own_functions import OwnFunction
from rolemesh.engine.specs import PythonEstimatorSpec


@dataclass(frozen=True, slots=True)
class JudgedBatch:
    """What an estimator of the user sees: the rows of a step that have a reward.

    Example: two rows of 2 and 3 completion tokens, of which the second row's first is masked::

        offsets = [0, 2, 5]
        mask_N = [1, 1, 0, 1, 1]
        scores_B = [1.0, 0.0]
        token_rewards_N = [0, 1.0, 0, 0, 0]
        to_each_token([0.5, -0.5]) == [0.5, 0.5, 0, -0.5, -0.5]
    """

    rewards_B: torch.Tensor
    """float64 [B], rewards, less the punishment of long completions."""
    scores_B: torch.Tensor
    """float64 [B], the same less the KL penalties of the row's tokens."""
    token_rewards_N: torch.Tensor
    """float64 [N], the reward on the row's last unmasked token, less each token's KL penalty."""
    mask_N: torch.Tensor
    """bool [N], 1 = sampled by the policy. Masked tokens get advantage 0, whatever is given."""
    offsets: torch.Tensor
    """int64 [B + 1]: row b owns tokens offsets[b] to offsets[b + 1] - 1."""
    groups: Groups
    """The rows of each prompt: index_B is the number of each row's group (-1 for a row without
    unmasked tokens, which takes no part); means, stds, to_rows."""
    columns: Mapping[str, Any]
    """What `reads` names: float64 [B] or [N] (finite; 0 at masked tokens), or a list of B texts."""

    def to_each_token(self, numbers_B: torch.Tensor) -> torch.Tensor:
        """[N], each row's number of [B] at its unmasked tokens, 0 at masked ones."""
        return numbers_B.repeat_interleave(self.offsets.diff()).masked_fill(~self.mask_N, 0)


@estimator_for(PythonEstimatorSpec)
def own_advantages(
    given: EstimatorInput, spec: PythonEstimatorSpec
) -> tuple[Experience, dict[str, float]]:
    """Calls `function(batch, **config)` with the `JudgedBatch` of a step, once and on one rank.

    It answers with advantages, floating [N], or with a mapping:

        advantages  floating [N], finite at unmasked tokens
        returns     floating [N], exactly if the spec says makes_returns
        metrics     finite numbers by name
    """
    function = given.function
    assert function is not None  # estimate_advantages gives one to a spec that names one
    tokens = BatchTokens.of(given.experience)
    rewards_B, metrics = shaped_rewards(given.experience, spec, tokens)
    earned = token_rewards(given, spec, tokens, rewards_B, metrics)
    batch = JudgedBatch(
        rewards_B=rewards_B,
        scores_B=earned.scores_B,
        token_rewards_N=earned.rewards_N,
        mask_N=tokens.mask_N,
        offsets=tokens.offsets,
        groups=Groups.of(given.experience, tokens.takes_part_B),
        columns={name: _read(given.experience, name, tokens) for name in spec.reads},
    )
    names = ("returns", "metrics") if spec.makes_returns else ("metrics",)
    answer = function.fields(function(batch), "advantages", names)
    advantages_N = _checked(function, answer["advantages"], "advantages", tokens)
    columns_N = {"advantages": advantages_N}
    if spec.makes_returns:
        if "returns" not in answer:
            raise function.wrong("no returns, but makes_returns is true: give both by name")
        columns_N["returns"] = _checked(function, answer["returns"], "returns", tokens)
    metrics = advantage_metrics(advantages_N, tokens.mask_N)
    ours = earned.metrics | metrics
    metrics |= _own_metrics(function, answer.get("metrics", {}), ours)
    return estimate(given, tokens, earned, columns_N, metrics)


def _read(experience: Experience, name: str, tokens: BatchTokens) -> Any:
    column = experience[name]
    if column.kind is ColumnKind.TEXT:
        return column.strings()
    if column.kind is ColumnKind.ROW:
        return read_rows(experience, name, tokens)
    return tokens.read(experience, name)


def _checked(function: OwnFunction, given: Any, what: str, tokens: BatchTokens) -> torch.Tensor:
    """Floating [N], 0 at masked tokens and finite at others."""
    size = len(tokens.mask_N)
    if not isinstance(given, torch.Tensor):
        raise function.wrong(
            f"{what} as a {type(given).__name__}: give a tensor of shape [{size}], one number for "
            "each completion token"
        )
    if given.shape != tokens.mask_N.shape or not given.dtype.is_floating_point:
        raise function.wrong(
            f"{what} of shape {list(given.shape)} and {given.dtype}: give floating numbers of "
            f"shape [{size}], one for each completion token (batch.to_each_token makes them of "
            "one a row)"
        )
    numbers_N = given.detach().to(tokens.mask_N.device).masked_fill(~tokens.mask_N, 0)
    bad = (~numbers_N.isfinite()).nonzero().flatten()
    if len(bad):
        at = int(bad[0])
        row = int((tokens.offsets <= at).sum()) - 1
        raise function.wrong(
            f"{what} {float(numbers_N[at])} at completion token {at - int(tokens.offsets[row])} of "
            f"row {row} ({len(bad)} of {tokens.num_unmasked} are not finite): give finite numbers"
        )
    return numbers_N


def _own_metrics(function: OwnFunction, given: Any, ours: Mapping[str, float]) -> dict[str, float]:
    if not isinstance(given, Mapping):
        raise function.wrong(f"metrics as a {type(given).__name__}: give numbers by name")
    for name, number in given.items():
        if name in ours:
            raise function.wrong(f"a metric called {name!r}, which is one of ours: name it apart")
        if not isinstance(number, int | float) or not math.isfinite(number):
            raise function.wrong(f"the metric {name!r} as {number!r}: give a finite number")
    return {name: float(number) for name, number in given.items()}
