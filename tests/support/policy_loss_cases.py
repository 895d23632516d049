"""Forms of correction, random batches with all that policy losses read, and a loss over one."""

from __future__ import annotations

import torch
from support.ragged_batches import RaggedBatch, mixed_masks, random_batch

from rolemesh.engine.algorithms.losses.base import ModelOutputs, make_loss
from rolemesh.engine.specs import (
    GeometricRejectionSpec,
    GspoPolicyLossSpec,
    MaskingSpec,
    OffPolicySpec,
    PolicyTermsSpec,
    SequenceTruncationSpec,
    TokenTruncationSpec,
)

WIDE = GspoPolicyLossSpec(clip_low=0.3, clip_high=0.4)
FORMS: dict[str, OffPolicySpec] = {
    "token_truncation": TokenTruncationSpec(cap=1.5),
    "sequence_truncation": SequenceTruncationSpec(cap=1.5),
    "masking": MaskingSpec(low=0.6, high=1.5),
    "row_masking": MaskingSpec(low=0.3, high=4.0, level="sequence"),
    "geometric_rejection": GeometricRejectionSpec(low=0.8, high=1.3),
}
LOGPROBS = ("new", "logprobs", "proximal_logprobs", "reference_logprobs")
RANGES = {
    **dict.fromkeys(LOGPROBS, (-2.0, -0.1)),
    "advantages": (-2.0, 2.0),
    "entropy": (0.0, 2.0),
}


def make_batch(seed: int = 111) -> RaggedBatch:
    """Eight ragged rows with all columns."""
    return random_batch(mixed_masks(seed), RANGES, seed)


def run(
    batch: RaggedBatch, spec: PolicyTermsSpec, dtype: torch.dtype = torch.float64
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, gradient by the log-probs, metrics."""
    new = batch.packed("new", dtype).requires_grad_()
    experience = batch.experience(dtype)
    outputs = ModelOutputs(logprobs_N=new, entropy_N=batch.packed("entropy", dtype))
    made = make_loss(spec)
    scale = made.completed(made.scale_of(experience), experience, lambda facts: [facts])
    loss, metrics = made(outputs, experience, scale)
    loss.backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    numbers = {name: float(number.detach()) for name, number in metrics.items()}
    return float(loss.detach()), new.grad, numbers
