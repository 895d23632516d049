"""Orders of training rows: position -> row, as pure functions.

An order holds no state of a run: the position is the cursor, and a resumed run asks for the next
one.
"""

from __future__ import annotations

import functools
import random
from array import array
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Protocol

from rolemesh.engine.seeds import derive_seed

EpochOrder = Callable[[int], Sequence[int]]
"""Every row number of a source once, by the number of the epoch."""


class Order(Protocol):
    """Maps each position of an endless split to a row."""

    def rows(self, start: int, count: int) -> list[int]:
        """Row numbers at positions start..start+count-1."""


def shuffled(num_rows: int, seed: str) -> EpochOrder:
    """Shuffles each epoch by itself; equal seeds give equal orders."""

    def order(epoch: int) -> Sequence[int]:
        # Four bytes a row, where a list takes forty.
        rows = array("i", range(num_rows))
        random.Random(f"{seed}/{epoch}").shuffle(rows)
        return rows

    return order


class Epochs:
    """One epoch after the other."""

    def __init__(self, num_rows: int, epoch_order: EpochOrder) -> None:
        """Takes the size of an epoch, at least 1, and the order of each."""
        self._num_rows = num_rows
        # A slice may begin in one epoch and end in the next.
        self._epoch_order = functools.lru_cache(maxsize=2)(epoch_order)

    def rows(self, start: int, count: int) -> list[int]:
        """See Order."""
        rows = []
        for position in range(start, start + count):
            epoch, within = divmod(position, self._num_rows)
            rows.append(self._epoch_order(epoch)[within])
        return rows


class Mixture:
    """Several sources in fixed shares.

    Draw k of source s has the time (k + u) / w_s, where w_s is its share and u, in [0, 1), derives
    from (seed, s, k). Positions run through all draws in the order of their times (stratified
    sampling). Hence at every position the number of draws of a source differs from its share of the
    time by at most one. The order of sources still looks random. The row at a position is found
    from the few draws around it. Shares and times are fractions, so nothing is rounded.

    Example: shares 3/4 and 1/4, at any start: 400 positions hold 298 to 302 draws of the first.
    """

    def __init__(
        self, orders: Sequence[Order], sizes: Sequence[int], weights: Sequence[float], seed: int
    ) -> None:
        """Takes the order, the number of rows and the weight (> 0, finite) of each source.

        Row numbers count over all sources: the rows of source 1 follow those of source 0.
        """
        total = sum(map(Fraction, weights))
        self._shares = [Fraction(weight) / total for weight in weights]
        self._orders = orders
        self._offsets = [sum(sizes[:number]) for number in range(len(sizes))]
        self._seed = seed

    def draws(self, start: int, count: int) -> list[tuple[int, int]]:
        """(source, number of the draw from that source) at positions start..start+count-1."""
        # At time T between T - S and T + S draws have been made, S being the number of sources.
        num_sources = len(self._shares)
        earliest = max(0, start - num_sources - 1)
        latest = start + count + num_sources
        firsts = [int(earliest * share) for share in self._shares]
        draws = []
        for source, (share, first) in enumerate(zip(self._shares, firsts, strict=True)):
            for draw in range(first, int(latest * share) + 1):
                jitter = Fraction(derive_seed(self._seed, "mixture", source, draw), 2**63)
                draws.append(((draw + jitter) / share, source, draw))
        draws.sort()
        skipped = start - sum(firsts)
        return [(source, draw) for _, source, draw in draws[skipped : skipped + count]]

    def rows(self, start: int, count: int) -> list[int]:
        """See Order."""
        return [
            self._offsets[source] + self._orders[source].rows(draw, 1)[0]
            for source, draw in self.draws(start, count)
        ]
