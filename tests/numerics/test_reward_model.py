"""Training of a reward model: against transformers' own, other cuts, checkpoints, exports."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import write_tiny_classifier, write_tiny_llama
from support.token_batches import token_batch
from support.updates import forward_backward, plan_whole, update_whole
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, LlamaForSequenceClassification

from rolemesh.engine.algorithms.preferences.pairs import PairIncompleteError
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.model_folders.model_files import ModelFolderError
from rolemesh.engine.models.classifier import Classifier
from rolemesh.engine.specs import (
    BradleyTerryLossSpec,
    ClassifierRewardSpec,
    DpoLossSpec,
    ModelSpec,
    OptimizerSpec,
    PpoPolicyLossSpec,
)
from rolemesh.engine.train.trainer import Trainer
from rolemesh.engine.weights.checkpoints.checkpoint import CheckpointMismatchError

GRADIENT_TOLERANCE = 5e-6
"""Relative, of the norm: the same float32 products row by row; see test_trainer."""
LOSS = BradleyTerryLossSpec(margin=0.1, centering=0.02)
PAIR_ORDER = [1, -1, -1, 1, 1, -1, 1, -1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of two labels."""
    return write_tiny_classifier(tmp_path_factory.mktemp("classifier"), seed=4)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"), seed=4)


def _source(folder: Path, **options: Any) -> ClassifierRewardSpec:
    fields = {name: options.pop(name) for name in ("label", "new_head") if name in options}
    model = ModelSpec.model_validate({"path": folder, "compute_dtype": "float32", **options})
    return ClassifierRewardSpec(model=model, **fields)


def _trainer(folder: Path, learning_rate: float = 1e-3, **options: Any) -> Trainer:
    return Trainer.reward(_source(folder, **options), OptimizerSpec(learning_rate=learning_rate))


