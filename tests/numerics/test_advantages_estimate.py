"""estimate_advantages: rewards, KL penalty, controller, metrics and refusals."""

from __future__ import annotations

import json
import math
import statistics

import pytest
import torch
from support import oracles
from support.ragged_batches import RaggedBatch, mixed_masks, pack, random_batch

from rolemesh.engine.algorithms.estimators.estimation import Controllers, estimate_advantages
from rolemesh.engine.algorithms.kl import KlController
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.layout.payload import ColumnMissingError
from rolemesh.engine.specs import AdaptiveKlSpec, FixedKlSpec, GaeSpec, KlForm

FLOAT32_TOLERANCE = 1e-5
"""Columns come back in float32; the arithmetic between is float64."""
FORMS = pytest.mark.parametrize("form", ["k1", "k2", "k3"])


def make_batch(seed: int = 21) -> RaggedBatch:
    batch = random_batch(
        mixed_masks(seed),
        {"logprobs": (-2.0, -0.1), "reference_logprobs": (-2.0, -0.1), "values": (-1.0, 1.0)},
        seed,
        {"rewards": (-1.0, 2.0)},
    )
    return batch.rounded_to(torch.float32)


def token_rewards(batch: RaggedBatch, coefficient: float, form: str) -> list[list[float]]:
    rows = []
    for b, mask in enumerate(batch.masks):
        row = [0.0] * len(mask)
        kept = [t for t, counts in enumerate(mask) if counts]
        for t in kept:
            logprob = batch.columns["logprobs"][b][t]
            reference = batch.columns["reference_logprobs"][b][t]
            row[t] = -coefficient * oracles.kl(form, logprob, reference)
        if kept:
            row[kept[-1]] += batch.row_columns["rewards"][b]
        rows.append(row)
    return rows


@FORMS
@pytest.mark.parametrize("whiten", [False, True])
def test_columns_are_those_of_the_formulas(form: KlForm, whiten: bool) -> None:
    batch = make_batch()
    spec = GaeSpec(
        gamma=0.98, lam=0.9, whiten=whiten, kl_in_reward=FixedKlSpec(coefficient=0.3), kl_form=form
    )
    controller = KlController(FixedKlSpec(coefficient=0.3))
    result, _ = estimate_advantages(
        batch.experience(torch.float32), spec, Controllers(kl=controller)
    )
    rewards = token_rewards(batch, 0.3, form)
    advantages, returns = oracles.gae(rewards, batch.columns["values"], batch.masks, 0.98, 0.9)
    if whiten:
        advantages = oracles.whiten(advantages, batch.masks)
    expected = {"token_rewards": rewards, "advantages": advantages, "returns": returns}
    assert set(result.columns) == set(expected)
    for name, rows in expected.items():
        assert result[name].kind is ColumnKind.COMPLETION
        assert result[name].values.dtype == torch.float32
        torch.testing.assert_close(
            result[name].values.double(),
            pack(rows, torch.float64),
            rtol=FLOAT32_TOLERANCE,
            atol=FLOAT32_TOLERANCE,
        )


