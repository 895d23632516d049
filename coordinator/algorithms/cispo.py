"""Clipped importance weights (CISPO, arXiv 2506.13585), as one step over the mesh."""

from rolemesh.coordinator.dataflow.roles import (
    ActorHandle,
    PromptBatch,
    ReferenceHandle,
    RewardHandle,
)


def cispo(
    prompts: PromptBatch,
    actor: ActorHandle,
    reward: RewardHandle,
    reference: ReferenceHandle | None = None,
) -> None:
    """One step: as GRPO, with a loss that clips weights and drops no token."""
    rollouts = actor.generate(prompts)
    if reference is not None:
        rollouts |= reference.compute_logprobs(rollouts)
    rollouts |= reward.compute_reward(rollouts)
    rollouts |= actor.compute_advantages(rollouts, "grpo")
    actor.update(rollouts)
