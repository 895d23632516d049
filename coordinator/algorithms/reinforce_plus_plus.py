"""REINFORCE++ (arXiv 2501.03262), as one step over the mesh."""

from rolemesh.coordinator.dataflow.roles import (
    ActorHandle,
    PromptBatch,
    ReferenceHandle,
    RewardHandle,
)


def reinforce_plus_plus(
    prompts: PromptBatch,
    actor: ActorHandle,
    reward: RewardHandle,
    reference: ReferenceHandle | None = None,
) -> None:
    """One step: sample, judge, normalise returns over the batch, train the actor."""
    rollouts = actor.generate(prompts)
    if reference is not None:
        rollouts |= reference.compute_logprobs(rollouts)
    rollouts |= reward.compute_reward(rollouts)
    rollouts |= actor.compute_advantages(rollouts, "reinforce_plus_plus")
    actor.update(rollouts)
