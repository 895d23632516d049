"""Losses on given data against loops in plain float64, with values and gradients."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from support.ragged_batches import RaggedBatch, mixed_masks, pack, random_batch

from rolemesh.engine.algorithms.estimators.estimation import estimate_advantages
from rolemesh.engine.algorithms.losses.base import LossScale, MetricShares, ModelOutputs, make_loss
from rolemesh.engine.algorithms.preferences.pairs import PairIncompleteError, Pairs
from rolemesh.engine.experience import Column, ColumnKind, Experience, offsets_of
from rolemesh.engine.specs import (
    BradleyTerryLossSpec,
    DpoLossSpec,
    KtoLossSpec,
    KtoPointSpec,
    SftLossSpec,
)

TOLERANCE = {
    torch.float64: 1e-10,
    # Row sums of up to 12 log-probs in float32, and differences of two of them.
    torch.float32: 2e-5,
}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["f64", "f32"])
STEP = 1e-6
"""Of central differences in float64, good to about STEP^2 and rounding / STEP."""
SLOPE_TOLERANCE = 1e-7

PAIR_IDS = (4, 4, 2, 2, -1, 9, 7, 7)
PREFERENCE = (1, -1, -1, 1, 1, 0, 1, -1)
"""Three pairs, one of them the other way round and with an empty row; a row without a pair; and an
all-masked one that is neither. Masks have holes, and one row has a single token."""

SPECS = {
    "sft_tokens": SftLossSpec(),
    "sft_rows": SftLossSpec(aggregation="seq_mean_token_mean"),
    "dpo": DpoLossSpec(beta=0.3),
    "cdpo": DpoLossSpec(beta=0.3, label_smoothing=0.2),
    "dpo_mean": DpoLossSpec(beta=0.3, log_ratio="mean"),
    "ipo": DpoLossSpec(beta=0.4, variant="ipo"),
    "ipo_mean": DpoLossSpec(beta=0.4, variant="ipo", log_ratio="mean"),
    "kto": KtoLossSpec(beta=0.5, wanted_weight=1.5, unwanted_weight=0.7),
    "bradley_terry": BradleyTerryLossSpec(),
    "bradley_terry_options": BradleyTerryLossSpec(margin=0.4, centering=0.05),
}
EVERY_SPEC = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
AnySpec = SftLossSpec | DpoLossSpec | KtoLossSpec | BradleyTerryLossSpec


def make_batch(seed: int = 5) -> RaggedBatch:
    batch = random_batch(
        mixed_masks(seed),
        dict.fromkeys(("new", "reference_logprobs", "proximal_logprobs"), (-2.0, 0.0)),
        seed + 1,
        {"scores": (-2.0, 2.0)},
    )
    batch.row_columns["pair_ids"] = list(PAIR_IDS)
    batch.row_columns["preference"] = list(PREFERENCE)
    batch.row_columns["kl_reference_point"] = [0.3] * len(PAIR_IDS)
    return batch


def experience_of(batch: RaggedBatch, dtype: torch.dtype) -> Experience:
    ids = Column(ColumnKind.ROW, torch.tensor(batch.row_columns["pair_ids"], dtype=torch.int64))
    return batch.experience(dtype) | Experience({"pair_ids": ids})


# --- oracles: plain floats, no code of the engine -------------------------------------------


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def ratio(batch: RaggedBatch, row: int, new: list[list[float]]) -> float:
    return math.fsum(
        policy - reference
        for policy, reference, counts in zip(
            new[row], batch.columns["reference_logprobs"][row], batch.masks[row], strict=True
        )
        if counts
    )


def pairs_of(batch: RaggedBatch) -> list[tuple[int, int]]:
    found = []
    for chosen, (pair, preference) in enumerate(zip(PAIR_IDS, PREFERENCE, strict=True)):
        if pair < 0 or preference != 1:
            continue
        (rejected,) = (
            row
            for row, (other, sign) in enumerate(zip(PAIR_IDS, PREFERENCE, strict=True))
            if other == pair and sign == -1
        )
        found.append((chosen, rejected))
    return found


def sft(batch: RaggedBatch, spec: SftLossSpec, new: list[list[float]]) -> float:
    rows = [
        [-x for x, counts in zip(row, mask, strict=True) if counts]
        for row, mask in zip(new, batch.masks, strict=True)
    ]
    rows = [row for row in rows if row]
    if spec.aggregation == "token_mean":
        tokens = [x for row in rows for x in row]
        return math.fsum(tokens) / len(tokens)
    return math.fsum(math.fsum(row) / len(row) for row in rows) / len(rows)


def dpo(batch: RaggedBatch, spec: DpoLossSpec, new: list[list[float]]) -> float:
    losses = []
    for rows in pairs_of(batch):
        ratios = [ratio(batch, row, new) for row in rows]
        if spec.log_ratio == "mean":
            ratios = [
                x / max(sum(batch.masks[row]), 1) for x, row in zip(ratios, rows, strict=True)
            ]
        margin = ratios[0] - ratios[1]
        if spec.variant == "ipo":
            losses.append((margin - 1 / (2 * spec.beta)) ** 2)
        else:
            losses.append(
                -(1 - spec.label_smoothing) * log_sigmoid(spec.beta * margin)
                - spec.label_smoothing * log_sigmoid(-spec.beta * margin)
            )
    return math.fsum(losses) / len(losses)


def kto(batch: RaggedBatch, spec: KtoLossSpec, new: list[list[float]]) -> float:
    losses = []
    for row, preference in enumerate(PREFERENCE):
        point = batch.row_columns["kl_reference_point"][row]
        value = spec.beta * (ratio(batch, row, new) - point)
        if preference == 1:
            losses.append(spec.wanted_weight - spec.wanted_weight * sigmoid(value))
        elif preference == -1:
            losses.append(spec.unwanted_weight - spec.unwanted_weight * sigmoid(-value))
    return math.fsum(losses) / len(losses)


def bradley_terry(batch: RaggedBatch, spec: BradleyTerryLossSpec, scores: list[float]) -> float:
    losses = [
        -log_sigmoid(scores[chosen] - scores[rejected] - spec.margin)
        + spec.centering * (scores[chosen] + scores[rejected]) ** 2
        for chosen, rejected in pairs_of(batch)
    ]
    return math.fsum(losses) / len(losses)


def expected_loss(batch: RaggedBatch, spec: AnySpec, numbers: list[float]) -> float:
    """The loss of packed log-probs or of scores."""
    if isinstance(spec, BradleyTerryLossSpec):
        return bradley_terry(batch, spec, numbers)
    left = iter(numbers)
    rows = [[next(left) for _ in mask] for mask in batch.masks]
    if isinstance(spec, SftLossSpec):
        return sft(batch, spec, rows)
    return dpo(batch, spec, rows) if isinstance(spec, DpoLossSpec) else kto(batch, spec, rows)


def slopes(loss: Callable[[list[float]], float], at: Sequence[float]) -> list[float]:
    """Gradient by central differences."""
    found = []
    for index in range(len(at)):
        up, down = list(at), list(at)
        up[index] += STEP
        down[index] -= STEP
        found.append((loss(up) - loss(down)) / (2 * STEP))
    return found


# --- the engine -----------------------------------------------------------------------------


def parameter_of(batch: RaggedBatch, spec: AnySpec, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(spec, BradleyTerryLossSpec):
        return torch.tensor(batch.row_columns["scores"], dtype=dtype).requires_grad_()
    return pack(batch.columns["new"], dtype).requires_grad_()


def run(
    batch: RaggedBatch, spec: AnySpec, dtype: torch.dtype, cut: Sequence[Sequence[int]]
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, gradient and metrics over micro-batches of the given rows."""
    experience, loss = experience_of(batch, dtype), make_loss(spec)
    scale = LossScale.of(experience.require(loss.columns))
    parameter = parameter_of(batch, spec, dtype)
    offsets = offsets_of(torch.tensor([len(mask) for mask in batch.masks])).tolist()
    total, metrics = 0.0, MetricShares()
    for rows in cut:
        if loss.needs == "scores":
            outputs = ModelOutputs(scores_B=parameter[torch.tensor(rows, dtype=torch.int64)])
        else:
            index = [i for row in rows for i in range(offsets[row], offsets[row + 1])]
            outputs = ModelOutputs(logprobs_N=parameter[torch.tensor(index, dtype=torch.int64)])
        part = experience.require(loss.columns).select(torch.tensor(rows, dtype=torch.int64))
        share, found = loss(outputs, part, scale)
        share.backward()
        total += float(share.detach())
        metrics.add(found)
    assert parameter.grad is not None
    return total, parameter.grad, metrics.totals()


