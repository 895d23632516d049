"""REINFORCE++ and ReMax, against returns written out as series, and the running baseline."""

from __future__ import annotations

import json
import random
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import estimator_oracles, oracles
from support.estimator_oracles import GroupedBatch
from support.ragged_batches import mixed_masks, pack, random_batch, random_masks

from rolemesh.engine.algorithms.estimators.estimation import Controllers, estimate_advantages
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.layout.payload import ColumnMissingError
from rolemesh.engine.specs import (
    FixedKlSpec,
    KlForm,
    OverlongSpec,
    ReinforcePlusPlusSpec,
    RemaxSpec,
    RunningBaselineSpec,
)

TOLERANCE = 1e-5
"""Columns come back in float32; whitening divides by a deviation that may be small."""
PROMPTS = [50, 9, 50, 2, 9, 50, 50, 7]
FORMS = pytest.mark.parametrize("form", ["k1", "k2", "k3"])


def make_batch(seed: int = 91) -> GroupedBatch:
    batch = random_batch(
        mixed_masks(seed),
        {"logprobs": (-2.0, -0.1), "reference_logprobs": (-2.0, -0.1)},
        seed,
        {"rewards": (-1.0, 2.0)},
    )
    return GroupedBatch(batch.rounded_to(torch.float32), PROMPTS)


def greedy_rows(rewards: dict[int, float]) -> Experience:
    """A baseline in the order given."""
    return Experience(
        {
            "prompt_ids": Column(ColumnKind.ROW, torch.tensor(list(rewards), dtype=torch.int64)),
            "rewards": Column(ColumnKind.ROW, torch.tensor(list(rewards.values()))),
        }
    )


BASELINE = {7: 0.5, 1234: 9.0, 50: -0.25, 9: 2.0, 2: 0.0}
"""In no order, with a prompt that the batch does not have; exact in float32."""


def assert_close(actual: Column, rows: list[list[float]]) -> None:
    assert actual.values.dtype == torch.float32
    torch.testing.assert_close(
        actual.values.double(), pack(rows, torch.float64), rtol=TOLERANCE, atol=TOLERANCE
    )


@FORMS
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_reinforce_plus_plus_whitens_the_returns_of_tokens(form: KlForm, gamma: float) -> None:
    grouped = make_batch()
    batch = grouped.batch
    spec = ReinforcePlusPlusSpec(
        gamma=gamma, kl_in_reward=FixedKlSpec(coefficient=0.2), kl_form=form
    )
    result, metrics = estimate_advantages(grouped.experience(), spec, Controllers.from_spec(spec))
    penalties = estimator_oracles.kl_penalties(batch, 0.2, form)
    rewards = estimator_oracles.token_rewards(batch.row_columns["rewards"], batch.masks, penalties)
    returns = estimator_oracles.returns(rewards, batch.masks, gamma)
    assert tuple(result.columns) == spec.makes()
    assert_close(result["token_rewards"], rewards)
    assert_close(result["advantages"], oracles.whiten(returns, batch.masks))
    kept = oracles.unmasked(returns, batch.masks)
    assert metrics["advantages/mean"] == pytest.approx(statistics.fmean(kept))
    assert metrics["advantages/std"] == pytest.approx(statistics.stdev(kept))
    assert metrics["reward/mean"] == pytest.approx(statistics.fmean(batch.row_columns["rewards"]))


def test_reinforce_plus_plus_punishes_long_rows() -> None:
    shape = OverlongSpec(max_length=9, buffer=6)
    grouped = make_batch()
    result, _ = estimate_advantages(grouped.experience(), ReinforcePlusPlusSpec(overlong=shape))
    batch = grouped.batch
    rewards = [
        reward + estimator_oracles.overlong(len(mask), 9, 6, 1.0)
        for reward, mask in zip(batch.row_columns["rewards"], batch.masks, strict=True)
    ]
    assert_close(result["token_rewards"], estimator_oracles.token_rewards(rewards, batch.masks))


@FORMS
def test_remax_subtracts_the_greedy_reward_of_the_prompt(form: KlForm) -> None:
    grouped = make_batch()
    batch = grouped.batch
    spec = RemaxSpec(kl_in_reward=FixedKlSpec(coefficient=0.2), kl_form=form)
    result, metrics = estimate_advantages(
        grouped.experience(), spec, Controllers.from_spec(spec), greedy_rows(BASELINE)
    )
    penalties = estimator_oracles.kl_penalties(batch, 0.2, form)
    rewards = estimator_oracles.token_rewards(batch.row_columns["rewards"], batch.masks, penalties)
    returns = estimator_oracles.returns(rewards, batch.masks, 1.0)
    advantages = [
        [
            number - BASELINE[prompt] if counts else 0.0
            for number, counts in zip(row, mask, strict=True)
        ]
        for row, mask, prompt in zip(returns, batch.masks, PROMPTS, strict=True)
    ]
    assert_close(result["advantages"], advantages)
    assert_close(result["token_rewards"], rewards)
    assert metrics["reward/baseline_mean"] == pytest.approx(
        statistics.fmean(BASELINE[prompt] for prompt in PROMPTS)
    )
    kept = oracles.unmasked(advantages, batch.masks)
    assert metrics["advantages/mean"] == pytest.approx(statistics.fmean(kept))


