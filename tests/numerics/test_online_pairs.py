"""Online DPO's pairs, against a loop over groups."""

from __future__ import annotations

import json
import random
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import estimator_oracles
from support.estimator_oracles import GroupedBatch
from support.ragged_batches import random_batch, random_masks

from rolemesh.engine.algorithms.estimators.estimation import estimate_advantages
from rolemesh.engine.algorithms.preferences.pairs import Pairs
from rolemesh.engine.experience import ColumnKind
from rolemesh.engine.specs import OnlineDpoSpec

SPEC = OnlineDpoSpec()


def expected_pairs(grouped: GroupedBatch) -> tuple[list[int], list[float], int, int]:
    """pair_ids, preference, ties and groups of one."""
    rewards, masks = grouped.batch.row_columns["rewards"], grouped.batch.masks
    pair_ids, preference = [-1] * len(masks), [0.0] * len(masks)
    ties = alone = number = 0
    for rows in estimator_oracles.groups(grouped.prompt_ids, masks).values():
        best = min(rows, key=lambda row: (-rewards[row], row))
        worst = min(rows, key=lambda row: (rewards[row], row))
        if len(rows) == 1:
            alone += 1
        elif rewards[best] == rewards[worst]:
            ties += 1
        else:
            pair_ids[best] = pair_ids[worst] = number
            preference[best], preference[worst] = 1.0, -1.0
            number += 1
    return pair_ids, preference, ties, alone


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 4), max_size=12),
    num_prompts=st.integers(1, 5),
    hole=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 2**20),
)
def test_best_and_worst_of_each_group_make_a_pair(
    lengths: list[int], num_prompts: int, hole: float, seed: int
) -> None:
    generator = random.Random(seed)
    batch = random_batch(random_masks(lengths, seed, hole), {}, seed)
    batch.row_columns["rewards"] = [generator.choice([0.0, 0.1, 0.7]) for _ in lengths]
    prompts = [generator.randrange(num_prompts) for _ in lengths]
    grouped = GroupedBatch(batch.rounded_to(torch.float32), prompts)
    result, metrics = estimate_advantages(grouped.experience(), SPEC)
    pair_ids, preference, ties, alone = expected_pairs(grouped)
    assert tuple(result.columns) == SPEC.makes()
    assert result["pair_ids"].kind is result["preference"].kind is ColumnKind.ROW
    assert result["pair_ids"].values.dtype == torch.int64
    assert result["preference"].values.dtype == torch.float32
    assert result["pair_ids"].values.tolist() == pair_ids
    assert result["preference"].values.tolist() == preference
    assert metrics["pairs/count"] == len(set(pair_ids) - {-1})
    assert (metrics["pairs/ties"], metrics["pairs/of_one"]) == (ties, alone)
    json.dumps(metrics, allow_nan=False)
    # What preference losses make of it.
    assert len(Pairs.of(result)) == metrics["pairs/count"]


def test_the_documented_example() -> None:
    batch = random_batch([[True]] * 5, {}, 0)
    batch.row_columns["rewards"] = [0.0, 1.0, 0.0, 2.0, 2.0]
    result, metrics = estimate_advantages(GroupedBatch(batch, [7, 7, 7, 3, 3]).experience(), SPEC)
    assert result["pair_ids"].values.tolist() == [0, 0, -1, -1, -1]
    assert result["preference"].values.tolist() == [-1, 1, 0, 0, 0]
    assert metrics == {
        "reward/mean": 1.0,
        "reward/std": pytest.approx(statistics.stdev([0, 1, 0, 2, 2])),
        "advantages/rows_without_tokens": 0,
        "pairs/count": 1,
        "pairs/ties": 1,
        "pairs/of_one": 0,
        "pairs/reward_margin": 1.0,
    }


def test_a_row_without_unmasked_tokens_is_in_no_pair() -> None:
    batch = random_batch([[True], [False, False], [True], []], {}, 0)
    batch.row_columns["rewards"] = [0.0, 9.0, 1.0, -9.0]
    result, _ = estimate_advantages(GroupedBatch(batch, [4] * 4).experience(), SPEC)
    assert result["pair_ids"].values.tolist() == [0, -1, 0, -1]
    assert result["preference"].values.tolist() == [-1, 0, 1, 0]


def test_a_reward_that_is_not_finite_is_refused() -> None:
    batch = random_batch([[True]] * 2, {}, 0)
    batch.row_columns["rewards"] = [0.0, float("nan")]
    with pytest.raises(ValueError, match="'rewards' is nan at row 1"):
        estimate_advantages(GroupedBatch(batch, [4, 4]).experience(), SPEC)
