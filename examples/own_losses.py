"""A policy loss and an estimator of one's own: PPO's clip and GRPO's advantages, written out.

In a recipe::

    algorithm:
      type: grpo
      advantages: "python:examples/own_losses.py:group_relative"
      policy_loss:
        type: python
        function: examples/own_losses.py:clipped
        config: {low: 0.2, high: 0.3}
        aggregation: seq_mean_token_mean
"""

import torch

MAX_LOG_RATIO = 20.0
"""exp overflows far beyond; there the branch that is not taken would send NaN into the gradient."""


def clipped(tokens, low=0.2, high=0.2):
    """The loss of each token: max(-ratio A, -clip(ratio) A), and how often the clip acts."""
    advantages = tokens.advantages_M
    ratio = (tokens.logprobs_M - tokens.old_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    losses = torch.maximum(-ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages)
    return {
        "losses": losses,
        "ratio": ratio,
        "metrics": {
            "clip_fraction_high": (advantages > 0) & (ratio > 1 + high),
            "clip_fraction_low": (advantages < 0) & (ratio < 1 - low),
        },
    }


def group_relative(batch, divide=True):
    """Scores less the mean of their prompt's rows, divided by these rows' standard deviation."""
    groups, scores = batch.groups, batch.scores_B
    advantages = scores - groups.to_rows(groups.means(scores))
    if divide:
        advantages = advantages / (groups.to_rows(groups.stds(scores)) + 1e-6)
    return batch.to_each_token(advantages)