WHOLE = [list(range(len(PAIR_IDS)))]


@DTYPES
@EVERY_SPEC
def test_loss_and_gradient_are_those_of_plain_loops(spec: AnySpec, dtype: torch.dtype) -> None:
    batch = make_batch().rounded_to(dtype)
    loss, gradient, metrics = run(batch, spec, dtype, WHOLE)
    numbers = parameter_of(batch, spec, torch.float64).tolist()
    tolerance = TOLERANCE[dtype]
    expected = expected_loss(batch, spec, numbers)
    assert loss == pytest.approx(expected, rel=tolerance, abs=tolerance)
    assert metrics["loss"] == pytest.approx(expected, rel=tolerance, abs=tolerance)
    torch.testing.assert_close(
        gradient.double(),
        torch.tensor(slopes(lambda at: expected_loss(batch, spec, at), numbers)).double(),
        rtol=0,
        atol=max(tolerance, SLOPE_TOLERANCE),
    )


@EVERY_SPEC
def test_any_cut_that_keeps_pairs_gives_the_same_gradient_and_metrics(spec: AnySpec) -> None:
    batch = make_batch()
    generator = random.Random(3)
    loss, gradient, metrics = run(batch, spec, torch.float64, WHOLE)
    units = [[0, 1], [2, 3], [4], [5], [6, 7]]
    for number in (2, 3, 5):
        generator.shuffle(units)
        cut = [[row for unit in units[i::number] for row in unit] for i in range(number)]
        other_loss, other_gradient, other_metrics = run(batch, spec, torch.float64, cut)
        assert other_loss == pytest.approx(loss, rel=1e-12)
        # A row's or pair's gradient is computed from it and global counts alone.
        assert torch.equal(other_gradient, gradient)
        assert other_metrics == pytest.approx(metrics, rel=1e-12)


