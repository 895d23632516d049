"""Training of a reward model on pairs (arXiv 2203.02155, eq. 1), as one step over the mesh."""

from rolemesh.coordinator.dataflow.roles import PromptBatch, RewardHandle


def reward_model(
    prompts: PromptBatch,
    reward: RewardHandle,
) -> None:
    """One step: read pairs, train the reward model to tell them apart."""
    reward.update(reward.read_preferences(prompts))