def test_remax_without_a_penalty_is_reward_less_baseline_at_each_token() -> None:
    grouped = make_batch()
    result, _ = estimate_advantages(grouped.experience(), RemaxSpec(), None, greedy_rows(BASELINE))
    rewards = grouped.batch.row_columns["rewards"]
    expected = [
        [(rewards[b] - BASELINE[PROMPTS[b]]) if counts else 0.0 for counts in mask]
        for b, mask in enumerate(grouped.batch.masks)
    ]
    assert_close(result["advantages"], expected)


def test_several_greedy_rows_of_a_prompt_count_by_their_mean() -> None:
    grouped = make_batch()
    once = greedy_rows(BASELINE)
    twice = Experience.concat([once, greedy_rows({50: 0.75})])
    result, _ = estimate_advantages(grouped.experience(), RemaxSpec(), None, twice)
    other, _ = estimate_advantages(
        grouped.experience(), RemaxSpec(), None, greedy_rows(BASELINE | {50: 0.25})
    )
    assert torch.equal(result["advantages"].values, other["advantages"].values)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 5), max_size=9),
    hole=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**20),
)
def test_both_hold_for_any_ragged_batch(lengths: list[int], hole: float, seed: int) -> None:
    generator = random.Random(seed)
    masks = random_masks(lengths, seed, hole)
    batch = random_batch(masks, {}, seed, {"rewards": (-1, 1)}).rounded_to(torch.float32)
    prompts = [generator.choice([50, 9, 7]) for _ in lengths]
    experience = GroupedBatch(batch, prompts).experience()
    rewards = estimator_oracles.token_rewards(batch.row_columns["rewards"], masks)

    result, metrics = estimate_advantages(experience, ReinforcePlusPlusSpec(gamma=0.95))
    returns = estimator_oracles.returns(rewards, masks, 0.95)
    assert_close(result["advantages"], oracles.whiten(returns, masks))
    json.dumps(metrics, allow_nan=False)

    result, metrics = estimate_advantages(experience, RemaxSpec(), None, greedy_rows(BASELINE))
    returns = estimator_oracles.returns(rewards, masks, 1.0)
    expected = [
        [x - BASELINE[p] if counts else 0.0 for x, counts in zip(row, mask, strict=True)]
        for row, mask, p in zip(returns, masks, prompts, strict=True)
    ]
    assert_close(result["advantages"], expected)
    json.dumps(metrics, allow_nan=False)


def test_a_prompt_without_a_greedy_row_is_named() -> None:
    experience = make_batch().experience()
    rest = {prompt: reward for prompt, reward in BASELINE.items() if prompt not in (2, 9)}
    with pytest.raises(ValueError, match=r"no row for prompt_ids \[2, 9\] \(2 prompts"):
        estimate_advantages(experience, RemaxSpec(), None, greedy_rows(rest))


def test_a_baseline_must_be_there_exactly_for_remax() -> None:
    experience = make_batch().experience()
    with pytest.raises(ValueError, match="baseline is missing: RemaxSpec compares"):
        estimate_advantages(experience, RemaxSpec())
    with pytest.raises(ValueError, match="ReinforcePlusPlusSpec compares with no second"):
        estimate_advantages(experience, ReinforcePlusPlusSpec(), None, greedy_rows(BASELINE))


def test_a_bad_baseline_is_refused() -> None:
    experience = make_batch().experience()
    good = greedy_rows(BASELINE)
    with pytest.raises(ValueError, match="'rewards' is nan at row 0"):
        estimate_advantages(
            experience, RemaxSpec(), None, greedy_rows(BASELINE | {7: float("nan")})
        )
    with pytest.raises(ColumnMissingError, match="'rewards' is missing"):
        estimate_advantages(experience, RemaxSpec(), None, good.require(["prompt_ids"]))
    floats = Column(ColumnKind.ROW, good["prompt_ids"].values.double())
    with pytest.raises(ValueError, match=r"'prompt_ids' has type torch\.float64"):
        estimate_advantages(
            experience, RemaxSpec(), None, good | Experience({"prompt_ids": floats})
        )


