"""Which beginnings rows have in common, token for token.

Rows in the order of their tokens have their likes as neighbours: what any two of them share is the
least that neighbours between them share. So a tree of rows is this order and one number a row, the
tokens that it takes from the row before it; the rest of the row, its branch, is its own.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

KeepsShared = Callable[[int, int], bool]
"""Takes the tokens that a row could share with the one before it, and its length; says whether it
does. Otherwise it begins a tree of its own."""


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Rows in the order of their tokens."""

    rows: list[int]
    """Row indexes, in order."""
    rank_of: list[int]
    """By row index: its place in `rows`."""
    shared: np.ndarray
    """int64, by place: tokens at the beginning that the row and the one before it have both; 0 for
    the first."""

    @classmethod
    def of(cls, rows: Sequence[torch.Tensor]) -> Self:
        """Of rows of tokens, integers of one type each."""
        tokens = [row.numpy() for row in rows]
        keys = [row.tobytes() for row in tokens]
        order = sorted(range(len(rows)), key=keys.__getitem__)
        shared = np.zeros(len(rows), dtype=np.int64)
        for place, (before, row) in enumerate(itertools.pairwise(order), start=1):
            shared[place] = _in_common(tokens[before], tokens[row])
        rank_of = [0] * len(rows)
        for place, row in enumerate(order):
            rank_of[row] = place
        return cls(order, rank_of, shared)

    @classmethod
    def apart(cls, num_rows: int) -> Self:
        """Of rows in their own order that share nothing, whatever their tokens."""
        places = list(range(num_rows))
        return cls(places, list(places), np.zeros(num_rows, dtype=np.int64))

    def between(self, first: int, second: int) -> int:
        """Tokens that the rows at two places share; the first stands before the second."""
        return int(self.shared[first + 1 : second + 1].min())


def _in_common(first: np.ndarray, second: np.ndarray) -> int:
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    at = int(differs.argmax()) if length else 0
    return at if length and differs[at] else length


@dataclass(frozen=True, slots=True)
class Branch:
    """What one row of a tree adds to the rows before it."""

    num_tokens: int
    """Its own, at least 1."""
    length: int
    """All tokens of the row: those that it attends to."""
    place: int
    """Of the row in the tree's order."""

    @property
    def shared(self) -> int:
        """Tokens that it takes from the row before it."""
        return self.length - self.num_tokens


class GrowingTree:
    """Rows of an order that are added one by one, and what they cost together.

    Example: of rows (5, 6, 7), (5, 6, 8) and (5, 6), the first has 3 tokens, the tree of all 4.
    """

    def __init__(self, order: RowOrder, lengths: Sequence[int], keeps: KeepsShared) -> None:
        """An empty tree.

        Args:
            order: Of all rows.
            lengths: Tokens in each row, by row index.
            keeps: What sharing is worth.
        """
        self._order = order
        self._lengths = lengths
        self._keeps = keeps
        self._places: list[int] = []
        self.num_tokens = 0
        """Each shared one once."""
        self.longest = 0
        """Of its rows."""

    def __len__(self) -> int:
        return len(self._places)

    def add(self, rows: Sequence[int]) -> None:
        """Takes rows, which it does not have yet."""
        for row in rows:
            place = self._order.rank_of[row]
            at = bisect.bisect(self._places, place)
            before = self._places[at - 1] if at else None
            if at < len(self._places):
                after = self._places[at]
                self.num_tokens += self._own(place, after) - self._own(before, after)
            self.num_tokens += self._own(before, place)
            self._places.insert(at, place)
            self.longest = max(self.longest, self._lengths[row])

    def branches(self) -> list[Branch]:
        """Of rows that have tokens of their own, in their order."""
        found = []
        before: int | None = None
        for place in self._places:
            own, length = self._own(before, place), self._lengths[self._order.rows[place]]
            if own:
                found.append(Branch(own, length, place))
            before = place
        return found

    def _own(self, before: int | None, place: int) -> int:
        """Tokens that the row at a place does not take from the row before it."""
        length = self._lengths[self._order.rows[place]]
        shared = 0 if before is None else self._order.between(before, place)
        return length - shared if shared and self._keeps(shared, length) else length
