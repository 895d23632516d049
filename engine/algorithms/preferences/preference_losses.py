"""Losses on given data: demonstrations (SFT), pairs (DPO, IPO, Bradley-Terry), judgements (KTO).

Sums over a row's tokens are in the type of the log-probs, float32 in training.

Shape letters: B rows, N packed completion tokens of the micro-batch, M those of them with loss
mask 1, P pairs, J judged rows.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from rolemesh.engine.algorithms.aggregation import LossScale, token_weights
from rolemesh.engine.algorithms.losses.base import (
    Loss,
    ModelOutputs,
    UnmaskedReader,
    loss_for,
)
from rolemesh.engine.algorithms.preferences.pairs import Pairs, log_ratios, preference_of
from rolemesh.engine.algorithms.ragged import loss_mask_of, unmasked_per_row
from rolemesh.engine.experience import Experience
from rolemesh.engine.hardware.devices import sent
from rolemesh.engine.specs import BradleyTerryLossSpec, DpoLossSpec, KtoLossSpec, SftLossSpec


@loss_for(SftLossSpec)
class SftLoss(Loss[SftLossSpec]):
    """Negative log-likelihood of the unmasked tokens: -log pi(y_t | x, y_<t).

    Averaged over all tokens, so that long completions weigh more, or over rows of their means.
    The metric `nll` is the mean over tokens in both cases: exp of it is the perplexity.
    """

    def __call__(
        self, outputs: ModelOutputs, batch: Experience, scale: LossScale
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Computes this micro-batch's share; see `Loss`."""
        logprobs_M = UnmaskedReader(batch).output("logprobs_N", outputs.logprobs_N)
        weights_M = token_weights(batch, scale, self.spec.aggregation, None, like=logprobs_M)
        loss = -(weights_M * logprobs_M).sum()
        nll = -logprobs_M.detach().sum(dtype=torch.float64) / scale.token_divisor
        return loss, {"loss": loss, "nll": nll}


