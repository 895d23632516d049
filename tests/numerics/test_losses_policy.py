"""The PPO policy loss, its gradients and its metrics, against closed forms in plain Python."""

from __future__ import annotations

import json
import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracles
from support.ragged_batches import RaggedBatch, mixed_masks, pack, random_batch, random_masks

from rolemesh.engine.algorithms.losses.base import LossScale, ModelOutputs, make_loss
from rolemesh.engine.specs import Aggregation, PpoPolicyLossSpec

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["f64", "f32"])
RANGES = {
    "new": (-2.0, -0.1),
    "entropy": (0.0, 3.0),
    "logprobs": (-2.0, -0.1),
    "reference_logprobs": (-2.0, -0.1),
    "advantages": (-2.0, 2.0),
}
"""Ratios from 0.15 to 6.7: every branch of the clipped loss occurs."""
SPECS = {
    "plain": PpoPolicyLossSpec(),
    "asymmetric": PpoPolicyLossSpec(clip_low=0.1, clip_high=0.35),
    "dual_clip": PpoPolicyLossSpec(dual_clip=1.5),
    "entropy": PpoPolicyLossSpec(entropy_coefficient=0.02),
    "kl_k1": PpoPolicyLossSpec(kl_in_loss=0.1, kl_form="k1"),
    "kl_k2": PpoPolicyLossSpec(kl_in_loss=0.1, kl_form="k2"),
    "kl_k3": PpoPolicyLossSpec(kl_in_loss=0.1, kl_form="k3"),
    **{
        mode: PpoPolicyLossSpec(
            aggregation=mode,
            norm_length=10 if mode == "seq_sum_norm" else None,
            dual_clip=3.0,
            entropy_coefficient=0.01,
            kl_in_loss=0.05,
        )
        for mode in get_args(Aggregation)
    },
}
EVERY_SPEC = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def expected_loss(
    batch: RaggedBatch, spec: PpoPolicyLossSpec
) -> tuple[float, list[list[float]], list[list[float]]]:
    """Loss, gradient by log-probs and gradient by entropy."""
    losses, slopes, entropy_slopes = [], [], []
    for b, mask in enumerate(batch.masks):
        row, row_slopes = [], []
        for t in range(len(mask)):
            new, old, advantage, reference, entropy = (
                batch.columns[name][b][t]
                for name in ("new", "logprobs", "advantages", "reference_logprobs", "entropy")
            )
            loss, slope = oracles.policy_token_loss(
                new, old, advantage, spec.clip_low, spec.clip_high, spec.dual_clip
            )
            loss -= spec.entropy_coefficient * entropy
            loss += spec.kl_in_loss * oracles.kl(spec.kl_form, new, reference)
            slope += spec.kl_in_loss * oracles.kl_slope(spec.kl_form, new, reference)
            row.append(loss)
            row_slopes.append(slope)
        losses.append(row)
        slopes.append(row_slopes)
        entropy_slopes.append([-spec.entropy_coefficient] * len(mask))
    how = (batch.masks, spec.aggregation, spec.norm_length)
    return (
        oracles.aggregate(losses, *how),
        oracles.aggregate_gradient(slopes, *how),
        oracles.aggregate_gradient(entropy_slopes, *how),
    )


def run(
    batch: RaggedBatch, spec: PpoPolicyLossSpec, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, float]]:
    new = batch.packed("new", dtype).requires_grad_()
    entropy = batch.packed("entropy", dtype).requires_grad_()
    experience = batch.experience(dtype)
    loss, metrics = make_loss(spec)(
        ModelOutputs(logprobs_N=new, entropy_N=entropy), experience, LossScale.of(experience)
    )
    loss.backward()
    entropy_gradient = torch.zeros_like(entropy) if entropy.grad is None else entropy.grad
    assert new.grad is not None
    numbers = {name: float(number.detach()) for name, number in metrics.items()}
    return loss.detach(), new.grad, entropy_gradient, numbers


def assert_matches(batch: RaggedBatch, spec: PpoPolicyLossSpec, dtype: torch.dtype) -> None:
    batch = batch.rounded_to(dtype)
    loss, gradient, entropy_gradient, metrics = run(batch, spec, dtype)
    expected, expected_gradient, expected_entropy_gradient = expected_loss(batch, spec)
    tolerance = TOLERANCE[dtype]
    assert float(loss) == pytest.approx(expected, rel=tolerance, abs=tolerance)
    assert metrics["loss"] == pytest.approx(expected, rel=tolerance, abs=tolerance)
    for actual, rows in (
        (gradient, expected_gradient),
        (entropy_gradient, expected_entropy_gradient),
    ):
        torch.testing.assert_close(
            actual.double(), pack(rows, torch.float64), rtol=tolerance, atol=tolerance
        )


