"""ReMax: the greedy completion is the baseline (arXiv 2310.10505), as one step over the mesh."""

from rolemesh.coordinator.dataflow.roles import (
    ActorHandle,
    PromptBatch,
    ReferenceHandle,
    RewardHandle,
)


def remax(
    prompts: PromptBatch,
    actor: ActorHandle,
    reward: RewardHandle,
    reference: ReferenceHandle | None = None,
) -> None:
    """One step: sample twice, judge both, compare, train the actor. There is no critic."""
    rollouts = actor.generate(prompts)
    baseline = actor.generate(prompts, greedy=True)
    if reference is not None:
        rollouts |= reference.compute_logprobs(rollouts)
    rollouts |= reward.compute_reward(rollouts)
    baseline |= reward.compute_reward(baseline)
    rollouts |= actor.compute_advantages(rollouts, "remax", baseline=baseline)
    actor.update(rollouts)
