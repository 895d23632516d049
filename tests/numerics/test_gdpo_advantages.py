"""GDPO, against a loop over sources and groups."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support import estimator_oracles
from support.estimator_oracles import GroupedBatch
from support.ragged_batches import pack, random_batch, random_masks

from rolemesh.engine.algorithms.estimators.estimation import estimate_advantages
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.layout.payload import ColumnMissingError
from rolemesh.engine.specs import FixedKlSpec, GdpoSpec, GrpoSpec, MaxRlSpec, OverlongSpec

WEIGHTS = {"right": 1.0, "form": 0.25, "short": -0.5}
TOLERANCE = 1e-5
"""Columns come back in float32, and the engine leaves out the mean over the batch, which is 0."""


def grouped_batch(
    prompts: list[int], parts: dict[str, list[float]], masks: list[list[bool]] | None = None
) -> GroupedBatch:
    """Rows whose reward is the sum of what applies; NaN: the source does not."""
    rows = [[True, True]] * len(prompts) if masks is None else masks
    batch = random_batch(rows, {}, 0)
    batch.row_columns = {f"reward/{name}": values for name, values in parts.items()}
    batch.row_columns["rewards"] = [
        sum(0.0 if math.isnan(value) else value for value in values)
        for values in zip(*parts.values(), strict=True)
    ]
    return GroupedBatch(batch.rounded_to(torch.float32), prompts)


def advantages(grouped: GroupedBatch, weights: dict[str, float], **fields: Any) -> torch.Tensor:
    found, metrics = estimate_advantages(grouped.experience(), GdpoSpec(weights=weights, **fields))
    json.dumps(metrics, allow_nan=False)
    return found["advantages"].values.double()


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 4), max_size=12),
    num_prompts=st.integers(1, 4),
    hole=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 2**20),
)
def test_advantages_are_those_of_a_loop_over_sources_and_groups(
    lengths: list[int], num_prompts: int, hole: float, seed: int
) -> None:
    generator = random.Random(seed)
    # Few different rewards, so that groups with equal ones occur, and some that do not apply.
    parts = {
        name: [generator.choice([0.0, 0.5, 1.0, math.nan]) for _ in lengths] for name in WEIGHTS
    }
    masks = random_masks(lengths, seed, hole)
    prompts = [generator.randrange(num_prompts) for _ in lengths]
    if not any(map(any, masks)):
        return
    grouped = grouped_batch(prompts, parts, masks)
    rows = estimator_oracles.gdpo(parts, WEIGHTS, prompts, masks)
    expected = [
        [number if counts else 0.0 for counts in mask]
        for number, mask in zip(rows, masks, strict=True)
    ]
    torch.testing.assert_close(
        advantages(grouped, WEIGHTS), pack(expected, torch.float64), rtol=TOLERANCE, atol=TOLERANCE
    )


def test_the_documented_numbers() -> None:
    grouped = grouped_batch([4] * 3, {"a": [1.0, 1.0, 0.0], "b": [1.0, 0.0, 0.0]})
    found = advantages(grouped, {"a": 1.0, "b": 1.0}).tolist()
    assert found == pytest.approx([1, 1, 0, 0, -1, -1], abs=1e-5)


def test_rewards_that_grpo_cannot_tell_apart_are_told_apart() -> None:
    """The fault that the paper is about: sums of 1 and 2 are the same to GRPO in a pair of rows."""
    right, form = [0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]
    grouped = grouped_batch([1, 1, 2, 2], {"right": right, "form": form})
    grpo, _ = estimate_advantages(grouped.experience(), GrpoSpec())
    assert grpo["advantages"].values[2] == pytest.approx(float(grpo["advantages"].values[6]))
    gdpo = advantages(grouped, {"right": 1.0, "form": 1.0})
    assert gdpo[6] == pytest.approx(2 * float(gdpo[2]))


def test_groups_that_are_equal_in_every_part_teach_exactly_nothing() -> None:
    parts = {"a": [0.1, 0.1, 0.1, 3.0, 1.0], "b": [0.7, 0.7, 0.7, 0.2, 0.3]}
    grouped = grouped_batch([1, 1, 1, 2, 2], parts)
    assert advantages(grouped, {"a": 1.0, "b": 2.0})[:6].tolist() == [0.0] * 6
    _, metrics = estimate_advantages(grouped.experience(), GdpoSpec(weights={"a": 1, "b": 2}))
    assert metrics["groups/all_equal"] == 1


def test_parts_whose_sum_is_equal_still_teach() -> None:
    grouped = grouped_batch([1, 1], {"a": [1.0, 0.0], "b": [0.0, 1.0]})
    _, metrics = estimate_advantages(
        grouped.experience(), GdpoSpec(weights={"a": 1.0, "b": 0.5}, zero_variance="left_out")
    )
    assert (metrics["groups/all_equal"], metrics["groups/left_out"]) == (0, 0)
    found = advantages(grouped, {"a": 1.0, "b": 0.5}, zero_variance="left_out")
    assert found[0] > 0 > found[2]


def test_a_trajectory_of_several_rows_counts_once() -> None:
    """Rows 0 and 1 are branches of one trajectory, which has the mean of their rewards."""
    columns = {
        "rewards": Column(ColumnKind.ROW, torch.tensor([1.0, 0.5, 0.0, 0.0])),
        "reward/a": Column(ColumnKind.ROW, torch.tensor([1.0, 0.5, 0.0, 0.0])),
        "loss_mask": Column.ragged(ColumnKind.COMPLETION, [[True]] * 4, torch.bool),
        "prompt_ids": Column(ColumnKind.ROW, torch.tensor([5, 5, 5, 5])),
        "sample_indexes": Column(ColumnKind.ROW, torch.tensor([0, 0, 1, 2])),
    }
    found, _ = estimate_advantages(Experience(columns), GdpoSpec(weights={"a": 3.0}))
    # Trajectories score 0.75, 0 and 0. One group: what its deviation divides by is the batch's.
    deviation = math.sqrt((0.5**2 + 2 * 0.25**2) / 2)
    expected = torch.tensor([0.75, 0.25, -0.25, -0.25]) / deviation
    torch.testing.assert_close(found["advantages"].values, expected, atol=1e-5, rtol=0)


def test_what_gdpo_cannot_use_is_refused_by_name() -> None:
    grouped = grouped_batch([1, 1], {"a": [1.0, 0.0]})
    with pytest.raises(ColumnMissingError, match="column 'reward/b' is missing"):
        advantages(grouped, {"a": 1.0, "b": 1.0})
    with pytest.raises(ValueError, match="weights is empty: give the weight of each source"):
        advantages(grouped, {})
    grouped.batch.row_columns["reward/a"] = [math.inf, 0.0]
    with pytest.raises(ValueError, match="'reward/a' is inf at row 0"):
        advantages(grouped, {"a": 1.0})


@pytest.mark.parametrize("spec_class", [GdpoSpec, MaxRlSpec])
def test_rewards_that_are_taken_as_they_came_have_nothing_taken_off(spec_class: Any) -> None:
    with pytest.raises(ValidationError, match=r"kl_in_reward is given, but .* takes rewards as"):
        spec_class(kl_in_reward=FixedKlSpec())
    with pytest.raises(ValidationError, match=r"overlong is given, but .* takes rewards as"):
        spec_class(overlong=OverlongSpec(max_length=4, buffer=2))


def test_maxrl_refuses_a_negative_reward_with_its_row() -> None:
    grouped = grouped_batch([1, 1], {"a": [1.0, -0.5]})
    with pytest.raises(ValueError, match=r"'rewards' is -0\.5 at row 1 .*rewards of 0 and above"):
        estimate_advantages(grouped.experience(), MaxRlSpec())