@pytest.mark.parametrize("name", [name for name in SPECS if not name.startswith("sft")])
def test_rows_that_were_not_judged_have_no_gradient(name: str) -> None:
    spec = SPECS[name]
    _, gradient, _ = run(make_batch(), spec, torch.float64, WHOLE)
    lengths = [len(mask) for mask in make_batch().masks]
    is_scores = isinstance(spec, BradleyTerryLossSpec)
    rows = gradient if is_scores else torch.split(gradient, lengths)
    assert float(rows[5].abs().sum()) == 0
    if not isinstance(spec, KtoLossSpec):
        assert float(rows[4].abs().sum()) == 0


@EVERY_SPEC
def test_what_a_masked_token_holds_reaches_nothing(spec: AnySpec) -> None:
    batch = make_batch()
    loss, _, _ = run(batch, spec, torch.float64, WHOLE)
    for name in ("new", "reference_logprobs"):
        batch.columns[name] = [
            [x if counts else math.nan for x, counts in zip(row, mask, strict=True)]
            for row, mask in zip(batch.columns[name], batch.masks, strict=True)
        ]
    with_nans, gradient, _ = run(batch, spec, torch.float64, WHOLE)
    assert with_nans == loss
    assert bool(gradient.isfinite().all())


@EVERY_SPEC
def test_rows_without_completion_give_zero_with_a_gradient(spec: AnySpec) -> None:
    """The filler of a replica that has fewer micro-batches than another."""
    loss = make_loss(spec)
    batch = Experience(
        {
            "loss_mask": Column.ragged(ColumnKind.COMPLETION, [[]], torch.bool),
            "reference_logprobs": Column.ragged(ColumnKind.COMPLETION, [[]], torch.float32),
            **{
                name: Column(ColumnKind.ROW, torch.zeros(1))
                for name in ("pair_ids", "preference", "kl_reference_point")
            },
        }
    )
    parameter = torch.zeros(1, requires_grad=True)
    outputs = ModelOutputs(logprobs_N=parameter[:0], scores_B=parameter)
    share, _ = loss(outputs, batch, LossScale(num_tokens=3, num_rows=2))
    share.backward()
    assert float(share.detach()) == 0
    assert parameter.grad is not None
    assert float(parameter.grad) == 0


