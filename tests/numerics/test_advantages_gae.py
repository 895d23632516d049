"""GAE, returns and whitening against the defining series in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracles
from support.ragged_batches import RaggedBatch, mixed_masks, pack, random_batch, random_masks

from rolemesh.engine.algorithms.estimators.advantages import gae, whiten
from rolemesh.engine.experience import offsets_of

TOLERANCE = {
    # A few thousand additions of numbers around 1 in float64.
    torch.float64: 1e-10,
    # Accumulation is float64: what is left is the rounding of the results.
    torch.float32: 1e-5,
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
DISCOUNTS = pytest.mark.parametrize(
    ("gamma", "lam"),
    [(1.0, 0.95), (0.99, 0.9), (1.0, 1.0), (0.0, 0.95), (0.9, 0.0), (0.0, 0.0), (1.0, 0.0)],
)
RANGES = {"rewards": (-1.0, 1.0), "values": (-1.0, 1.0)}


def offsets_for(masks: list[list[bool]]) -> torch.Tensor:
    return offsets_of(torch.tensor([len(mask) for mask in masks], dtype=torch.int64))


def assert_gae_matches(batch: RaggedBatch, dtype: torch.dtype, gamma: float, lam: float) -> None:
    batch = batch.rounded_to(dtype)
    advantages, returns = gae(
        batch.packed("rewards", dtype),
        batch.packed("values", dtype),
        pack(batch.masks, torch.bool),
        offsets_for(batch.masks),
        gamma=gamma,
        lam=lam,
    )
    expected_advantages, expected_returns = oracles.gae(
        batch.columns["rewards"], batch.columns["values"], batch.masks, gamma, lam
    )
    assert advantages.dtype == returns.dtype == dtype
    for actual, expected in ((advantages, expected_advantages), (returns, expected_returns)):
        torch.testing.assert_close(
            actual.double(),
            pack(expected, torch.float64),
            rtol=TOLERANCE[dtype],
            atol=TOLERANCE[dtype],
        )


@DTYPES
@DISCOUNTS
def test_gae_of_ragged_rows_with_holes_is_the_series(
    dtype: torch.dtype, gamma: float, lam: float
) -> None:
    assert_gae_matches(random_batch(mixed_masks(seed=1), RANGES, seed=2), dtype, gamma, lam)


@DTYPES
@DISCOUNTS
def test_gae_is_exact_on_both_sides_of_every_block_edge(
    dtype: torch.dtype, gamma: float, lam: float
) -> None:
    lengths = [1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 385]
    masks = random_masks(lengths, seed=3, hole=0.0)
    assert_gae_matches(random_batch(masks, RANGES, seed=4), dtype, gamma, lam)


@DTYPES
def test_gae_carries_over_many_blocks_in_rows_of_skewed_length(dtype: torch.dtype) -> None:
    lengths = [1500, *[1] * 60, 700, *[3] * 20, 0, 1]
    masks = random_masks(lengths, seed=5, hole=0.1)
    assert_gae_matches(random_batch(masks, RANGES, seed=6), dtype, gamma=1.0, lam=1.0)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 140), max_size=8),
    hole=st.sampled_from([0.0, 0.2, 0.9, 1.0]),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    seed=st.integers(0, 2**20),
)
def test_gae_of_any_ragged_batch_is_the_series(
    lengths: list[int], hole: float, gamma: float, lam: float, seed: int
) -> None:
    batch = random_batch(random_masks(lengths, seed, hole), RANGES, seed)
    assert_gae_matches(batch, torch.float64, gamma, lam)
    assert_gae_matches(batch, torch.float32, gamma, lam)


def test_gae_example_of_the_docstring_holds() -> None:
    advantages, returns = gae(
        torch.tensor([0.0, 0.0, 1.0]),
        torch.full((3,), 0.5),
        torch.ones(3, dtype=torch.bool),
        torch.tensor([0, 3]),
        gamma=1.0,
        lam=1.0,
    )
    assert advantages.tolist() == [0.5, 0.5, 0.5]
    assert returns.tolist() == [1.0, 1.0, 1.0]


def test_masked_tokens_are_never_read_and_stay_zero() -> None:
    masks = mixed_masks(seed=7)
    batch = random_batch(masks, RANGES, seed=8)
    mask = pack(masks, torch.bool)
    rewards, values = batch.packed("rewards", torch.float64), batch.packed("values", torch.float64)
    arguments = {"loss_mask_N": mask, "offsets": offsets_for(masks), "gamma": 0.99, "lam": 0.95}
    clean = gae(rewards, values, **arguments)
    poisoned = gae(
        rewards.masked_fill(~mask, math.nan), values.masked_fill(~mask, math.inf), **arguments
    )
    for before, after in zip(clean, poisoned, strict=True):
        assert torch.equal(before, after)
        assert torch.count_nonzero(after[~mask]) == 0


def test_rows_do_not_leak_into_each_other() -> None:
    masks = random_masks([200, 130, 5], seed=9, hole=0.1)
    batch = random_batch(masks, RANGES, seed=10)
    together, _ = gae(
        batch.packed("rewards", torch.float64),
        batch.packed("values", torch.float64),
        pack(masks, torch.bool),
        offsets_for(masks),
        gamma=1.0,
        lam=1.0,
    )
    poisoned = batch.packed("rewards", torch.float64)
    poisoned[200 + masks[1].index(True)] = math.nan  # row 1
    changed, _ = gae(
        poisoned,
        batch.packed("values", torch.float64),
        pack(masks, torch.bool),
        offsets_for(masks),
        gamma=1.0,
        lam=1.0,
    )
    assert torch.equal(together[:200], changed[:200])
    assert torch.equal(together[330:], changed[330:])


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [5, 0, 2]])
def test_gae_without_unmasked_tokens_is_zero(lengths: list[int]) -> None:
    masks = random_masks(lengths, seed=0, hole=1.0)
    assert_gae_matches(random_batch(masks, RANGES, seed=0), torch.float32, 1.0, 0.95)


def test_padding_stays_small_for_skewed_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of 20,000 tokens among 50,000 of one token: a padded matrix would have 1e9."""
    from rolemesh.engine.algorithms import ragged

    widths: list[int] = []
    scan = ragged._scan_blocks

    def recording_scan(values, sums, stops, lengths, decay, width):  # type: ignore[no-untyped-def]
        widths.append(int(((lengths + width - 1) // width).sum()) * width)
        scan(values, sums, stops, lengths, decay, width)

    monkeypatch.setattr(ragged, "_scan_blocks", recording_scan)
    lengths = torch.ones(50_001, dtype=torch.int64)
    lengths[77] = 20_000
    ragged.decayed_sums(torch.ones(70_000, dtype=torch.float64), lengths, 0.9)
    assert sum(widths) < 2 * 70_000


def test_gae_refuses_bad_input_by_name() -> None:
    ones, mask, offsets = torch.ones(3), torch.ones(3, dtype=torch.bool), torch.tensor([0, 3])
    with pytest.raises(ValueError, match=r"shapes \(3,\), \(2,\)"):
        gae(ones, ones[:2], mask, offsets, gamma=1, lam=1)
    with pytest.raises(ValueError, match=r"loss_mask has type torch.float32"):
        gae(ones, ones, ones, offsets, gamma=1, lam=1)
    with pytest.raises(ValueError, match="offsets end at 2"):
        gae(ones, ones, mask, torch.tensor([0, 2]), gamma=1, lam=1)
    with pytest.raises(ValueError, match=r"gamma is 1\.5"):
        gae(ones, ones, mask, offsets, gamma=1.5, lam=1)
    with pytest.raises(ValueError, match=r"lam is -0\.1"):
        gae(ones, ones, mask, offsets, gamma=1, lam=-0.1)


@DTYPES
def test_whitening_is_the_two_pass_formula(dtype: torch.dtype) -> None:
    masks = mixed_masks(seed=11)
    batch = random_batch(masks, {"x": (-3.0, 5.0)}, seed=12).rounded_to(dtype)
    whitened = whiten(batch.packed("x", dtype), pack(masks, torch.bool))
    expected = pack(oracles.whiten(batch.columns["x"], masks), torch.float64)
    assert whitened.dtype == dtype
    torch.testing.assert_close(
        whitened.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


def test_whitening_survives_a_large_common_offset_in_float32() -> None:
    masks = random_masks([500], seed=13)
    batch = random_batch(masks, {"x": (1e4, 1e4 + 1)}, seed=14).rounded_to(torch.float32)
    whitened = whiten(batch.packed("x", torch.float32), pack(masks, torch.bool))
    expected = pack(oracles.whiten(batch.columns["x"], masks), torch.float64)
    torch.testing.assert_close(whitened.double(), expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 20), max_size=6), seed=st.integers(0, 2**20))
def test_whitening_of_any_ragged_batch_is_the_two_pass_formula(
    lengths: list[int], seed: int
) -> None:
    masks = random_masks(lengths, seed, hole=0.5)
    batch = random_batch(masks, {"x": (-2.0, 2.0)}, seed)
    whitened = whiten(batch.packed("x", torch.float64), pack(masks, torch.bool))
    expected = pack(oracles.whiten(batch.columns["x"], masks), torch.float64)
    torch.testing.assert_close(whitened, expected, rtol=1e-10, atol=1e-10)


def test_whitening_of_one_none_or_equal_tokens_is_zero() -> None:
    numbers = torch.tensor([7.0, math.nan, 3.0])
    for mask in ([True, False, False], [False, False, False]):
        assert whiten(numbers, torch.tensor(mask)).tolist() == [0.0, 0.0, 0.0]
    equal = torch.full((4,), 0.1)
    assert whiten(equal, torch.ones(4, dtype=torch.bool)).tolist() == [0.0] * 4
