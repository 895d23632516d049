"""GRPO without its biases (Dr. GRPO, arXiv 2503.20783), as one step over the mesh."""

from rolemesh.coordinator.dataflow.roles import (
    ActorHandle,
    PromptBatch,
    ReferenceHandle,
    RewardHandle,
)


def dr_grpo(
    prompts: PromptBatch,
    actor: ActorHandle,
    reward: RewardHandle,
    reference: ReferenceHandle | None = None,
) -> None:
    """One step: as GRPO, without dividing by deviations and lengths."""
    rollouts = actor.generate(prompts)
    if reference is not None:
        rollouts |= reference.compute_logprobs(rollouts)
    rollouts |= reward.compute_reward(rollouts)
    rollouts |= actor.compute_advantages(rollouts, "dr_grpo")
    actor.update(rollouts)
