"""What estimators estimate: their expectation over all draws is the gradient that they promise.

A policy of three outcomes, drawn n times for one prompt: all 3^n draws are gone through, and the
mean over rows of advantage * grad log pi is weighed by the probability of each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rolemesh.engine.algorithms.estimators.estimation import Controllers, estimate_advantages
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.specs import (
    EstimatorPartSpec,
    MaxRlSpec,
    PassAtKSpec,
    RlooSpec,
    RunningBaselineSpec,
)

LOGITS = (0.3, -0.7, -1.2)
BINARY = (0.0, 1.0, 0.0)
"""Rewards of the outcomes: one is right, with a probability of a quarter."""
GRADED = (-0.5, 2.0, 0.25)
TOLERANCE = 1e-6
"""Advantages come back in float32; all else is float64."""


def expected_gradient(
    spec: EstimatorPartSpec, rewards: Sequence[float], number: int, *, steps_before: Any = ()
) -> torch.Tensor:
    """Of the logits, float64 [3]: over all draws of that many rows for one prompt.

    `steps_before` are the rewards of batches that came before.
    """
    probs = torch.tensor(LOGITS, dtype=torch.float64).softmax(0)
    total = torch.zeros(3, dtype=torch.float64)
    for draw in itertools.product(range(3), repeat=number):
        controllers = Controllers.from_spec(spec)
        for before in steps_before:
            estimate_advantages(one_group(before), spec, controllers)
        found, _ = estimate_advantages(
            one_group([rewards[outcome] for outcome in draw]), spec, controllers
        )
        advantages_n = found["advantages"].values.double()
        # grad log softmax(logits)[outcome]
        scores_n3 = torch.eye(3, dtype=torch.float64)[list(draw)] - probs
        weight = math.prod(float(probs[outcome]) for outcome in draw)
        total += weight * (advantages_n[:, None] * scores_n3).mean(0)
    return total


def one_group(rewards: Sequence[float]) -> Experience:
    return Experience(
        {
            "rewards": Column(ColumnKind.ROW, torch.tensor(rewards)),
            "prompt_ids": Column(ColumnKind.ROW, torch.zeros(len(rewards), dtype=torch.int64)),
            "loss_mask": Column.ragged(ColumnKind.COMPLETION, [[True]] * len(rewards), torch.bool),
        }
    )


def gradient_of_the_best_of(k: int, rewards: Sequence[float]) -> torch.Tensor:
    """Of the expected best of k draws, by automatic differentiation of the sum over all of them."""
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    probs = logits.softmax(0)
    value = torch.zeros((), dtype=torch.float64)
    for draw in itertools.product(range(3), repeat=k):
        value = value + probs[list(draw)].prod() * max(rewards[outcome] for outcome in draw)
    (gradient,) = torch.autograd.grad(value, logits)
    return gradient


@pytest.mark.parametrize("rewards", [BINARY, GRADED], ids=["binary", "graded"])
@pytest.mark.parametrize(("k", "number"), [(2, 3), (2, 5), (3, 5), (4, 5)])
def test_pass_at_k_is_unbiased(k: int, number: int, rewards: tuple[float, ...]) -> None:
    torch.testing.assert_close(
        expected_gradient(PassAtKSpec(k=k), rewards, number),
        gradient_of_the_best_of(k, rewards),
        rtol=TOLERANCE,
        atol=TOLERANCE,
    )


@pytest.mark.parametrize("number", [2, 4, 5])
def test_maxrl_estimates_the_first_terms_of_the_log_likelihood(number: int) -> None:
    """The log of p is -sum of (1 - p)^k / k: the terms of k < n, each of them pass@k / k."""
    expected = sum(gradient_of_the_best_of(k, BINARY) / k for k in range(1, number))
    torch.testing.assert_close(
        expected_gradient(MaxRlSpec(), BINARY, number), expected, rtol=TOLERANCE, atol=TOLERANCE
    )


@pytest.mark.parametrize(
    ("spec", "steps_before"),
    [
        (RlooSpec(), ()),
        (RunningBaselineSpec(), ()),
        (RunningBaselineSpec(decay=0.5), ([1.0, 0.0, 0.5], [2.0])),
    ],
    ids=["rloo", "running_baseline at first", "running_baseline later"],
)
def test_a_baseline_that_does_not_know_the_row_leaves_the_gradient_of_the_mean(
    spec: EstimatorPartSpec, steps_before: Any
) -> None:
    torch.testing.assert_close(
        expected_gradient(spec, GRADED, 3, steps_before=steps_before),
        gradient_of_the_best_of(1, GRADED),
        rtol=TOLERANCE,
        atol=TOLERANCE,
    )
