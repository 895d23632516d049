"""The family of GRPO: policy gradients on judged completions, without a critic.

Its members are one function (`coordinator/algorithms/policy_gradient.py`) and differ in what they
make of rewards, in their loss, and in how many completions they sample. A row here is an
`algorithm.type`: its section of a recipe is made of the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rolemesh.engine.specs import (
    CispoPolicyLossSpec,
    ClipCovPolicyLossSpec,
    DppoPolicyLossSpec,
    DrGrpoSpec,
    GdpoSpec,
    GmpoPolicyLossSpec,
    GroupEstimatorSpec,
    GrpoSpec,
    GspoPolicyLossSpec,
    KlCovPolicyLossSpec,
    MaxRlSpec,
    PassAtKSpec,
    PolicyTermsSpec,
    PpoPolicyLossSpec,
    ReinforcePlusPlusBaselineSpec,
    ReinforcePlusPlusSpec,
    ReinforcePolicyLossSpec,
    RlooSpec,
    RunningBaselineSpec,
    SapoPolicyLossSpec,
    ShapedRewardSpec,
    ToprPolicyLossSpec,
    VespoPolicyLossSpec,
)


@dataclass(frozen=True)
class PolicyGradient:
    """A row: what an algorithm of the family does where a recipe says nothing else."""

    paper: str
    """What it is, with its source."""
    advantages: ShapedRewardSpec
    """The estimator. A recipe may name another one of its kind, by `type`."""
    policy_loss: PolicyTermsSpec | type[PolicyTermsSpec]
    """The loss; a class where each recipe has to give its numbers. A recipe may name any other."""
    samples_per_prompt: int
    """Completions of a prompt."""
    loss_text: str = "The loss of the policy."
    """What people are told of the loss."""

    @property
    def compares(self) -> bool:
        """Whether completions of a prompt are compared with each other, so that two are needed."""
        return isinstance(self.advantages, GroupEstimatorSpec)


POLICY_GRADIENTS: Mapping[str, PolicyGradient] = {
    "grpo": PolicyGradient(
        "Group-relative policy optimisation (arXiv 2402.03300).",
        GrpoSpec(),
        PpoPolicyLossSpec(aggregation="seq_mean_token_mean"),
        samples_per_prompt=8,
    ),
    "dr_grpo": PolicyGradient(
        "GRPO without its biases (Dr. GRPO, arXiv 2503.20783).",
        DrGrpoSpec(),
        PpoPolicyLossSpec,
        samples_per_prompt=8,
        loss_text='With aggregation "seq_sum_norm" and norm_length, the constant that replaces '
        "lengths: the longest completion.",
    ),
    "gspo": PolicyGradient(
        "Group sequence policy optimisation (arXiv 2507.18071).",
        GrpoSpec(),
        GspoPolicyLossSpec(),
        samples_per_prompt=8,
    ),
    "cispo": PolicyGradient(
        "Clipped importance weights instead of clipped updates (CISPO, arXiv 2506.13585).",
        GrpoSpec(),
        CispoPolicyLossSpec(),
        samples_per_prompt=8,
    ),
    "rloo": PolicyGradient(
        "REINFORCE with the other completions of a prompt as baseline (arXiv 2402.14740).",
        RlooSpec(),
        ReinforcePolicyLossSpec(),
        samples_per_prompt=8,
    ),
    "reinforce_plus_plus": PolicyGradient(
        "REINFORCE++ (arXiv 2501.03262).",
        ReinforcePlusPlusSpec(),
        PpoPolicyLossSpec(),
        samples_per_prompt=1,
    ),
    "reinforce_plus_plus_baseline": PolicyGradient(
        "REINFORCE++ with the group's mean as baseline (arXiv 2501.03262).",
        ReinforcePlusPlusBaselineSpec(),
        PpoPolicyLossSpec(),
        samples_per_prompt=8,
    ),
    "dppo": PolicyGradient(
        "Masks by divergence instead of clipped ratios (DPPO, arXiv 2602.04879).",
        GrpoSpec(),
        DppoPolicyLossSpec(),
        samples_per_prompt=8,
    ),
    "sapo": PolicyGradient(
        "A soft gate in place of the clip (SAPO, arXiv 2511.20347).",
        GrpoSpec(),
        SapoPolicyLossSpec(),
        samples_per_prompt=8,
    ),
    "gmpo": PolicyGradient(
        "The geometric mean of a completion's ratios (GMPO, arXiv 2507.20673).",
        GrpoSpec(),
        GmpoPolicyLossSpec(),
        samples_per_prompt=8,
    ),
    "vespo": PolicyGradient(
        "Soft weights of whole completions, for old data (VESPO, arXiv 2602.10693).",
        GrpoSpec(),
        VespoPolicyLossSpec(),
        samples_per_prompt=8,
    ),
    "topr": PolicyGradient(
        "REINFORCE in which wrong completions fade (TOPR, arXiv 2503.14286).",
        GrpoSpec(),
        ToprPolicyLossSpec(),
        samples_per_prompt=8,
    ),
    "clip_cov": PolicyGradient(
        "Some tokens that drain entropy lose their gradient (Clip-Cov, arXiv 2505.22617).",
        GrpoSpec(),
        ClipCovPolicyLossSpec(),
        samples_per_prompt=8,
    ),
    "kl_cov": PolicyGradient(
        "Tokens that drain entropy the most are penalised (KL-Cov, arXiv 2505.22617).",
        GrpoSpec(),
        KlCovPolicyLossSpec(),
        samples_per_prompt=8,
    ),
    "gdpo": PolicyGradient(
        "Several rewards, normalised apart (GDPO, arXiv 2601.05242).",
        GdpoSpec(),
        PpoPolicyLossSpec(aggregation="seq_mean_token_mean"),
        samples_per_prompt=8,
    ),
    "maxrl": PolicyGradient(
        "Maximum likelihood of being right (MaxRL, arXiv 2602.02710).",
        MaxRlSpec(),
        PpoPolicyLossSpec(),
        samples_per_prompt=8,
    ),
    "pass_at_k": PolicyGradient(
        "The best of k completions counts (arXiv 2505.15201).",
        PassAtKSpec(),
        PpoPolicyLossSpec(),
        samples_per_prompt=8,
    ),
    "reinforce": PolicyGradient(
        "REINFORCE with a running mean of rewards as baseline (Williams, 1992).",
        RunningBaselineSpec(),
        ReinforcePolicyLossSpec(),
        samples_per_prompt=1,
    ),
}
"""By `algorithm.type` of the recipe."""
