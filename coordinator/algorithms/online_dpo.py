"""DPO on the policy's own completions (arXiv 2402.04792), as one step over the mesh."""

from rolemesh.coordinator.dataflow.roles import (
    ActorHandle,
    PromptBatch,
    ReferenceHandle,
    RewardHandle,
)


def online_dpo(
    prompts: PromptBatch,
    actor: ActorHandle,
    reference: ReferenceHandle,
    reward: RewardHandle,
) -> None:
    """One step: sample groups, judge, pair the best with the worst, train the actor."""
    rollouts = actor.generate(prompts)
    rollouts |= reference.compute_logprobs(rollouts)
    rollouts |= reward.compute_reward(rollouts)
    rollouts |= actor.compute_advantages(rollouts, "online_dpo")
    actor.update(rollouts)
