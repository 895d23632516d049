"""Calls that leave a trainer's weights as they were: losses without gradients, and failures."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support.small_trainers import (
    POLICY_LOSS,
    VALUE_LOSS,
    batch_near,
    gradients_of,
    relative_distance,
    small_trainer,
    weights_of,
)
from support.tiny_models import write_tiny_llama
from support.updates import forward_backward, plan_whole, update_whole

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.layout.payload import ColumnMissingError
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, PpoPolicyLossSpec
from rolemesh.engine.train.model_in_training import GradientPendingError
from rolemesh.engine.train.trainer import (
    LossNotFiniteError,
    NoGradientError,
    Trainer,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"), seed=4)


def test_a_loss_without_gradients_is_that_of_training_and_changes_nothing(folder: Path) -> None:
    trainer, other = (small_trainer(folder, micro_batch_tokens=20) for _ in range(2))
    batch = batch_near(trainer)
    before = weights_of(trainer)
    found, outputs = trainer.forward_backward(
        batch, POLICY_LOSS, plan_whole(trainer, batch), without_gradients=True
    )
    expected, scored = other.forward_backward(batch, POLICY_LOSS, plan_whole(other, batch))
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-7)
    torch.testing.assert_close(outputs["logprobs"].values, scored["logprobs"].values)
    assert gradients_of(trainer) == {}
    assert relative_distance(weights_of(trainer), before) == 0
    with pytest.raises(NoGradientError):
        trainer.optim_step()
    assert trainer.policy_version == 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_loss_without_gradients_leaves_those_that_are_there(folder: Path, fails: bool) -> None:
    trainer = small_trainer(folder)
    batch = batch_near(trainer)
    forward_backward(trainer, batch, POLICY_LOSS)
    before = {name: gradient.clone() for name, gradient in gradients_of(trainer).items()}
    assert before
    if fails:
        advantages = batch["advantages"]
        nan = Column(
            ColumnKind.COMPLETION, torch.full_like(advantages.values, math.nan), advantages.offsets
        )
        with pytest.raises(LossNotFiniteError, match=r"loss is nan .*\): look for"):
            forward_backward(
                trainer,
                batch | Experience({"advantages": nan}),
                POLICY_LOSS,
                without_gradients=True,
            )
    else:
        forward_backward(trainer, batch, POLICY_LOSS, without_gradients=True)
    assert relative_distance(gradients_of(trainer), before) == 0
    trainer.optim_step()
    assert trainer.policy_version == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_drops_gradients_and_moves_no_weight(
    folder: Path, bad: float
) -> None:
    trainer = small_trainer(folder, micro_batch_tokens=20)
    batch = batch_near(trainer)
    before = weights_of(trainer)
    spoiled = batch["advantages"].values.clone()
    spoiled[batch["loss_mask"].values.nonzero()[-1]] = bad
    column = Column(ColumnKind.COMPLETION, spoiled, batch["advantages"].offsets)
    with pytest.raises(LossNotFiniteError, match="gradients were dropped, weights not touched"):
        forward_backward(trainer, batch | Experience({"advantages": column}), POLICY_LOSS)
    assert gradients_of(trainer) == {}
    assert trainer.policy_version == 0
    with pytest.raises(NoGradientError):
        trainer.optim_step()
    assert relative_distance(weights_of(trainer), before) == 0
    forward_backward(trainer, batch, POLICY_LOSS)
    trainer.optim_step()
    assert trainer.policy_version == 1


def test_a_pass_that_fails_half_way_leaves_no_gradient_behind(folder: Path) -> None:
    trainer = Trainer.policy(
        ModelSpec(path=folder, compute_dtype="float32", micro_batch_tokens=1), OptimizerSpec()
    )

    def leave(stage: str, done: int, total: int) -> None:
        raise ConnectionError("the caller is gone")

    with pytest.raises(ConnectionError):
        forward_backward(trainer, batch_near(trainer), PpoPolicyLossSpec(), leave)
    assert all(weight.grad is None for weight in trainer.model.parameters())
    with pytest.raises(NoGradientError):
        trainer.optim_step()


def test_a_gradient_that_is_not_finite_moves_no_weight_and_is_named(folder: Path) -> None:
    trainer = small_trainer(folder)
    before = weights_of(trainer)
    forward_backward(trainer, batch_near(trainer), POLICY_LOSS)
    norm = trainer.model.lm.get_parameter("model.norm.weight")
    norm.grad[3] = math.nan
    with pytest.raises(LossNotFiniteError, match=r"first in \['model\.norm\.weight'\]"):
        trainer.optim_step()
    assert trainer.policy_version == 0
    assert gradients_of(trainer) == {}
    assert relative_distance(weights_of(trainer), before) == 0


def test_a_row_that_is_all_masked_gives_no_gradient(folder: Path) -> None:
    trainer = small_trainer(folder)
    batch = batch_near(trainer)
    none = Column(
        ColumnKind.COMPLETION,
        torch.zeros_like(batch["loss_mask"].values),
        batch["loss_mask"].offsets,
    )
    forward_backward(trainer, batch | Experience({"loss_mask": none}), POLICY_LOSS)
    assert all(float(gradient.abs().max()) == 0 for gradient in gradients_of(trainer).values())


def test_the_wrong_loss_an_empty_batch_and_a_missing_column_are_refused(folder: Path) -> None:
    trainer = small_trainer(folder)
    batch = batch_near(trainer)
    with pytest.raises(ValueError, match="a value loss needs a value model, but this policy"):
        forward_backward(trainer, batch, VALUE_LOSS)
    with pytest.raises(ValueError, match="compute_values needs a value model"):
        trainer.compute_values(batch)
    with pytest.raises(ValueError, match="0 rows"):
        forward_backward(trainer, batch.slice(0, 0), POLICY_LOSS)
    with pytest.raises(ColumnMissingError, match="'advantages'"):
        forward_backward(
            trainer,
            batch.require(["tokens", "prompt_lengths", "logprobs", "loss_mask"]),
            POLICY_LOSS,
        )
    with pytest.raises(ValueError, match="epochs is 0"):
        update_whole(trainer, batch, POLICY_LOSS, epochs=0, mini_batch_rows=1, seed=0)
    with pytest.raises(ValueError, match="mini_batch_rows is 0"):
        update_whole(trainer, batch, POLICY_LOSS, epochs=1, mini_batch_rows=0, seed=0)


def test_a_checkpoint_is_refused_while_gradients_are_pending(folder: Path, tmp_path: Path) -> None:
    trainer = small_trainer(folder)
    forward_backward(trainer, batch_near(trainer), POLICY_LOSS)
    with pytest.raises(GradientPendingError, match="optim_step or drop_gradients"):
        trainer.save(tmp_path / "checkpoint")
    trainer.drop_gradients()
    trainer.save(tmp_path / "checkpoint")
