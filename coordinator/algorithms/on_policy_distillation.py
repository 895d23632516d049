"""On-policy distillation (GKD, arXiv 2306.13649), as one step over the mesh."""

from rolemesh.coordinator.dataflow.roles import (
    ActorHandle,
    PromptBatch,
    RewardHandle,
    TeacherHandle,
)


def on_policy_distillation(
    prompts: PromptBatch,
    actor: ActorHandle,
    teacher: TeacherHandle,
    reward: RewardHandle | None = None,
) -> None:
    """One step: sample, let the teacher score each token, train the actor towards it."""
    rollouts = actor.generate(prompts)
    rollouts |= teacher.compute_logprobs(rollouts)
    if reward is not None:
        # Reported, and not trained on.
        rollouts |= reward.compute_reward(rollouts)
    rollouts |= actor.compute_advantages(rollouts, "reverse_kl")
    actor.update(rollouts)
