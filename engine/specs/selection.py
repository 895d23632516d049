"""Rules that say which groups of a batch are kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rolemesh.engine.specs.base import PartSpec


class RewardSpreadSpec(PartSpec):
    """Dynamic sampling (DAPO, arXiv 2503.14476, eq. 11): groups whose rewards differ.

    The paper keeps groups in which some answers are right and not all are. A group whose rewards
    are all equal has advantages 0 under every group estimator, and teaches nothing.
    """

    type: Literal["reward_spread"] = "reward_spread"
    min_std: float = Field(default=0.0, ge=0)
    """Keep groups whose rewards have a standard deviation (n - 1) above this."""

    def columns(self) -> tuple[str, ...]:
        """Rewards, and which rows form a group."""
        return ("rewards", "prompt_ids")


SelectionSpec = Annotated[RewardSpreadSpec, Field()]
"""Becomes a union discriminated on `type` with the second rule."""
