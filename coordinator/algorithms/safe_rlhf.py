"""Safe RLHF: PPO under a limit on the mean cost (arXiv 2310.12773), as one step over the mesh."""

from rolemesh.coordinator.dataflow.roles import (
    ActorHandle,
    CostHandle,
    CriticHandle,
    PromptBatch,
    ReferenceHandle,
    RewardHandle,
)


def safe_rlhf(
    prompts: PromptBatch,
    actor: ActorHandle,
    critic: CriticHandle,
    reference: ReferenceHandle,
    reward: RewardHandle,
    cost: CostHandle,
) -> None:
    """One step: PPO with a cost beside the reward, and texts that keep the language."""
    rollouts = actor.generate(prompts)
    rollouts |= critic.compute_values(rollouts)
    rollouts |= reference.compute_logprobs(rollouts)
    rollouts |= reward.compute_reward(rollouts)
    rollouts |= cost.compute_cost(rollouts)
    rollouts |= actor.compute_advantages(rollouts, "safe_rlhf")
    pretraining = actor.read_pretraining(prompts)
    critic.update(rollouts)
    actor.update(rollouts, pretraining)
