"""Proximal policy optimisation with a critic (arXiv 1707.06347), as one step over the mesh."""

from rolemesh.coordinator.dataflow.roles import (
    ActorHandle,
    CriticHandle,
    PromptBatch,
    ReferenceHandle,
    RewardHandle,
)


def ppo(
    prompts: PromptBatch,
    actor: ActorHandle,
    critic: CriticHandle,
    reference: ReferenceHandle,
    reward: RewardHandle,
) -> None:
    """One step: sample, judge, estimate advantages, train critic and actor."""
    rollouts = actor.generate(prompts)
    rollouts |= critic.compute_values(rollouts)
    rollouts |= reference.compute_logprobs(rollouts)
    rollouts |= reward.compute_reward(rollouts)
    rollouts |= actor.compute_advantages(rollouts, "gae")
    critic.update(rollouts)
    actor.update(rollouts)
