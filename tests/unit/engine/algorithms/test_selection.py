"""Tests of which groups are kept."""

from __future__ import annotations

import random
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolemesh.engine.algorithms.preferences.pairs import PairIncompleteError
from rolemesh.engine.algorithms.selection import select_groups
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.layout.payload import ColumnMissingError
from rolemesh.engine.specs import PairedSpec, RewardSpreadSpec


def rows_of(prompt_ids: list[int], rewards: list[float]) -> Experience:
    return Experience(
        {
            "prompt_ids": Column(ColumnKind.ROW, torch.tensor(prompt_ids, dtype=torch.int64)),
            "rewards": Column(ColumnKind.ROW, torch.tensor(rewards, dtype=torch.float64)),
            "loss_mask": Column.ragged(ColumnKind.COMPLETION, [[True]] * len(rewards), torch.bool),
        }
    )


@settings(max_examples=100, deadline=None)
@given(
    prompts=st.lists(st.integers(-3, 3), max_size=14),
    min_std=st.sampled_from([0.0, 0.2]),
    max_groups=st.integers(0, 4),
    seed=st.integers(0, 2**20),
)
def test_groups_with_spread_are_kept_in_the_order_of_their_first_rows(
    prompts: list[int], min_std: float, max_groups: int, seed: int
) -> None:
    generator = random.Random(seed)
    rewards = [generator.choice([0.1, 0.3, 1.0]) for _ in prompts]
    rows, num_groups, metrics = select_groups(
        rows_of(prompts, rewards), RewardSpreadSpec(min_std=min_std), max_groups
    )
    members: dict[int, list[float]] = {}
    for prompt, reward in zip(prompts, rewards, strict=True):
        members.setdefault(prompt, []).append(reward)
    wanted = [
        prompt
        for prompt, of_group in members.items()
        if len(of_group) > 1 and statistics.stdev(of_group) > min_std
    ]
    kept = wanted[:max_groups] if max_groups else wanted
    assert rows.dtype == torch.int64
    assert rows.tolist() == [row for row, prompt in enumerate(prompts) if prompt in kept]
    assert num_groups == len(kept)
    assert metrics == {
        "selection/groups": len(members),
        "selection/wanted": len(wanted),
        "selection/kept": len(kept),
        "selection/rows": len(rows),
    }


def test_the_documented_example() -> None:
    batch = rows_of([5, 5, 6, 6, 5], [0, 0, 1, 0, 1])
    assert select_groups(batch, RewardSpreadSpec(), 0)[0].tolist() == [0, 1, 2, 3, 4]
    assert select_groups(batch, RewardSpreadSpec(), 1)[0].tolist() == [0, 1, 4]


def test_equal_rewards_have_no_spread_at_all() -> None:
    """0.1 three times: their mean in floating point is not 0.1."""
    rows, num_groups, _ = select_groups(
        rows_of([1, 1, 1, 2], [0.1, 0.1, 0.1, 0.5]), RewardSpreadSpec(), 0
    )
    assert (rows.tolist(), num_groups) == ([], 0)


def test_bad_input_is_refused() -> None:
    batch = rows_of([1, 1], [0.0, float("nan")])
    with pytest.raises(ValueError, match="max_groups is -1"):
        select_groups(batch, RewardSpreadSpec(), -1)
    with pytest.raises(ValueError, match="'rewards' is nan at row 1"):
        select_groups(batch, RewardSpreadSpec(), 0)
    with pytest.raises(ColumnMissingError, match="'prompt_ids' is missing"):
        select_groups(batch.require(["rewards"]), RewardSpreadSpec(), 0)
    with pytest.raises(ValueError, match="min_std"):
        RewardSpreadSpec(min_std=-0.1)


def pairs_of(pair_ids: list[int], preference: list[float]) -> Experience:
    return Experience(
        {
            "pair_ids": Column(ColumnKind.ROW, torch.tensor(pair_ids)),
            "preference": Column(ColumnKind.ROW, torch.tensor(preference)),
        }
    )


def test_the_rows_of_a_pair_become_neighbours_and_the_chosen_one_is_first() -> None:
    batch = pairs_of([1, 0, -1, 0, 1, -1], [-1.0, 1.0, 0.0, -1.0, 1.0, 0.0])
    rows, num_pairs, metrics = select_groups(batch, PairedSpec(), 0)
    assert (rows.tolist(), num_pairs) == ([1, 3, 4, 0], 2)
    assert metrics["selection/rows"] == 4
    rows, num_pairs, metrics = select_groups(batch, PairedSpec(), 1)
    assert (rows.tolist(), num_pairs) == ([1, 3], 1)
    assert (metrics["selection/groups"], metrics["selection/kept"]) == (2, 1)


def test_a_batch_without_pairs_keeps_nothing() -> None:
    rows, num_pairs, _ = select_groups(pairs_of([-1, -1], [0.0, 0.0]), PairedSpec(), 0)
    assert (rows.tolist(), num_pairs) == ([], 0)


def test_half_a_pair_is_refused() -> None:
    with pytest.raises(PairIncompleteError, match="pair 3"):
        select_groups(pairs_of([3, -1], [1.0, 0.0]), PairedSpec(), 0)
