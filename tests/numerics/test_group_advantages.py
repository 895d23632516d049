"""GRPO, Dr. GRPO, RLOO, pass@k, MaxRL and REINFORCE++ with baseline, against loops over groups."""

from __future__ import annotations

import json
import math
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
    AdaptiveKlSpec,
    DrGrpoSpec,
    FixedKlSpec,
    GroupEstimatorSpec,
    GrpoSpec,
    KlForm,
    MaxRlSpec,
    OverlongSpec,
    PassAtKSpec,
    ReinforcePlusPlusBaselineSpec,
    RlooSpec,
)

FLOAT32_TOLERANCE = 1e-6
"""Columns come back in float32, which rounds by 6e-8; the arithmetic between is float64."""
WHITENED_TOLERANCE = 1e-5
"""A deviation close to zero is divided by one close to zero, with 1e-4 beside it."""
ORACLES = {
    "grpo": (GrpoSpec(), estimator_oracles.grpo),
    "grpo_without_std": (GrpoSpec(normalize_std=False), estimator_oracles.centred),
    "dr_grpo": (DrGrpoSpec(), estimator_oracles.centred),
    "rloo": (RlooSpec(), estimator_oracles.rloo),
    "pass_at_2": (PassAtKSpec(k=2), estimator_oracles.pass_at_k(2)),
    "pass_at_3": (PassAtKSpec(k=3), estimator_oracles.pass_at_k(3)),
    "maxrl": (MaxRlSpec(), estimator_oracles.maxrl),
    "baseline": (ReinforcePlusPlusBaselineSpec(), estimator_oracles.centred),
}
EVERY = pytest.mark.parametrize("name", ORACLES)
SHAPED = pytest.mark.parametrize("name", [name for name in ORACLES if name != "maxrl"])
"""Those whose rewards may be punished before they are compared."""
PROMPTS = [50, 9, 50, 2, 9, 50, 50, 7, 50, 9, 50, 3, 9, 50, 50, 50]
"""Scattered. Of 50's nine rows two are empty and two all masked; 2, 7 and 3 stand alone."""


def make_batch(name: str = "grpo", seed: int = 81) -> GroupedBatch:
    """With rewards that the estimator takes."""
    batch = random_batch(
        mixed_masks(seed) + mixed_masks(seed + 1),
        {"logprobs": (-2.0, -0.1), "reference_logprobs": (-2.0, -0.1)},
        seed,
        {"rewards": (0.0 if name == "maxrl" else -1.0, 2.0)},
    )
    return GroupedBatch(batch.rounded_to(torch.float32), PROMPTS)


def expected_advantages(
    grouped: GroupedBatch, name: str, coefficient: float = 0.0, form: str = "k1"
) -> tuple[list[list[float]], list[list[float]]]:
    """Advantages and token rewards."""
    batch, masks = grouped.batch, grouped.batch.masks
    penalties = None
    if coefficient:
        penalties = estimator_oracles.kl_penalties(batch, coefficient, form)
    rewards = estimator_oracles.token_rewards(batch.row_columns["rewards"], masks, penalties)
    scores = [math.fsum(row) for row in rewards]
    advantages = estimator_oracles.compare_in_groups(
        scores, grouped.prompt_ids, masks, ORACLES[name][1]
    )
    if name == "baseline":
        advantages = oracles.whiten(advantages, masks)
    return advantages, rewards


def assert_close(
    actual: Column, rows: list[list[float]], tolerance: float = FLOAT32_TOLERANCE
) -> None:
    assert actual.kind is ColumnKind.COMPLETION
    assert actual.values.dtype == torch.float32
    torch.testing.assert_close(
        actual.values.double(), pack(rows, torch.float64), rtol=tolerance, atol=tolerance
    )


@EVERY
def test_advantages_are_those_of_a_loop_over_groups(name: str) -> None:
    grouped, spec = make_batch(name), ORACLES[name][0]
    result, _ = estimate_advantages(grouped.experience(), spec)
    advantages, rewards = expected_advantages(grouped, name)
    assert tuple(result.columns) == spec.makes()
    assert_close(result["advantages"], advantages)
    assert_close(result["token_rewards"], rewards)


