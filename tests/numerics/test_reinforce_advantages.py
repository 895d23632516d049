"""REINFORCE++ and ReMax, against returns written out as series."""

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

from rolemesh.engine.algorithms.estimation import Controllers, estimate_advantages
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.layout.payload import ColumnMissingError
from rolemesh.engine.specs import (
    FixedKlSpec,
    KlForm,
    OverlongSpec,
    ReinforcePlusPlusSpec,
    RemaxSpec,
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
