"""Rows that are not trained on never touch the baseline of the rows that are (verl#6452).

Rejected are rows whose loss_mask is False throughout, e.g. since an environment or a filter took
them out, and rows that no reward could be had for (is_judged). Both keep their place in the batch.
"""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch

from rolemesh.engine.algorithms.estimators.estimation import Controllers, estimate_advantages
from rolemesh.engine.algorithms.selection import select_groups
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.specs import (
    EstimatorPartSpec,
    EstimatorSpec,
    GdpoSpec,
    GroupEstimatorSpec,
    OnlineDpoSpec,
    OwnFunctionSpec,
    PassAtKSpec,
    ReinforcePlusPlusSpec,
    RewardSpreadSpec,
    RunningBaselineSpec,
)

PROMPTS = [4, 9, 4, 4, 9, 9, 4, 9, 4, 9]
REWARDS = [1.0, 0.0, 0.5, 0.0, 1.0, 0.25, 1.0, 1.0, 0.0, 0.0]
REJECTED = [2, 4, 8]
KEPT = torch.tensor([row for row in range(len(PROMPTS)) if row not in REJECTED])
MASKS = [[True, False, True], [True]] * 5


def compared_specs() -> list[EstimatorPartSpec]:
    """Every estimator whose result for a row depends on other rows' rewards, but users' own."""
    members, *_ = get_args(EstimatorSpec)
    settings: dict[Any, dict[str, Any]] = {
        GdpoSpec: {"weights": {"a": 1.0, "b": 0.5}},
        PassAtKSpec: {"k": 2},
    }
    others = (OnlineDpoSpec, ReinforcePlusPlusSpec, RunningBaselineSpec)
    return [
        one(**settings.get(one, {}))
        for one in get_args(members)
        if (issubclass(one, GroupEstimatorSpec) and not issubclass(one, OwnFunctionSpec))
        or one in others
    ]


EVERY = pytest.mark.parametrize("spec", compared_specs(), ids=lambda spec: spec.type)


def batch_of(rewards: list[float], how: str) -> Experience:
    """All rows, of which some are rejected."""
    masks = [
        [False] * len(mask) if how == "masked out" and row in REJECTED else mask
        for row, mask in enumerate(MASKS)
    ]
    numbers = torch.tensor(rewards)
    columns = {
        "prompt_ids": Column(ColumnKind.ROW, torch.tensor(PROMPTS)),
        "loss_mask": Column.ragged(ColumnKind.COMPLETION, masks, torch.bool),
        "rewards": Column(ColumnKind.ROW, numbers),
        "reward/a": Column(ColumnKind.ROW, numbers),
        "reward/b": Column(ColumnKind.ROW, (numbers - 0.5).abs()),
    }
    if how == "not judged":
        is_judged_B = torch.tensor([row not in REJECTED for row in range(len(PROMPTS))])
        columns["is_judged"] = Column(ColumnKind.ROW, is_judged_B)
    return Experience(columns)


def estimates(batch: Experience, spec: EstimatorPartSpec) -> tuple[Experience, dict[str, Any]]:
    """Of the rows that are kept, and the controllers' state after."""
    controllers = Controllers.from_spec(spec)
    found, _ = estimate_advantages(batch, spec, controllers)
    return found.select(KEPT) if found.num_rows == len(PROMPTS) else found, controllers.state_dict()


@EVERY
@pytest.mark.parametrize(
    ("how", "reward"),
    [
        ("masked out", -1000.0),
        ("masked out", 1000.0),
        ("not judged", 1000.0),
        ("not judged", math.nan),
    ],
)
def test_a_rejected_row_never_touches_the_baseline_of_others(
    spec: EstimatorPartSpec, how: str, reward: float
) -> None:
    rewards = [reward if row in REJECTED else REWARDS[row] for row in range(len(PROMPTS))]
    found, state = estimates(batch_of(rewards, how), spec)
    expected, expected_state = estimates(batch_of(REWARDS, "none").select(KEPT), spec)
    assert state == expected_state
    for name, column in expected.columns.items():
        assert torch.equal(found[name].values, column.values), name


@EVERY
def test_the_same_reward_does_touch_it_where_the_row_counts(spec: EstimatorPartSpec) -> None:
    """Otherwise the test above would hold for an estimator that looks at no other row."""
    rewards = [1000.0 if row in REJECTED else REWARDS[row] for row in range(len(PROMPTS))]
    found, _ = estimates(batch_of(rewards, "none"), spec)
    expected, _ = estimates(batch_of(REWARDS, "none"), spec)
    name = spec.makes()[0]
    assert not torch.equal(found[name].values, expected[name].values)


def test_a_rejected_row_lends_no_spread_to_its_group() -> None:
    """Dynamic sampling would else train on a group whose only difference is thrown away."""
    rewards = [1000.0 if row in REJECTED else 0.5 * PROMPTS[row] for row in range(len(PROMPTS))]
    for how in ("masked out", "not judged"):
        rows, number, metrics = select_groups(batch_of(rewards, how), RewardSpreadSpec(), 0)
        assert (len(rows), number, metrics["selection/groups"]) == (0, 0, 2)
    assert select_groups(batch_of(rewards, "none"), RewardSpreadSpec(), 0)[1] == 2


def test_a_group_that_is_kept_keeps_its_rejected_rows() -> None:
    """A step deals out whole groups; the mask keeps these rows out of the loss."""
    rows, number, _ = select_groups(batch_of(REWARDS, "masked out"), RewardSpreadSpec(), 1)
    assert (rows.tolist(), number) == ([0, 2, 3, 6, 8], 1)
