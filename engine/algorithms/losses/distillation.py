"""The loss between a teacher's distribution and the policy's.

Shape letters: M unmasked completion tokens, K tokens at each place that a teacher tells apart,
C = K for each teacher of a row, O = K + 1 outcomes: the K tokens and all others together.
"""

from __future__ import annotations

import math

import torch

from rolemesh.engine.algorithms.aggregation import LossScale, token_weights
from rolemesh.engine.algorithms.losses.base import (
    Loss,
    ModelOutputs,
    UnmaskedReader,
    loss_for,
    token_share,
)
from rolemesh.engine.experience import Experience
from rolemesh.engine.specs import DistillationLossSpec
from rolemesh.engine.specs.columns import (
    teacher_voices,
    top_column,
    top_ids_column,
    weights_column,
)

SMALLEST_TAIL = 1e-6
"""What all other tokens together have at least. One minus a sum of K float32 numbers is no more
exact than this, and the ratio of two such remainders would be noise."""


@loss_for(DistillationLossSpec)
class DistillationLoss(Loss[DistillationLossSpec]):
    """A divergence between teacher and policy over K + 1 outcomes at each token; see its spec.

    Of several teachers of a row the mean of the divergences to each, by weight.

    The metrics teacher_mass and policy_mass say how much of either distribution the K tokens hold:
    far below 1, the teacher tells too few of them apart.
    """

    def __init__(self, spec: DistillationLossSpec) -> None:
        super().__init__(spec)
        self._voices = teacher_voices(spec.teachers)
        self.choices = tuple(top_ids_column(voice) for voice in self._voices)

    def __call__(
        self, outputs: ModelOutputs, batch: Experience, scale: LossScale
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Computes this micro-batch's share; see `Loss`."""
        spec, read = self.spec, UnmaskedReader(batch)
        policy_MC = read.output("choices_NK", outputs.choices_NK, dims=2)
        losses_M = policy_MC.new_zeros(len(policy_MC))
        masses_M = {"teacher_mass": losses_M, "policy_mass": losses_M}
        for voice, policy_MK in zip(
            self._voices, policy_MC.chunk(len(self._voices), 1), strict=True
        ):
            teacher_MK = read.column(top_column(voice), like=policy_MC).view(policy_MK.shape)
            found_M = divergence(with_tail(teacher_MK), with_tail(policy_MK), spec)
            with torch.no_grad():
                held_M = {
                    "teacher_mass": teacher_MK.exp().sum(1),
                    "policy_mass": policy_MK.exp().sum(1),
                }
            if spec.teachers > 1:
                counts_M = read.row_column(weights_column(voice), like=policy_MC)
                found_M = counts_M * found_M
                held_M = {name: counts_M * mass_M for name, mass_M in held_M.items()}
            losses_M = losses_M + found_M
            masses_M = {name: mass_M + held_M[name] for name, mass_M in masses_M.items()}
        weights_M = token_weights(batch, scale, spec.aggregation, spec.norm_length, like=losses_M)
        loss = (weights_M * losses_M).sum()
        metrics = {name: token_share(mass_M, scale) for name, mass_M in masses_M.items()}
        return loss, {"loss": loss, "distillation_loss": loss, **metrics}


def with_tail(logprobs_MK: torch.Tensor) -> torch.Tensor:
    """Log-probs of K tokens and of all others together, [M, K + 1].

    Example: log-probs of 0.5 and 0.25 get that of 0.25 beside them.
    """
    rest_M = 1 - logprobs_MK.exp().sum(1)
    return torch.cat([logprobs_MK, rest_M.clamp_min(SMALLEST_TAIL).log()[:, None]], 1)


def divergence(
    teacher_MO: torch.Tensor, policy_MO: torch.Tensor, spec: DistillationLossSpec
) -> torch.Tensor:
    """The divergence of the spec from log-probs of the same outcomes, [M], in nats."""
    if spec.divergence == "forward_kl":
        return _kl(teacher_MO, policy_MO)
    if spec.divergence == "reverse_kl":
        return _kl(policy_MO, teacher_MO)
    share = 0.5 if spec.mixture is None else spec.mixture
    mixed_MO = torch.logaddexp(teacher_MO + math.log(share), policy_MO + math.log1p(-share))
    return share * _kl(teacher_MO, mixed_MO) + (1 - share) * _kl(policy_MO, mixed_MO)


def _kl(of_MO: torch.Tensor, to_MO: torch.Tensor) -> torch.Tensor:
    """KL of one distribution to another from log-probs, [M]."""
    return (of_MO.exp() * (of_MO - to_MO)).sum(1)
