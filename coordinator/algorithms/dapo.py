"""DAPO: dynamic sampling on top of GRPO (arXiv 2503.14476), as one step over the mesh."""

from rolemesh.coordinator.dataflow.roles import ActorHandle, PromptBatch, RewardHandle


def dapo(
    prompts: PromptBatch,
    actor: ActorHandle,
    reward: RewardHandle,
) -> None:
    """One step: sample until enough groups have something to teach, compare, train the actor."""
    rollouts = actor.generate_selected(prompts, judge=reward.compute_reward)
    rollouts |= actor.compute_advantages(rollouts)
    actor.update(rollouts)