def test_extreme_margins_have_finite_losses_and_gradients() -> None:
    """float32 exp overflows at 89; a policy may drift much further from its reference."""
    for spec in (DpoLossSpec(beta=1.0), KtoLossSpec(beta=1.0), BradleyTerryLossSpec()):
        batch = make_batch()
        batch.columns["new"] = [[x * 1e3 for x in row] for row in batch.columns["new"]]
        batch.row_columns["scores"] = [x * 1e3 for x in batch.row_columns["scores"]]
        loss, gradient, _ = run(batch, spec, torch.float32, WHOLE)
        assert math.isfinite(loss)
        assert bool(gradient.isfinite().all())


def test_metrics_of_pairs_are_means_over_the_pairs() -> None:
    batch = make_batch()
    _, _, metrics = run(batch, SPECS["dpo"], torch.float64, WHOLE)
    rewards = [
        [0.3 * ratio(batch, row, batch.columns["new"]) for row in rows] for rows in pairs_of(batch)
    ]
    means = [sum(pair[i] for pair in rewards) / len(rewards) for i in (0, 1)]
    assert metrics["chosen_reward"] == pytest.approx(means[0])
    assert metrics["rejected_reward"] == pytest.approx(means[1])
    assert metrics["preference_margin"] == pytest.approx(means[0] - means[1])
    right = sum(chosen > rejected for chosen, rejected in rewards)
    assert metrics["preference_accuracy"] == pytest.approx(right / len(rewards))


def test_dpo_of_an_untrained_policy_is_log_two_and_as_right_as_a_guess() -> None:
    batch = make_batch()
    batch.columns["new"] = batch.columns["reference_logprobs"]
    loss, _, metrics = run(batch, DpoLossSpec(), torch.float64, WHOLE)
    assert loss == pytest.approx(math.log(2))
    assert metrics["preference_accuracy"] == 0.5
    assert metrics["preference_margin"] == 0


@pytest.mark.parametrize("is_reward_model", [False, True])
def test_one_tie_among_pairs_is_half_right(is_reward_model: bool) -> None:
    batch = make_batch()
    (tied_chosen, tied_rejected), *others = pairs_of(batch)
    if is_reward_model:
        spec: AnySpec = BradleyTerryLossSpec()
        scores = batch.row_columns["scores"]
        scores[tied_chosen] = scores[tied_rejected]
        margins = [scores[chosen] - scores[rejected] for chosen, rejected in others]
    else:
        spec, new = DpoLossSpec(), batch.columns["new"]
        for row in (tied_chosen, tied_rejected):
            new[row] = batch.columns["reference_logprobs"][row]
        margins = [ratio(batch, one, new) - ratio(batch, other, new) for one, other in others]
    assert all(margins)
    _, _, metrics = run(batch, spec, torch.float64, WHOLE)
    right = sum(margin > 0 for margin in margins) + 0.5
    assert metrics["preference_accuracy"] == pytest.approx(right / (len(others) + 1))


@pytest.mark.parametrize("tied", [None, 0, 2])
def test_kto_compares_each_judged_row_with_the_reference_point(tied: int | None) -> None:
    batch = make_batch()
    new, point = batch.columns["new"], 0.3
    if tied is not None:
        # Exactly at the point: such a row is right half of the time.
        batch.row_columns["kl_reference_point"] = [0.0] * len(PAIR_IDS)
        new[tied], point = batch.columns["reference_logprobs"][tied], 0.0
    _, _, metrics = run(batch, SPECS["kto"], torch.float64, WHOLE)
    judged = [(row, sign) for row, sign in enumerate(PREFERENCE) if sign]
    leads = [sign * (ratio(batch, row, new) - point) for row, sign in judged]
    right = math.fsum(1.0 if lead > 0 else 0.5 if lead == 0 else 0.0 for lead in leads)
    assert metrics["preference_accuracy"] == pytest.approx(right / len(judged))
    means = [
        math.fsum(0.5 * ratio(batch, row, new) for row, sign in judged if sign == wanted)
        / sum(sign == wanted for _, sign in judged)
        for wanted in (1, -1)
    ]
    assert metrics["preference_margin"] == pytest.approx(means[0] - means[1])