@FORMS
def test_metrics_are_those_of_the_definitions(form: KlForm) -> None:
    batch = make_batch()
    spec = GaeSpec(gamma=1.0, lam=0.95, kl_in_reward=FixedKlSpec(coefficient=0.1), kl_form=form)
    controller = KlController(FixedKlSpec(coefficient=0.1))
    _, metrics = estimate_advantages(
        batch.experience(torch.float32), spec, Controllers(kl=controller)
    )

    rewards = token_rewards(batch, 0.1, form)
    advantages, returns = oracles.gae(rewards, batch.columns["values"], batch.masks, 1.0, 0.95)
    kls = [
        [oracles.kl(form, p, q) for p, q in zip(*pair, strict=True)]
        for pair in zip(batch.columns["logprobs"], batch.columns["reference_logprobs"], strict=True)
    ]
    kept_kl = oracles.unmasked(kls, batch.masks)
    kept_advantages = oracles.unmasked(advantages, batch.masks)
    kept_returns = oracles.unmasked(returns, batch.masks)
    num_rows = sum(any(mask) for mask in batch.masks)
    expected = {
        "reward/mean": statistics.fmean(batch.row_columns["rewards"]),
        "reward/std": statistics.stdev(batch.row_columns["rewards"]),
        "kl/mean": statistics.fmean(kept_kl),
        "kl/per_row": math.fsum(kept_kl) / num_rows,
        "kl/coefficient": 0.1,
        "advantages/mean": statistics.fmean(kept_advantages),
        "advantages/std": statistics.stdev(kept_advantages),
        "advantages/rows_without_tokens": len(batch.masks) - num_rows,
        "returns/mean": statistics.fmean(kept_returns),
        "returns/std": statistics.stdev(kept_returns),
        "values/mean": statistics.fmean(oracles.unmasked(batch.columns["values"], batch.masks)),
        "values/explained_variance": 1
        - statistics.variance(kept_advantages) / statistics.variance(kept_returns),
    }
    assert metrics == pytest.approx(expected, rel=1e-10, abs=1e-10)
    json.dumps(metrics, allow_nan=False)


def test_penalty_uses_the_coefficient_of_before_and_the_controller_moves_once() -> None:
    batch = make_batch()
    kl_spec = AdaptiveKlSpec(coefficient=0.2, target=1e-3, horizon=100)
    controller = KlController(kl_spec)
    spec = GaeSpec(kl_in_reward=kl_spec, kl_form="k3", whiten=False)
    result, metrics = estimate_advantages(
        batch.experience(torch.float32), spec, Controllers(kl=controller)
    )
    num_rows = sum(any(mask) for mask in batch.masks)
    assert metrics["kl/coefficient"] == 0.2
    assert controller.coefficient == pytest.approx(0.2 * (1 + 0.2 * num_rows / 100))
    torch.testing.assert_close(
        result["token_rewards"].values.double(),
        pack(token_rewards(batch, 0.2, "k3"), torch.float64),
        rtol=FLOAT32_TOLERANCE,
        atol=FLOAT32_TOLERANCE,
    )


def test_a_refused_batch_leaves_the_controller_alone() -> None:
    kl_spec = AdaptiveKlSpec(coefficient=0.2, target=1e-3)
    controller = KlController(kl_spec)
    experience = make_batch().experience(torch.float32)
    columns = {name: column for name, column in experience.columns.items() if name != "values"}
    with pytest.raises(ColumnMissingError, match="values"):
        estimate_advantages(
            Experience(columns), GaeSpec(kl_in_reward=kl_spec), Controllers(kl=controller)
        )
    assert controller.coefficient == 0.2


def test_kl_is_reported_but_not_charged_without_a_penalty() -> None:
    batch = make_batch()
    result, metrics = estimate_advantages(batch.experience(torch.float32), GaeSpec(), None)
    assert metrics["kl/mean"] != 0
    assert "kl/coefficient" not in metrics
    torch.testing.assert_close(
        result["token_rewards"].values.double(),
        pack(token_rewards(batch, 0.0, "k1"), torch.float64),
        rtol=FLOAT32_TOLERANCE,
        atol=FLOAT32_TOLERANCE,
    )


def test_kl_metrics_are_absent_without_a_reference() -> None:
    batch = make_batch()
    del batch.columns["reference_logprobs"]
    _, metrics = estimate_advantages(batch.experience(torch.float32), GaeSpec(), None)
    assert not [name for name in metrics if name.startswith("kl/")]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_with_its_row(bad: float) -> None:
    batch = make_batch()
    batch.row_columns["rewards"][3] = bad
    with pytest.raises(ValueError, match=rf"'rewards' is {bad} at row 3 .*finite"):
        estimate_advantages(batch.experience(torch.float32), GaeSpec(), None)


