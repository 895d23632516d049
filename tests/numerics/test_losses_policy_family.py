"""Policy losses: value and gradient against loops over tokens.

What only the losses of 2025 and 2026 promise is in test_losses_policy_rules.py, what corrections
promise in test_losses_policy_corrections.py.
"""

from __future__ import annotations

import json
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracles, policy_oracles
from support.policy_loss_cases import FORMS, RANGES, WIDE, make_batch, run
from support.ragged_batches import RaggedBatch, pack, random_batch, random_masks

from rolemesh.engine.algorithms.losses.base import LossScale, ModelOutputs, make_loss
from rolemesh.engine.layout.payload import ColumnMissingError
from rolemesh.engine.specs import (
    Aggregation,
    CispoPolicyLossSpec,
    ClipCovPolicyLossSpec,
    DppoPolicyLossSpec,
    GmpoPolicyLossSpec,
    GspoPolicyLossSpec,
    KlCovPolicyLossSpec,
    MaskingSpec,
    PolicyTermsSpec,
    PpoPolicyLossSpec,
    ReinforcePolicyLossSpec,
    SapoPolicyLossSpec,
    TokenTruncationSpec,
    ToprPolicyLossSpec,
    VespoPolicyLossSpec,
)

GRADIENT_TOLERANCE = 1e-8
"""Error of central differences with a step of 1e-6 in float64."""
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Sums of some fifty numbers of size 1; in float32 also exp of numbers up to 2."""
AGGREGATIONS: tuple[Aggregation, ...] = (
    "token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_mean",
    "seq_sum_norm",
)
WIDE_TOKEN = GspoPolicyLossSpec(level="token", clip_low=0.3, clip_high=0.4)
SPECS: dict[str, PolicyTermsSpec] = {
    "decoupled_dual": PpoPolicyLossSpec(
        off_policy=TokenTruncationSpec(cap=0.8),
        **{"dual_clip": 1.5, "kl_in_loss": 0.1, "entropy_coefficient": 0.02},
    ),
    **{
        f"{name}_{form}{'_normalized' * (normalize is not None)}": spec.model_copy(
            update={"off_policy": part.model_copy(update={"normalize": normalize})}
        )
        for name, spec in (
            ("ppo", PpoPolicyLossSpec()),
            ("gspo_token", WIDE_TOKEN),
            ("cispo", CispoPolicyLossSpec(clip_high=0.3)),
            ("reinforce", ReinforcePolicyLossSpec()),
        )
        for form, part in FORMS.items()
        # What is normalized is the weights' own: the loss reads only what came of it.
        for normalize in ((None, "batch") if name in ("ppo", "reinforce") else (None,))
    },
    "ppo_same_pass": PpoPolicyLossSpec(
        off_policy=MaskingSpec(low=0.6, high=1.5, proximal="same_pass")
    ),
    "reinforce_scored": ReinforcePolicyLossSpec(
        off_policy=TokenTruncationSpec(cap=1.5, proximal="scored")
    ),
    "gspo": GspoPolicyLossSpec(),
    "gspo_wide": WIDE,
    "gspo_token": WIDE_TOKEN,
    "gspo_kl": WIDE.model_copy(update={"kl_in_loss": 0.2, "entropy_coefficient": 0.1}),
    "cispo": CispoPolicyLossSpec(),
    "cispo_two_sided": CispoPolicyLossSpec(clip_low=0.2, clip_high=0.3, kl_in_loss=0.1),
    "reinforce": ReinforcePolicyLossSpec(),
    "reinforce_capped_kl": ReinforcePolicyLossSpec(
        off_policy=TokenTruncationSpec(cap=1.2), kl_in_loss=0.1, kl_form="k2"
    ),
    "dppo_tv": DppoPolicyLossSpec(),
    "dppo_kl": DppoPolicyLossSpec(divergence="kl", kl_in_loss=0.1, entropy_coefficient=0.02),
    "dppo_one_sided": DppoPolicyLossSpec(divergence_low=0.05, divergence_high=0.9),
    "sapo": SapoPolicyLossSpec(),
    "sapo_steep": SapoPolicyLossSpec(gate_positive=3.0, gate_negative=5.0, kl_in_loss=0.1),
    "gmpo": GmpoPolicyLossSpec(),
    "gmpo_narrow": GmpoPolicyLossSpec(clip_low=0.1, clip_high=0.2, entropy_coefficient=0.1),
    "vespo": VespoPolicyLossSpec(),
    "vespo_flat": VespoPolicyLossSpec(power_positive=1.0, power_negative=1.0, kl_in_loss=0.1),
    "topr": ToprPolicyLossSpec(),
    "clip_cov": ClipCovPolicyLossSpec(covariance_share=0.1, covariance_low=0.2),
    "clip_cov_all": ClipCovPolicyLossSpec(
        covariance_share=1.0, covariance_low=-0.1, covariance_high=0.3, kl_in_loss=0.1
    ),
    "kl_cov": KlCovPolicyLossSpec(covariance_share=0.2),
    "kl_cov_one": KlCovPolicyLossSpec(penalty_coefficient=0.3, entropy_coefficient=0.1),
    **{
        f"{name}_{mode}": spec.model_copy(
            update={
                "aggregation": mode,
                "norm_length": 10 if mode == "seq_sum_norm" else None,
            }
        )
        for mode in AGGREGATIONS
        for name, spec in (
            ("gspo_wide", WIDE),
            ("cispo", CispoPolicyLossSpec()),
            ("reinforce", ReinforcePolicyLossSpec()),
            ("gmpo", GmpoPolicyLossSpec()),
            ("vespo", VespoPolicyLossSpec()),
            ("kl_cov", KlCovPolicyLossSpec(covariance_share=0.2)),
        )
    },
}
EVERY_SPEC = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def expected_gradient(batch: RaggedBatch, spec: PolicyTermsSpec) -> torch.Tensor:
    new = batch.columns["new"]
    slopes = policy_oracles.gradient(
        lambda rows: policy_oracles.policy_loss(rows, new, batch, spec), new
    )
    return pack(slopes, torch.float64)


@EVERY_SPEC
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["f64", "f32"])
def test_loss_is_that_of_a_loop_over_tokens(spec: PolicyTermsSpec, dtype: torch.dtype) -> None:
    batch = make_batch().rounded_to(dtype)
    loss, _, metrics = run(batch, spec, dtype)
    new = batch.columns["new"]
    expected = policy_oracles.policy_loss(new, new, batch, spec)
    assert loss == pytest.approx(expected, rel=TOLERANCE[dtype], abs=TOLERANCE[dtype])
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
    json.dumps(metrics, allow_nan=False)


@EVERY_SPEC
def test_gradient_is_that_of_finite_differences(spec: PolicyTermsSpec) -> None:
    batch = make_batch(112)
    _, gradient, _ = run(batch, spec)
    torch.testing.assert_close(
        gradient,
        expected_gradient(batch, spec),
        rtol=GRADIENT_TOLERANCE,
        atol=GRADIENT_TOLERANCE,
    )


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 7), max_size=6),
    hole=st.sampled_from([0.0, 0.4, 1.0]),
    name=st.sampled_from(sorted(SPECS)),
    seed=st.integers(0, 2**20),
)
def test_loss_holds_for_any_ragged_batch(
    lengths: list[int], hole: float, name: str, seed: int
) -> None:
    batch = random_batch(random_masks(lengths, seed, hole), RANGES, seed)
    loss, _, metrics = run(batch, SPECS[name])
    new = batch.columns["new"]
    expected = policy_oracles.policy_loss(new, new, batch, SPECS[name])
    assert loss == pytest.approx(expected, rel=1e-12, abs=1e-12)
    json.dumps(metrics, allow_nan=False)


@EVERY_SPEC
def test_without_unmasked_tokens_loss_and_gradient_are_zero(spec: PolicyTermsSpec) -> None:
    masked_and_empty: list[list[list[bool]]] = [[[False] * 4, [False]], [[], []]]
    for masks in masked_and_empty:
        loss, gradient, metrics = run(random_batch(masks, RANGES, 0), spec, torch.float32)
        assert loss == 0
        assert torch.count_nonzero(gradient) == 0
        assert set(metrics.values()) == {0.0}


@EVERY_SPEC
def test_masked_tokens_reach_neither_loss_nor_gradient(spec: PolicyTermsSpec) -> None:
    batch = make_batch()
    clean = run(batch, spec, torch.float32)
    for rows in batch.columns.values():
        for row, mask in zip(rows, batch.masks, strict=True):
            row[:] = [x if counts else math.nan for x, counts in zip(row, mask, strict=True)]
    poisoned = run(batch, spec, torch.float32)
    assert clean[0] == poisoned[0]
    assert torch.equal(clean[1], poisoned[1])
    assert clean[2] == poisoned[2]


@EVERY_SPEC
def test_an_absurd_log_ratio_gives_finite_gradients(spec: PolicyTermsSpec) -> None:
    batch = random_batch([[True] * 4], RANGES, seed=49)
    batch.columns["new"] = [[-0.1, -300.0, -0.1, -300.0]]
    batch.columns["logprobs"] = [[-300.0, -0.1, -300.0, -0.1]]
    batch.columns["reference_logprobs"] = batch.columns["new"]
    batch.columns["proximal_logprobs"] = [[-0.1, -300.0, -300.0, -0.1]]
    batch.columns["advantages"] = [[1.0, 1.0, -1.0, -1.0]]
    loss, gradient, metrics = run(batch, spec, torch.float32)
    assert math.isfinite(loss)
    assert bool(gradient.isfinite().all())
    json.dumps(metrics, allow_nan=False)


def test_columns_say_what_the_loss_reads() -> None:
    for spec in SPECS.values():
        loss, experience = make_loss(spec), make_batch().experience(torch.float32)
        assert loss.columns == spec.columns()
        outputs = ModelOutputs(
            logprobs_N=make_batch().packed("new", torch.float32),
            entropy_N=make_batch().packed("entropy", torch.float32),
        )
        loss(outputs, experience.require(loss.columns), LossScale.of(experience))
    form = TokenTruncationSpec()
    for spec in (PpoPolicyLossSpec, GspoPolicyLossSpec, CispoPolicyLossSpec):
        assert "proximal_logprobs" in spec(off_policy=form).columns()
        assert "proximal_logprobs" not in spec().columns()
    # By the policy now, unless the mean of the weights must be known before.
    assert "proximal_logprobs" not in ReinforcePolicyLossSpec(off_policy=form).columns()
    normalized = ReinforcePolicyLossSpec(off_policy=TokenTruncationSpec(normalize="batch"))
    assert "proximal_logprobs" in normalized.columns()


def test_a_missing_proximal_column_is_named() -> None:
    batch = make_batch()
    del batch.columns["proximal_logprobs"]
    with pytest.raises(ColumnMissingError, match="'proximal_logprobs' is missing"):
        run(batch, PpoPolicyLossSpec(off_policy=TokenTruncationSpec()))


# --- GSPO --------------------------------------------------------------------------------------


def with_one_advantage_a_row(batch: RaggedBatch) -> RaggedBatch:
    rows = batch.columns["advantages"]
    batch.columns["advantages"] = [[row[0]] * len(row) if row else [] for row in rows]
    return batch


def test_with_one_advantage_a_row_gspo_is_the_paper_s_mean_over_rows() -> None:
    batch = with_one_advantage_a_row(make_batch())
    of_rows = []
    for b, mask in enumerate(batch.masks):
        kept = [t for t, counts in enumerate(mask) if counts]
        if kept:
            new, old = (batch.columns[name][b] for name in ("new", "logprobs"))
            ratio = math.exp(sum(new[t] - old[t] for t in kept) / len(kept))
            advantage = batch.columns["advantages"][b][0]
            clipped = min(max(ratio, 0.7), 1.4)
            of_rows.append(min(ratio * advantage, clipped * advantage))
    assert run(batch, WIDE)[0] == pytest.approx(-statistics.fmean(of_rows), rel=1e-12)


def test_both_levels_of_gspo_agree_where_a_row_has_one_advantage() -> None:
    """In value and gradient, as section 4.3 of the paper says."""
    batch = with_one_advantage_a_row(make_batch())
    loss, gradient, metrics = run(batch, WIDE)
    token = run(batch, WIDE_TOKEN)
    assert loss == pytest.approx(token[0], rel=1e-12)
    torch.testing.assert_close(gradient, token[1], rtol=1e-12, atol=1e-14)
    assert metrics == pytest.approx(token[2], rel=1e-12)


def test_gspo_does_not_clip_within_a_row() -> None:
    """Two tokens far off in opposite directions: their row's ratio is 1."""
    batch = random_batch([[True, False, True]], RANGES, 0)
    batch.columns["logprobs"] = [[-1.0, -1.0, -1.0]]
    batch.columns["new"] = [[-0.5, -9.0, -1.5]]
    batch.columns["advantages"] = [[1.0, 1.0, 1.0]]
    loss, gradient, metrics = run(batch, GspoPolicyLossSpec())
    assert loss == pytest.approx(-1.0)
    assert gradient.tolist() == pytest.approx([-0.5, 0.0, -0.5])
    assert metrics["ratio_max"] == pytest.approx(1.0)
    assert run(batch, PpoPolicyLossSpec())[2]["clip_fraction_high"] == 0.5


