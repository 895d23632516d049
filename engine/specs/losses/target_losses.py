"""What the specs share of losses whose caller may give the tokens to score at each place."""

from __future__ import annotations

from pydantic import Field

from rolemesh.engine.specs.base import PartSpec
from rolemesh.engine.specs.columns import MAX_WIDTH, TARGET_IDS


class TargetLossSpec(PartSpec):
    """A loss over log-probs of the row's own tokens, or of given ones."""

    targets: int = Field(default=0, ge=0, le=MAX_WIDTH)
    """Token ids that are given at each place, in the column target_ids; 0: the row's own next token
    is scored."""

    def target_columns(self) -> tuple[str, ...]:
        """The column of given tokens, where there are some."""
        return (TARGET_IDS,) if self.targets else ()
