"""What DPPO, SAPO, GMPO, VESPO, TOPR, Clip-Cov and KL-Cov each promise, on batches made for it.

Value and gradient of all of them are held to loops in test_losses_policy_family.py.
"""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch
from support import oracles, policy_oracles
from support.ragged_batches import RaggedBatch, mixed_masks, random_batch

from rolemesh.engine.algorithms.losses.base import LossScale, ModelOutputs, make_loss
from rolemesh.engine.algorithms.losses.soft_policy_losses import binary_kl, binary_tv
from rolemesh.engine.specs import (
    ClipCovPolicyLossSpec,
    CovariancePolicyLossSpec,
    DppoPolicyLossSpec,
    GmpoPolicyLossSpec,
    GspoPolicyLossSpec,
    KlCovPolicyLossSpec,
    PolicyTermsSpec,
    PpoPolicyLossSpec,
    SapoPolicyLossSpec,
    ToprPolicyLossSpec,
    VespoPolicyLossSpec,
)


def rows(
    sampled: list[list[float]], new: list[list[float]], advantages: list[list[float]]
) -> RaggedBatch:
    """Log-probs when sampled and now, and advantages; no token is masked."""
    columns = {"logprobs": sampled, "new": new, "advantages": advantages}
    return RaggedBatch([[True] * len(row) for row in sampled], columns)


def run(batch: RaggedBatch, spec: PolicyTermsSpec) -> tuple[list[float], dict[str, float]]:
    """Gradient of the loss of each token by its log-prob, in float64, and metrics.

    The gradient is that of the sum: by token_mean it is multiplied by the number of tokens.
    """
    new = batch.packed("new", torch.float64).requires_grad_()
    experience = batch.experience(torch.float64)
    loss_of_spec = make_loss(spec.model_copy(update={"aggregation": "token_mean"}))
    scale = loss_of_spec.completed(LossScale.of(experience), experience, lambda facts: [facts])
    loss, metrics = loss_of_spec(ModelOutputs(logprobs_N=new), experience, scale)
    loss.backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    gradient: list[float] = (new.grad * scale.num_tokens).tolist()
    return gradient, {name: float(number.detach()) for name, number in metrics.items()}


# --- DPPO --------------------------------------------------------------------------------------


def test_dppo_masks_what_leaves_the_region_and_nothing_that_returns() -> None:
    low, high = math.log(0.3), math.log(0.7)
    batch = rows([[low, high, low, high]], [[high, low, high, low]], [[1.0, 1.0, -1.0, -1.0]])
    up, down = 0.7 / 0.3, 0.3 / 0.7
    gradient, metrics = run(batch, DppoPolicyLossSpec())
    assert gradient == pytest.approx([0.0, -down, up, 0.0])
    assert (metrics["clip_fraction_high"], metrics["clip_fraction_low"]) == (0.25, 0.25)
    assert metrics["divergence"] == pytest.approx(0.4)
    one_sided = DppoPolicyLossSpec(divergence_high=0.41)
    assert run(batch, one_sided)[0] == pytest.approx([-up, -down, up, 0.0])


def test_dppo_judges_the_paper_s_two_tokens_otherwise_than_ppo() -> None:
    """Section 4.2: a rare token becomes 100 times as likely, a certain one falls to 0.80."""
    batch = rows(
        [[math.log(1e-4), math.log(0.99)]], [[math.log(1e-2), math.log(0.8)]], [[1.0, -1.0]]
    )
    assert run(batch, PpoPolicyLossSpec())[0] == pytest.approx([0.0, 0.8 / 0.99])
    for divergence in ("tv", "kl"):
        spec = DppoPolicyLossSpec(divergence=divergence)
        assert run(batch, spec)[0] == pytest.approx([-100.0, 0.0])


def test_binary_divergences_are_those_of_two_outcomes() -> None:
    now, sampled = torch.tensor([0.8, 0.3, 0.5]).double(), torch.tensor([0.99, 0.6, 0.5]).double()
    torch.testing.assert_close(
        binary_tv(now.log(), sampled.log()), (now - sampled).abs(), rtol=1e-14, atol=1e-15
    )
    two, two_sampled = torch.stack([now, 1 - now]), torch.stack([sampled, 1 - sampled])
    expected = (two_sampled * (two_sampled / two).log()).sum(0)
    found = binary_kl(now.log(), sampled.log())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
    assert found[0] == pytest.approx(0.1810, abs=5e-5)


