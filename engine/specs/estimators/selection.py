"""Rules that say which groups, or pairs, of a batch are kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rolemesh.engine.specs.base import PartSpec
from rolemesh.engine.specs.columns import PAIR_COLUMNS


class RewardSpreadSpec(PartSpec):
    """Dynamic sampling (DAPO, arXiv 2503.14476, eq. 11): groups whose rewards differ.

    The paper keeps groups in which some answers are right and not all are. A group whose rewards
    are all equal has advantages 0 under every group estimator, and teaches nothing.
    """

    type: Literal["reward_spread"] = "reward_spread"
    min_std: float = Field(default=0.0, ge=0)
    """Keep groups whose rewards have a standard deviation (n - 1) above this. Rows without unmasked
    tokens do not count for it, as in every estimator."""

    def columns(self) -> tuple[str, ...]:
        """Rewards, mask, and which rows form a group."""
        return ("rewards", "loss_mask", "prompt_ids")


class PairedSpec(PartSpec):
    """Rows that are in a pair, the two of each pair as neighbours, the chosen one first.

    For `OnlineDpoSpec` on more than two completions a prompt: the rows in between have nothing to
    learn from and need not pass through the model.
    """

    type: Literal["paired"] = "paired"

    def columns(self) -> tuple[str, ...]:
        """Which rows make pairs."""
        return PAIR_COLUMNS


SelectionSpec = Annotated[RewardSpreadSpec | PairedSpec, Field(discriminator="type")]
