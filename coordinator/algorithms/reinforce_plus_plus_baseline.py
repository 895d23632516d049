"""REINFORCE++ with the group's mean as baseline (arXiv 2501.03262), as one step."""

from rolemesh.coordinator.dataflow.roles import (
    ActorHandle,
    PromptBatch,
    ReferenceHandle,
    RewardHandle,
)


def reinforce_plus_plus_baseline(
    prompts: PromptBatch,
    actor: ActorHandle,
    reward: RewardHandle,
    reference: ReferenceHandle | None = None,
) -> None:
    """One step: sample groups, judge, subtract means, normalise over the batch, train."""
    rollouts = actor.generate(prompts)
    if reference is not None:
        rollouts |= reference.compute_logprobs(rollouts)
    rollouts |= reward.compute_reward(rollouts)
    rollouts |= actor.compute_advantages(rollouts, "reinforce_plus_plus_baseline")
    actor.update(rollouts)
