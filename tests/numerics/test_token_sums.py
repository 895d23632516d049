"""Sums over tokens with weights of the caller: each form against a loop, in value and gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from support.ragged_batches import mixed_masks, random_batch

from rolemesh.engine.algorithms.losses.base import LossScale, ModelOutputs, make_loss
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.specs import TokenSumLossSpec
from rolemesh.engine.specs.columns import RATIO_MASK, TARGET_IDS, TOKEN_WEIGHTS

FORMS: dict[str, dict[str, Any]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {},
    "ppo-own-clips": {"clip_low": 0.95, "clip_high": 1.02},
    "cispo": {"clip_high": 1.1},
    "gspo": {"clip_low": 0.9, "clip_high": 1.05},
    "dro": {"beta": 0.3},
}


def spec_of(name: str, **fields: Any) -> TokenSumLossSpec:
    given = {"form": name.partition("-")[0], **FORMS[name], **fields}
    return TokenSumLossSpec.model_validate(given)


def batch_of(*, width: int = 0) -> Experience:
    ranges = {"logprobs": (-2.0, -0.1), "advantages": (-1.0, 1.0), TOKEN_WEIGHTS: (-1.0, 2.0)}
    whole = random_batch(mixed_masks(seed=6), ranges, seed=7).experience(torch.float64)
    offsets, number = whole["loss_mask"].offsets, len(whole["loss_mask"].values)
    generator = torch.Generator().manual_seed(8)
    columns = {
        RATIO_MASK: Column(ColumnKind.COMPLETION, torch.rand(number, generator=generator), offsets)
    }
    if width:
        shape = (number, width)
        weights = torch.rand(shape, generator=generator, dtype=torch.float64)
        ids = torch.zeros(shape, dtype=torch.int32)
        columns[TOKEN_WEIGHTS] = Column(ColumnKind.COMPLETION, weights, offsets)
        columns[TARGET_IDS] = Column(ColumnKind.COMPLETION, ids, offsets)
    return whole | Experience(columns)


def by_hand(spec: TokenSumLossSpec, batch: Experience, leaf: torch.Tensor) -> torch.Tensor:
    """The spec's formula, one token after another."""
    offsets, mask = batch["loss_mask"].offsets, batch["loss_mask"].values
    assert offsets is not None
    total = torch.zeros((), dtype=torch.float64)
    for first, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        places = [place for place in range(first, end) if mask[place]]
        sampled, advantages = batch["logprobs"].values, batch["advantages"].values
        if spec.form == "gspo":
            weights = [float(batch[RATIO_MASK].values[place]) for place in places]
            gaps = [float(leaf[place, 0] - sampled[place]) for place in places]
            mean = sum(w * g for w, g in zip(weights, gaps, strict=True)) / (sum(weights) or 1)
        for place in places:
            now, then, advantage = leaf[place, 0], float(sampled[place]), float(advantages[place])
            if spec.form == "cross_entropy":
                weights_here = batch[TOKEN_WEIGHTS].values[place].reshape(-1)
                total = total - (weights_here * leaf[place]).sum()
                continue
            ratio = torch.exp(now - then)
            if spec.form == "importance_sampling":
                total = total - ratio * advantage
            elif spec.form == "dro":
                total = total - now * advantage + spec.beta / 2 * (now - then) ** 2
            elif spec.form == "cispo":
                low, high = spec.clips
                total = total - min(max(float(ratio), low), high) * advantage * now
            else:
                low, high = spec.clips
                if spec.form == "gspo":
                    ratio = math.exp(mean) * torch.exp(now - now.detach())
                clipped = ratio.clamp(low, high)
                total = total - torch.minimum(ratio * advantage, clipped * advantage)
    return total


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("targets", [0, 1])
def test_each_form_is_its_formula_in_any_cut(name: str, targets: int) -> None:
    batch = batch_of(width=targets)
    spec = spec_of(name, targets=targets)
    place = torch.arange(len(batch["loss_mask"].values))
    batch |= Experience({"place": Column(ColumnKind.COMPLETION, place, batch["loss_mask"].offsets)})
    start = torch.linspace(-2.5, -0.05, len(place), dtype=torch.float64)[:, None]
    expected = start.clone().requires_grad_()
    total = by_hand(spec, batch, expected)
    total.backward()
    every = list(range(batch.num_rows))
    for rows in ([every], [every[:3], every[3:4], every[4:]]):
        leaf = start.clone().requires_grad_()
        found = 0.0
        for part in rows:
            cut = batch.select(torch.tensor(part))
            own = leaf[cut["place"].values]
            outputs = ModelOutputs(choices_NK=own) if targets else ModelOutputs(own[:, 0])
            share, metrics = make_loss(spec)(outputs, cut, LossScale.of(batch))
            share.backward()
            found += float(metrics["loss"])
        assert found == pytest.approx(total.item(), rel=1e-10)
        torch.testing.assert_close(leaf.grad, expected.grad, rtol=1e-8, atol=1e-12)


def test_several_targets_a_place_are_weighed_one_by_one() -> None:
    batch = batch_of(width=3)
    spec = spec_of("cross_entropy", targets=3)
    leaf = torch.linspace(-3, 0, 3 * len(batch["loss_mask"].values), dtype=torch.float64)
    leaf = leaf.view(-1, 3).requires_grad_()
    loss, _ = make_loss(spec)(ModelOutputs(choices_NK=leaf), batch, LossScale.of(batch))
    loss.backward()
    kept = batch["loss_mask"].values[:, None]
    weights = batch[TOKEN_WEIGHTS].values
    torch.testing.assert_close(leaf.grad, -weights * kept, rtol=1e-12, atol=0)


def test_a_ratio_beyond_all_measure_stays_a_number() -> None:
    batch = batch_of()
    far = Column(
        ColumnKind.COMPLETION,
        torch.full_like(batch["logprobs"].values, -2000.0),
        batch["loss_mask"].offsets,
    )
    batch |= Experience({"logprobs": far})
    for name in ("importance_sampling", "ppo", "cispo", "gspo"):
        leaf = torch.full((len(far.values),), -0.5).requires_grad_()
        loss, _ = make_loss(spec_of(name))(ModelOutputs(leaf), batch, LossScale.of(batch))
        loss.backward()
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"form": "ppo", "targets": 2}, "targets is 2 with form 'ppo'"),
        ({"form": "dro", "clip_low": 0.5}, "clip_low is given with form 'dro', which clips"),
        ({"form": "ppo", "clip_low": 1.3}, "clip_low is 1.3 and clip_high 1.2"),
        ({"form": "stable_reinforce"}, "form"),
    ],
)
def test_what_a_form_does_not_have_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        TokenSumLossSpec.model_validate(fields)