@SHAPED
@pytest.mark.parametrize("form", ["k1", "k2", "k3"])
def test_a_kl_in_the_reward_lowers_the_row_s_score(name: str, form: KlForm) -> None:
    kl_spec = AdaptiveKlSpec(coefficient=0.3, target=1e-3, horizon=100)
    spec = ORACLES[name][0].model_copy(update={"kl_in_reward": kl_spec, "kl_form": form})
    grouped, controllers = make_batch(), Controllers.from_spec(spec)
    result, metrics = estimate_advantages(grouped.experience(), spec, controllers)
    advantages, rewards = expected_advantages(grouped, name, 0.3, form)
    assert_close(result["advantages"], advantages)
    assert_close(result["token_rewards"], rewards)
    assert metrics["kl/coefficient"] == 0.3
    num_rows = sum(any(mask) for mask in grouped.batch.masks)
    moved = 0.3 * (1 + math.copysign(0.2, metrics["kl/per_row"] - 1e-3) * num_rows / 100)
    assert controllers.kl is not None
    assert controllers.kl.coefficient == pytest.approx(moved)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 5), max_size=9),
    num_prompts=st.integers(1, 5),
    hole=st.sampled_from([0.0, 0.5, 1.0]),
    name=st.sampled_from(sorted(ORACLES)),
    seed=st.integers(0, 2**20),
)
def test_advantages_hold_for_any_ragged_batch(
    lengths: list[int], num_prompts: int, hole: float, name: str, seed: int
) -> None:
    generator = random.Random(seed)
    batch = random_batch(random_masks(lengths, seed, hole), {}, seed, {"rewards": (0, 1)})
    # Few different rewards, so that groups with equal ones occur.
    batch.row_columns["rewards"] = [generator.choice([0.0, 0.1, 0.7]) for _ in lengths]
    prompts = [generator.randrange(num_prompts) - 2 for _ in lengths]
    grouped = GroupedBatch(batch.rounded_to(torch.float32), prompts)
    spec = ORACLES[name][0]
    if isinstance(spec, PassAtKSpec) and lengths and max(map(prompts.count, prompts)) <= spec.k:
        with pytest.raises(ValueError, match="pass@k needs more than k"):
            estimate_advantages(grouped.experience(), spec)
        return
    result, metrics = estimate_advantages(grouped.experience(), spec)
    advantages, _ = expected_advantages(grouped, name)
    assert_close(result["advantages"], advantages, WHITENED_TOLERANCE)
    json.dumps(metrics, allow_nan=False)


@EVERY
def test_the_order_of_rows_changes_nothing(name: str) -> None:
    grouped, spec = make_batch(name), ORACLES[name][0]
    result, metrics = estimate_advantages(grouped.experience(), spec)
    rows = list(result["advantages"].rows())
    for seed in range(5):
        order = list(range(len(PROMPTS)))
        random.Random(seed).shuffle(order)
        other, other_metrics = estimate_advantages(grouped.reordered(order).experience(), spec)
        for row, b in zip(other["advantages"].rows(), order, strict=True):
            torch.testing.assert_close(row, rows[b], rtol=1e-6, atol=1e-7)
        assert other_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-9)


@EVERY
def test_equal_rewards_and_groups_of_one_teach_exactly_nothing(name: str) -> None:
    """0.1 four times: their mean in floating point is not 0.1."""
    spec = ORACLES[name][0]
    batch = random_batch([[True, True]] * 5, {}, 0)
    batch.row_columns["rewards"] = [0.1, 0.1, 0.1, 0.1, 5.0]
    grouped = GroupedBatch(batch, [1, 1, 1, 1, 2])
    result, metrics = estimate_advantages(grouped.experience(), spec)
    assert result["advantages"].values.tolist() == [0.0] * 10
    assert metrics["groups/all_equal"] == 1
    assert metrics["groups/of_one"] == 1


