"""Cutting a mini-batch into micro-batches changes neither loss, nor gradient, nor metrics."""

from __future__ import annotations

import random

import pytest
import torch
from support.ragged_batches import RaggedBatch, mixed_masks, pack, random_batch

from rolemesh.engine.algorithms.losses.base import (
    LossScale,
    MetricShares,
    ModelOutputs,
    make_loss,
)
from rolemesh.engine.experience import Column, ColumnKind, Experience, offsets_of
from rolemesh.engine.specs import (
    AggregatedLossSpec,
    CispoPolicyLossSpec,
    ClipCovPolicyLossSpec,
    DppoPolicyLossSpec,
    GeometricRejectionSpec,
    GmpoPolicyLossSpec,
    GspoPolicyLossSpec,
    KlCovPolicyLossSpec,
    MaskingSpec,
    PpoPolicyLossSpec,
    PpoValueLossSpec,
    ReinforcePolicyLossSpec,
    SapoPolicyLossSpec,
    SequenceTruncationSpec,
    TokenTruncationSpec,
    ToprPolicyLossSpec,
    VespoPolicyLossSpec,
)

NORM = {"aggregation": "seq_sum_norm", "norm_length": 10}
SPECS = {
    "policy_token_mean": PpoPolicyLossSpec(dual_clip=2.0, entropy_coefficient=0.1, kl_in_loss=0.1),
    "policy_seq_mean_token_sum": PpoPolicyLossSpec(aggregation="seq_mean_token_sum"),
    "policy_seq_mean_token_mean": PpoPolicyLossSpec(
        aggregation="seq_mean_token_mean", entropy_coefficient=0.1, kl_in_loss=0.1, kl_form="k1"
    ),
    "policy_seq_sum_norm": PpoPolicyLossSpec(**NORM),
    "policy_decoupled": PpoPolicyLossSpec(off_policy=TokenTruncationSpec(cap=1.5)),
    **{
        f"policy_{form.type}{'_normalized' * (normalize is not None)}": PpoPolicyLossSpec(
            off_policy=form.model_copy(update={"normalize": normalize})
        )
        for form in (
            SequenceTruncationSpec(),
            MaskingSpec(high=1.5),
            GeometricRejectionSpec(low=0.9, high=1.2),
        )
        for normalize in (None, "batch")
    },
    "gspo": GspoPolicyLossSpec(clip_low=0.3, clip_high=0.4, entropy_coefficient=0.1),
    "gspo_token_mean": GspoPolicyLossSpec(aggregation="token_mean"),
    "gspo_token": GspoPolicyLossSpec(level="token", kl_in_loss=0.1),
    "cispo": CispoPolicyLossSpec(clip_high=0.5),
    "reinforce": ReinforcePolicyLossSpec(off_policy=TokenTruncationSpec(cap=1.5)),
    "reinforce_normalized": ReinforcePolicyLossSpec(
        off_policy=TokenTruncationSpec(cap=1.5, normalize="batch")
    ),
    "reinforce_seq_sum_norm": ReinforcePolicyLossSpec(**NORM),
    "dppo": DppoPolicyLossSpec(divergence_low=0.5, divergence_high=0.5),
    "dppo_kl": DppoPolicyLossSpec(divergence="kl", kl_in_loss=0.1),
    "sapo": SapoPolicyLossSpec(),
    "gmpo": GmpoPolicyLossSpec(entropy_coefficient=0.1),
    "gmpo_token_mean": GmpoPolicyLossSpec(aggregation="token_mean"),
    "vespo": VespoPolicyLossSpec(),
    "topr": ToprPolicyLossSpec(),
    "clip_cov": ClipCovPolicyLossSpec(covariance_share=0.2, covariance_low=0.0),
    "kl_cov": KlCovPolicyLossSpec(covariance_share=0.2),
    "value_token_mean": PpoValueLossSpec(),
    "value_seq_mean_token_sum": PpoValueLossSpec(aggregation="seq_mean_token_sum"),
    "value_seq_mean_token_mean": PpoValueLossSpec(aggregation="seq_mean_token_mean"),
    "value_seq_sum_norm": PpoValueLossSpec(**NORM),
}
EVERY_SPEC = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
COLUMNS = ("logprobs", "proximal_logprobs", "reference_logprobs", "advantages", "values", "returns")
RELATIVE = {
    # A token's gradient is computed from that token and global counts alone, so it is the same
    # number in every cut; only sums over tokens (loss, metrics) are rounded in another order.
    torch.float64: 1e-12,
    torch.float32: 1e-6,
}


def make_batch() -> RaggedBatch:
    """Eight rows, among them an empty one and one that is all masked."""
    ranges = dict.fromkeys((*COLUMNS, "new", "entropy"), (-1.0, 1.0))
    return random_batch(mixed_masks(seed=71), ranges, seed=72)


