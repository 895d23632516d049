"""What a forward pass over packed rows takes, by the sizes of a model and the kind of device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rolemesh.engine.packing.token_tree import Branch


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """What decides how rows are packed on one kind of device."""

    attention_slowness: float
    """How much longer attention takes than a large product of matrices for as many operations."""
    call: int
    """Multiplications of attention that take as long as calling it once more."""
    margin: float
    """Sharing must cost less than this part of not sharing: above, gathering eats what is saved."""


DEVICE_COSTS = {
    # Measured with heads 64 wide, forward and backward: 2 times beside float32 products and 3 times
    # beside bfloat16 ones.
    "cpu": DeviceCosts(attention_slowness=3.0, call=2**21, margin=0.95),
    # Assumed, not measured: those of a CPU, and a call of 20 microseconds.
    # `tests/benchmarks/tree_sharing.py --constants` gives a GPU's.
    "cuda": DeviceCosts(attention_slowness=3.0, call=2**32, margin=0.95),
}
"""By kind of device (`kind_of`)."""


@dataclass(frozen=True, slots=True)
class PassCost:
    """Decides which beginnings rows share, and which of them attend in one call.

    Its unit is what one token takes without attention.
    """

    pairs_per_token: float
    """Pairs of query and key that take as long as all else that is done for one token."""
    pairs_per_call: float
    """Pairs that take as long as a further block: a block holds no more of them as padding."""
    margin: float
    """See `DeviceCosts`."""
    shares: bool = True
    """Whether rows may share tokens at all."""

    @classmethod
    def of_sizes(
        cls, *, layer_weights: int, attention_width: int, kind: str, shares: bool = True
    ) -> PassCost:
        """From the sizes of a layer.

        Args:
            layer_weights: Elements of its matrices; each is one multiplication a token.
            attention_width: Heads times their width; twice as many multiplications a pair.
            kind: Of the device, "cpu" or "cuda".
            shares: Whether rows may share tokens at all.
        """
        costs = DEVICE_COSTS[kind]
        pairs = layer_weights / (2 * attention_width * costs.attention_slowness)
        return cls(pairs, costs.call / (2 * attention_width), costs.margin, shares)

    def keeps(self, shared: int, length: int) -> bool:
        """Whether a row's first tokens are worth taking from another row.

        A branch computes all pairs of its tokens with the whole row, and a row by itself half of
        its pairs.

        Args:
            shared: Tokens that it would take, at most `length`.
            length: Of the row.
        """
        if not self.shares:
            return False
        own = length - shared
        as_branch = own * (1 + length / self.pairs_per_token)
        alone = length * (1 + length / (2 * self.pairs_per_token))
        return as_branch < self.margin * alone

    def blocks(self, branches: Sequence[Branch]) -> list[list[Branch]]:
        """Branches of similar sizes together; those that share nothing for themselves, and first.

        Each block is in the order of its branches' own tokens, from many to few.
        """
        blocks: list[list[Branch]] = []
        queries = keys = pairs = 0
        for branch in sorted(
            branches, key=lambda one: (one.shared > 0, -one.num_tokens, -one.length, one.place)
        ):
            pairs += branch.num_tokens * branch.length
            keys = max(keys, branch.length)
            is_alike = bool(blocks) and bool(branch.shared) == bool(blocks[-1][0].shared)
            if is_alike and (len(blocks[-1]) + 1) * queries * keys - pairs <= self.pairs_per_call:
                blocks[-1].append(branch)
                continue
            blocks.append([branch])
            queries, keys = branch.num_tokens, branch.length
            pairs = queries * keys
        return blocks


APART = PassCost(pairs_per_token=1.0, pairs_per_call=0.0, margin=0.0, shares=False)
"""Each row by itself; rows of one length attend in one call."""