@loss_for(DpoLossSpec)
class DpoLoss(Loss[DpoLossSpec]):
    """Direct preference optimisation (arXiv 2305.18290, eq. 7) and two relatives.

    With the log-ratio h(y) = log pi(y | x) - log pi_ref(y | x) of a completion and the margin
    m = h(chosen) - h(rejected), a pair's loss is

        sigmoid   -(1 - s) log sigma(beta m) - s log sigma(-beta m)
        ipo       (m - 1 / (2 beta))^2             (arXiv 2310.12036, eq. 17, tau = beta)

    s is label_smoothing: 0 gives DPO, more gives cDPO (E. Mitchell, "A note on DPO with noisy
    preferences", 2023). Averaged over the pairs of the mini-batch.
    """

    def __call__(
        self, outputs: ModelOutputs, batch: Experience, scale: LossScale
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Computes this micro-batch's share; see `Loss`."""
        spec = self.spec
        pairs = Pairs.of(batch)
        ratios_B = log_ratios(_given("logprobs_N", outputs.logprobs_N), batch)
        if spec.log_ratio == "mean":
            counts_B = unmasked_per_row(*loss_mask_of(batch)).clamp_min(1)
            ratios_B = ratios_B / sent(counts_B.to(ratios_B.dtype), ratios_B.device)
        chosen_P = ratios_B[sent(pairs.chosen_P, ratios_B.device)]
        rejected_P = ratios_B[sent(pairs.rejected_P, ratios_B.device)]
        margins_P = chosen_P - rejected_P
        if spec.variant == "ipo":
            losses_P = (margins_P - 1 / (2 * spec.beta)).square()
        else:
            smoothing, logits_P = spec.label_smoothing, spec.beta * margins_P
            losses_P = -(1 - smoothing) * logsigmoid(logits_P) - smoothing * logsigmoid(-logits_P)
        loss = (losses_P / scale.pair_divisor).sum()
        return loss, {
            "loss": loss,
            **_pair_metrics(spec.beta * chosen_P, spec.beta * rejected_P, scale),
        }


@loss_for(KtoLossSpec)
class KtoLoss(Loss[KtoLossSpec]):
    """Kahneman-Tversky optimisation (arXiv 2402.01306, eq. 8).

    With the log-ratio h of a completion and the reference point z_0, a judged row's loss is

        wanted     lambda_D (1 - sigma(beta (h - z_0)))
        unwanted   lambda_U (1 - sigma(beta (z_0 - h)))

    Averaged over the judged rows of the mini-batch; rows of preference 0 are left out. z_0 is the
    column kl_reference_point, which `algorithms.kto.kto_point` estimates once a batch; no
    gradient goes through it, as in the paper. preference_accuracy is the share of judged rows on
    their side of it: h > z_0 of wanted ones, h < z_0 of unwanted ones.
    """

    def __call__(
        self, outputs: ModelOutputs, batch: Experience, scale: LossScale
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Computes this micro-batch's share; see `Loss`."""
        spec = self.spec
        ratios_B = log_ratios(_given("logprobs_N", outputs.logprobs_N), batch)
        preference_B = preference_of(batch)
        judged = preference_B.nonzero().flatten()
        device, dtype = ratios_B.device, ratios_B.dtype
        ratios_J = ratios_B[sent(judged, device)]
        points_J = sent(batch["kl_reference_point"].values[judged].to(dtype), device)
        # 1 - sigma(x) = sigma(-x), which keeps its digits where sigma(x) is close to 1.
        signs_J = sent(preference_B[judged].to(dtype), device)
        is_wanted_J = preference_B[judged] > 0
        wanted_J = sent(is_wanted_J.to(dtype), device)
        weights_J = spec.wanted_weight * wanted_J + spec.unwanted_weight * (1 - wanted_J)
        losses_J = weights_J * torch.sigmoid(-spec.beta * signs_J * (ratios_J - points_J))
        loss = (losses_J / scale.judged_divisor).sum()
        with torch.no_grad():
            rewards_J = spec.beta * ratios_J.double()
            # By places: how many a mask takes, a device would have to be asked.
            wanted, unwanted = (
                rewards_J[sent(is_one_J.nonzero().flatten(), device)].sum() / max(number, 1.0)
                for is_one_J, number in (
                    (is_wanted_J, scale.num_wanted),
                    (~is_wanted_J, scale.num_unwanted),
                )
            )
            right = _num_right(signs_J * (ratios_J - points_J))
            metrics = {
                "loss": loss,
                "preference_accuracy": right / scale.judged_divisor,
                "preference_margin": wanted - unwanted,
                "chosen_reward": wanted,
                "rejected_reward": unwanted,
                "kl_reference_point": points_J.double().sum() / scale.judged_divisor,
            }
        return loss, metrics


@loss_for(BradleyTerryLossSpec)
class BradleyTerryLoss(Loss[BradleyTerryLossSpec]):
    """Loss of a reward model on pairs (Bradley-Terry; arXiv 2203.02155, eq. 1).

    With the scores s of a pair, its loss is

        -log sigma(s(chosen) - s(rejected) - margin) + centering (s(chosen) + s(rejected))^2

    margin as in arXiv 2307.09288, eq. 2, but the same for all pairs; centering as in arXiv
    2312.09244: only differences of scores are learnt from pairs, and it takes the freedom to drift.
    Averaged over the pairs of the mini-batch.
    """

    needs = "scores"

    def __call__(
        self, outputs: ModelOutputs, batch: Experience, scale: LossScale
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Computes this micro-batch's share; see `Loss`."""
        scores_B = _given("scores_B", outputs.scores_B)
        if scores_B.shape != (batch.num_rows,):
            raise ValueError(
                f"scores_B has shape {tuple(scores_B.shape)}, but the batch has "
                f"{batch.num_rows} rows: give one number a row"
            )
        pairs = Pairs.of(batch)
        chosen_P = scores_B[sent(pairs.chosen_P, scores_B.device)]
        rejected_P = scores_B[sent(pairs.rejected_P, scores_B.device)]
        losses_P = -logsigmoid(chosen_P - rejected_P - self.spec.margin)
        if self.spec.centering > 0:
            losses_P = losses_P + self.spec.centering * (chosen_P + rejected_P).square()
        loss = (losses_P / scale.pair_divisor).sum()
        return loss, {"loss": loss, **_pair_metrics(chosen_P, rejected_P, scale)}


def _pair_metrics(
    chosen_P: torch.Tensor, rejected_P: torch.Tensor, scale: LossScale
) -> dict[str, torch.Tensor]:
    """Means over the pairs of the mini-batch, from the rewards of both rows of each pair.

    preference_accuracy is the share of pairs whose chosen row has the greater reward.
    """
    with torch.no_grad():
        chosen_P, rejected_P = chosen_P.double(), rejected_P.double()
        sums = {
            "preference_accuracy": _num_right(chosen_P - rejected_P),
            "preference_margin": (chosen_P - rejected_P).sum(),
            "chosen_reward": chosen_P.sum(),
            "rejected_reward": rejected_P.sum(),
        }
        return {name: total / scale.pair_divisor for name, total in sums.items()}


def _num_right(leads: torch.Tensor) -> torch.Tensor:
    """How many leads are above 0; one that is exactly 0 is a tie and counts as a half.

    A policy that is its own reference, as before the first step, tells nothing apart: it is right
    as often as a guess.
    """
    return (leads.sign() + 1).sum(dtype=torch.float64) / 2


def _given(name: str, output: torch.Tensor | None) -> torch.Tensor:
    """The model output; float32, or float64 if it came so."""
    if output is None:
        raise ValueError(f"{name} is None: the loss needs this output of the model")
    return output if output.dtype == torch.float64 else output.float()