def test_binary_kl_is_finite_and_keeps_its_digits_at_certain_tokens() -> None:
    """In float32 1 - exp(-1e-6) has one digit. Certain now, and not before: a large divergence."""
    sampled, now = torch.tensor([-1e-6, -1e-6, 0.0, 0.0]), torch.tensor([-3e-6, 0.0, -1e-6, -300.0])
    found = binary_kl(now, sampled).double()
    p, q = math.exp(-3e-6), math.exp(-1e-6)
    exact = q * 2e-6 + (1 - q) * math.log((1 - q) / (1 - p))
    assert found[0] == pytest.approx(exact, rel=1e-3)
    assert bool(found.isfinite().all())
    assert found[3] == pytest.approx(300.0)


def test_dppo_s_thresholds_follow_the_divergence_and_are_checked() -> None:
    assert DppoPolicyLossSpec().thresholds == (0.15, 0.15)
    assert DppoPolicyLossSpec(divergence="kl", divergence_low=2.0).thresholds == (2.0, 0.05)
    with pytest.raises(ValueError, match=r"are \(0.15, 1.0\), but a divergence 'tv'"):
        DppoPolicyLossSpec(divergence_high=1.0)


# --- SAPO --------------------------------------------------------------------------------------


def test_sapo_s_gradient_fades_with_the_distance_and_never_stops() -> None:
    """Weights of arXiv 2511.20347: sech^2(tau (ratio - 1) / 2)."""
    log_ratios = [0.0, 0.5, -0.5, 1.5, 0.5]
    advantages = [1.0, 1.0, 1.0, 1.0, -1.0]
    batch = rows([[-2.0] * 5], [[-2.0 + each for each in log_ratios]], [advantages])
    spec = SapoPolicyLossSpec(gate_positive=2.0, gate_negative=4.0)
    gradient, metrics = run(batch, spec)
    weights = []
    for log_ratio, advantage, found in zip(log_ratios, advantages, gradient, strict=True):
        ratio, tau = math.exp(log_ratio), 2.0 if advantage > 0 else 4.0
        weights.append(1 / math.cosh(tau * (ratio - 1) / 2) ** 2)
        assert found == pytest.approx(-advantage * ratio * weights[-1])
    assert 0 < weights[3] < weights[1] < weights[0] == 1
    assert metrics["token_weight_mean"] == pytest.approx(statistics.fmean(weights))


# --- GMPO --------------------------------------------------------------------------------------


def test_gmpo_takes_the_gradient_of_the_clipped_token_alone() -> None:
    batch = rows([[-2.0] * 3, [-2.0] * 3], [[-1.0, -2.0, -1.9]] * 2, [[1.0] * 3, [-1.0] * 3])
    gradient, metrics = run(batch, GmpoPolicyLossSpec())
    clipped, whole = math.exp((0.4 + 0.0 + 0.1) / 3), math.exp((1.0 + 0.0 + 0.1) / 3)
    assert gradient == pytest.approx([0.0, -clipped, -clipped, whole, whole, whole])
    assert (metrics["clip_fraction_high"], metrics["clip_fraction_low"]) == (1 / 6, 0.0)
    assert metrics["ratio_max"] == pytest.approx(whole)


def test_without_a_clip_gmpo_is_gspo() -> None:
    ranges = {"new": (-2.0, -0.1), "logprobs": (-2.0, -0.1), "advantages": (-2.0, 2.0)}
    batch = random_batch(mixed_masks(7), ranges, 8)
    gmpo = GmpoPolicyLossSpec(clip_low=9.0, clip_high=9.0)
    gspo = GspoPolicyLossSpec(clip_low=0.999, clip_high=100.0)
    assert run(batch, gmpo)[0] == pytest.approx(run(batch, gspo)[0], rel=1e-12)


# --- VESPO and TOPR ----------------------------------------------------------------------------