def test_a_clipped_row_has_no_gradient_in_gspo() -> None:
    batch = random_batch([[True, True], [True, True]], RANGES, 0)
    batch.columns["logprobs"] = [[-1.0, -1.0], [-1.0, -1.0]]
    batch.columns["new"] = [[-0.9, -0.9], [-0.9, -0.9]]
    batch.columns["advantages"] = [[1.0, 1.0], [-1.0, -1.0]]
    _, gradient, metrics = run(batch, GspoPolicyLossSpec())
    assert gradient[:2].tolist() == [0.0, 0.0]
    assert bool((gradient[2:] > 0).all())
    assert metrics["clip_fraction_high"] == 0.5


# --- CISPO and REINFORCE -----------------------------------------------------------------------


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    batch = random_batch([[True, True, True]], RANGES, 0)
    batch.columns["new"] = [[-0.1, -1.0, -3.0]]
    batch.columns["logprobs"] = [[-4.0, -1.0, -1.0]]
    batch.columns["advantages"] = [[3.0, 3.0, 3.0]]
    _, gradient, metrics = run(batch, CispoPolicyLossSpec(clip_low=0.5, clip_high=1.0))
    assert gradient.tolist() == pytest.approx([-2.0, -1.0, -0.5])
    assert metrics["clip_fraction_high"] == pytest.approx(1 / 3)
    assert metrics["clip_fraction_low"] == pytest.approx(1 / 3)
    _, gradient, _ = run(batch, CispoPolicyLossSpec(clip_high=1.0))
    assert gradient.tolist() == pytest.approx([-2.0, -1.0, -math.exp(-2)])


