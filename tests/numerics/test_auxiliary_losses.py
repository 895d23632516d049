"""Further losses of an update, and units of rows: against gradients added by hand, and on ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.parallel_training import Job, Trained, joined, make_trainer, part_of, record_gradients
from support.rank_processes import RankContext, RankPool
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch
from support.updates import ALONE, auxiliary_whole, forward_backward, update_whole

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.parallel.mesh import RankGroup
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, PpoPolicyLossSpec, PpoValueLossSpec
from rolemesh.engine.train.auxiliary import AuxiliaryLoss
from rolemesh.engine.train.mini_batch import accumulate
from rolemesh.engine.train.plan import UpdatePlan
from rolemesh.engine.train.trainer import Trainer

GRADIENT_TOLERANCE = 5e-6
"""Relative, of the norm: float32 sums in another order, as in test_parallel_training."""
METRIC_TOLERANCE = 1e-5

VALUE_LOSS = PpoValueLossSpec()
OTHER_LOSS = PpoValueLossSpec(clip=None)
WEIGHT = 0.25


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"), seed=4)


def _critic(folder: Path, mesh: Any = None) -> Trainer:
    trainer = Trainer.critic(
        ModelSpec(path=folder, compute_dtype="float32", micro_batch_tokens=24),
        OptimizerSpec(learning_rate=1e-3),
    )
    torch.nn.init.normal_(
        trainer.model.head.weight,  # type: ignore[union-attr]
        std=0.1,
        generator=torch.Generator().manual_seed(1),
    )
    return trainer


def _auxiliary(
    weight: float = WEIGHT, *, num_steps: int = 1, parts: RankGroup = ALONE
) -> AuxiliaryLoss:
    rows = token_batch(prompt_lengths=(2, 3, 1, 4, 2), completion_lengths=(5, 3, 6, 2, 4), seed=9)
    return auxiliary_whole(rows, OTHER_LOSS, weight, num_steps=num_steps, parts=parts)


def test_gradients_are_added_with_their_weight_and_by_their_own_counts(folder: Path) -> None:
    batch, extra = token_batch(), _auxiliary()
    trainer = _critic(folder)
    steps = record_gradients(trainer)
    metrics = update_whole(
        trainer, batch, VALUE_LOSS, epochs=1, mini_batch_rows=8, seed=3, auxiliary=[extra]
    )
    alone = []
    for rows, loss in ((batch, VALUE_LOSS), (extra.batch, OTHER_LOSS)):
        other = _critic(folder)
        found = forward_backward(other, rows, loss)
        alone.append(
            (found, {name: weight.grad.clone() for name, weight in other.model.named_weights()})
        )
    (main, main_gradients), (further, further_gradients) = alone
    [step] = steps
    for name, gradient in step.items():
        expected = main_gradients[name] + WEIGHT * further_gradients[name]
        assert (gradient - expected).norm() <= GRADIENT_TOLERANCE * expected.norm(), name
    for name, number in main.items():
        assert metrics[name] == pytest.approx(number, rel=METRIC_TOLERANCE), name
    for name, number in further.items():
        assert metrics[f"auxiliary/ppo_value/{name}"] == pytest.approx(number, METRIC_TOLERANCE)


def test_rows_are_dealt_out_over_the_optimizer_steps_in_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = _critic(folder)
    seen: list[list[int]] = []

    def recording(model: Any, batch: Any, places: Any, *args: Any, **options: Any) -> Any:
        if options.get("weight") is not None:
            seen.append(list(places))
        return accumulate(model, batch, places, *args, **options)

    monkeypatch.setattr("rolemesh.engine.train.trainer.accumulate", recording)
    extra = _auxiliary(num_steps=6)
    calls: list[tuple[int, int]] = []
    metrics = update_whole(
        trainer,
        token_batch(),
        VALUE_LOSS,
        epochs=2,
        mini_batch_rows=3,
        seed=3,
        auxiliary=[extra],
        progress=lambda _stage, done, total: calls.append((done, total)),
    )
    # 5 rows over 2 x 3 steps: one step has none.
    assert metrics["optimizer_steps"] == 6
    assert seen == [[0], [1], [2], [3], [4]]
    assert calls[-1] == (21, 21)
    assert calls == sorted(calls)


def test_weight_zero_changes_no_weight_of_the_model(folder: Path) -> None:
    weights = []
    for auxiliary in ([], [_auxiliary(0.0, num_steps=3)]):
        trainer = _critic(folder)
        update_whole(
            trainer,
            token_batch(),
            VALUE_LOSS,
            epochs=1,
            mini_batch_rows=3,
            seed=3,
            auxiliary=auxiliary,
        )
        weights.append({name: weight.clone() for name, weight in trainer.named_weights()})
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ([_auxiliary(-1.0)], "weight of auxiliary loss 'ppo_value' is -1.0"),
        ([_auxiliary(float("nan"))], "is nan: give a finite number"),
        ([_auxiliary(), _auxiliary()], "2 losses of type 'ppo_value': give one of each type"),
        (
            [replace(_auxiliary(), loss=PpoPolicyLossSpec())],
            "a policy loss needs a causal language model",
        ),
    ],
    ids=["negative", "not finite", "twice", "needs log-probs"],
)
def test_an_auxiliary_loss_that_cannot_be_added_is_refused(
    folder: Path, losses: list[AuxiliaryLoss], message: str
) -> None:
    trainer = _critic(folder)
    with pytest.raises(ValueError, match=message):
        update_whole(
            trainer,
            token_batch(),
            VALUE_LOSS,
            epochs=1,
            mini_batch_rows=8,
            seed=3,
            auxiliary=losses,
        )
    assert trainer.policy_version == 0


def test_a_unit_shares_its_forward_pass(folder: Path) -> None:
    trainer = _critic(folder)
    seen: list[list[int]] = []
    run = trainer.rank_model.run

    def recording(passes: Any, *args: Any, **options: Any) -> None:
        seen.extend(micro_batch.part["number"].values.tolist() for micro_batch in passes)
        run(passes, *args, **options)

    trainer.rank_model.run = recording  # type: ignore[method-assign]
    numbered = token_batch() | Experience(
        {"number": Column(ColumnKind.ROW, torch.arange(8)), "returns": token_batch()["returns"]}
    )
    select = numbered.require
    # The loss does not ask for the column: let it through.
    object.__setattr__(numbered, "require", lambda _columns: select(tuple(numbered.columns)))
    update_whole(
        trainer, numbered, VALUE_LOSS, epochs=2, mini_batch_rows=4, seed=3, rows_per_unit=2
    )
    assert sorted(row for rows in seen for row in rows) == sorted([*range(8)] * 2)
    for rows in seen:
        assert all(second == first + 1 for first, second in zip(rows[::2], rows[1::2], strict=True))
        assert all(row % 2 == 0 for row in rows[::2])


def test_units_that_do_not_divide_the_batch_are_refused(folder: Path) -> None:
    trainer = _critic(folder)
    with pytest.raises(ValueError, match="has 8 rows, which is no multiple of rows_per_unit 3"):
        forward_backward(trainer, token_batch(), VALUE_LOSS, rows_per_unit=3)
    with pytest.raises(ValueError, match="mini_batch_rows is 3, no multiple of rows_per_unit 2"):
        update_whole(
            trainer, token_batch(), VALUE_LOSS, epochs=1, mini_batch_rows=3, seed=3, rows_per_unit=2
        )


# --- ranks --------------------------------------------------------------------------------


def update(at: RankContext, job: Job, holds_all: bool) -> Trained:
    """An update with units and a further loss, of which a rank holds all rows or its own."""
    with at.connect(HybridLayout(job.layout)) as mesh:
        extra = _auxiliary(num_steps=2, parts=mesh.parts)
        trainer = make_trainer(job, at, mesh)
        gradients = record_gradients(trainer)
        if not holds_all:
            lengths = extra.batch["tokens"].lengths().tolist()
            plan = UpdatePlan.dealt(lengths, mesh.parts, num_steps=2)
            held = extra.batch.select(torch.tensor(plan.rows, dtype=torch.int64))
            extra = replace(extra, batch=held, plan=plan)
        metrics = update_whole(
            trainer,
            job.batch,
            job.loss,
            epochs=1,
            mini_batch_rows=4,
            seed=5,
            rows_per_unit=2,
            auxiliary=[extra],
        )
        return part_of(trainer, metrics, gradients)


@pytest.mark.parametrize(
    "layout",
    [
        TrainLayout(dp=2),
        pytest.param(TrainLayout(dp=4, fsdp=4), marks=pytest.mark.slow),
        TrainLayout(tp=2, pp=2, dp=2, fsdp=2),
    ],
    ids=str,
)
def test_ranks_agree_with_one_rank(rank_pool: RankPool, folder: Path, layout: TrainLayout) -> None:
    job = Job(folder, token_batch(), VALUE_LOSS, kind="critic")
    alone = joined(rank_pool.run(update, 1, job, True), job.layout)
    job = replace(job, layout=layout)
    all_rows = joined(rank_pool.run(update, layout.world_size, job, True), layout)
    own_rows = joined(rank_pool.run(update, layout.world_size, job, False), layout)
    assert all_rows.metrics == own_rows.metrics
    assert all_rows.metrics.keys() == alone.metrics.keys()
    for name, number in alone.metrics.items():
        if name.endswith("computed_fraction"):
            continue  # A rank that has no row left computes a filler.
        assert all_rows.metrics[name] == pytest.approx(
            number, rel=METRIC_TOLERANCE, abs=METRIC_TOLERANCE
        ), name
    for name, gradient in alone.gradients[0].items():
        assert torch.equal(all_rows.gradients[0][name], own_rows.gradients[0][name]), name
        distance = (all_rows.gradients[0][name] - gradient).norm()
        assert distance <= GRADIENT_TOLERANCE * gradient.norm(), name
