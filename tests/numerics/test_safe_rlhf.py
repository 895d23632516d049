"""Safe RLHF: rewards less weighted costs through GAE, and the multiplier that weighs them."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

import pytest
import torch
from support import estimator_oracles, oracles
from support.ragged_batches import RaggedBatch, mixed_masks, pack, random_batch

from rolemesh.engine.algorithms.estimators.estimation import (
    LAGRANGE_MULTIPLIER,
    Controllers,
    estimate_advantages,
)
from rolemesh.engine.algorithms.lagrange import LagrangeMultiplier
from rolemesh.engine.experience import Column, Experience
from rolemesh.engine.layout.payload import ColumnMissingError
from rolemesh.engine.specs import AdaptiveKlSpec, GaeSpec, SafeRlhfSpec

TOLERANCE = 1e-5
"""Columns come back in float32; whitening divides by a deviation."""
SPEC = SafeRlhfSpec(
    gamma=0.98, lam=0.9, cost_limit=0.5, initial_multiplier=2.0, multiplier_rate=0.25
)


def make_batch(seed: int = 101) -> RaggedBatch:
    batch = random_batch(
        mixed_masks(seed),
        {"logprobs": (-2.0, -0.1), "reference_logprobs": (-2.0, -0.1), "values": (-1.0, 1.0)},
        seed,
        {"rewards": (-1.0, 2.0), "costs": (0.0, 3.0)},
    )
    return batch.rounded_to(torch.float32)


def costs_that_count(batch: RaggedBatch) -> list[float]:
    pairs = zip(batch.row_columns["costs"], batch.masks, strict=True)
    return [cost for cost, mask in pairs if any(mask)]


def assert_close(actual: Column, rows: list[list[float]]) -> None:
    torch.testing.assert_close(
        actual.values.double(), pack(rows, torch.float64), rtol=TOLERANCE, atol=TOLERANCE
    )


def run(
    batch: RaggedBatch, spec: SafeRlhfSpec = SPEC, controllers: Controllers | None = None
) -> tuple[Experience, dict[str, float], Controllers]:
    controllers = Controllers.from_spec(spec) if controllers is None else controllers
    result, metrics = estimate_advantages(batch.experience(torch.float32), spec, controllers)
    return result, metrics, controllers


@pytest.mark.parametrize("whiten", [False, True])
def test_columns_are_gae_of_the_combined_reward(whiten: bool) -> None:
    batch = make_batch()
    kl_spec = AdaptiveKlSpec(coefficient=0.1, target=1e-3)
    spec = SPEC.model_copy(update={"whiten": whiten, "kl_in_reward": kl_spec})
    result, _, _ = run(batch, spec)
    pairs = zip(batch.row_columns["rewards"], batch.row_columns["costs"], strict=True)
    combined = [(reward - 2.0 * cost) / (1 + 2.0) for reward, cost in pairs]
    penalties = estimator_oracles.kl_penalties(batch, 0.1, "k1")
    rewards = estimator_oracles.token_rewards(combined, batch.masks, penalties)
    advantages, returns = oracles.gae(rewards, batch.columns["values"], batch.masks, 0.98, 0.9)
    if whiten:
        advantages = oracles.whiten(advantages, batch.masks)
    assert set(result.columns) == set(spec.makes())
    assert_close(result["token_rewards"], rewards)
    assert_close(result["returns"], returns)
    assert_close(result["advantages"], advantages)


def test_the_multiplier_moves_once_in_log_space_after_it_was_used() -> None:
    batch = make_batch()
    _, metrics, controllers = run(batch)
    mean_cost = statistics.fmean(costs_that_count(batch))
    assert metrics["cost/multiplier"] == pytest.approx(2.0)
    assert metrics["cost/mean"] == pytest.approx(mean_cost)
    assert metrics["cost/std"] == pytest.approx(statistics.stdev(costs_that_count(batch)))
    assert metrics["reward/mean"] == pytest.approx(statistics.fmean(batch.row_columns["rewards"]))
    assert controllers.multiplier is not None
    expected = 2.0 * math.exp(0.25 * 2.0 * (mean_cost - 0.5))
    assert controllers.multiplier.value == pytest.approx(expected)
    json.dumps(metrics, allow_nan=False)


def test_a_cost_below_the_limit_lowers_the_multiplier() -> None:
    multiplier = LagrangeMultiplier(SPEC)
    multiplier.update(-1.5)
    assert multiplier.value == pytest.approx(2.0 * math.exp(0.25 * 2.0 * -2.0))
    assert multiplier.value > 0


def test_the_documented_numbers() -> None:
    multiplier = LagrangeMultiplier(SafeRlhfSpec(multiplier_rate=0.1, cost_limit=2.0))
    multiplier.update(3.0)
    assert multiplier.value == pytest.approx(1.105, abs=1e-3)


def test_the_multiplier_stops_at_its_bound() -> None:
    multiplier = LagrangeMultiplier(SPEC)
    for _ in range(100):
        multiplier.update(50.0)
    assert multiplier.value == pytest.approx(5.0)


def test_rows_without_tokens_do_not_move_the_multiplier() -> None:
    batch = random_batch(
        [[False, False], []], {"values": (-1, 1)}, 0, {"rewards": (0, 1), "costs": (5, 9)}
    )
    result, metrics, controllers = run(batch)
    assert controllers.multiplier is not None
    assert controllers.multiplier.value == pytest.approx(2.0)
    assert result["advantages"].values.tolist() == [0.0, 0.0]
    json.dumps(metrics, allow_nan=False)


def test_state_survives_json_and_bounds_stay_the_recipe_s() -> None:
    _, _, controllers = run(make_batch())
    state = json.loads(json.dumps(controllers.state_dict()))
    assert set(state) == {LAGRANGE_MULTIPLIER}
    restored = Controllers.from_spec(SPEC)
    restored.load_state_dict(state)
    assert restored.multiplier is not None
    assert controllers.multiplier is not None
    assert restored.multiplier.value == controllers.multiplier.value
    tighter = Controllers.from_spec(SafeRlhfSpec(initial_multiplier=0.5, max_multiplier=1.5))
    tighter.load_state_dict(state)
    assert tighter.multiplier is not None
    assert tighter.multiplier.value == pytest.approx(1.5)


def test_state_of_other_controllers_is_left_alone() -> None:
    controllers = Controllers.from_spec(GaeSpec())
    controllers.load_state_dict({LAGRANGE_MULTIPLIER: {"log_multiplier": 1.0}})
    assert controllers.state_dict() == {}


@pytest.mark.parametrize(
    "state",
    [{}, {"log_multiplier": "1"}, {"log_multiplier": math.nan}, {"log_multiplier": 1.0, "x": 2}],
    ids=["empty", "text", "nan", "more"],
)
def test_a_state_that_does_not_fit_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="take an older checkpoint"):
        LagrangeMultiplier(SPEC).load_state_dict(state)


def test_a_refused_batch_moves_nothing() -> None:
    spec = SPEC.model_copy(update={"kl_in_reward": AdaptiveKlSpec(coefficient=0.2, target=1e-3)})
    controllers = Controllers.from_spec(spec)
    before = controllers.state_dict()
    batch = make_batch()
    batch.row_columns["costs"][1] = math.inf
    with pytest.raises(ValueError, match="'costs' is inf at row 1"):
        run(batch, spec, controllers)
    del batch.row_columns["costs"]
    with pytest.raises(ColumnMissingError, match="column 'costs' is missing"):
        run(batch, spec, controllers)
    assert controllers.state_dict() == before


def test_the_multiplier_must_be_there_exactly_for_safe_rlhf() -> None:
    experience = make_batch().experience(torch.float32)
    with pytest.raises(ValueError, match="SafeRlhfSpec, but there is no Lagrange multiplier"):
        estimate_advantages(experience, SPEC)
    with pytest.raises(ValueError, match="GaeSpec, but there is a Lagrange multiplier"):
        estimate_advantages(experience, GaeSpec(), Controllers.from_spec(SPEC))


def test_the_first_multiplier_lies_within_the_bound() -> None:
    with pytest.raises(ValueError, match=r"initial_multiplier is 6\.0 and max_multiplier is 5\.0"):
        SafeRlhfSpec(initial_multiplier=6.0)


def test_a_limit_on_costs_is_held_in_the_long_run() -> None:
    """A player that takes reward x at cost x as long as it pays: x = 4 if 1 > lambda, else 0."""
    multiplier = LagrangeMultiplier(SafeRlhfSpec(cost_limit=1.0, multiplier_rate=0.005))
    costs = []
    for _ in range(4000):
        costs.append(4.0 if multiplier.value < 1 else 0.0)
        multiplier.update(costs[-1])
    # Weighted by lambda the mean is the limit; unweighted it is off by about a step of ln lambda.
    assert statistics.fmean(costs[1000:]) == pytest.approx(1.0, abs=0.02)