@DTYPES
@EVERY_SPEC
def test_loss_and_gradient_are_the_closed_form(spec: PpoPolicyLossSpec, dtype: torch.dtype) -> None:
    assert_matches(random_batch(mixed_masks(seed=41), RANGES, seed=42), spec, dtype)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), max_size=6),
    hole=st.sampled_from([0.0, 0.4, 1.0]),
    name=st.sampled_from(sorted(SPECS)),
    seed=st.integers(0, 2**20),
)
def test_loss_and_gradient_hold_for_any_ragged_batch(
    lengths: list[int], hole: float, name: str, seed: int
) -> None:
    batch = random_batch(random_masks(lengths, seed, hole), RANGES, seed)
    assert_matches(batch, SPECS[name], torch.float64)


@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("advantage", [1.3, -1.3])
@pytest.mark.parametrize("ratio", [0.3, 0.7, 1.1, 1.4, 2.5])
def test_the_oracle_agrees_with_central_differences(
    ratio: float, advantage: float, dual_clip: float | None
) -> None:
    def loss(new: float) -> float:
        return oracles.policy_token_loss(new, -1.0, advantage, 0.2, 0.3, dual_clip)[0]

    new = -1.0 + math.log(ratio)
    _, slope = oracles.policy_token_loss(new, -1.0, advantage, 0.2, 0.3, dual_clip)
    # The step's own error is about 1e-10 a unit of curvature, rounding about 1e-11.
    assert oracles.central_difference(loss, new, 1e-5) == pytest.approx(slope, abs=1e-8)


def test_metrics_are_those_of_the_definitions() -> None:
    batch = random_batch(mixed_masks(seed=43), RANGES, seed=44)
    spec = PpoPolicyLossSpec(clip_low=0.1, clip_high=0.3, dual_clip=2.0, kl_in_loss=0.1)
    _, _, _, metrics = run(batch, spec, torch.float64)
    new, old, advantages, entropy, reference = (
        oracles.unmasked(batch.columns[name], batch.masks)
        for name in ("new", "logprobs", "advantages", "entropy", "reference_logprobs")
    )
    ratios = [math.exp(p - q) for p, q in zip(new, old, strict=True)]
    pairs = list(zip(ratios, advantages, strict=True))
    differences = [abs(p - q) for p, q in zip(new, old, strict=True)]
    num_tokens = len(new)
    clipped = [
        oracles.policy_token_loss(p, q, a, 0.1, 0.3, 2.0)[0]
        for p, q, a in zip(new, old, advantages, strict=True)
    ]
    expected = {
        "loss": metrics["loss"],
        "policy_loss": math.fsum(clipped) / num_tokens,
        "kl_loss": math.fsum(oracles.kl("k3", *pair) for pair in zip(new, reference, strict=True))
        / num_tokens,
        "entropy": math.fsum(entropy) / num_tokens,
        "ratio_mean": math.fsum(ratios) / num_tokens,
        "ratio_max": max(ratios),
        "approx_kl": math.fsum(r - 1 - math.log(r) for r in ratios) / num_tokens,
        "clip_fraction_high": sum(a > 0 and r > 1.3 for r, a in pairs) / num_tokens,
        "clip_fraction_low": sum(a < 0 and r < 0.9 for r, a in pairs) / num_tokens,
        "dual_clip_fraction": sum(a < 0 and r > 2.0 for r, a in pairs) / num_tokens,
        "sampler_logprob_diff_mean": math.fsum(differences) / num_tokens,
        "sampler_logprob_diff_max": max(differences),
        # Without a correction the policy now stands for that of the start.
        "sampler_ratio_mean": math.fsum(ratios) / num_tokens,
        "sampler_kl_k1": math.fsum(q - p for p, q in zip(new, old, strict=True)) / num_tokens,
        "sampler_kl_k3": math.fsum(r - 1 - math.log(r) for r in ratios) / num_tokens,
        "sampler_chi_square": math.fsum(r * r - 1 for r in ratios) / num_tokens,
    }
    assert metrics == pytest.approx(expected, rel=1e-10, abs=1e-10)
    assert min(metrics["clip_fraction_high"], metrics["clip_fraction_low"]) > 0


def test_an_unchanged_policy_has_ratio_one_and_the_plain_policy_gradient() -> None:
    batch = random_batch(mixed_masks(seed=45), RANGES, seed=46)
    batch.columns["new"] = batch.columns["logprobs"]
    _, gradient, _, metrics = run(batch, PpoPolicyLossSpec(), torch.float64)
    assert metrics["ratio_mean"] == pytest.approx(1.0, rel=1e-12)
    assert metrics["ratio_max"] == 1.0
    assert metrics["approx_kl"] == metrics["clip_fraction_high"] == 0.0
    num_tokens = sum(map(sum, batch.masks))
    slopes = [
        [-a / num_tokens if counts else 0.0 for a, counts in zip(row, mask, strict=True)]
        for row, mask in zip(batch.columns["advantages"], batch.masks, strict=True)
    ]
    torch.testing.assert_close(gradient, pack(slopes, torch.float64), rtol=1e-10, atol=1e-10)


@EVERY_SPEC
@pytest.mark.parametrize("masks", [[[False] * 4, [False]], [[], []]], ids=["masked", "empty"])
def test_without_unmasked_tokens_loss_and_gradient_are_zero(
    spec: PpoPolicyLossSpec, masks: list[list[bool]]
) -> None:
    loss, gradient, entropy_gradient, metrics = run(
        random_batch(masks, RANGES, 0), spec, torch.float32
    )
    assert float(loss) == 0
    assert torch.count_nonzero(gradient) == torch.count_nonzero(entropy_gradient) == 0
    assert set(metrics.values()) == {0.0}