@EVERY
def test_metrics_are_those_of_the_definitions(name: str) -> None:
    grouped = make_batch(name)
    _, metrics = estimate_advantages(grouped.experience(), ORACLES[name][0])
    batch, rewards = grouped.batch, grouped.batch.row_columns["rewards"]
    members = estimator_oracles.groups(PROMPTS, batch.masks)
    raw = estimator_oracles.compare_in_groups(rewards, PROMPTS, batch.masks, ORACLES[name][1])
    kept = oracles.unmasked(raw, batch.masks)
    kl = oracles.unmasked(estimator_oracles.kl_penalties(batch, 1.0, "k1"), batch.masks)
    num_rows = sum(map(len, members.values()))
    k = getattr(ORACLES[name][0], "k", None)
    too_small = sum(len(rows) <= k for rows in members.values()) if k else 0
    assert metrics == pytest.approx(
        {
            "reward/mean": statistics.fmean(rewards),
            "reward/std": statistics.stdev(rewards),
            "kl/mean": statistics.fmean(kl),
            "kl/per_row": math.fsum(kl) / num_rows,
            "advantages/mean": statistics.fmean(kept),
            "advantages/std": statistics.stdev(kept),
            "advantages/rows_without_tokens": len(PROMPTS) - num_rows,
            "groups/count": len(members),
            "groups/of_one": sum(len(rows) == 1 for rows in members.values()),
            "groups/all_equal": 0,
            "groups/std": statistics.fmean(
                statistics.stdev(rewards[row] for row in rows)
                for rows in members.values()
                if len(rows) > 1
            ),
            **({"groups/too_small": too_small} if k else {}),
        },
        rel=1e-10,
        abs=1e-10,
    )


def test_a_row_without_unmasked_tokens_is_no_member() -> None:
    grouped = make_batch()
    result, _ = estimate_advantages(grouped.experience(), RlooSpec())
    for row in (2, 5):  # one is empty, the other all masked
        grouped.batch.row_columns["rewards"][row] = 1000.0
    other, _ = estimate_advantages(grouped.experience(), RlooSpec())
    assert torch.equal(result["advantages"].values, other["advantages"].values)


def test_the_documented_numbers() -> None:
    batch = random_batch([[True]] * 4, {}, 0)
    batch.row_columns["rewards"] = [1.0, 0.0, 0.0, 1.0]
    experience = GroupedBatch(batch, [3] * 4).experience()
    for spec, number in ((GrpoSpec(), 0.866), (RlooSpec(), 2 / 3), (DrGrpoSpec(), 0.5)):
        result, _ = estimate_advantages(experience, spec)
        expected = [number, -number, -number, number]
        assert result["advantages"].values.tolist() == pytest.approx(expected, abs=1e-4)
    for rewards, spec, expected in (
        ([1.0, 0.0, 0.0, 0.0], PassAtKSpec(k=2), [2, -2 / 3, -2 / 3, -2 / 3]),
        ([1.0, 0.0, 0.0, 0.0], MaxRlSpec(), [3, -1, -1, -1]),
        ([1.0, 1.0, 1.0, 0.0], MaxRlSpec(), [1 / 3, 1 / 3, 1 / 3, -1]),
    ):
        batch.row_columns["rewards"] = rewards
        result, _ = estimate_advantages(GroupedBatch(batch, [3] * 4).experience(), spec)
        assert result["advantages"].values.tolist() == pytest.approx(expected, abs=1e-6)


@SHAPED
def test_long_rows_are_punished_before_they_are_compared(name: str) -> None:
    shape = OverlongSpec(max_length=9, buffer=6, penalty=1.5)
    spec = ORACLES[name][0].model_copy(update={"overlong": shape})
    grouped = make_batch()
    result, metrics = estimate_advantages(grouped.experience(), spec)
    masks, rewards = grouped.batch.masks, grouped.batch.row_columns["rewards"]
    punishments = [estimator_oracles.overlong(len(mask), 9, 6, 1.5) for mask in masks]
    assert len(set(punishments)) > 3, "otherwise a case is not seen"
    grouped.batch.row_columns["rewards"] = [
        reward + punishment for reward, punishment in zip(rewards, punishments, strict=True)
    ]
    advantages, token_rewards = expected_advantages(grouped, name)
    assert_close(result["advantages"], advantages)
    assert_close(result["token_rewards"], token_rewards)
    assert metrics["reward/mean"] == pytest.approx(statistics.fmean(rewards))
    assert metrics["overlong/punishment"] == pytest.approx(statistics.fmean(punishments))
    assert metrics["overlong/fraction"] == sum(p < 0 for p in punishments) / len(masks)


