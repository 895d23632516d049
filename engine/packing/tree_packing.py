"""Packs rows that begin alike as a tree, in which each shared token stands once.

Completions of one prompt share it, and each other's first tokens; prompts share what their chat
template puts in front; turns of a session share all that came before. Which rows share a forward
pass follows from the rows alone: every rank that has the same rows plans the same passes.

Shape letters: S packed tokens, U distinct completion tokens, N completion tokens; R branches of a
block, of C tokens at most, that attend to T tokens at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rolemesh.engine.devices import sent
from rolemesh.engine.experience import Experience
from rolemesh.engine.packing.batching import (
    PaddedRows,
    check_prompt_lengths,
    check_units,
    micro_batches,
    unit_rows,
)
from rolemesh.engine.packing.token_tree import Branch, GrowingTree, RowOrder
from rolemesh.engine.packing.tree_layout import Block, RowGather, TreeLayout

MOST_KEYS_PER_TOKEN = 8
"""Keys and values are laid out for each branch, with all that it shares, and kept for the backward
pass. They are narrow beside what the other products of a token keep (a thirtieth in an 8B model of
the Llama family), but a long prompt with many short completions has many: a pass has at most this
many times the tokens of its budget."""


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """What decides between the two ways on one kind of device."""

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
class SharingCost:
    """Estimates what a forward pass takes, in tokens without attention."""

    pairs_per_token: float
    """Pairs of query and key that take as long as all else that is done for one token."""
    pairs_per_call: float
    """Pairs that take as long as a further block: a block holds no more of them as padding."""
    margin: float
    """See `DeviceCosts`."""

    @classmethod
    def of_sizes(cls, *, layer_weights: int, attention_width: int, kind: str) -> SharingCost:
        """From the sizes of a layer.

        Args:
            layer_weights: Elements of its matrices; each is one multiplication a token.
            attention_width: Heads times their width; twice as many multiplications a pair.
            kind: Of the device, "cpu" or "cuda".
        """
        costs = DEVICE_COSTS[kind]
        pairs = layer_weights / (2 * attention_width * costs.attention_slowness)
        return cls(pairs, costs.call / (2 * attention_width), costs.margin)

    def rectangle(self, num_rows: int, longest: int) -> float:
        """Cost of right-padded rows; causal attention computes half of the pairs."""
        return num_rows * longest * (1 + longest / (2 * self.pairs_per_token))

    def keeps(self, shared: int, length: int) -> bool:
        """Whether a row's first tokens are worth taking from another row.

        A branch computes all pairs of its tokens with the whole row, and a row by itself half of
        its pairs.
        """
        more_pairs = (length - shared) * length - length**2 / 2
        return shared > more_pairs / self.pairs_per_token

    def tree(self, branches: Sequence[Branch]) -> float:
        """Cost of rows that are packed together, as `pack_tree` lays them out."""
        num_tokens = sum(branch.num_tokens for branch in branches)
        pairs = sum(map(_num_pairs, self.blocks(branches)))
        return num_tokens + pairs / self.pairs_per_token

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


def _rectangle_of(block: Sequence[Branch]) -> tuple[int, int]:
    """C and T."""
    return max(one.num_tokens for one in block), max(one.length for one in block)


def _num_pairs(block: Sequence[Branch]) -> float:
    queries, keys = _rectangle_of(block)
    return len(block) * queries * keys / (1 if block[0].shared else 2)


@dataclass(frozen=True, slots=True)
class Pass:
    """Rows of one forward pass."""

    rows: list[int]
    """Row indexes."""
    shares: bool
    """Whether they are packed as a tree; otherwise they are padded."""


def plan_passes(
    rows: Sequence[torch.Tensor],
    *,
    max_tokens: int,
    cost: SharingCost,
    rows_per_unit: int = 1,
) -> list[Pass]:
    """Cuts rows into forward passes, and decides for each whether its rows share tokens.

    Rows that begin alike go to the same pass wherever they stand in the batch, as far as the budget
    allows; where it does not, a pass ends where its last rows share least, once it is half full. A
    pass shares when the estimated cost is below that of the same rows padded. All other rows are
    grouped by `micro_batches`; where no two rows begin alike, so are all.

    Args:
        rows: Integers [T] each.
        max_tokens: Of a pass; shared tokens count once, padding counts. At least 1.
        cost: Of the model.
        rows_per_unit: Neighbouring rows that stay together; 1: each row for itself.

    Returns:
        Each row exactly once, units whole. Passes that share come first, in the order of their
        tokens, then those that do not, from long to short rows.
    """
    check_units(len(rows), rows_per_unit)
    lengths = [len(row) for row in rows]
    order = RowOrder.of(rows)
    passes = []
    plain_units: list[int] = []
    for units in _trees(order, lengths, cost, max_tokens, rows_per_unit):
        chosen = unit_rows(units, rows_per_unit)
        tree = GrowingTree(order, lengths, cost.keeps)
        tree.add(chosen)
        own = [lengths[row] for row in chosen]
        padded = sum(
            cost.rectangle(len(group), max(own[row] for row in group))
            for group in micro_batches(own, max_tokens, rows_per_unit)
        )
        if tree.num_tokens < sum(own) and cost.tree(tree.branches()) < cost.margin * padded:
            passes.append(Pass(chosen, shares=True))
        else:
            plain_units += units
    plain = unit_rows(sorted(plain_units), rows_per_unit)
    for group in micro_batches([lengths[row] for row in plain], max_tokens, rows_per_unit):
        passes.append(Pass([plain[place] for place in group], shares=False))
    return passes


def _trees(
    order: RowOrder,
    lengths: Sequence[int],
    cost: SharingCost,
    max_tokens: int,
    rows_per_unit: int,
) -> Iterator[list[int]]:
    """Units of one pass after another."""

    def first_place(unit: int) -> int:
        return min(order.rank_of[row] for row in unit_rows([unit], rows_per_unit))

    waiting = deque(sorted(range(len(lengths) // rows_per_unit), key=first_place))
    while waiting:
        tree = GrowingTree(order, lengths, cost.keeps)
        taken: list[int] = []
        sizes: list[int] = []
        while waiting:
            tree.add(unit_rows([waiting[0]], rows_per_unit))
            fits = (
                tree.num_tokens <= max_tokens
                and len(tree) * tree.longest <= MOST_KEYS_PER_TOKEN * max_tokens
            )
            if taken and not fits:
                break
            taken.append(waiting.popleft())
            sizes.append(tree.num_tokens)
        if waiting:
            places = [first_place(unit) for unit in (*taken, waiting[0])]
            ends = [at for at in range(1, len(places)) if 2 * sizes[at - 1] >= max_tokens]
            end = min(
                ends or [len(taken)],
                key=lambda at: (order.between(places[at - 1], places[at]), -at),
            )
            waiting.extendleft(reversed(taken[end:]))
            del taken[end:]
        yield taken


def pack_tree(batch: Experience, device: torch.device | str, cost: SharingCost) -> PaddedRows:
    """Lays rows out for a forward pass in which what they share stands once.

    Args:
        batch: With the columns tokens and prompt_lengths.
        device: Where the model is.
        cost: Of the model; says which beginnings are worth sharing.

    Returns:
        One row of S tokens without padding, and each distinct completion token once: `of_rows` of
        what is computed for those is in the order of `batch`, as it is after `pad_rows`.

    Raises:
        ValueError: See `pad_rows`.
    """
    prompt_lengths = check_prompt_lengths(batch).tolist()
    rows = list(batch["tokens"].rows())
    lengths = [len(row) for row in rows]
    order = RowOrder.of(rows)
    tree = GrowingTree(order, lengths, cost.keeps)
    tree.add(range(len(rows)))
    branches = tree.branches()
    blocks = cost.blocks(branches)
    first_of = {}
    num_tokens = 0
    for branch in (branch for block in blocks for branch in block):
        first_of[branch.place] = num_tokens
        num_tokens += branch.num_tokens
    tokens_S = torch.empty(num_tokens, dtype=torch.int64)
    positions_S = torch.empty(num_tokens, dtype=torch.int64)
    branch_of = {branch.place: branch for branch in branches}
    places_by_row: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(rows)
    places = np.empty(0, dtype=np.int64)
    for place, row in enumerate(order.rows):
        if place not in branch_of:
            # The same row as the one before it.
            places_by_row[row] = places
            continue
        branch, first = branch_of[place], first_of[place]
        own = slice(first, first + branch.num_tokens)
        places = np.concatenate([places[: branch.shared], np.arange(own.start, own.stop)])
        places_by_row[row] = places
        tokens_S[own] = rows[row][branch.shared :].to(torch.int64)
        positions_S[own] = torch.arange(branch.shared, branch.length)
    completions = [
        (row_places[prompt:], row_places[prompt - 1 : -1])
        for row_places, prompt in zip(places_by_row, prompt_lengths, strict=True)
    ]
    token_N, state_N = (np.concatenate(one) for one in zip(*completions, strict=True))
    # A token has one token before it, whatever row it is read from.
    token_U, first_U, distinct_N = np.unique(token_N, return_index=True, return_inverse=True)
    state_U = torch.from_numpy(state_N[first_U])
    branch_S, last_branch_S = _branches_with(branches, first_of, num_tokens)
    layout = TreeLayout(
        positions_1S=positions_S[None],
        blocks=tuple(
            _lay_out(
                block,
                first_of[block[0].place],
                [places_by_row[order.rows[one.place]] for one in block],
                num_tokens,
            )
            for block in blocks
        ),
        states_U=RowGather.of(state_U, num_tokens),
        rows_N=RowGather.of(torch.from_numpy(distinct_N), len(token_U)),
        branch_S=branch_S,
        last_branch_S=last_branch_S,
    )
    return PaddedRows(
        tokens_BT=sent(tokens_S[None], device),
        lengths_B=sent(torch.tensor([num_tokens]), device),
        state_index_U=sent(state_U, device),
        targets_U=sent(tokens_S[torch.from_numpy(token_U)], device),
        tree=layout.to(device),
    )


def _lay_out(
    block: Sequence[Branch],
    first: int,
    places_by_branch: Sequence[np.ndarray],
    num_tokens: int,
) -> Block:
    lengths_R = torch.tensor([branch.num_tokens for branch in block])
    queries, keys = _rectangle_of(block)
    place_C, place_T = torch.arange(queries), torch.arange(keys)
    is_query_RC = place_C < lengths_R[:, None]
    query_RC = (lengths_R.cumsum(0) - lengths_R)[:, None] + place_C
    own = int(lengths_R.sum())
    all_keys = may_attend = None
    if block[0].shared:
        key_RT = torch.full((len(block), keys), -1, dtype=torch.int64)
        for row_T, places in zip(key_RT, places_by_branch, strict=True):
            row_T[: len(places)] = torch.from_numpy(places)
        all_keys = RowGather.of(key_RT.flatten(), num_tokens)
        shared_R = torch.tensor([branch.shared for branch in block])
        if bool((shared_R == shared_R[0]).all()):
            shared_R = shared_R[:1]  # one mask for all rows
        may_attend = (place_T <= shared_R[:, None, None] + place_C[:, None])[:, None]
    return Block(
        first=first,
        num_tokens=own,
        num_branches=len(block),
        queries=RowGather.of(query_RC.masked_fill(~is_query_RC, -1).flatten(), own),
        back=RowGather.of(is_query_RC.flatten().nonzero().flatten(), is_query_RC.numel()),
        keys=all_keys,
        may_attend=may_attend,
    )


def _branches_with(
    branches: Sequence[Branch], first_of: dict[int, int], num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token of S the branch that it is of, and the last one whose row has it."""
    branch_S, last_S = np.empty((2, num_tokens), dtype=np.int64)
    shared = np.array([branch.shared for branch in branches])
    for number, branch in enumerate(branches):
        own = slice(first_of[branch.place], first_of[branch.place] + branch.num_tokens)
        branch_S[own] = number
        # Falls: later rows share less and less with this one.
        least = np.minimum.accumulate(shared[number + 1 :])
        positions = np.arange(branch.shared, branch.length)
        last_S[own] = number + np.searchsorted(-least, -positions, side="left")
    return torch.from_numpy(branch_S), torch.from_numpy(last_S)
