"""Importance weights of policy losses against the difference between sampler and trainer."""

from __future__ import annotations

from typing import Any, Final

from rolemesh.coordinator.recipe.algorithms import AlgorithmSection, AlgorithmSpec
from rolemesh.coordinator.recipe.rates import planned_updates
from rolemesh.engine.specs import Numerics, PpoPolicyLossSpec, ReinforcePolicyLossSpec

FAST_IMPORTANCE_CAP: Final = 2.0
"""Cap of the weights under fast numerics: that of verl and of TRL's first correction, and C of the
note that proposed it (fengyao.notion.site/off-policy-rl, 2025)."""


def with_importance(
    algorithm: AlgorithmSpec, numerics: Numerics, num_prompts: int
) -> AlgorithmSpec:
    """An algorithm's section whose policy loss says how it weighs tokens.

    Args:
        algorithm: Of the recipe.
        numerics: Of the recipe.
        num_prompts: Prompts of a step.

    Returns:
        The section as it is, but with fast numerics and a loss that takes a cap and leaves it out,
        the cap; and where each step makes one optimizer step, no scoring pass for it.

    Raises:
        ValueError: The loss takes its own pass for the start of an update that has several steps.
    """
    if not isinstance(algorithm, AlgorithmSection):
        return algorithm
    updates = planned_updates(algorithm, num_prompts)
    loss = algorithm.parts.fields.get("policy_loss")
    given = getattr(loss, "model_fields_set", frozenset())
    if (
        numerics == "fast"
        and isinstance(loss, PpoPolicyLossSpec | ReinforcePolicyLossSpec)
        and "importance_cap" not in given
    ):
        chosen: dict[str, Any] = {"importance_cap": FAST_IMPORTANCE_CAP}
        if isinstance(loss, PpoPolicyLossSpec) and updates == 1 and "proximal" not in given:
            chosen["proximal"] = "same_pass"
        loss = loss.model_copy(update=chosen)
        algorithm = algorithm.model_copy(update={"policy_loss": loss})
    if isinstance(loss, PpoPolicyLossSpec) and loss.proximal == "same_pass" and updates != 1:
        number = "a number that is not known" if updates is None else str(updates)
        raise ValueError(
            f"algorithm.policy_loss.proximal is 'same_pass', but a step makes {number} of "
            "optimizer steps, of which only the first begins with the weights of the start: set it "
            "to 'scored', or mini_batch_rows to all rows of a step and epochs to 1"
        )
    return algorithm
