"""Estimators on returns of tokens, without critic and groups: REINFORCE++ and ReMax.

Shape letters: B rows, N packed completion tokens, P prompts of the baseline.
"""

from __future__ import annotations

import torch

from rolemesh.engine.algorithms.estimators.advantages import whiten
from rolemesh.engine.algorithms.estimators.estimation import EstimatorInput, estimator_for
from rolemesh.engine.algorithms.estimators.token_rewards import (
    BatchTokens,
    advantage_metrics,
    estimate,
    finite_rows,
    read_rows,
    reward_metrics,
    shaped_rewards,
    token_rewards,
)
from rolemesh.engine.algorithms.groups import Groups, prompt_ids_of
from rolemesh.engine.algorithms.ragged import decayed_sums
from rolemesh.engine.experience import Experience
from rolemesh.engine.specs import ReinforcePlusPlusSpec, RemaxSpec


@estimator_for(ReinforcePlusPlusSpec)
def reinforce_plus_plus_advantages(
    given: EstimatorInput, spec: ReinforcePlusPlusSpec
) -> tuple[Experience, dict[str, float]]:
    """REINFORCE++ (arXiv 2501.03262): discounted returns of tokens, whitened over the batch.

        advantage[t] = token_reward[t] + gamma * advantage[t + 1]

    where t + 1 is the row's next unmasked token; see `whiten` for what follows.
    """
    tokens = BatchTokens.of(given.experience)
    rewards_B, metrics = shaped_rewards(given.experience, spec, tokens)
    earned = token_rewards(given, spec, tokens, rewards_B, metrics)
    returns_N = _returns(earned.rewards_N, tokens, spec.gamma)
    columns_N = {"advantages": whiten(returns_N, tokens.mask_N)}
    return estimate(given, tokens, earned, columns_N, advantage_metrics(returns_N, tokens.mask_N))


@estimator_for(RemaxSpec)
def remax_advantages(given: EstimatorInput, spec: RemaxSpec) -> tuple[Experience, dict[str, float]]:
    """ReMax (arXiv 2310.10505, algorithm 1): returns of tokens less the greedy row's reward.

        advantage[t] = token_reward[t] + token_reward[t + 1] + ... - baseline of the prompt

    Without a KL penalty that is reward - baseline at each token. The baseline carries no penalty.
    Where it has several rows of a prompt (the prompt stood in the data twice), their mean counts;
    prompts that the batch does not have are ignored.

    Raises:
        ValueError: A prompt of the batch has no row in the baseline; names it.
    """
    assert given.baseline is not None  # estimate_advantages refuses a missing one
    tokens = BatchTokens.of(given.experience)
    rewards_B = read_rows(given.experience, "rewards", tokens)
    baselines_B = _baselines(given.experience, given.baseline).to(tokens.mask_N.device)
    earned = token_rewards(given, spec, tokens, rewards_B, reward_metrics(rewards_B, tokens))
    returns_N = _returns(earned.rewards_N, tokens, 1.0)
    advantages_N = returns_N - tokens.to_each_token(baselines_B)
    metrics = advantage_metrics(advantages_N, tokens.mask_N)
    metrics["reward/baseline_mean"] = float(baselines_B.mean()) if len(baselines_B) else 0.0
    return estimate(given, tokens, earned, {"advantages": advantages_N}, metrics)


def _baselines(experience: Experience, baseline: Experience) -> torch.Tensor:
    """float64 [B] on the CPU: the baseline's reward for the prompt of each row."""
    wanted_B = prompt_ids_of(experience)
    groups = Groups.of(baseline)
    means_P = groups.means(finite_rows(baseline, "rewards").cpu())
    # Any row of a group knows its prompt.
    prompts_P = torch.zeros(len(groups), dtype=torch.int64)
    prompts_P[groups.index_B] = prompt_ids_of(baseline)
    prompts_P, order = prompts_P.sort()
    at_B = torch.searchsorted(prompts_P, wanted_B).clamp_max(max(len(prompts_P) - 1, 0))
    found_B = prompts_P[at_B] == wanted_B if len(prompts_P) else torch.zeros_like(wanted_B).bool()
    if not bool(found_B.all()):
        missing = sorted(set(wanted_B[~found_B].tolist()))
        raise ValueError(
            f"the baseline has no row for prompt_ids {missing[:3]} ({len(missing)} "
            "prompts of the batch): give one greedy row for each prompt"
        )
    return means_P[order][at_B]


def _returns(rewards_N: torch.Tensor, tokens: BatchTokens, gamma: float) -> torch.Tensor:
    """float64 [N], discounted sums over unmasked tokens; 0 at masked ones."""
    returns_N = torch.zeros_like(rewards_N)
    returns_N[tokens.mask_N] = decayed_sums(rewards_N[tokens.mask_N], tokens.counts_B, gamma)
    return returns_N