def test_on_policy_all_losses_have_the_gradient_of_reinforce() -> None:
    batch = with_one_advantage_a_row(make_batch())
    batch.columns["new"] = batch.columns["logprobs"]
    batch.columns["proximal_logprobs"] = batch.columns["logprobs"]
    expected = run(batch, ReinforcePolicyLossSpec(aggregation="token_mean"))[1]
    for spec in SPECS.values():
        if isinstance(spec, ClipCovPolicyLossSpec):
            continue  # takes the gradient of some tokens, on-policy too
        bare = spec.model_copy(
            update={
                "aggregation": "token_mean",
                "norm_length": None,
                "kl_in_loss": 0.0,
                "entropy_coefficient": 0.0,
            }
        )
        cap = getattr(spec.off_policy, "cap", 1.0)
        is_cut = spec.off_policy is not None and spec.off_policy.normalize is None
        factor = min(1.0, cap) if is_cut else 1.0
        torch.testing.assert_close(run(batch, bare)[1], factor * expected, rtol=1e-12, atol=1e-14)


def test_reinforce_weighs_by_the_policy_now() -> None:
    batch = make_batch()
    _, _, plain = run(batch, ReinforcePolicyLossSpec())
    assert "importance_weight_mean" not in plain
    _, _, metrics = run(batch, ReinforcePolicyLossSpec(off_policy=TokenTruncationSpec(cap=1.2)))
    new, sampled = (
        oracles.unmasked(batch.columns[name], batch.masks) for name in ("new", "logprobs")
    )
    ratios = [math.exp(n - s) for n, s in zip(new, sampled, strict=True)]
    assert metrics["importance_weight_mean"] == pytest.approx(
        statistics.fmean(min(ratio, 1.2) for ratio in ratios)
    )
    assert metrics["importance_capped_fraction"] == pytest.approx(
        statistics.fmean(ratio > 1.2 for ratio in ratios)
    )
    assert metrics["ratio_mean"] == plain["ratio_mean"]
