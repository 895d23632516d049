"""The family of GRPO (arXiv 2402.03300), as one step over the mesh.

GRPO, Dr. GRPO, GSPO, CISPO, RLOO and REINFORCE++ are these statements. Each has its own estimator
of advantages, loss and number of samples: a row of
`coordinator/recipe/algorithm/policy_gradients.py`.
"""

from rolemesh.coordinator.dataflow.roles import (
    ActorHandle,
    PromptBatch,
    ReferenceHandle,
    RewardHandle,
)


def policy_gradient(
    prompts: PromptBatch,
    actor: ActorHandle,
    reward: RewardHandle,
    reference: ReferenceHandle | None = None,
) -> None:
    """One step: sample, judge, make advantages of the rewards, train the actor."""
    rollouts = actor.generate(prompts)
    if reference is not None:
        rollouts |= reference.compute_logprobs(rollouts)
    rollouts |= reward.compute_reward(rollouts)
    rollouts |= actor.compute_advantages(rollouts)
    actor.update(rollouts)
