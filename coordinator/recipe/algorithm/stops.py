"""Stop texts of an algorithm, held against what the policy talks to."""

from __future__ import annotations

from typing import Any


def check_stops(recipe: Any) -> None:
    """Refuses stop texts where an environment says where a turn ends.

    Args:
        recipe: A Recipe, whose parts are valid.

    Raises:
        ValueError: Names the field.
    """
    sampling, sampler = recipe.sampling, recipe.rollout or recipe.actor
    if sampling is None or not (sampling.stop or sampling.stop_token_ids):
        return
    if getattr(sampler, "environment", None) is not None:
        raise ValueError(
            "algorithm.sampling.stop or stop_token_ids is given, but the policy talks to an "
            "environment, which says where a turn ends: leave it out"
        )
