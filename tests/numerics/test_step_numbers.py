"""Numbers of AdamW that a caller gives for one step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch
from support.updates import forward_backward, plan_whole

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.specs import (
    AdamwStepSpec,
    ModelSpec,
    MuonSpec,
    OptimizerSpec,
    TokenSumLossSpec,
)
from rolemesh.engine.specs.columns import TARGET_IDS, TOKEN_WEIGHTS
from rolemesh.engine.train.trainer import Trainer

STEPS = (
    None,
    AdamwStepSpec(betas=(0.5, 0.7), eps=1e-6, weight_decay=0.0, max_grad_norm=None),
    AdamwStepSpec(betas=(0.9, 0.99), eps=1e-3, weight_decay=0.3, max_grad_norm=0.01),
    None,
)
RATES = (1e-3, 2e-3, 5e-4, 1e-3)
SPEC = OptimizerSpec(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5)
TOLERANCE = 5e-3
"""Relative to the steps so far: where a gradient is small, a step is a ratio of moments that differ
in their last bits."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"), seed=4)


def trainer_of(folder: Path, spec: OptimizerSpec | MuonSpec) -> Trainer:
    model = ModelSpec.model_validate({"path": folder, "compute_dtype": "float32"})
    return Trainer.policy(model, spec)


def batch_of(seed: int = 0) -> Experience:
    batch = token_batch(seed=seed)
    mask = batch["loss_mask"]
    weights = Column(ColumnKind.COMPLETION, torch.ones(len(mask.values)), mask.offsets)
    return batch | Experience({TOKEN_WEIGHTS: weights})


def test_each_step_goes_by_its_own_numbers(folder: Path) -> None:
    ours, theirs = trainer_of(folder, SPEC), trainer_of(folder, SPEC)
    weights = dict(theirs.model.named_weights())
    matrices = [weight for weight in weights.values() if weight.dim() > 1]
    vectors = [weight for weight in weights.values() if weight.dim() < 2]
    adamw = torch.optim.AdamW([{"params": matrices}, {"params": vectors}], foreach=False)
    for number, (step, rate) in enumerate(zip(STEPS, RATES, strict=True)):
        batch = batch_of(number)
        for trainer in (ours, theirs):
            forward_backward(trainer, batch, TokenSumLossSpec())
        metrics = ours.optim_step(rate, step)
        said = SPEC if step is None else step
        moved = [weight for weight in weights.values() if weight.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(moved, said.max_grad_norm or float("inf"))
        for group, decay in zip(adamw.param_groups, (said.weight_decay, 0.0), strict=True):
            group |= {"lr": rate, "betas": said.betas, "eps": said.eps, "weight_decay": decay}
        adamw.step()
        theirs.drop_gradients()
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        assert metrics["learning_rate"] == rate
        moved_by = sum(RATES[: number + 1])
        for name, weight in ours.named_weights():
            torch.testing.assert_close(weight, weights[name], rtol=0, atol=TOLERANCE * moved_by)


def test_muon_has_no_numbers_of_adamw_and_keeps_its_gradient(folder: Path) -> None:
    trainer = trainer_of(folder, MuonSpec(learning_rate=1e-3))
    forward_backward(trainer, batch_of(), TokenSumLossSpec())
    with pytest.raises(ValueError, match=r"optimizer\.type is 'muon'"):
        trainer.optim_step(None, STEPS[1])
    assert trainer.policy_version == 0
    trainer.optim_step()


def test_given_targets_are_scored_in_the_place_of_the_next_tokens(folder: Path) -> None:
    trainer = trainer_of(folder, SPEC)
    batch = batch_of()
    mask = batch["loss_mask"]
    own = torch.cat(
        [
            tokens[length:]
            for tokens, length in zip(
                batch["tokens"].rows(), batch["prompt_lengths"].values.tolist(), strict=True
            )
        ]
    )
    plan = plan_whole(trainer, batch)
    _, plain = trainer.forward_backward(batch, TokenSumLossSpec(), plan)
    gradients = {
        name: w.grad.clone() for name, w in trainer.model.named_weights() if w.grad is not None
    }
    trainer.drop_gradients()
    # The next token with the weight 1, and another one with 0.
    ids = torch.stack([own, (own + 1) % 512], 1).int()
    weights = torch.stack([torch.ones(len(own)), torch.zeros(len(own))], 1)
    given = batch | Experience(
        {
            TARGET_IDS: Column(ColumnKind.COMPLETION, ids, mask.offsets),
            TOKEN_WEIGHTS: Column(ColumnKind.COMPLETION, weights, mask.offsets),
        }
    )
    _, told = trainer.forward_backward(given, TokenSumLossSpec(targets=2), plan)
    assert told["choices"].width == 2
    torch.testing.assert_close(told["choices"].values[:, 0], plain["logprobs"].values)
    torch.testing.assert_close(told["logprobs"].values, plain["logprobs"].values)
    for name, weight in trainer.model.named_weights():
        if name in gradients:
            torch.testing.assert_close(weight.grad, gradients[name], rtol=1e-4, atol=1e-6)
