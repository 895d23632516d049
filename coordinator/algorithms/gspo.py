"""Group sequence policy optimisation (arXiv 2507.18071), as one step over the mesh."""

from rolemesh.coordinator.dataflow.roles import (
    ActorHandle,
    PromptBatch,
    ReferenceHandle,
    RewardHandle,
)


def gspo(
    prompts: PromptBatch,
    actor: ActorHandle,
    reward: RewardHandle,
    reference: ReferenceHandle | None = None,
) -> None:
    """One step: as GRPO, with one ratio for a whole completion in the loss."""
    rollouts = actor.generate(prompts)
    if reference is not None:
        rollouts |= reference.compute_logprobs(rollouts)
    rollouts |= reward.compute_reward(rollouts)
    rollouts |= actor.compute_advantages(rollouts, "grpo")
    actor.update(rollouts)
