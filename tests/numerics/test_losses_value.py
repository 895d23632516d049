"""The PPO value loss against its closed form; the registry of losses."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracles
from support.ragged_batches import RaggedBatch, mixed_masks, pack, random_batch, random_masks

from rolemesh.engine.algorithms.losses.base import LossScale, ModelOutputs, loss_for, make_loss
from rolemesh.engine.specs import Aggregation, GaeSpec, PpoPolicyLossSpec, PpoValueLossSpec

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["f64", "f32"])
RANGES = {"new": (-1.0, 1.0), "values": (-1.0, 1.0), "returns": (-1.0, 1.0)}
SPECS = {
    "clipped": PpoValueLossSpec(clip=0.3),
    "unclipped": PpoValueLossSpec(clip=None),
    **{
        mode: PpoValueLossSpec(aggregation=mode, norm_length=10 if mode == "seq_sum_norm" else None)
        for mode in get_args(Aggregation)
    },
}
EVERY_SPEC = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def run(
    batch: RaggedBatch, spec: PpoValueLossSpec, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    new = batch.packed("new", dtype).requires_grad_()
    experience = batch.experience(dtype)
    loss, metrics = make_loss(spec)(
        ModelOutputs(values_N=new), experience, LossScale.of(experience)
    )
    loss.backward()
    assert new.grad is not None
    numbers = {name: float(number.detach()) for name, number in metrics.items()}
    return loss.detach(), new.grad, numbers


def token_losses(batch: RaggedBatch, clip: float | None) -> list[list[tuple[float, float]]]:
    names = ("new", "values", "returns")
    return [
        [oracles.value_token_loss(*numbers, clip) for numbers in zip(*rows, strict=True)]
        for rows in zip(*(batch.columns[name] for name in names), strict=True)
    ]


def assert_matches(batch: RaggedBatch, spec: PpoValueLossSpec, dtype: torch.dtype) -> None:
    batch = batch.rounded_to(dtype)
    loss, gradient, metrics = run(batch, spec, dtype)
    tokens = token_losses(batch, spec.clip)
    how = (batch.masks, spec.aggregation, spec.norm_length)
    expected = oracles.aggregate([[x for x, _ in row] for row in tokens], *how)
    slopes = oracles.aggregate_gradient([[x for _, x in row] for row in tokens], *how)
    tolerance = TOLERANCE[dtype]
    for actual in (float(loss), metrics["value_loss"], metrics["loss"]):
        assert actual == pytest.approx(expected, rel=tolerance, abs=tolerance)
    torch.testing.assert_close(
        gradient.double(), pack(slopes, torch.float64), rtol=tolerance, atol=tolerance
    )


@DTYPES
@EVERY_SPEC
def test_loss_and_gradient_are_the_closed_form(spec: PpoValueLossSpec, dtype: torch.dtype) -> None:
    assert_matches(random_batch(mixed_masks(seed=61), RANGES, seed=62), spec, dtype)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), max_size=6),
    hole=st.sampled_from([0.0, 0.4, 1.0]),
    name=st.sampled_from(sorted(SPECS)),
    seed=st.integers(0, 2**20),
)
def test_loss_and_gradient_hold_for_any_ragged_batch(
    lengths: list[int], hole: float, name: str, seed: int
) -> None:
    batch = random_batch(random_masks(lengths, seed, hole), RANGES, seed)
    assert_matches(batch, SPECS[name], torch.float64)


@pytest.mark.parametrize("new", [-0.9, -0.25, 0.05, 0.4, 0.9])
@pytest.mark.parametrize("target", [-0.7, 0.1, 0.8])
def test_the_oracle_agrees_with_central_differences(new: float, target: float) -> None:
    def loss(value: float) -> float:
        return oracles.value_token_loss(value, 0.1, target, 0.2)[0]

    _, slope = oracles.value_token_loss(new, 0.1, target, 0.2)
    # Quadratic pieces: the difference is exact but for rounding, about 1e-11.
    assert oracles.central_difference(loss, new, 1e-5) == pytest.approx(slope, abs=1e-9)


def test_metrics_are_those_of_the_definitions() -> None:
    batch = random_batch(mixed_masks(seed=63), RANGES, seed=64)
    _, _, metrics = run(batch, SPECS["clipped"], torch.float64)
    new, old, returns = (
        oracles.unmasked(batch.columns[name], batch.masks) for name in ("new", "values", "returns")
    )
    clipped = [
        oracles.value_token_loss(v, o, r, 0.3)[0] > oracles.value_token_loss(v, o, r, None)[0]
        for v, o, r in zip(new, old, returns, strict=True)
    ]
    assert metrics["value_clip_fraction"] == pytest.approx(sum(clipped) / len(clipped))
    assert 0 < metrics["value_clip_fraction"] < 1
    assert metrics["values_mean"] == pytest.approx(math.fsum(new) / len(new))
    assert metrics["value_error_max"] == pytest.approx(
        max(abs(v - r) for v, r in zip(new, returns, strict=True))
    )


@EVERY_SPEC
@pytest.mark.parametrize("masks", [[[False] * 4, [False]], [[], []]], ids=["masked", "empty"])
def test_without_unmasked_tokens_loss_and_gradient_are_zero(
    spec: PpoValueLossSpec, masks: list[list[bool]]
) -> None:
    loss, gradient, metrics = run(random_batch(masks, RANGES, 0), spec, torch.float32)
    assert float(loss) == 0
    assert torch.count_nonzero(gradient) == 0
    assert set(metrics.values()) == {0.0}


@EVERY_SPEC
def test_masked_tokens_reach_neither_loss_nor_gradient(spec: PpoValueLossSpec) -> None:
    batch = random_batch(mixed_masks(seed=65), RANGES, seed=66)
    clean = run(batch, spec, torch.float32)
    for rows in batch.columns.values():
        for row, mask in zip(rows, batch.masks, strict=True):
            row[:] = [x if counts else math.nan for x, counts in zip(row, mask, strict=True)]
    poisoned = run(batch, spec, torch.float32)
    assert torch.equal(clean[0], poisoned[0])
    assert torch.equal(clean[1], poisoned[1])
    assert clean[2] == poisoned[2]


def test_columns_say_what_the_loss_reads() -> None:
    loss = make_loss(PpoValueLossSpec())
    assert loss.columns == ("values", "returns", "loss_mask")
    assert (loss.needs, loss.needs_entropy) == ("values", False)


def test_missing_output_is_refused() -> None:
    experience = random_batch([[True]], RANGES, 0).experience(torch.float32)
    with pytest.raises(ValueError, match="values_N is None"):
        make_loss(PpoValueLossSpec())(ModelOutputs(), experience, LossScale.of(experience))


def test_a_spec_without_a_loss_is_refused_and_none_is_registered_twice() -> None:
    with pytest.raises(ValueError, match=r"no loss for GaeSpec: give one of .*PpoPolicyLossSpec"):
        make_loss(GaeSpec())
    with pytest.raises(ValueError, match="PpoPolicyLossSpec has a loss already"):
        loss_for(PpoPolicyLossSpec)(object)
