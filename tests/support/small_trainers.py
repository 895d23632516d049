"""Trainers of tiny models in float32, batches for them, and what a step did to them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from support.token_batches import token_batch

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.specs import (
    ModelSpec,
    MuonSpec,
    OptimizerSpec,
    PpoPolicyLossSpec,
    PpoValueLossSpec,
)
from rolemesh.engine.train.trainer import Trainer

POLICY_LOSS = PpoPolicyLossSpec(entropy_coefficient=0.01, kl_in_loss=0.1)
VALUE_LOSS = PpoValueLossSpec()


def small_trainer(folder: Path, kind: str = "policy", **options: Any) -> Trainer:
    """A policy or a critic; `options`: fields of its ModelSpec, and `optimizer`: of its spec."""
    given = {"learning_rate": 1e-3, **options.pop("optimizer", {})}
    optimizer = (MuonSpec if given.get("type") == "muon" else OptimizerSpec)(**given)
    spec = ModelSpec.model_validate({"path": folder, "compute_dtype": "float32", **options})
    return (Trainer.policy if kind == "policy" else Trainer.critic)(spec, optimizer)


def batch_near(trainer: Trainer, seed: int = 0) -> Experience:
    """A batch whose old log-probs are near the trainer's, so that some ratios are clipped."""
    batch = token_batch(seed=seed)
    if trainer.kind == "critic":
        return batch
    scored = trainer.compute_logprobs(batch, temperature=1.0)["logprobs"]
    generator = torch.Generator().manual_seed(seed)

    def moved(scale: float) -> Column:
        noise_N = scale * torch.randn(len(scored.values), generator=generator)
        return Column(ColumnKind.COMPLETION, scored.values + noise_N, scored.offsets)

    return batch | Experience({"logprobs": moved(0.3), "reference_logprobs": moved(0.5)})


def gradients_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copies of the gradients that are there, by weight."""
    return {
        name: weight.grad.clone()
        for name, weight in trainer.model.named_weights()
        if weight.grad is not None
    }


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copies of all weights."""
    return {name: weight.clone() for name, weight in trainer.named_weights()}


def relative_distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The norm of the difference, by that of the right side."""
    assert left.keys() == right.keys()
    distance = sum(float((left[name] - right[name]).double().square().sum()) for name in left)
    size = sum(float(tensor.double().square().sum()) for tensor in right.values())
    return math.sqrt(distance / size)