def accumulate(
    batch: RaggedBatch,
    spec: AggregatedLossSpec,
    cut: list[list[int]],
    dtype: torch.dtype,
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, gradient by a shared parameter of all tokens' outputs, metrics."""
    experience = batch.experience(dtype)
    versions = [[t % 4 for t in range(len(mask))] for mask in batch.masks]
    column = Column.ragged(ColumnKind.COMPLETION, versions, torch.int64)
    experience |= Experience({"policy_versions": column})
    loss = make_loss(spec)
    loss.policy_version = 4
    # As ranks do: each counts its own rows.
    parts = (experience.require(loss.columns).select(torch.tensor(rows)) for rows in cut)
    scale = LossScale.total(loss.scale_of(part) for part in parts)
    scale = loss.completed(scale, experience, lambda facts: [facts])
    parameter = batch.packed("new", dtype).requires_grad_()
    entropy_parameter = batch.packed("entropy", dtype).requires_grad_()
    offsets = offsets_of(torch.tensor([len(mask) for mask in batch.masks])).tolist()
    total, metrics = 0.0, MetricShares()
    for rows in cut:
        index = torch.tensor(
            [i for row in rows for i in range(offsets[row], offsets[row + 1])], dtype=torch.int64
        )
        outputs = ModelOutputs(
            logprobs_N=parameter[index],
            entropy_N=entropy_parameter[index],
            values_N=parameter[index],
        )
        read = experience.require((*loss.columns, *loss.optional_columns))
        micro_batch = read.select(torch.tensor(rows))
        share, share_metrics = loss(outputs, micro_batch, scale)
        share.backward()
        total += float(share.detach())
        metrics.add(share_metrics)
    gradients = [p.grad for p in (parameter, entropy_parameter) if p.grad is not None]
    return total, torch.cat(gradients), metrics.totals()


@EVERY_SPEC
@pytest.mark.parametrize(
    ("dtype", "parts"),
    [(torch.float64, 1), (torch.float32, 2), (torch.float64, 5), (torch.float32, 8)],
    ids=str,
)
def test_micro_batches_add_up_to_the_mini_batch(
    spec: AggregatedLossSpec, dtype: torch.dtype, parts: int
) -> None:
    batch = make_batch()
    rows = list(range(len(batch.masks)))
    random.Random(parts).shuffle(rows)
    cut = [rows[part::parts] for part in range(parts)]
    whole_loss, whole_gradient, whole_metrics = accumulate(batch, spec, [sorted(rows)], dtype)
    loss, gradient, metrics = accumulate(batch, spec, cut, dtype)
    assert loss == pytest.approx(whole_loss, rel=RELATIVE[dtype], abs=RELATIVE[dtype])
    torch.testing.assert_close(gradient, whole_gradient, rtol=RELATIVE[dtype], atol=0)
    assert metrics == pytest.approx(whole_metrics, rel=RELATIVE[dtype], abs=RELATIVE[dtype])


@pytest.mark.parametrize("parts", [1, 2])
def test_normalized_weights_have_the_mean_one_over_the_mini_batch(parts: int) -> None:
    """With advantages of 1 and a ratio of 1 the loss is their mean."""
    batch = make_batch()
    batch.columns["new"] = batch.columns["proximal_logprobs"]
    batch.columns["advantages"] = [[1.0] * len(mask) for mask in batch.masks]
    rows = list(range(len(batch.masks)))
    cut = [rows[part::parts] for part in range(parts)]
    for name, spec in SPECS.items():
        if name.startswith("policy_") and name.endswith("_normalized"):
            loss, _, metrics = accumulate(batch, spec, cut, torch.float64)
            assert loss == pytest.approx(-1.0, rel=1e-12), name
            # Reported is what they were divided by.
            assert abs(metrics["importance_weight_mean"] - 1) > 0.05


def test_the_cut_really_is_uneven() -> None:
    """Otherwise a mean over micro-batches would pass the test above."""
    masks = make_batch().masks
    counts = [sum(map(sum, masks[part::5])) for part in range(5)]
    assert len(set(counts)) > 2
    assert int(pack(masks, torch.int64).sum()) == sum(counts)


def test_metrics_combine_by_sum_and_by_maximum() -> None:
    shares = MetricShares()
    assert shares.totals() == {}
    for numbers in (
        {"loss": 1.0, "ratio_max": 3.0},
        {"loss": 0.5, "ratio_max": 2.0, "entropy": 0.1},
    ):
        shares.add(
            {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}
        )
    assert shares.totals() == {"loss": 1.5, "ratio_max": 3.0, "entropy": 0.1}