@pytest.mark.parametrize(("advantage", "power", "decay"), [(1.5, 2.0, 3.0), (-1.5, 3.0, 2.0)])
def test_vespo_weighs_by_the_product_of_the_row_s_ratios(
    advantage: float, power: float, decay: float
) -> None:
    """Not by their mean: a row twice as long is twice as far away."""
    for length in (1, 2, 4):
        batch = rows([[-2.0] * length], [[-1.9] * length], [[advantage] * length])
        ratio = math.exp(0.1 * length)
        weight = ratio**power * math.exp(decay * (1 - ratio))
        gradient, metrics = run(batch, VespoPolicyLossSpec())
        assert gradient == pytest.approx([-weight * advantage] * length)
        assert metrics["token_weight_mean"] == pytest.approx(weight)
        assert metrics["ratio_mean"] == pytest.approx(ratio)


def test_vespo_lets_no_row_count_without_bound() -> None:
    """The kernel is largest at w = power / decay; rows of any age stay below that."""
    largest = (2 / 3) ** 2 * math.exp(3 * (1 - 2 / 3))
    for distance in (-400.0, -3.0, math.log(2 / 3), 0.0, 3.0, 400.0):
        batch = rows([[-500.0] * 2], [[-500.0 + distance / 2] * 2], [[1.0] * 2])
        weight = -run(batch, VespoPolicyLossSpec())[0][0]
        assert 0 <= weight <= largest * (1 + 1e-12)


def test_topr_counts_wanted_rows_in_full_and_lets_unlearned_ones_fade() -> None:
    far, near = [[-3.0] * 2], [[-1.0] * 2]
    for sampled, new, advantage, weight in (
        (near, far, 2.0, 1.0),  # wanted and unlikely by now: that is what it learns from
        (near, far, -2.0, math.exp(-4.0)),
        (far, near, -2.0, 1.0),  # unwanted and likelier by now: no more than once
        (near, near, -2.0, 1.0),
    ):
        gradient, metrics = run(rows(sampled, new, [[advantage] * 2]), ToprPolicyLossSpec())
        assert gradient == pytest.approx([-weight * advantage] * 2)
        assert metrics["token_weight_mean"] == pytest.approx(weight)


# --- Clip-Cov and KL-Cov -----------------------------------------------------------------------

RANGES = {"new": (-2.0, -0.1), "logprobs": (-2.0, -0.1), "advantages": (-2.0, 2.0)}


def chosen(batch: RaggedBatch, spec: CovariancePolicyLossSpec) -> list[bool]:
    """Which tokens the loss treats in its own way, told by its gradient alone."""
    bare = PpoPolicyLossSpec(clip_low=0.99, clip_high=1e9)
    plain, found = run(batch, bare)[0], run(batch, spec)[0]
    return [abs(a - b) > 1e-9 for a, b in zip(plain, found, strict=True)]


def unclipped(**fields: float) -> ClipCovPolicyLossSpec:
    return ClipCovPolicyLossSpec(clip_low=0.99, clip_high=1e9, **fields)


@pytest.mark.parametrize(("share", "number"), [(1e-6, 1), (0.05, 2), (0.3, 9), (1.0, 19)])
def test_kl_cov_penalises_the_share_with_the_highest_covariance(share: float, number: int) -> None:
    batch = random_batch([[True] * 9, [True] * 3, [], [True] * 15], RANGES, 3)
    spec = KlCovPolicyLossSpec(covariance_share=share, penalty_coefficient=0.7)
    expected = policy_oracles.chosen_tokens(batch, spec)
    assert len(expected) == number
    places = [(b, t) for b, mask in enumerate(batch.masks) for t in range(len(mask))]
    assert chosen(batch, spec) == [place in expected for place in places]
    gradient, metrics = run(batch, spec)
    plain = run(batch, PpoPolicyLossSpec(clip_low=0.99, clip_high=1e9))[0]
    for (b, t), found, bare in zip(places, gradient, plain, strict=True):
        pull = math.copysign(0.7, batch.columns["new"][b][t] - batch.columns["logprobs"][b][t])
        assert found == pytest.approx(bare + pull * ((b, t) in expected))
    assert metrics["covariance_chosen_fraction"] == pytest.approx(number / 27)


