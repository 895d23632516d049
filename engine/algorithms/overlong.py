"""Soft punishment of long completions (DAPO, arXiv 2503.14476, eq. 13)."""

from __future__ import annotations

import torch

from rolemesh.engine.algorithms.token_rewards import BatchTokens, read_rows, reward_metrics
from rolemesh.engine.experience import Experience
from rolemesh.engine.specs import OverlongSpec, ShapedRewardSpec


def overlong_punishments(lengths_B: torch.Tensor, spec: OverlongSpec) -> torch.Tensor:
    """What is added to rewards for length: 0 for short completions, down to -penalty.

        penalty * clip((max_length - buffer - length) / buffer, -1, 0)

    Args:
        lengths_B: int64, completion tokens.
        spec: Where it begins and ends.

    Returns:
        float64 [B].

    Example: max_length 20, buffer 4, penalty 1: lengths (16, 17, 20, 30) give (0, -0.25, -1, -1).
    """
    over_B = (spec.max_length - spec.buffer - lengths_B).double() / spec.buffer
    return spec.penalty * over_B.clamp(-1, 0)


def shaped_rewards(
    experience: Experience, spec: ShapedRewardSpec, tokens: BatchTokens
) -> tuple[torch.Tensor, dict[str, float]]:
    """Rewards with the punishment, if the spec wants one, and metrics of both.

    "reward/mean" and "/std" are those of the rewards as they came.

    Returns:
        float64 [B] and metrics.
    """
    rewards_B = read_rows(experience, "rewards", tokens)
    metrics = reward_metrics(rewards_B, tokens)
    if spec.overlong is None:
        return rewards_B, metrics
    punishments_B = overlong_punishments(tokens.lengths_B(), spec.overlong)
    num_rows = max(len(punishments_B), 1)
    metrics["overlong/fraction"] = float((punishments_B < 0).sum()) / num_rows
    metrics["overlong/punishment"] = float(punishments_B.sum()) / num_rows
    return rewards_B + punishments_B, metrics
