"""Group-relative policy optimisation (arXiv 2402.03300), as one step over the mesh."""

from rolemesh.coordinator.dataflow.roles import (
    ActorHandle,
    PromptBatch,
    ReferenceHandle,
    RewardHandle,
)


def grpo(
    prompts: PromptBatch,
    actor: ActorHandle,
    reward: RewardHandle,
    reference: ReferenceHandle | None = None,
) -> None:
    """One step: sample groups, judge, compare within each group, train the actor."""
    rollouts = actor.generate(prompts)
    if reference is not None:
        rollouts |= reference.compute_logprobs(rollouts)
    rollouts |= reward.compute_reward(rollouts)
    rollouts |= actor.compute_advantages(rollouts, "grpo")
    actor.update(rollouts)