def test_equal_advantages_choose_no_token() -> None:
    batch = rows([[-2.0, -1.0], [-0.5]], [[-1.5, -1.2], [-0.4]], [[0.0, 0.0], [0.0]])
    gradient, metrics = run(batch, KlCovPolicyLossSpec(covariance_share=0.5))
    assert gradient == [0.0, 0.0, 0.0]
    assert metrics["covariance_chosen_fraction"] == 0.0


def test_the_metric_is_the_covariance_of_log_prob_and_advantage() -> None:
    batch = random_batch(mixed_masks(9), RANGES, 10)
    sampled, advantages = (
        oracles.unmasked(batch.columns[name], batch.masks) for name in ("logprobs", "advantages")
    )
    expected = statistics.covariance(sampled, advantages) * (len(sampled) - 1) / len(sampled)
    for spec in (KlCovPolicyLossSpec(), ClipCovPolicyLossSpec()):
        assert run(batch, spec)[1]["covariance"] == pytest.approx(expected, rel=1e-12)


def test_clip_cov_draws_from_the_range_alone() -> None:
    batch = random_batch([[True] * 40] * 10, RANGES, 4)
    scored = policy_oracles.chosen_tokens(
        batch, unclipped(covariance_share=1.0, covariance_low=0.3, covariance_high=0.8)
    )
    found = chosen(batch, unclipped(covariance_share=0.05, covariance_low=0.3, covariance_high=0.8))
    assert sum(found) == 20 < len(scored)
    assert {divmod(place, 40) for place, is_chosen in enumerate(found) if is_chosen} < scored
    # Where the range holds fewer tokens than the share, all of these and no others.
    found = chosen(batch, unclipped(covariance_share=0.9, covariance_low=0.3, covariance_high=0.8))
    assert sum(found) == len(scored) < 360
    nowhere = unclipped(covariance_share=0.9, covariance_low=50.0, covariance_high=51.0)
    assert not any(chosen(batch, nowhere))


def test_clip_cov_draws_evenly_also_among_tokens_that_are_alike() -> None:
    """4,000 certain tokens in 40 rows with one advantage each: the draw cannot tell by numbers.

    The counts of ten columns of 400 tokens are hypergeometric, with mean 40 and deviation 5.7; all
    within 5 deviations with odds of less than 1 in 100,000 against it.
    """
    advantages = [[1.0 + 0.01 * row] * 100 for row in range(40)]
    batch = rows([[0.0] * 100] * 40, [[-0.1] * 100] * 40, advantages)
    found = chosen(batch, unclipped(covariance_share=0.1, covariance_low=-1.0, covariance_high=1.0))
    assert sum(found) == 400
    for first in range(10):
        # Every tenth place of the rows.
        assert abs(sum(found[first::10]) - 40) < 5 * 5.7
    for first in range(0, 4000, 400):
        assert abs(sum(found[first : first + 400]) - 40) < 5 * 5.7


@pytest.mark.parametrize(
    "spec",
    [KlCovPolicyLossSpec(covariance_share=0.1), unclipped(covariance_share=0.1, covariance_low=0)],
    ids=lambda spec: spec.type,
)
def test_the_order_of_rows_chooses_no_token(spec: CovariancePolicyLossSpec) -> None:
    masks = [[True] * length for length in (5, 8, 2, 13)]
    batch = random_batch(masks, RANGES, 5)
    turned = RaggedBatch(
        masks[::-1], {name: column[::-1] for name, column in batch.columns.items()}
    )
    starts = (0, 5, 13, 15, 28)
    found = chosen(batch, spec)
    by_row = [found[a:b] for a, b in itertools.pairwise(starts)]
    assert sum(found) == 3
    assert chosen(turned, spec) == [each for row in by_row[::-1] for each in row]


def test_an_empty_range_of_covariances_is_refused() -> None:
    with pytest.raises(ValueError, match=r"covariance_low is 5.0 and covariance_high is 5.0"):
        ClipCovPolicyLossSpec(covariance_low=5.0)