@EVERY
@pytest.mark.parametrize("column", ["rewards", "prompt_ids", "loss_mask"])
def test_a_missing_column_is_named(name: str, column: str) -> None:
    experience = make_batch().experience()
    rest = Experience({n: c for n, c in experience.columns.items() if n != column})
    with pytest.raises(ColumnMissingError, match=f"column '{column}' is missing"):
        estimate_advantages(rest, ORACLES[name][0])


def test_bad_columns_are_refused() -> None:
    grouped = make_batch()
    experience = grouped.experience()
    ids = experience["prompt_ids"].values
    for column, message in (
        (experience["logprobs"], "'prompt_ids' is a completion column: give one number a row"),
        (Column(ColumnKind.ROW, ids.float()), r"'prompt_ids' has type torch\.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            estimate_advantages(experience | Experience({"prompt_ids": column}), GrpoSpec())
    grouped.batch.row_columns["rewards"][4] = math.nan
    with pytest.raises(ValueError, match="'rewards' is nan at row 4"):
        estimate_advantages(grouped.experience(), GrpoSpec())


@SHAPED
def test_a_refused_batch_leaves_the_controller_alone(name: str) -> None:
    spec: GroupEstimatorSpec = ORACLES[name][0]
    kl_spec = AdaptiveKlSpec(coefficient=0.2, target=1e-3)
    spec = spec.model_copy(update={"kl_in_reward": kl_spec})
    controllers, experience = Controllers.from_spec(spec), make_batch().experience()
    rest = Experience({n: c for n, c in experience.columns.items() if n != "prompt_ids"})
    with pytest.raises(ColumnMissingError):
        estimate_advantages(rest, spec, controllers)
    assert controllers.kl is not None
    assert controllers.kl.coefficient == 0.2


def test_a_baseline_that_nobody_reads_is_refused() -> None:
    experience = make_batch().experience()
    with pytest.raises(ValueError, match="GrpoSpec compares with no second experience"):
        estimate_advantages(experience, GrpoSpec(), None, experience)


def test_a_fixed_penalty_of_a_long_row_counts_all_its_tokens() -> None:
    """Not only the last one: the score is the sum over the row."""
    batch = random_batch([[True, False, True], [True]], {}, 0)
    batch.columns["logprobs"] = [[-1.0, -9.0, -1.0], [-1.0]]
    batch.columns["reference_logprobs"] = [[-2.0, -1.0, -2.0], [-1.0]]
    batch.row_columns["rewards"] = [1.0, 1.0]
    spec = DrGrpoSpec(kl_in_reward=FixedKlSpec(coefficient=0.5))
    result, _ = estimate_advantages(
        GroupedBatch(batch, [0, 0]).experience(), spec, Controllers.from_spec(spec)
    )
    assert result["advantages"].values.tolist() == [-0.5, 0.0, -0.5, 0.5]
    assert result["token_rewards"].values.tolist() == [-0.5, 0.0, 0.5, 1.0]


def test_a_trajectory_of_several_rows_counts_once_in_its_group() -> None:
    """An agent's session that went two ways: its mean stands for it, its rows for themselves."""
    columns = {
        "rewards": Column(ColumnKind.ROW, torch.tensor([1.0, 0.5, 0.0, 0.0])),
        "loss_mask": Column.ragged(ColumnKind.COMPLETION, [[True]] * 4, torch.bool),
        "prompt_ids": Column(ColumnKind.ROW, torch.tensor([5, 5, 5, 5])),
        "sample_indexes": Column(ColumnKind.ROW, torch.tensor([0, 0, 1, 2])),
    }
    # Trajectories score 0.75, 0 and 0: mean 0.25, deviation sqrt(0.375 / 2).
    centred = [0.75, 0.25, -0.25, -0.25]
    deviation = math.sqrt(0.375 / 2)
    expected = {
        "grpo": [one / deviation for one in centred],
        "dr_grpo": centred,
        "rloo": [1.5 * one for one in centred],
        "pass_at_2": [2.0, 1.0, -0.75, -0.75],
        "maxrl": [one / 0.25 for one in centred],
    }
    for name, wanted in expected.items():
        spec = ORACLES[name][0]
        found, metrics = estimate_advantages(
            Experience(columns), spec, Controllers.from_spec(spec), None, None
        )
        torch.testing.assert_close(
            found["advantages"].values, torch.tensor(wanted), atol=1e-5, rtol=0
        )
        assert metrics["groups/count"] == 1.0