@EVERY_SPEC
def test_masked_tokens_reach_neither_loss_nor_gradient(spec: PpoPolicyLossSpec) -> None:
    batch = random_batch(mixed_masks(seed=47), RANGES, seed=48)
    clean = run(batch, spec, torch.float32)
    for rows in batch.columns.values():
        for row, mask in zip(rows, batch.masks, strict=True):
            row[:] = [x if counts else math.nan for x, counts in zip(row, mask, strict=True)]
    poisoned = run(batch, spec, torch.float32)
    for before, after in zip(clean[:3], poisoned[:3], strict=True):
        assert torch.equal(before, after)
    assert clean[3] == poisoned[3]
    masked = ~pack(batch.masks, torch.bool)
    assert torch.count_nonzero(poisoned[1][masked]) == 0


@EVERY_SPEC
def test_an_absurd_log_ratio_gives_finite_gradients(spec: PpoPolicyLossSpec) -> None:
    """exp(300) overflows float32: the clipped branch must not see 0 * inf."""
    batch = random_batch([[True] * 4], RANGES, seed=49)
    batch.columns["new"] = [[-0.1, -300.0, -0.1, -300.0]]
    batch.columns["logprobs"] = [[-300.0, -0.1, -300.0, -0.1]]
    batch.columns["reference_logprobs"] = batch.columns["new"]
    batch.columns["advantages"] = [[1.0, 1.0, -1.0, -1.0]]
    loss, gradient, _, metrics = run(batch, spec, torch.float32)
    assert math.isfinite(float(loss))
    assert bool(gradient.isfinite().all())
    json.dumps(metrics, allow_nan=False)


def test_low_precision_outputs_are_computed_in_float32() -> None:
    batch = random_batch(mixed_masks(seed=51), RANGES, seed=52).rounded_to(torch.bfloat16)
    experience = batch.experience(torch.float32)
    new = batch.packed("new", torch.bfloat16).requires_grad_()
    outputs = ModelOutputs(logprobs_N=new, entropy_N=batch.packed("entropy", torch.bfloat16))
    loss, _ = make_loss(PpoPolicyLossSpec())(outputs, experience, LossScale.of(experience))
    loss.backward()
    assert loss.dtype == torch.float32
    assert new.grad is not None
    assert new.grad.dtype == torch.bfloat16
    expected, _, _ = expected_loss(batch, PpoPolicyLossSpec())
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_columns_say_what_the_loss_reads() -> None:
    assert make_loss(PpoPolicyLossSpec()).columns == ("logprobs", "advantages", "loss_mask")
    assert make_loss(PpoPolicyLossSpec(kl_in_loss=0.1)).columns[-1] == "reference_logprobs"
    for spec in SPECS.values():
        batch = random_batch(mixed_masks(seed=53), RANGES, seed=54)
        experience = batch.experience(torch.float32)
        loss = make_loss(spec)
        needs_entropy = spec.entropy_coefficient > 0
        assert (loss.needs, loss.needs_entropy) == ("logprobs", needs_entropy)
        outputs = ModelOutputs(
            logprobs_N=batch.packed("new", torch.float32),
            entropy_N=batch.packed("entropy", torch.float32),
        )
        loss(outputs, experience.require(loss.columns), LossScale.of(experience))


def test_missing_or_misshapen_outputs_are_refused() -> None:
    batch = random_batch(mixed_masks(seed=55), RANGES, seed=56)
    experience = batch.experience(torch.float32)
    scale, loss = LossScale.of(experience), make_loss(PpoPolicyLossSpec(entropy_coefficient=0.1))
    new = batch.packed("new", torch.float32)
    with pytest.raises(ValueError, match="entropy_N is None"):
        loss(ModelOutputs(logprobs_N=new), experience, scale)
    with pytest.raises(ValueError, match="logprobs_N has shape"):
        loss(ModelOutputs(logprobs_N=new[1:], entropy_N=new), experience, scale)


def test_an_entropy_that_nobody_asked_for_is_no_metric_and_changes_no_number() -> None:
    batch = random_batch(mixed_masks(seed=55), RANGES, seed=56)
    experience = batch.experience(torch.float32)
    scale, loss = LossScale.of(experience), make_loss(PpoPolicyLossSpec())
    assert (loss.needs_entropy, loss.reports_entropy) == (False, True)
    assert make_loss(PpoPolicyLossSpec(entropy_coefficient=0.1)).needs_entropy
    new, entropy = batch.packed("new", torch.float32), batch.packed("entropy", torch.float32)
    value, metrics = loss(ModelOutputs(logprobs_N=new, entropy_N=entropy), experience, scale)
    other_value, others = loss(ModelOutputs(logprobs_N=new), experience, scale)
    assert torch.equal(value, other_value)
    del metrics["entropy"]
    assert {name: float(number) for name, number in metrics.items()} == {
        name: float(number) for name, number in others.items()
    }
