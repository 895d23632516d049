"""Supervised fine-tuning, as one step over the mesh."""

from rolemesh.coordinator.dataflow.roles import ActorHandle, PromptBatch


def sft(
    prompts: PromptBatch,
    actor: ActorHandle,
) -> None:
    """One step: read completions, train the actor on them."""
    actor.update(actor.read_demonstrations(prompts))
