"""Kahneman-Tversky optimisation (arXiv 2402.01306), as one step over the mesh."""

from rolemesh.coordinator.dataflow.roles import ActorHandle, PromptBatch, ReferenceHandle


def kto(
    prompts: PromptBatch,
    actor: ActorHandle,
    reference: ReferenceHandle,
) -> None:
    """One step: read judged completions, find the reference point, train the actor."""
    judged = actor.read_judgements(prompts)
    judged |= reference.compute_logprobs(judged)
    judged |= actor.compute_logprobs(judged)
    judged |= actor.compute_advantages(judged, "kto")
    actor.update(judged)
