"""Corrections for samples of another policy: what fast numerics fill in, and what fits a step."""

from __future__ import annotations

from typing import Final

from rolemesh.coordinator.recipe.algorithm.algorithms import AlgorithmSpec, SampledSpec
from rolemesh.coordinator.recipe.algorithm.rates import planned_updates
from rolemesh.engine.specs import Numerics, PolicyTermsSpec, TokenTruncationSpec

FAST_CAP: Final = 2.0
"""Cap of the weights under fast numerics: that of verl and of TRL's first correction, and C of the
note that proposed it (fengyao.notion.site/off-policy-rl, 2025)."""


def with_off_policy(
    algorithm: AlgorithmSpec, numerics: Numerics, num_prompts: int
) -> AlgorithmSpec:
    """An algorithm's section that says how its policy loss is corrected.

    Args:
        algorithm: Of the recipe.
        numerics: Of the recipe.
        num_prompts: Prompts of a step.

    Returns:
        The section as it is, but with fast numerics, and off_policy left out for a loss that does
        not correct itself, truncated weights of tokens; and where each step makes one optimizer
        step, no scoring pass for them.

    Raises:
        ValueError: The pass that trains is taken for the start of an update that has several steps.
    """
    if not isinstance(algorithm, SampledSpec):
        return algorithm
    loss = algorithm.parts.fields.get("policy_loss")
    if not isinstance(loss, PolicyTermsSpec):
        return algorithm
    updates = planned_updates(algorithm, num_prompts)
    chosen = algorithm.off_policy
    is_left_out = "off_policy" not in algorithm.model_fields_set
    if numerics == "fast" and is_left_out and not loss.corrects_itself:
        spares_pass = updates == 1 and not loss.weighs_now
        chosen = TokenTruncationSpec(cap=FAST_CAP, proximal="same_pass" if spares_pass else None)
        loss = loss.model_copy(update={"off_policy": chosen})
        algorithm = algorithm.model_copy(update={"off_policy": chosen, "policy_loss": loss})
    if chosen is not None and chosen.proximal == "same_pass" and updates != 1:
        number = "a number that is not known" if updates is None else str(updates)
        raise ValueError(
            f"algorithm.off_policy.proximal is 'same_pass', but a step makes {number} of "
            "optimizer steps, of which only the first begins with the weights of the start: set it "
            "to 'scored', or mini_batch_rows to all rows of a step and epochs to 1"
        )
    return algorithm