def test_a_value_that_is_not_finite_is_refused_with_row_and_token() -> None:
    batch = make_batch()
    batch.columns["values"][3][batch.masks[3].index(True)] = math.nan
    token = batch.masks[3].index(True)
    with pytest.raises(ValueError, match=f"'values' is nan at completion token {token} of row 3"):
        estimate_advantages(batch.experience(torch.float32), GaeSpec(), None)


def test_numbers_of_masked_tokens_do_not_matter() -> None:
    batch = make_batch()
    clean, _ = estimate_advantages(batch.experience(torch.float32), GaeSpec(), None)
    for rows in batch.columns.values():
        for row, mask in zip(rows, batch.masks, strict=True):
            row[:] = [x if counts else math.nan for x, counts in zip(row, mask, strict=True)]
    poisoned, metrics = estimate_advantages(batch.experience(torch.float32), GaeSpec(), None)
    json.dumps(metrics, allow_nan=False)
    for name in clean.columns:
        assert torch.equal(clean[name].values, poisoned[name].values)


@pytest.mark.parametrize("name", ["rewards", "values", "loss_mask", "reference_logprobs"])
def test_a_missing_column_is_named(name: str) -> None:
    experience = make_batch().experience(torch.float32)
    columns = {other: column for other, column in experience.columns.items() if other != name}
    spec = FixedKlSpec(coefficient=0.1)
    with pytest.raises(ColumnMissingError, match=f"column '{name}' is missing"):
        estimate_advantages(
            Experience(columns),
            GaeSpec(kl_in_reward=spec),
            Controllers(kl=KlController(spec)),
        )


def test_columns_of_the_wrong_kind_are_refused() -> None:
    experience = make_batch().experience(torch.float32)
    rewards_a_token = experience | Experience({"rewards": experience["values"]})
    with pytest.raises(ValueError, match="'rewards' is a completion column"):
        estimate_advantages(rewards_a_token, GaeSpec(), None)
    values_a_row = experience | Experience({"values": experience["rewards"]})
    with pytest.raises(ValueError, match="'values' is a row column"):
        estimate_advantages(values_a_row, GaeSpec(), None)
    mask = experience["loss_mask"]
    mask_of_floats = Column(mask.kind, mask.values.float(), mask.offsets)
    with pytest.raises(ValueError, match=r"'loss_mask' has type torch\.float32"):
        estimate_advantages(experience | Experience({"loss_mask": mask_of_floats}), GaeSpec(), None)


def test_controller_and_spec_must_go_together() -> None:
    experience = make_batch().experience(torch.float32)
    with pytest.raises(ValueError, match="no controller"):
        estimate_advantages(experience, GaeSpec(kl_in_reward=FixedKlSpec()), None)
    with pytest.raises(ValueError, match="kl_in_reward is None"):
        estimate_advantages(experience, GaeSpec(), Controllers(kl=KlController(FixedKlSpec())))


@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_batch_without_unmasked_tokens_gives_zeros_and_finite_metrics(length: int) -> None:
    batch = random_batch(
        [[False] * length, [False] * length], {"values": (-1, 1)}, 0, {"rewards": (0, 1)}
    )
    result, metrics = estimate_advantages(batch.experience(torch.float32), GaeSpec(), None)
    json.dumps(metrics, allow_nan=False)
    assert metrics["advantages/rows_without_tokens"] == 2
    for column in result.columns.values():
        assert column.values.tolist() == [0.0] * (2 * length)


def test_a_single_row_with_a_single_token_gives_finite_metrics() -> None:
    batch = random_batch([[True]], {"values": (0.5, 0.5)}, 0, {"rewards": (1, 1)})
    result, metrics = estimate_advantages(
        batch.experience(torch.float32), GaeSpec(whiten=False), None
    )
    json.dumps(metrics, allow_nan=False)
    assert result["advantages"].values.tolist() == [0.5]
    assert result["returns"].values.tolist() == [1.0]
