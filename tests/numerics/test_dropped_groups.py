"""Rows of a dropped group: estimates, losses and updates are those of a batch without them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from support.ragged_batches import random_batch
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch
from support.updates import forward_backward

from rolemesh.engine.algorithms.estimators.estimation import Controllers, estimate_advantages
from rolemesh.engine.algorithms.losses.base import LossScale, ModelOutputs, make_loss
from rolemesh.engine.algorithms.selection import select_groups
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.specs import (
    EstimatorSpec,
    LossSpec,
    ModelSpec,
    OptimizerSpec,
    PpoPolicyLossSpec,
    PpoValueLossSpec,
    RewardSpreadSpec,
)
from rolemesh.engine.train.trainer import Trainer
from rolemesh.services.reward.judging import Judged, OwnSource, RewardSources
from rolemesh.services.reward.outcome import judged_columns

PROMPTS = (4, 4, 9, 9, 4, 7, 7, 9)
DROPPED = 9
"""Rows 2, 3 and 7."""
KEPT_ROWS = torch.tensor([0, 1, 4, 5, 6])

LOSS_TOLERANCE = 1e-12
"""float64: the same terms, summed in another order."""
GRADIENT_TOLERANCE = 1e-6
"""Relative, of the norm: the same float32 products in other blocks (as in test_trainer)."""
USUAL_INITIALIZER_RANGE = 0.02

ESTIMATORS: list[dict[str, Any]] = [
    {"type": "gae"},
    {"type": "gae", "kl_in_reward": {"type": "adaptive"}, "lam": 0.9},
    {"type": "safe_rlhf"},
    {"type": "grpo", "kl_in_reward": {"type": "fixed"}},
    {"type": "dr_grpo", "overlong": {"max_length": 5, "buffer": 3}},
    {"type": "rloo"},
    {"type": "pass_at_k", "k": 2},
    {"type": "running_baseline"},
    {"type": "grpo", "zero_variance": "left_out"},
    {"type": "reinforce_plus_plus"},
    {"type": "reinforce_plus_plus_baseline"},
    {"type": "online_dpo"},
]


class NoSource:
    """Judges nothing: its judge only says that groups may be dropped."""

    columns: tuple[str, ...] = ()
    reads_images = False
    full_score = None

    def score(self, batch: Experience, progress: object) -> torch.Tensor:
        raise AssertionError("nobody asks it")


def with_rewards(batch: Experience) -> tuple[Experience, Experience]:
    """The batch as a reward service leaves it that dropped a group; and the rows that it kept."""
    ids = Column(ColumnKind.ROW, torch.tensor(PROMPTS))
    rewards_B = torch.linspace(-1.0, 2.0, len(PROMPTS))
    rewards_B = rewards_B[torch.randperm(len(PROMPTS), generator=torch.Generator().manual_seed(3))]
    costs = Column(ColumnKind.ROW, rewards_B.square())
    whole = batch | Experience({"prompt_ids": ids, "costs": costs})
    kept = whole | Experience({"rewards": Column(ColumnKind.ROW, rewards_B)})
    is_judged_B = torch.tensor(PROMPTS) != DROPPED
    judged = Judged(
        rewards_B=rewards_B.masked_fill(~is_judged_B, math.nan), is_judged_B=is_judged_B
    )
    sources = RewardSources([OwnSource(name="none", weight=1.0, reward=NoSource())])
    sources.may_drop = True
    return whole | judged_columns("rewards", whole, judged, sources), kept.select(KEPT_ROWS)


def ragged() -> Experience:
    """Rows with holes in their masks, one of them without tokens that count."""
    masks = [
        [True, False, True],
        [True],
        [True, True, False, True],
        [True, True],
        [False, True, True, True, True],
        [False, False],
        [True, True, True],
        [True],
    ]
    names = ("logprobs", "reference_logprobs", "values", "advantages", "returns", "new")
    return random_batch(masks, dict.fromkeys(names, (-1.0, 1.0)), seed=5).experience(torch.float64)


@pytest.mark.parametrize("parameters", ESTIMATORS, ids=lambda parameters: parameters["type"])
def test_estimates_are_those_of_the_judged_rows_alone_bit_for_bit(
    parameters: dict[str, Any],
) -> None:
    spec: Any = TypeAdapter(EstimatorSpec).validate_python(parameters)
    dropped, kept = with_rewards(ragged())
    of_dropped, of_kept = Controllers.from_spec(spec), Controllers.from_spec(spec)
    found, metrics = estimate_advantages(dropped, spec, of_dropped)
    expected, expected_metrics = estimate_advantages(kept, spec, of_kept)
    assert metrics == expected_metrics
    assert of_dropped.state_dict() == of_kept.state_dict()
    assert set(found.columns) == set(expected.columns)
    absent = torch.tensor([2, 3, 7])
    for name, column in expected.columns.items():
        assert torch.equal(found.select(KEPT_ROWS)[name].values, column.values)
        fill = -1 if name == "pair_ids" else 0
        assert (found.select(absent)[name].values == fill).all()


@pytest.mark.parametrize(
    "spec",
    [
        PpoPolicyLossSpec(kl_in_loss=0.1),
        PpoPolicyLossSpec(aggregation="seq_mean_token_mean", kl_in_loss=0.1),
        PpoPolicyLossSpec(aggregation="seq_mean_token_sum"),
        PpoPolicyLossSpec(aggregation="seq_sum_norm", norm_length=10),
        PpoValueLossSpec(),
        PpoValueLossSpec(aggregation="seq_mean_token_mean"),
    ],
    ids=lambda spec: f"{spec.type}-{spec.aggregation}",
)
def test_losses_and_their_gradients_are_those_of_a_batch_without_the_rows(spec: Any) -> None:
    dropped, kept = with_rewards(ragged())
    found, gradient_N = loss_of(dropped, spec)
    expected, kept_gradient_N = loss_of(kept, spec)
    assert found == pytest.approx(expected, rel=LOSS_TOLERANCE)
    offsets = dropped["loss_mask"].offsets
    gradients = Experience({"g": Column(ColumnKind.COMPLETION, gradient_N, offsets)})
    torch.testing.assert_close(
        gradients.select(KEPT_ROWS)["g"].values, kept_gradient_N, rtol=LOSS_TOLERANCE, atol=0.0
    )
    assert (gradients.select(torch.tensor([2, 3, 7]))["g"].values == 0).all()


def loss_of(batch: Experience, spec: LossSpec) -> tuple[float, torch.Tensor]:
    loss = make_loss(spec)
    new_N = batch["new"].values.clone().requires_grad_()
    outputs = ModelOutputs(logprobs_N=new_N, entropy_N=new_N, values_N=new_N)
    value, _ = loss(outputs, batch.require(loss.columns), LossScale.of(batch))
    value.backward()
    assert new_N.grad is not None
    return float(value.detach()), new_N.grad


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
@pytest.mark.parametrize(
    ("kind", "estimator"),
    [("policy", "grpo"), ("policy", "rloo"), ("policy", "gae"), ("critic", "gae")],
)
def test_an_update_with_a_dropped_group_is_the_update_without_it(
    tmp_path: Path, kind: str, estimator: str, aggregation: str
) -> None:
    folder = write_tiny_llama(tmp_path, seed=4, initializer_range=USUAL_INITIALIZER_RANGE)
    spec: Any = TypeAdapter(EstimatorSpec).validate_python({"type": estimator})
    loss: LossSpec = (
        PpoPolicyLossSpec(aggregation=aggregation)
        if kind == "policy"
        else PpoValueLossSpec(aggregation=aggregation)
    )
    gradients = []
    for batch in with_rewards(token_batch(seed=1)):
        trainer = make_trainer(folder, kind)
        if kind == "policy":
            logprobs = trainer.compute_logprobs(batch, temperature=1.0)
            batch = batch | logprobs
        estimated, _ = estimate_advantages(batch, spec)
        forward_backward(trainer, batch | estimated, loss)
        gradients.append(
            torch.cat(
                [
                    weight.grad.double().flatten()
                    for _, weight in trainer.model.named_weights()
                    if weight.grad is not None
                ]
            )
        )
    with_drop, without = gradients
    assert float(without.norm()) > 0
    assert float((with_drop - without).norm() / without.norm()) < GRADIENT_TOLERANCE


def make_trainer(folder: Path, kind: str) -> Trainer:
    model = ModelSpec.model_validate({"path": folder, "compute_dtype": "float32"})
    make = Trainer.policy if kind == "policy" else Trainer.critic
    trainer = make(model, OptimizerSpec(learning_rate=1e-3))
    if kind == "critic":
        head: Any = trainer.model
        generator = torch.Generator().manual_seed(1)
        torch.nn.init.normal_(head.head.weight, std=0.1, generator=generator)
    return trainer


def test_a_batch_of_which_nothing_is_left_is_refused_with_where_to_look() -> None:
    dropped, _ = with_rewards(ragged())
    none = Experience({"is_judged": Column(ColumnKind.ROW, torch.zeros(len(PROMPTS)).bool())})
    spec: Any = TypeAdapter(EstimatorSpec).validate_python({"type": "grpo"})
    with pytest.raises(ValueError, match="nothing is left to learn from"):
        estimate_advantages(dropped | none, spec)


def test_a_dropped_group_is_not_selected_and_does_not_count() -> None:
    dropped, kept = with_rewards(ragged())
    rows, number, metrics = select_groups(dropped, RewardSpreadSpec(), 0)
    kept_rows, kept_number, kept_metrics = select_groups(kept, RewardSpreadSpec(), 0)
    assert rows.tolist() == KEPT_ROWS[kept_rows].tolist()
    assert (number, metrics) == (kept_number, kept_metrics)
    none = Experience({"is_judged": Column(ColumnKind.ROW, torch.zeros(len(PROMPTS)).bool())})
    rows, number, _ = select_groups(dropped | none, RewardSpreadSpec(), 0)
    assert (len(rows), number) == (0, 0)
