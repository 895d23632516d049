"""Which rows share a forward pass.

It follows from the rows alone: every rank that has the same rows plans the same passes.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rolemesh.engine.packing.batching import check_units, unit_lengths, unit_rows
from rolemesh.engine.packing.pass_cost import PassCost
from rolemesh.engine.packing.token_tree import GrowingTree, RowOrder

MOST_KEYS_PER_TOKEN = 8
"""Keys and values are laid out for each branch, with all that it shares, and kept for the backward
pass. They are narrow beside what the other products of a token keep (a thirtieth in an 8B model of
the Llama family), but a long prompt with many short completions has many: a pass has at most this
many times the tokens of its budget."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Units that stay in one pass: a tree, a part of one, or rows that share nothing."""

    units: list[int]
    num_tokens: int
    """Each shared one once."""
    num_keys: int
    """That are laid out for branches, at most; 0 where nothing is shared."""


def plan_passes(
    rows: Sequence[torch.Tensor],
    *,
    max_tokens: int,
    cost: PassCost,
    rows_per_unit: int = 1,
) -> list[list[int]]:
    """Cuts rows into forward passes of packed rows.

    Rows that begin alike go to the same pass wherever they stand in the batch, as far as the budget
    allows; where it does not, a tree is cut where its rows share least, once a pass is half full.
    What is left whole is put into passes by its tokens, longest first, each where it leaves the
    least room.

    Args:
        rows: Integers [T] each.
        max_tokens: Of a pass; shared tokens count once. At least 1. A unit that has more stands
            alone.
        cost: Of the model.
        rows_per_unit: Neighbouring rows that stay together; 1: each row for itself.

    Returns:
        Row indexes, each exactly once, units whole.

    Raises:
        ValueError: The rows are no whole units, or max_tokens is below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}: give at least 1")
    check_units(len(rows), rows_per_unit)
    lengths = [len(row) for row in rows]
    pieces = (
        list(_trees(RowOrder.of(rows), lengths, cost, max_tokens, rows_per_unit))
        if cost.shares
        else [
            _Piece([unit], num_tokens, 0)
            for unit, num_tokens in enumerate(unit_lengths(lengths, rows_per_unit))
        ]
    )
    return [
        unit_rows([unit for piece in group for unit in piece.units], rows_per_unit)
        for group in _passes(pieces, max_tokens)
    ]


def _passes(pieces: Sequence[_Piece], max_tokens: int) -> list[list[_Piece]]:
    """Best fit, from many tokens to few."""
    passes: list[list[_Piece]] = []
    keys_of: list[int] = []
    # (tokens that still fit, pass), in this order.
    room: list[tuple[int, int]] = []
    most_keys = MOST_KEYS_PER_TOKEN * max_tokens
    for piece in sorted(pieces, key=lambda one: (-one.num_tokens, one.units)):
        at = bisect.bisect_left(room, (piece.num_tokens, -1))
        while at < len(room) and keys_of[room[at][1]] + piece.num_keys > most_keys:
            at += 1
        if at == len(room):
            number, free = len(passes), max_tokens
            passes.append([])
            keys_of.append(0)
        else:
            free, number = room.pop(at)
        passes[number].append(piece)
        keys_of[number] += piece.num_keys
        bisect.insort(room, (free - piece.num_tokens, number))
    return passes


def _trees(
    order: RowOrder,
    lengths: Sequence[int],
    cost: PassCost,
    max_tokens: int,
    rows_per_unit: int,
) -> Iterator[_Piece]:
    """Units that share tokens together, as far as the budget allows."""

    def rows_of(unit: int) -> list[int]:
        return unit_rows([unit], rows_per_unit)

    def first_place(unit: int) -> int:
        return min(order.rank_of[row] for row in rows_of(unit))

    def growing(units: Sequence[int]) -> GrowingTree:
        tree = GrowingTree(order, lengths, cost.keeps)
        for unit in units:
            tree.add(rows_of(unit))
        return tree

    waiting = deque(sorted(range(len(lengths) // rows_per_unit), key=first_place))
    while waiting:
        tree = growing([])
        taken: list[int] = []
        sizes: list[int] = []
        is_whole = True
        while waiting:
            before = tree.num_tokens
            tree.add(rows_of(waiting[0]))
            if taken and tree.num_tokens - before == growing([waiting[0]]).num_tokens:
                # It shares nothing with those before it, and so does none that follows.
                break
            fits = tree.num_tokens <= max_tokens and _num_keys(tree) <= (
                MOST_KEYS_PER_TOKEN * max_tokens
            )
            if taken and not fits:
                is_whole = False
                break
            taken.append(waiting.popleft())
            sizes.append(tree.num_tokens)
        if not is_whole:
            places = [first_place(unit) for unit in (*taken, waiting[0])]
            ends = [at for at in range(1, len(places)) if 2 * sizes[at - 1] >= max_tokens]
            end = min(
                ends or [len(taken)],
                key=lambda at: (order.between(places[at - 1], places[at]), -at),
            )
            waiting.extendleft(reversed(taken[end:]))
            del taken[end:]
        tree = growing(taken)
        is_shared = tree.num_tokens < sum(lengths[row] for unit in taken for row in rows_of(unit))
        yield _Piece(taken, tree.num_tokens, _num_keys(tree) if is_shared else 0)


def _num_keys(tree: GrowingTree) -> int:
    """Keys that are laid out for its branches, at most."""
    return len(tree) * tree.longest
