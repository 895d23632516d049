"""Direct preference optimisation (arXiv 2305.18290), as one step over the mesh."""

from rolemesh.coordinator.dataflow.roles import ActorHandle, PromptBatch, ReferenceHandle


def dpo(
    prompts: PromptBatch,
    actor: ActorHandle,
    reference: ReferenceHandle,
) -> None:
    """One step: read pairs, score them under the reference, train the actor."""
    pairs = actor.read_preferences(prompts)
    pairs |= reference.compute_logprobs(pairs)
    actor.update(pairs)