def _batch(seed: int = 0) -> Experience:
    """Four pairs of neighbours; the prompts of a pair are not equal, which no loss asks."""
    pair_ids = torch.tensor([row // 2 + 10 for row in range(8)])
    preference = torch.tensor(PAIR_ORDER, dtype=torch.float32)
    return token_batch(seed=seed) | Experience(
        {
            "pair_ids": Column(ColumnKind.ROW, pair_ids),
            "preference": Column(ColumnKind.ROW, preference),
        }
    )


def _gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {
        name: weight.grad.clone()
        for name, weight in trainer.model.named_weights()
        if weight.grad is not None
    }


def _distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    distance = sum(float((left[name] - right[name]).double().square().sum()) for name in left)
    size = sum(float(tensor.double().square().sum()) for tensor in right.values())
    return math.sqrt(distance / size)


def _rows(batch: Experience) -> list[list[int]]:
    return [row.tolist() for row in batch["tokens"].rows()]


@pytest.mark.parametrize("label", [0, 1])
def test_loss_gradients_and_scores_are_those_of_transformers_row_by_row(
    folder: Path, label: int
) -> None:
    batch, trainer = _batch(), _trainer(folder, label=label, micro_batch_tokens=40)
    metrics, outputs = trainer.forward_backward(batch, LOSS, plan_whole(trainer, batch, 2))

    theirs = LlamaForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    theirs.eval()
    # One row at a time: nothing is padded, so their pooling takes the last token too.
    scores = [theirs(input_ids=torch.tensor([row])).logits[0, label] for row in _rows(batch)]
    losses = []
    for pair in range(4):
        first, second = scores[2 * pair], scores[2 * pair + 1]
        chosen, rejected = (first, second) if PAIR_ORDER[2 * pair] == 1 else (second, first)
        losses.append(
            -logsigmoid(chosen - rejected - LOSS.margin)
            + LOSS.centering * (chosen + rejected).square()
        )
    loss = torch.stack(losses).mean()
    loss.backward()
    expected = {name: weight.grad for name, weight in theirs.named_parameters()}

    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert outputs["scores"].kind is ColumnKind.ROW
    torch.testing.assert_close(
        outputs["scores"].values, torch.stack(scores).detach(), rtol=1e-5, atol=1e-5
    )
    assert _distance(_gradients(trainer), expected) < GRADIENT_TOLERANCE


def test_gradients_are_the_same_in_every_cut(folder: Path) -> None:
    found = {}
    for budget in (10_000, 40, 1):
        trainer = _trainer(folder, micro_batch_tokens=budget)
        metrics = forward_backward(trainer, _batch(), LOSS, rows_per_unit=2)
        found[budget] = metrics, _gradients(trainer)
    for metrics, gradients in found.values():
        assert metrics == pytest.approx(found[1][0], rel=1e-5, abs=1e-6)
        assert _distance(gradients, found[1][1]) < GRADIENT_TOLERANCE


def test_the_classifier_scores_with_the_weights_of_the_moment(folder: Path) -> None:
    trainer = _trainer(folder, label=1)
    classifier = Classifier(
        ModelSpec(path=folder, compute_dtype="float32"), label=1, trained=trainer.rank_model
    )
    frozen = Classifier(ModelSpec(path=folder, compute_dtype="float32"), label=1)
    rows = _rows(_batch())
    before = classifier.score(rows)
    assert torch.equal(before, frozen.score(rows))
    update_whole(trainer, _batch(), LOSS, epochs=1, mini_batch_rows=8, seed=1, rows_per_unit=2)
    after = classifier.score(rows)
    assert not torch.allclose(before, after)
    # Scoring leaves nothing behind that training would add to.
    assert not _gradients(trainer)


def test_a_new_head_scores_everything_zero_and_learns_from_its_first_step(llama: Path) -> None:
    trainer = _trainer(llama, new_head=True, learning_rate=3e-3)
    head = dict(trainer.named_weights())["score.weight"]
    assert head.shape == (1, 64)
    assert not head.any()
    update = {"epochs": 1, "mini_batch_rows": 8, "seed": 1, "rows_per_unit": 2}
    first = update_whole(trainer, _batch(), BradleyTerryLossSpec(), **update)
    assert first["loss"] == pytest.approx(math.log(2))
    # All scores are equal: ties, which a guess gets right half of the time.
    assert first["preference_accuracy"] == 0.5
    assert head.any()
    for _ in range(10):
        last = update_whole(trainer, _batch(), BradleyTerryLossSpec(), **update)
    assert last["preference_accuracy"] == 1
    assert last["loss"] < 0.3


def test_an_export_is_a_classifier_with_the_very_scores(llama: Path, tmp_path: Path) -> None:
    trainer = _trainer(llama, new_head=True, learning_rate=1e-2)
    update_whole(trainer, _batch(), LOSS, epochs=2, mini_batch_rows=4, seed=1, rows_per_unit=2)
    trainer.export(tmp_path / "reward")
    rows = _rows(_batch(seed=3))
    spec = ModelSpec(path=tmp_path / "reward", compute_dtype="float32")
    of_trainer = Classifier(spec, trained=trainer.rank_model)
    exported = Classifier(spec).score(rows)
    assert exported.std() > 0
    assert torch.equal(exported, of_trainer.score(rows))
    # So does transformers itself, from the folder alone; its head sums in another order.
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    with torch.no_grad():
        scores = [float(theirs(input_ids=torch.tensor([row])).logits[0, 0]) for row in rows]
    assert exported.tolist() == pytest.approx(scores, rel=1e-4, abs=1e-5)
    # And it can be trained further.
    again = Trainer.reward(ClassifierRewardSpec(model=spec), OptimizerSpec())
    assert forward_backward(again, _batch(), LOSS, rows_per_unit=2)["loss"] > 0


def test_training_goes_on_bit_for_bit_from_a_checkpoint(llama: Path, tmp_path: Path) -> None:
    update = {"epochs": 1, "mini_batch_rows": 4, "rows_per_unit": 2}
    trainer = _trainer(llama, new_head=True)
    update_whole(trainer, _batch(), LOSS, seed=1, **update)
    trainer.save(tmp_path / "checkpoint")
    expected = update_whole(trainer, _batch(seed=1), LOSS, seed=2, **update)
    other = _trainer(llama, new_head=True)
    other.load(tmp_path / "checkpoint")
    assert other.policy_version == 2
    assert update_whole(other, _batch(seed=1), LOSS, seed=2, **update) == expected
    for (name, left), (_, right) in zip(
        trainer.named_weights(), other.named_weights(), strict=True
    ):
        assert torch.equal(left, right), name


# --- refusals -------------------------------------------------------------------------------


def test_a_checkpoint_of_another_kind_is_refused(llama: Path, tmp_path: Path) -> None:
    policy = Trainer.policy(ModelSpec(path=llama), OptimizerSpec())
    policy.save(tmp_path / "checkpoint")
    with pytest.raises(CheckpointMismatchError, match="policy"):
        _trainer(llama, new_head=True).load(tmp_path / "checkpoint")


def test_a_pair_in_two_forward_passes_is_refused(folder: Path) -> None:
    trainer = _trainer(folder, micro_batch_tokens=1)
    with pytest.raises(PairIncompleteError, match="rows_per_unit"):
        forward_backward(trainer, _batch(), LOSS)
    assert not _gradients(trainer)


def test_losses_go_with_their_model(folder: Path, llama: Path) -> None:
    with pytest.raises(ValueError, match="a policy loss needs a causal language model"):
        forward_backward(_trainer(folder), _batch(), PpoPolicyLossSpec())
    with pytest.raises(ValueError, match="a policy loss needs a causal language model"):
        forward_backward(_trainer(folder), _batch(), DpoLossSpec())
    policy = Trainer.policy(ModelSpec(path=llama), OptimizerSpec())
    with pytest.raises(ValueError, match="a reward model's loss needs a reward model"):
        forward_backward(policy, _batch(), LOSS)


def test_a_folder_that_has_a_head_takes_no_new_one(folder: Path) -> None:
    with pytest.raises(ModelFolderError, match="leave new_head out"):
        _trainer(folder, new_head=True)


def test_a_folder_without_a_head_needs_a_new_one(llama: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"lacks the weights \['score.weight'\]"):
        _trainer(llama)


def test_a_label_that_the_head_lacks_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"label is 2, but the classifier in .* has 2 labels"):
        _trainer(folder, label=2)
