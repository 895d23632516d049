"""Groups with nothing to teach: whether they count in the loss is one named choice.

TRL#6365 and #6367: a loss that divides by the tokens of such groups, too, is smaller, and by how
much depends on how many there were. TRL#7068: their KL in the loss pulls, though nothing else does.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.ragged_batches import random_batch, random_masks

from rolemesh.engine.algorithms.estimators.estimation import estimate_advantages
from rolemesh.engine.algorithms.losses.base import LossScale, MetricShares, ModelOutputs, make_loss
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.specs import (
    CispoPolicyLossSpec,
    DrGrpoSpec,
    GdpoSpec,
    GroupAdvantageSpec,
    GrpoSpec,
    GspoPolicyLossSpec,
    MaxRlSpec,
    PassAtKSpec,
    PolicyTermsSpec,
    PpoPolicyLossSpec,
    ReinforcePlusPlusBaselineSpec,
    ReinforcePolicyLossSpec,
    RlooSpec,
)

PROMPTS = [1, 1, 1, 2, 2, 2, 3, 3, 3, 4]
"""Prompt 2 has equal rewards, and 4 stands alone."""
REWARDS = [1.0, 0.0, 0.25, 0.5, 0.5, 0.5, 0.0, 0.0, 1.0, 1.0]
TAUGHT = torch.tensor([0, 1, 2, 6, 7, 8])
LENGTHS = [3, 1, 4, 7, 2, 5, 2, 6, 1, 9]
TOLERANCE = 1e-12
"""float64: the same terms, summed in another order."""

ESTIMATORS: dict[str, tuple[type[GroupAdvantageSpec], dict[str, Any]]] = {
    "grpo": (GrpoSpec, {}),
    "dr_grpo": (DrGrpoSpec, {}),
    "rloo": (RlooSpec, {}),
    "pass_at_k": (PassAtKSpec, {"k": 2}),
    "maxrl": (MaxRlSpec, {}),
    "gdpo": (GdpoSpec, {"weights": {"a": 1.0, "b": 0.5}}),
    "reinforce_plus_plus_baseline": (ReinforcePlusPlusBaselineSpec, {}),
}
EVERY_ESTIMATOR = pytest.mark.parametrize("name", ESTIMATORS)
TERMS: dict[str, Any] = {"kl_in_loss": 0.1, "entropy_coefficient": 0.05}
LOSSES: dict[str, PolicyTermsSpec] = {
    "token_mean": PpoPolicyLossSpec(**TERMS),
    "seq_mean_token_mean": PpoPolicyLossSpec(aggregation="seq_mean_token_mean", **TERMS),
    "seq_mean_token_sum": ReinforcePolicyLossSpec(**TERMS),
    "seq_sum_norm": PpoPolicyLossSpec(aggregation="seq_sum_norm", norm_length=10, **TERMS),
    "gspo": GspoPolicyLossSpec(clip_low=0.3, clip_high=0.4, **TERMS),
    "cispo": CispoPolicyLossSpec(**TERMS),
}
EVERY_LOSS = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())


def make_batch() -> Experience:
    ranges = dict.fromkeys(("logprobs", "reference_logprobs", "new", "entropy"), (-1.0, 0.0))
    batch = random_batch(random_masks(LENGTHS, 5), ranges, 6).experience(torch.float64)
    rewards = torch.tensor(REWARDS)
    numbers = {"rewards": rewards, "reward/a": rewards, "reward/b": 2 * rewards}
    return batch | Experience(
        {
            "prompt_ids": Column(ColumnKind.ROW, torch.tensor(PROMPTS)),
            **{name: Column(ColumnKind.ROW, values) for name, values in numbers.items()},
        }
    )


def estimated(batch: Experience, name: str, **fields: Any) -> tuple[Experience, dict[str, float]]:
    spec_class, settings = ESTIMATORS[name]
    spec = spec_class(**settings, **fields)
    columns, metrics = estimate_advantages(batch, spec)
    assert tuple(sorted(columns.columns)) == tuple(sorted(spec.makes()))
    return batch | columns, metrics


def loss_of(
    batch: Experience, spec: PolicyTermsSpec, cuts: list[list[list[int]]]
) -> tuple[float, list[torch.Tensor], dict[str, float]]:
    """Loss, gradient by row of the log-probs, and metrics: ranks, each with its micro-batches."""
    loss = make_loss(spec)
    parts = [[batch.select(torch.tensor(rows)) for rows in of_rank] for of_rank in cuts]
    scale = LossScale.total(
        LossScale.of(batch.select(torch.tensor([*itertools.chain(*of_rank)]))) for of_rank in cuts
    )
    total, shares = 0.0, MetricShares()
    gradients: dict[int, torch.Tensor] = {}
    for of_rank, rows_of_rank in zip(parts, cuts, strict=True):
        for part, rows in zip(of_rank, rows_of_rank, strict=True):
            new_N = part["new"].values.clone().requires_grad_()
            entropy_N = part["entropy"].values.clone().requires_grad_()
            outputs = ModelOutputs(logprobs_N=new_N, entropy_N=entropy_N)
            share, metrics = loss(outputs, part.require(loss.columns), scale)
            share.backward()
            total += float(share.detach())
            shares.add(metrics)
            both_N = torch.stack((new_N.grad, entropy_N.grad))  # type: ignore[arg-type]
            lengths = part["loss_mask"].lengths().tolist()
            gradients |= dict(zip(rows, both_N.split(lengths, dim=1), strict=True))
    return total, [gradients[row] for row in sorted(gradients)], shares.totals()


def whole(batch: Experience) -> list[list[list[int]]]:
    return [[list(range(batch.num_rows))]]


@EVERY_ESTIMATOR
@EVERY_LOSS
def test_groups_that_are_left_out_are_as_if_they_had_not_been_sampled(
    name: str, loss: PolicyTermsSpec
) -> None:
    """Loss, gradient and metrics; KL and entropy of these groups with them."""
    batch, metrics = estimated(make_batch(), name, zero_variance="left_out")
    without, _ = estimated(make_batch().select(TAUGHT), name)
    assert metrics["groups/left_out"] == 2
    found, gradients, loss_metrics = loss_of(batch, loss, whole(batch))
    expected, expected_gradients, expected_metrics = loss_of(without, loss, whole(without))
    assert found == pytest.approx(expected, rel=TOLERANCE)
    assert loss_metrics == pytest.approx(expected_metrics, rel=TOLERANCE)
    for row, gradient in zip(TAUGHT.tolist(), expected_gradients, strict=True):
        torch.testing.assert_close(gradients[row], gradient, rtol=TOLERANCE, atol=0)
    for row in set(range(len(PROMPTS))) - set(TAUGHT.tolist()):
        assert not gradients[row].any()


@EVERY_LOSS
def test_groups_that_are_counted_stay_in_the_divisor_and_keep_kl_and_entropy(
    loss: PolicyTermsSpec,
) -> None:
    """The default: one gradient a token, whatever came of the other prompts of the batch."""
    batch, metrics = estimated(make_batch(), "grpo")
    assert "groups/left_out" not in metrics
    left_out, _ = estimated(make_batch(), "grpo", zero_variance="left_out")
    scale, scale_without = LossScale.of(batch), LossScale.of(left_out)
    assert scale.num_rows > scale_without.num_rows
    _, gradients, _ = loss_of(batch, loss, whole(batch))
    _, gradients_without, _ = loss_of(left_out, loss, whole(left_out))
    ratio = scale_without.num_rows / scale.num_rows
    if loss.aggregation == "token_mean":
        ratio = scale_without.num_tokens / scale.num_tokens
    for row in TAUGHT.tolist():
        torch.testing.assert_close(
            gradients[row], ratio * gradients_without[row], rtol=TOLERANCE, atol=0
        )
    assert gradients[3].any()


@pytest.mark.parametrize("zero_variance", ["counted", "left_out"])
@EVERY_LOSS
def test_neither_choice_depends_on_micro_batches_or_ranks(
    loss: PolicyTermsSpec, zero_variance: str
) -> None:
    batch, _ = estimated(make_batch(), "grpo", zero_variance=zero_variance)
    expected, expected_gradients, expected_metrics = loss_of(batch, loss, whole(batch))
    # One rank has nothing but rows of the two groups, and one micro-batch of another one, too.
    cuts = [[[3, 9], [4, 5]], [[0], [1, 6], [7]], [[2, 8]]]
    found, gradients, metrics = loss_of(batch, loss, cuts)
    assert found == pytest.approx(expected, rel=TOLERANCE)
    assert metrics == pytest.approx(expected_metrics, rel=TOLERANCE)
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=TOLERANCE, atol=0)


@EVERY_ESTIMATOR
def test_a_batch_with_nothing_to_teach_gives_a_loss_of_zero(name: str) -> None:
    rows = torch.tensor([3, 4, 5])
    batch, metrics = estimated(make_batch().select(rows), name, zero_variance="left_out")
    assert metrics["groups/left_out"] == 1
    found, gradients, _ = loss_of(batch, LOSSES["token_mean"], whole(batch))
    assert found == 0
    assert not torch.cat(gradients, dim=1).any()
