"""Policy losses that are corrected for who sampled: weights, masks, and the gap that is told."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from support import oracles
from support.policy_loss_cases import FORMS, RANGES, WIDE, make_batch, run
from support.ragged_batches import random_batch

from rolemesh.engine.algorithms.losses.base import ModelOutputs, make_loss
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.specs import (
    GeometricRejectionSpec,
    MaskingSpec,
    OffPolicySpec,
    PolicyTermsSpec,
    PpoPolicyLossSpec,
    ReinforcePolicyLossSpec,
    TokenTruncationSpec,
)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize(
    "loss", [PpoPolicyLossSpec(), WIDE, ReinforcePolicyLossSpec()], ids=["ppo", "gspo", "reinforce"]
)
@pytest.mark.parametrize("normalize", [None, "batch"])
def test_samples_of_the_same_policy_need_no_correction(
    form: OffPolicySpec, loss: PolicyTermsSpec, normalize: str | None
) -> None:
    batch = make_batch()
    # Of REINFORCE the policy now must be that of the samples, too.
    batch.columns["proximal_logprobs"] = batch.columns["logprobs"]
    if isinstance(loss, ReinforcePolicyLossSpec):
        batch.columns["new"] = batch.columns["logprobs"]
    plain, plain_gradient, _ = run(batch, loss)
    part = form.model_copy(update={"normalize": normalize})
    found, gradient, metrics = run(batch, loss.model_copy(update={"off_policy": part}))
    assert found == plain
    assert torch.equal(gradient, plain_gradient)
    assert metrics["importance_weight_mean"] == pytest.approx(1.0)
    struck = {"importance_capped_fraction", "importance_masked_fraction"} & metrics.keys()
    assert [metrics[name] for name in struck] == [0.0]


def test_bounds_that_nothing_reaches_change_nothing() -> None:
    batch = make_batch()
    loose = PpoPolicyLossSpec(clip_low=0.999, clip_high=1e6)
    # Without clips the weight and the ratio multiply to the ratio to the samples.
    for form in (TokenTruncationSpec(cap=1e6), MaskingSpec(low=0, high=1e6)):
        plain, gradient, _ = run(batch, loose)
        found, found_gradient, _ = run(batch, loose.model_copy(update={"off_policy": form}))
        assert found == pytest.approx(plain, rel=1e-12)
        torch.testing.assert_close(found_gradient, gradient, rtol=1e-12, atol=1e-14)
    # Rows that all stay are not weighted; the update has no clip at its start.
    batch.columns["new"] = batch.columns["proximal_logprobs"]
    everything = GeometricRejectionSpec(low=0, high=1e6)
    found = run(batch, PpoPolicyLossSpec(off_policy=everything))[0]
    advantages = oracles.unmasked(batch.columns["advantages"], batch.masks)
    assert found == pytest.approx(-statistics.fmean(advantages), rel=1e-12)


def test_a_mask_takes_a_token_s_gradient_and_leaves_the_divisor() -> None:
    batch = random_batch([[True, True], [True, False], []], RANGES, 0)
    batch.columns["logprobs"] = [[-1.0, -1.0], [-1.0, -1.0], []]
    batch.columns["new"] = [[-1.0, -3.0], [-1.0, -1.0], []]
    batch.columns["proximal_logprobs"] = batch.columns["new"]
    batch.columns["advantages"] = [[1.0, 1.0], [1.0, 1.0], []]

    def gradient(form: OffPolicySpec) -> list[float]:
        return run(batch, PpoPolicyLossSpec(off_policy=form))[1].tolist()

    third = -1 / 3
    assert gradient(MaskingSpec()) == pytest.approx([third, 0, third, 0])
    assert gradient(MaskingSpec(level="sequence")) == pytest.approx([0, 0, third, 0])
    assert gradient(GeometricRejectionSpec()) == pytest.approx([0, 0, third, 0])
    assert gradient(GeometricRejectionSpec(low=0.36)) == pytest.approx([third, third, third, 0])
    # Divided by their mean the weights leave masked tokens out of it.
    assert gradient(MaskingSpec(normalize="batch")) == pytest.approx([-0.5, 0, -0.5, 0])
    assert gradient(GeometricRejectionSpec(normalize="batch")) == pytest.approx([0, 0, -1, 0])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_a_broken_log_prob_of_the_sampler_is_not_masked_away(form: OffPolicySpec) -> None:
    batch = random_batch([[True, True]], RANGES, 0)
    batch.columns["logprobs"] = [[math.nan, -1.0]]
    assert math.isnan(run(batch, PpoPolicyLossSpec(off_policy=form))[0])


def test_the_pass_at_the_start_stands_for_the_scored_column() -> None:
    batch = make_batch()
    batch.columns["proximal_logprobs"] = batch.columns["new"]
    form = TokenTruncationSpec(cap=1.2)
    scored, scored_gradient, metrics = run(batch, PpoPolicyLossSpec(off_policy=form))
    del batch.columns["proximal_logprobs"]
    spec = PpoPolicyLossSpec(off_policy=TokenTruncationSpec(cap=1.2, proximal="same_pass"))
    loss, gradient, own_metrics = run(batch, spec)
    assert loss == scored
    assert torch.equal(gradient, scored_gradient)
    assert own_metrics == metrics
    assert metrics["ratio_max"] == 1.0
    assert 0 < metrics["importance_capped_fraction"] < 1


def test_decoupled_metrics_are_those_of_the_definitions() -> None:
    batch = make_batch()
    _, _, metrics = run(batch, PpoPolicyLossSpec(off_policy=TokenTruncationSpec(cap=1.5)))
    new, sampled, proximal, advantages = (
        oracles.unmasked(batch.columns[name], batch.masks)
        for name in ("new", "logprobs", "proximal_logprobs", "advantages")
    )
    weights = [math.exp(p - s) for p, s in zip(proximal, sampled, strict=True)]
    ratios = [math.exp(n - p) for n, p in zip(new, proximal, strict=True)]
    pairs = list(zip(ratios, advantages, strict=True))
    expected = {
        "importance_weight_mean": statistics.fmean(min(w, 1.5) for w in weights),
        "importance_capped_fraction": sum(w > 1.5 for w in weights) / len(weights),
        "ratio_mean": statistics.fmean(ratios),
        "ratio_max": max(ratios),
        "approx_kl": statistics.fmean(r - 1 - math.log(r) for r in ratios),
        "clip_fraction_high": sum(a > 0 and r > 1.2 for r, a in pairs) / len(pairs),
        "clip_fraction_low": sum(a < 0 and r < 0.8 for r, a in pairs) / len(pairs),
        # How far the policy is from the one that sampled, whatever the update began with.
        "sampler_logprob_diff_max": max(abs(n - s) for n, s in zip(new, sampled, strict=True)),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-10)
    assert 0 < metrics["importance_capped_fraction"] < 1
    _, _, metrics = run(batch, PpoPolicyLossSpec(off_policy=MaskingSpec(low=0.6, high=1.5)))
    outside = [not 0.6 <= w <= 1.5 for w in weights]
    assert 0 < metrics["importance_masked_fraction"] < 1
    assert metrics["importance_masked_fraction"] == pytest.approx(statistics.fmean(outside))


@pytest.mark.parametrize("is_corrected", [False, True])
def test_the_gap_to_the_sampler_is_told_with_and_without_a_correction(is_corrected: bool) -> None:
    batch = make_batch()
    start, form = ("proximal_logprobs", MaskingSpec()) if is_corrected else ("new", None)
    _, _, shares = run(batch, PpoPolicyLossSpec(off_policy=form))
    metrics = make_loss(PpoPolicyLossSpec()).finished(shares)
    start_M, sampled_M = (
        oracles.unmasked(batch.columns[name], batch.masks) for name in (start, "logprobs")
    )
    logs = [p - s for p, s in zip(start_M, sampled_M, strict=True)]
    ratios = list(map(math.exp, logs))
    squares = statistics.fmean(r * r for r in ratios)
    expected = {
        "sampler_ratio_mean": statistics.fmean(ratios),
        "sampler_kl_k1": -statistics.fmean(logs),
        "sampler_kl_k3": statistics.fmean(math.exp(x) - 1 - x for x in logs),
        "sampler_chi_square": squares - 1,
        "effective_sample_fraction": statistics.fmean(ratios) ** 2 / squares,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-10)
    assert not any(name.startswith("age/") for name in metrics)


def test_the_gap_is_told_by_the_age_of_the_weights_that_sampled() -> None:
    batch = make_batch()
    experience = batch.experience(torch.float64)
    versions = [[10 - t for t in range(len(mask))] for mask in batch.masks]
    column = Column.ragged(ColumnKind.COMPLETION, versions, torch.int64)
    experience |= Experience({"policy_versions": column})
    loss = make_loss(PpoPolicyLossSpec())
    loss.policy_version = 11
    outputs = ModelOutputs(logprobs_N=batch.packed("new", torch.float64))
    _, shares = loss(outputs, experience, loss.scale_of(experience))
    metrics = loss.finished({name: float(number) for name, number in shares.items()})
    by_age: dict[int, list[float]] = {}
    for b, mask in enumerate(batch.masks):
        for t, counts in enumerate(mask):
            if counts:
                log = batch.columns["new"][b][t] - batch.columns["logprobs"][b][t]
                by_age.setdefault(min(1 + t, 4), []).append(math.exp(log) - 1 - log)
    total = sum(map(len, by_age.values()))
    expected = {f"age/{age}/fraction": len(numbers) / total for age, numbers in by_age.items()} | {
        f"age/{age}/sampler_kl_k3": statistics.fmean(numbers) for age, numbers in by_age.items()
    }
    assert set(by_age) == {1, 2, 3, 4}
    found = {name: number for name, number in metrics.items() if name.startswith("age/")}
    assert found == pytest.approx(expected, rel=1e-10)