@pytest.mark.parametrize("coefficient", [0.0, 0.2])
def test_the_running_baseline_is_the_mean_score_of_the_steps_before(coefficient: float) -> None:
    """The first step's rows are each compared with the mean of the others."""
    kl_spec = FixedKlSpec(coefficient=coefficient) if coefficient else None
    spec = RunningBaselineSpec(
        decay=0.75, kl_in_reward=kl_spec, overlong=OverlongSpec(max_length=9, buffer=6)
    )
    controllers = Controllers.from_spec(spec)
    baseline = None
    for seed in (91, 92, 93, 94):
        grouped = make_batch(seed)
        batch = grouped.batch
        rewards = [
            reward + estimator_oracles.overlong(len(mask), 9, 6, 1.0)
            for reward, mask in zip(batch.row_columns["rewards"], batch.masks, strict=True)
        ]
        penalties = estimator_oracles.kl_penalties(batch, coefficient, "k1")
        earned = estimator_oracles.token_rewards(rewards, batch.masks, penalties)
        scores = [sum(row) for row in earned]
        counted = [score for score, mask in zip(scores, batch.masks, strict=True) if any(mask)]
        assert len(counted) < len(scores), "otherwise a case is not seen"
        mean = statistics.fmean(counted)
        result, metrics = estimate_advantages(grouped.experience(), spec, controllers)
        expected = []
        for score, mask in zip(scores, batch.masks, strict=True):
            others = (sum(counted) - score) / (len(counted) - 1)
            number = score - (others if baseline is None else baseline)
            expected.append([number if counts else 0.0 for counts in mask])
        assert_close(result["advantages"], expected)
        assert_close(result["token_rewards"], earned)
        assert metrics["reward/baseline_mean"] == pytest.approx(
            mean if baseline is None else baseline
        )
        kept = oracles.unmasked(expected, batch.masks)
        assert metrics["advantages/mean"] == pytest.approx(statistics.fmean(kept))
        baseline = mean if baseline is None else 0.75 * baseline + 0.25 * mean


def test_a_run_that_goes_on_from_a_checkpoint_has_the_same_bits() -> None:
    """The state goes through JSON, as in a checkpoint; 0.1 and its sums have no short binary."""
    spec = RunningBaselineSpec(decay=0.9)

    def step(seed: int, controllers: Controllers) -> torch.Tensor:
        found, _ = estimate_advantages(make_batch(seed).experience(), spec, controllers)
        return found["advantages"].values

    through, interrupted = Controllers.from_spec(spec), Controllers.from_spec(spec)
    # Also before the first step, where there is no mean yet.
    for seed in range(91, 96):
        again = Controllers.from_spec(spec)
        again.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
        interrupted = again
        assert torch.equal(step(seed, through), step(seed, interrupted))
        assert through.state_dict() == interrupted.state_dict()
    assert through.baseline is not None
    assert through.baseline.value is not None


def test_what_fails_leaves_the_running_baseline_alone() -> None:
    spec = RunningBaselineSpec()
    controllers = Controllers.from_spec(spec)
    estimate_advantages(make_batch().experience(), spec, controllers)
    before = controllers.state_dict()
    grouped = make_batch()
    grouped.batch.row_columns["rewards"][0] = float("inf")
    with pytest.raises(ValueError, match="'rewards' is inf at row 0"):
        estimate_advantages(grouped.experience(), spec, controllers)
    nothing = random_batch([[False], []], {}, 0, {"rewards": (5, 6)}).experience(torch.float32)
    _, metrics = estimate_advantages(nothing, spec, controllers)
    json.dumps(metrics, allow_nan=False)
    assert controllers.state_dict() == before


def test_a_running_baseline_and_its_spec_must_go_together() -> None:
    experience = make_batch().experience()
    with pytest.raises(ValueError, match="RunningBaselineSpec, but there is no running baseline"):
        estimate_advantages(experience, RunningBaselineSpec(), Controllers())
    held = Controllers.from_spec(RunningBaselineSpec())
    with pytest.raises(ValueError, match="ReinforcePlusPlusSpec, but there is a running baseline"):
        estimate_advantages(experience, ReinforcePlusPlusSpec(), held)
    for state in ({}, {"value": float("nan")}, {"value": "1"}, {"value": 1.0, "decay": 0.5}):
        with pytest.raises(ValueError, match="state of the running baseline is"):
            held.load_state_dict({"running_baseline": state})


def test_the_documented_numbers_of_the_running_baseline() -> None:
    spec = RunningBaselineSpec(decay=0.9)
    controllers = Controllers.from_spec(spec)
    for rewards, expected in (
        ([1.0, 0.0, 0.0], [1, -0.5, -0.5]),
        ([1.0, 1.0, 0.0], [2 / 3, 2 / 3, -1 / 3]),
    ):
        batch = random_batch([[True]] * 3, {}, 0)
        batch.row_columns["rewards"] = rewards
        found, _ = estimate_advantages(batch.experience(torch.float32), spec, controllers)
        assert found["advantages"].values.tolist() == pytest.approx(expected, abs=1e-6)
    assert controllers.baseline is not None
    assert controllers.baseline.value == pytest.approx(0.9 / 3 + 0.1 * 2 / 3)
