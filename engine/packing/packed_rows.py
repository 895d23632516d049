"""Rows as one packed row for a forward pass, in which each shared token stands once.

Nothing is padded: rows stand one behind the other. Completions of one prompt share it, and each
other's first tokens; prompts share what their chat template puts in front; turns of a session share
all that came before. `pass_cost` says which beginnings are worth sharing.

Several ranks may cut the packed row among them (`row_cut`): each then has L of its tokens, and the
results of all come together before they are those of rows.

Shape letters: B rows, S packed tokens, U distinct completion tokens, N completion tokens; of these
this rank has L, V and M (all, where a row is not cut); D width, T longest row, W numbers of a
token's route; R branches of a block, of C tokens at most, that attend to T tokens at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.hardware.devices import sent
from rolemesh.engine.packing.pass_cost import APART, PassCost
from rolemesh.engine.packing.row_cut import RowCut
from rolemesh.engine.packing.row_images import PackedImages, RowImages
from rolemesh.engine.packing.token_tree import Branch, GrowingTree, RowOrder
from rolemesh.engine.packing.tree_layout import Block, RowGather, TreeLayout
from rolemesh.engine.parallel.mesh import RankGroup
from rolemesh.engine.specs.columns import ROUTES


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of a forward pass, with the way back to what was computed for each row."""

    tokens_1S: torch.Tensor
    """int64 [1, S]."""
    lengths_B: torch.Tensor
    """int64 [B], tokens in each row; those that it shares count."""
    last_B: torch.Tensor
    """int64 [B], the place of each row's last token."""
    targets_U: torch.Tensor
    """int64 [U], the distinct completion tokens."""
    layout: TreeLayout
    """How the tokens attend to each other, and where what belongs to rows stands."""
    routes_SW: torch.Tensor | None = None
    """uint8 [S, W], the experts of each token in each layer that has some; None: not given."""
    cut: RowCut | None = None
    """This rank's part of the row; None: all of it."""
    images: PackedImages | None = None
    """Those among the tokens that this rank computes; None: there are none."""

    @property
    def longest(self) -> int:
        """Most tokens that one of them attends to, padding of attention counted."""
        return self.layout.longest

    @property
    def tokens_1L(self) -> torch.Tensor:
        """int64, the tokens that this rank computes."""
        return self.tokens_1S if self.cut is None else self.cut.tokens_1L

    @property
    def targets_V(self) -> torch.Tensor:
        """int64, the distinct completion tokens whose states before them this rank has."""
        return self.targets_U if self.cut is None else self.targets_U[self.cut.states.own_M]

    def states(self, hidden_1LD: torch.Tensor) -> torch.Tensor:
        """Hidden states [V, D] before this rank's distinct completion tokens.

        The state before a token predicts it, and is the state that the token's value belongs to.
        """
        gather = self.layout.states_U if self.cut is None else self.cut.states.tokens_M
        return gather(hidden_1LD[0])

    def of_rows(self, values_V: torch.Tensor) -> torch.Tensor:
        """What was computed for distinct completion tokens, float [V, ...], for all: [N, ...]."""
        values_U = values_V if self.cut is None else self.cut.states.of_all(values_V)
        shape = values_U.shape[1:]
        flat = self.layout.rows_N(values_U.view(len(values_U), shape.numel()))
        return flat.view(-1, *shape)

    def states_by_row(
        self, hidden_1LD: torch.Tensor, ids_NK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States before the completion tokens of rows, each row's by itself, and ids at each.

        Args:
            hidden_1LD: Float.
            ids_NK: int64, further ids of each completion token.

        Returns:
            Float [M, D], and int64 [M, 1 + K]: this rank's, the token itself first.
        """
        targets_N = self.targets_U[self.layout.rows_N.index_M]
        ids_NJ = torch.cat([targets_N[:, None], ids_NK], 1)
        if self.cut is None:
            return self.layout.rows_N(self.layout.states_U(hidden_1LD[0])), ids_NJ
        places = self.cut.completions
        return places.tokens_M(hidden_1LD[0]), ids_NJ[places.own_M]

    def all_by_row(self, values_M: torch.Tensor) -> torch.Tensor:
        """What was computed of `states_by_row`, [M, ...], for all completion tokens: [N, ...]."""
        return values_M if self.cut is None else self.cut.completions.of_all(values_M)

    def at_ends(self, hidden_1LD: torch.Tensor) -> torch.Tensor:
        """Hidden states at the last tokens of rows, those that this rank has: [B, D] uncut."""
        if self.cut is None:
            return hidden_1LD[0][self.last_B]
        return self.cut.ends.tokens_M(hidden_1LD[0])

    def all_ends(self, values: torch.Tensor) -> torch.Tensor:
        """What was computed of `at_ends`, for all rows: [B, ...]."""
        return values if self.cut is None else self.cut.ends.of_all(values)

    def rectangle(self) -> Rectangle:
        """The rows right-padded, for a model that takes no packed ones.

        Raises:
            ValueError: Rows share tokens; `APART` packs them so that they do not.
        """
        if int(self.lengths_B.sum()) != self.tokens_1S.shape[1]:
            raise ValueError("rows that share tokens are no rectangle: pack them apart")
        place_T = torch.arange(int(self.lengths_B.max()), device=self.lengths_B.device)
        first_B = self.last_B - self.lengths_B + 1
        is_token_BT = place_T < self.lengths_B[:, None]
        places_BT = first_B[:, None] + place_T
        tokens_BT = self.tokens_1S[0][places_BT.where(is_token_BT, 0)]
        index_S = torch.empty_like(self.tokens_1S[0])
        index_S[places_BT[is_token_BT]] = is_token_BT.flatten().nonzero().flatten()
        return Rectangle(tokens_BT.where(is_token_BT, PAD_TOKEN), is_token_BT, index_S)


PAD_TOKEN = 0
"""Fills a rectangle. Any id would do: no state that is read ever sees a pad."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Right-padded rows."""

    tokens_BT: torch.Tensor
    """int64 [B, T]."""
    is_token_BT: torch.Tensor
    """bool [B, T], False for padding."""
    index_S: torch.Tensor
    """int64 [S], into the flattened [B * T]: the packed tokens in their order."""

    def packed(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """What was computed for the rectangle, float [B, T, D], as [1, S, D]."""
        return hidden_BTD.flatten(0, 1).index_select(0, self.index_S)[None]


def check_prompt_lengths(batch: Experience) -> torch.Tensor:
    """Column prompt_lengths, int64 [B].

    Args:
        batch: With the columns tokens and prompt_lengths.

    Raises:
        ValueError: A prompt is empty (no state precedes its first completion token) or longer
            than its row.
    """
    tokens = batch["tokens"]
    if tokens.kind is not ColumnKind.SEQUENCE or tokens.offsets is None:
        raise ValueError(f"column 'tokens' is a {tokens.kind.value} column: give whole sequences")
    lengths_B = tokens.lengths()
    prompt_lengths_B = batch["prompt_lengths"].values
    bad = ((prompt_lengths_B < 1) | (prompt_lengths_B > lengths_B)).nonzero().flatten()
    if len(bad):
        row = int(bad[0])
        raise ValueError(
            f"prompt_lengths of row {row} is {int(prompt_lengths_B[row])} in a row of "
            f"{int(lengths_B[row])} tokens: give at least 1 and at most the row's length"
        )
    return prompt_lengths_B


def whole_rows(token_rows: Sequence[Sequence[int] | torch.Tensor]) -> Experience:
    """Rows in which no token is a completion's, as `pack_rows` takes them.

    Args:
        token_rows: Token ids, at least one a row.
    """
    lengths = torch.tensor([len(row) for row in token_rows])
    tokens = [torch.as_tensor(row, dtype=torch.int64) for row in token_rows]
    return Experience(
        {
            "tokens": Column.ragged(ColumnKind.SEQUENCE, tokens, torch.int64),
            "prompt_lengths": Column(ColumnKind.ROW, lengths),
        }
    )


def pack_rows(
    batch: Experience,
    device: torch.device | str,
    cost: PassCost = APART,
    cp: RankGroup | None = None,
    images: RowImages | None = None,
) -> PackedRows:
    """Lays rows out for a forward pass in which what they share stands once.

    Args:
        batch: With the columns tokens and prompt_lengths, maybe routes; at least one row.
        device: Where the model is.
        cost: Of the model; says which beginnings are worth sharing. Without, none is.
        cp: The ranks that cut the packed row among them, if any do: all have the same batch.
        images: Of the rows, if any has some.

    Returns:
        One row of S tokens, and each distinct completion token once: `of_rows` of what is computed
        for those is in the order of `batch`.

    Raises:
        ValueError: See `check_prompt_lengths`.
    """
    prompt_lengths = check_prompt_lengths(batch).tolist()
    rows = list(batch["tokens"].rows())
    lengths = [len(row) for row in rows]
    keys = rows if images is None else images.keys(rows)
    order = RowOrder.of(keys) if cost.shares else RowOrder.apart(len(rows))
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
    num_marked = 0 if images is None else num_tokens
    axes_3S, source_S = positions_S.new_empty(3, num_marked), positions_S.new_empty(num_marked)
    branch_of = {branch.place: branch for branch in branches}
    routes = list(batch[ROUTES].rows()) if ROUTES in batch else None
    routes_SW = None if routes is None else routes[0].new_empty(num_tokens, routes[0].shape[1])
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
        if images is not None:
            axes_3S[:, own] = images.positions[row][:, branch.shared :]
            source_S[own] = images.sources[row][branch.shared :]
        if routes is not None and routes_SW is not None:
            routes_SW[own] = routes[row][branch.shared :]
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
        axes_31S=None if images is None else axes_3S[:, None],
        blocks=tuple(
            _lay_out(
                block,
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
    last_B = torch.tensor([int(row_places[-1]) for row_places in places_by_row])
    cut = None
    if cp is not None and cp.size > 1:
        cut = RowCut.of(cp, layout, tokens_S[None], last_B, routes_SW).to(device)
    placed = None
    if images is not None:
        placed = PackedImages.of(images, source_S if cut is None else cut.own_part(source_S, -1))
    return PackedRows(
        tokens_1S=sent(tokens_S[None], device),
        lengths_B=sent(torch.tensor(lengths), device),
        last_B=sent(last_B, device),
        targets_U=sent(tokens_S[torch.from_numpy(token_U)], device),
        layout=layout.to(device),
        routes_SW=None if routes_SW is None else sent(routes_SW, device),
        cut=cut,
        images=None if placed is None else placed.to(device),
    )


def _lay_out(
    block: Sequence[Branch],
    places_by_branch: Sequence[np.ndarray],
    num_tokens: int,
) -> Block:
    lengths_R = torch.tensor([branch.num_tokens for branch in block])
    queries = max(branch.num_tokens for branch in block)
    keys = max(branch.length for branch in block)
    place_C, place_T = torch.arange(queries), torch.arange(keys)
    is_query_RC = place_C < lengths_R[:, None]
    query_RC = (lengths_R.cumsum(0) - lengths_R)[:, None] + place_C
    own = int(lengths_R.sum())
    all_keys = may_attend = into_rectangle = back = None
    if own < is_query_RC.numel():
        into_rectangle = RowGather.of(query_RC.masked_fill(~is_query_RC, -1).flatten(), own)
        back = RowGather.of(is_query_RC.flatten().nonzero().flatten(), is_query_RC.numel())
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
        num_tokens=own,
        num_branches=len(block),
        queries=into_rectangle,
        back=back,
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
