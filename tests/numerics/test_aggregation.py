"""Aggregation modes and the counts behind them, against their definitions."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracles
from support.ragged_batches import RaggedBatch, mixed_masks, pack, random_batch, random_masks

from rolemesh.engine.algorithms.aggregation import LossScale, token_weights
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.layout.payload import ColumnMissingError
from rolemesh.engine.specs import Aggregation

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
MODES: list[tuple[Aggregation, int | None]] = [
    (mode, 10 if mode == "seq_sum_norm" else None) for mode in get_args(Aggregation)
]
EVERY_MODE = pytest.mark.parametrize(("mode", "norm_length"), MODES, ids=[m for m, _ in MODES])


def aggregate(
    batch: RaggedBatch, mode: Aggregation, norm_length: int | None, dtype: torch.dtype
) -> tuple[float, torch.Tensor]:
    """The loss of token losses "x", and its gradient by each of them."""
    experience = batch.experience(dtype)
    losses = batch.packed("x", dtype).requires_grad_()
    weights = token_weights(experience, LossScale.of(experience), mode, norm_length, like=losses)
    assert weights.dtype == dtype
    total = (weights * losses[pack(batch.masks, torch.bool)]).sum()
    (gradient,) = torch.autograd.grad(total, losses)
    return float(total.detach()), gradient


@EVERY_MODE
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["f64", "f32"])
def test_every_mode_is_its_definition(
    mode: Aggregation, norm_length: int | None, dtype: torch.dtype
) -> None:
    batch = random_batch(mixed_masks(seed=31), {"x": (-1.0, 2.0)}, seed=32).rounded_to(dtype)
    total, gradient = aggregate(batch, mode, norm_length, dtype)
    rows = batch.columns["x"]
    tolerance = TOLERANCE[dtype]
    assert total == pytest.approx(
        oracles.aggregate(rows, batch.masks, mode, norm_length), rel=tolerance, abs=tolerance
    )
    ones = [[1.0] * len(row) for row in rows]
    expected = pack(oracles.aggregate_gradient(ones, batch.masks, mode, norm_length), torch.float64)
    torch.testing.assert_close(gradient.double(), expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), max_size=8),
    hole=st.sampled_from([0.0, 0.4, 1.0]),
    mode=st.sampled_from(MODES),
    seed=st.integers(0, 2**20),
)
def test_every_mode_holds_for_any_ragged_batch(
    lengths: list[int], hole: float, mode: tuple[Aggregation, int | None], seed: int
) -> None:
    batch = random_batch(random_masks(lengths, seed, hole), {"x": (-1.0, 1.0)}, seed)
    total, _ = aggregate(batch, *mode, torch.float64)
    expected = oracles.aggregate(batch.columns["x"], batch.masks, *mode)
    assert total == pytest.approx(expected, rel=1e-10, abs=1e-10)


def test_scale_counts_unmasked_tokens_and_rows_that_have_some() -> None:
    masks = [[True, False, True], [False, False], [], [True]]
    experience = random_batch(masks, {}, 0).experience(torch.float32)
    assert LossScale.of(experience) == LossScale(num_tokens=3, num_rows=2)


def test_the_modes_give_the_numbers_of_a_worked_example() -> None:
    masks = [[True, True, True], [True, False, False]]
    batch = random_batch(masks, {"x": (0, 1)}, 0)
    batch.columns["x"] = [[1.0, 2.0, 3.0], [10.0, 99.0, 99.0]]
    expected = {
        "token_mean": 16 / 4,
        "seq_mean_token_sum": (6 + 10) / 2,
        "seq_mean_token_mean": (2 + 10) / 2,
        "seq_sum_norm": (6 / 10 + 10 / 10) / 2,
    }
    for mode, norm_length in MODES:
        total, _ = aggregate(batch, mode, norm_length, torch.float64)
        assert total == pytest.approx(expected[mode], rel=1e-12)


def test_scale_needs_a_boolean_mask_a_token() -> None:
    with pytest.raises(ColumnMissingError, match="loss_mask"):
        LossScale.of(Experience({"rewards": Column(ColumnKind.ROW, torch.zeros(2))}))
    with pytest.raises(ValueError, match="'loss_mask' is a row column"):
        LossScale.of(Experience({"loss_mask": Column(ColumnKind.ROW, torch.ones(2).bool())}))


def test_scales_of_parts_add_up_to_the_whole_ones() -> None:
    masks = [[True, True, True], [False, False], [True, False, False], [True]]
    batch = random_batch(masks, {}, 0).experience(torch.float32)
    cut = [[2, 0], [1], [], [3]]
    parts = [batch.select(torch.tensor(rows, dtype=torch.int64)) for rows in cut]
    assert LossScale.total(LossScale.of(part) for part in parts) == LossScale.of(batch)
    assert LossScale.total([]) == LossScale(0.0, 0.0)


def test_unknown_mode_and_missing_norm_length_are_refused() -> None:
    experience = random_batch([[True]], {}, 0).experience(torch.float32)
    scale, like = LossScale.of(experience), torch.zeros(1)
    with pytest.raises(ValueError, match="aggregation is 'median'"):
        token_weights(experience, scale, "median", None, like=like)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="norm_length is None"):
        token_weights(experience, scale, "seq_sum_norm", None, like=like)