# --- pairs ----------------------------------------------------------------------------------


def pair_batch(pair_ids: Sequence[int], preference: Sequence[float]) -> Experience:
    return Experience(
        {
            "pair_ids": Column(ColumnKind.ROW, torch.tensor(pair_ids)),
            "preference": Column(ColumnKind.ROW, torch.tensor(preference, dtype=torch.float32)),
        }
    )


def test_pairs_are_found_wherever_their_rows_stand() -> None:
    pairs = Pairs.of(pair_batch([4, 2, -1, 2, 4, 7], [1, -1, 1, 1, -1, 0]))
    assert pairs.chosen_P.tolist() == [3, 0]
    assert pairs.rejected_P.tolist() == [1, 4]


@pytest.mark.parametrize(
    ("pair_ids", "preference"),
    [([3, 5, 5], [1, 1, -1]), ([3, 3], [1, 1]), ([3, 3, 3], [1, -1, -1])],
    ids=["torn", "two chosen", "three rows"],
)
def test_a_pair_that_is_not_two_rows_is_refused(
    pair_ids: list[int], preference: list[float]
) -> None:
    with pytest.raises(PairIncompleteError, match=r"pair 3 with the preferences .*rows_per_unit"):
        Pairs.of(pair_batch(pair_ids, preference))


def test_a_preference_that_means_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"preference of row 1 is 0\.5: give 1"):
        Pairs.of(pair_batch([1, 1], [1, 0.5]))


# --- the reference point of KTO -------------------------------------------------------------


@DTYPES
def test_the_reference_point_is_the_mean_log_ratio_of_rows_that_are_neither(
    dtype: torch.dtype,
) -> None:
    batch = make_batch()
    # Only row 5 is neither, and it is all masked: take two more.
    batch.row_columns["preference"] = [0, -1, 0, -1, 1, 0, 1, -1]
    batch.columns["proximal_logprobs"] = [
        [x + 1.5 for x in row] for row in batch.columns["proximal_logprobs"]
    ]
    batch = batch.rounded_to(dtype)
    column, metrics = estimate_advantages(experience_of(batch, dtype), KtoPointSpec())
    expected = (
        math.fsum(ratio(batch, row, batch.columns["proximal_logprobs"]) for row in (0, 2, 5)) / 3
    )
    assert expected > 0
    points = column["kl_reference_point"].values
    assert points.dtype == torch.float32
    assert points.tolist() == pytest.approx([expected] * 8, rel=1e-6)
    assert metrics["kl_reference_point"] == pytest.approx(expected, rel=1e-6)


def test_a_negative_reference_point_becomes_zero() -> None:
    batch = make_batch()
    batch.row_columns["preference"] = [0, -1, 0, -1, 1, 0, 1, -1]
    batch.columns["proximal_logprobs"] = [[x - 5 for x in row] for row in batch.columns["new"]]
    column, metrics = estimate_advantages(experience_of(batch, torch.float32), KtoPointSpec())
    assert column["kl_reference_point"].values.tolist() == [0.0] * 8
    assert metrics["kl_reference_point_raw"] < 0


def test_a_batch_without_rows_for_the_divergence_is_refused() -> None:
    batch = make_batch()
    batch.row_columns["preference"] = [1, -1] * 4
    with pytest.raises(ValueError, match="preference is 0 in none of 8 rows"):
        estimate_advantages(experience_of(batch, torch.float32), KtoPointSpec())


def test_log_probs_that_are_not_finite_give_no_reference_point() -> None:
    batch = make_batch()
    batch.row_columns["preference"] = [0] * 8
    batch.columns["proximal_logprobs"][0][0] = math.nan
    with pytest.raises(ValueError, match="must be finite"):
        estimate_advantages(experience_of(batch, torch.float32), KtoPointSpec())


# --- specs ----------------------------------------------------------------------------------


def test_smoothing_goes_with_the_sigmoid_alone() -> None:
    with pytest.raises(ValueError, match=r"label_smoothing is 0\.1 with variant 'ipo'"):
        DpoLossSpec(variant="ipo", label_smoothing=0.1)
