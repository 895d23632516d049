"""What tiny models of families are trained on, and what they are asked to sample."""

from __future__ import annotations

from pathlib import Path

from support.parallel_training import Job, near_policy
from support.rollout_checks import short_requests
from support.token_batches import token_batch

from rolemesh.engine.specs import ModelSpec, OptimizerSpec, PpoPolicyLossSpec
from rolemesh.engine.train.trainer import Trainer

VOCABULARY = 190
"""Padded to 192: the last slice has fewer rows."""
REQUESTS = short_requests(VOCABULARY)
LOSS = PpoPolicyLossSpec(entropy_coefficient=0.01, kl_in_loss=0.1)


def plain_spec(folder: Path) -> ModelSpec:
    """The folder's model in float32."""
    return ModelSpec(path=folder, compute_dtype="float32")


def family_job(folder: Path) -> Job:
    """A job over a batch whose old log-probs are near those of the folder's model."""
    batch = token_batch(vocab_size=VOCABULARY)
    trainer = Trainer.policy(plain_spec(folder), OptimizerSpec())
    scored = trainer.compute_logprobs(batch, temperature=1.0)["logprobs"]
    return Job(folder, near_policy(batch, scored), LOSS)
