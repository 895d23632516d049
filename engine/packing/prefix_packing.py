"""Packs the completions of one prompt behind one copy of it, where that is cheaper.

Which rows share a forward pass follows from the rows alone: every rank that has the same rows
plans the same passes.

Shape letters: S packed tokens, N completion tokens; rows, prompts and their lengths as in
`prefix_layout`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rolemesh.engine.experience import Experience
from rolemesh.engine.packing.batching import (
    PaddedRows,
    check_units,
    micro_batches,
    prompts_of,
    unit_rows,
)
from rolemesh.engine.packing.prefix_layout import PrefixLayout, RowGather

MOST_KEYS_PER_TOKEN = 8
"""Keys and values are laid out for each row, prompt included, and kept for the backward pass. They
are narrow beside what the other products of a token keep (a thirtieth in an 8B model of the Llama
family), but a long prompt with many short completions has many: a pass has at most this many times
the tokens of its budget."""


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """What decides between the two ways on one kind of device."""

    attention_slowness: float
    """How much longer attention takes than a large product of matrices for as many operations."""
    margin: float
    """Sharing must cost less than this part of not sharing: above, gathering eats what is saved."""


DEVICE_COSTS = {
    # Measured with heads 64 wide, forward and backward: 2 times beside float32 products and 3 times
    # beside bfloat16 ones.
    "cpu": DeviceCosts(attention_slowness=3.0, margin=0.95),
    # Assumed, not measured: those of a CPU. `tests/benchmarks/prefix_sharing.py --constants` gives
    # a GPU's.
    "cuda": DeviceCosts(attention_slowness=3.0, margin=0.95),
}
"""By kind of device (`kind_of`)."""


@dataclass(frozen=True, slots=True)
class SharingCost:
    """Estimates what a forward pass takes, in tokens without attention."""

    pairs_per_token: float
    """Pairs of query and key that take as long as all else that is done for one token."""
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
        return cls(pairs, costs.margin)

    def rectangle(self, num_rows: int, longest: int) -> float:
        """Cost of right-padded rows; causal attention computes half of the pairs."""
        return num_rows * longest * (1 + longest / (2 * self.pairs_per_token))

    def packed(
        self, lengths: Sequence[int], prompt_lengths: Sequence[int], prompts: Sequence[int]
    ) -> float:
        """Cost of rows that are packed together, as `pack_rows` lays them out."""
        prompt_length_of = dict(zip(prompts, prompt_lengths, strict=True))
        num_tokens = sum(prompt_length_of.values()) + sum(lengths) - sum(prompt_lengths)
        longest_prompt = max(prompt_length_of.values())
        longest_completion = max(
            length - prompt for length, prompt in zip(lengths, prompt_lengths, strict=True)
        )
        pairs = len(prompt_length_of) * longest_prompt**2 / 2 + len(
            lengths
        ) * longest_completion * max(lengths)
        return num_tokens + pairs / self.pairs_per_token


@dataclass(frozen=True, slots=True)
class Pass:
    """Rows of one forward pass."""

    rows: list[int]
    """Row indexes."""
    shares: bool
    """Whether their prompts are packed; otherwise the rows are padded."""


def prompt_numbers(batch: Experience) -> list[int]:
    """A number for each row's prompt; equal prompts, token for token, have equal numbers.

    Args:
        batch: With the columns tokens and prompt_lengths.
    """
    numbers: dict[bytes, int] = {}
    return [
        numbers.setdefault(prompt.numpy().tobytes(), len(numbers)) for prompt in prompts_of(batch)
    ]


def plan_passes(
    lengths: Sequence[int],
    prompt_lengths: Sequence[int],
    prompts: Sequence[int],
    *,
    max_tokens: int,
    cost: SharingCost,
    rows_per_unit: int = 1,
) -> list[Pass]:
    """Cuts rows into forward passes, and decides for each whether its rows share prompts.

    Rows with equal prompts go to the same pass wherever they stand in the batch, as far as the
    budget allows. A pass shares when two of its rows have the same prompt and the estimated cost is
    below that of the same rows padded. All other rows are grouped by `micro_batches`; where no two
    rows have the same prompt, so are all.

    Args:
        lengths: Tokens in each row.
        prompt_lengths: Prompt tokens in each row.
        prompts: From `prompt_numbers`.
        max_tokens: Of a pass; packed tokens count once, padding counts. At least 1.
        cost: Of the model.
        rows_per_unit: Neighbouring rows that stay together; 1: each row for itself.

    Returns:
        Each row exactly once. Passes that share come first, then those that do not, either from
        long to short rows.
    """
    check_units(len(lengths), rows_per_unit)
    rows_of: dict[int, list[int]] = {}
    for first in range(0, len(lengths), rows_per_unit):
        rows_of.setdefault(prompts[first], []).extend(range(first, first + rows_per_unit))
    repeated = {number for number, count in Counter(prompts).items() if count > 1}
    filling = _Filling(lengths, prompt_lengths, prompts, max_tokens)
    plain: list[int] = []
    for rows in sorted(rows_of.values(), key=lambda rows: (-max(lengths[r] for r in rows), rows)):
        if repeated.isdisjoint(prompts[row] for row in rows):
            plain += rows
        else:
            starts = range(0, len(rows), rows_per_unit)
            filling.add([rows[start : start + rows_per_unit] for start in starts])
    passes = []
    for rows in filling.groups:
        own = [lengths[row] for row in rows]
        padded = sum(
            cost.rectangle(len(group), max(own[row] for row in group))
            for group in micro_batches(own, max_tokens, rows_per_unit)
        )
        packed = cost.packed(
            own, [prompt_lengths[row] for row in rows], [prompts[row] for row in rows]
        )
        if len({prompts[row] for row in rows}) < len(rows) and packed < cost.margin * padded:
            passes.append(Pass(rows, shares=True))
        else:
            plain += rows
    units = sorted(row // rows_per_unit for row in plain[::rows_per_unit])
    plain = unit_rows(units, rows_per_unit)
    for group in micro_batches([lengths[row] for row in plain], max_tokens, rows_per_unit):
        passes.append(Pass([plain[place] for place in group], shares=False))
    return passes


class _Filling:
    """Puts units into groups, one group after another, as long as the budget allows."""

    def __init__(
        self,
        lengths: Sequence[int],
        prompt_lengths: Sequence[int],
        prompts: Sequence[int],
        max_tokens: int,
    ) -> None:
        self._lengths = lengths
        self._prompt_lengths = prompt_lengths
        self._prompts = prompts
        self._max_tokens = max_tokens
        self.groups: list[list[int]] = []

    def add(self, units: list[list[int]]) -> None:
        """Takes units of one prompt, together if a group of their own could hold them all."""
        together = [row for unit in units for row in unit]
        if not self._fits(together) and self._within(together):
            self.groups.append([])
        for unit in units:
            if not self._fits(unit):
                self.groups.append([])
            self.groups[-1].extend(unit)

    def num_tokens(self, rows: Sequence[int]) -> int:
        """Of rows that are packed."""
        prompt_length_of = {self._prompts[row]: self._prompt_lengths[row] for row in rows}
        completions = sum(self._lengths[row] - self._prompt_lengths[row] for row in rows)
        return sum(prompt_length_of.values()) + completions

    def _fits(self, rows: list[int]) -> bool:
        return bool(self.groups) and (not self.groups[-1] or self._within(self.groups[-1] + rows))

    def _within(self, rows: list[int]) -> bool:
        longest = max(self._lengths[row] for row in rows)
        return (
            self.num_tokens(rows) <= self._max_tokens
            and len(rows) * longest <= MOST_KEYS_PER_TOKEN * self._max_tokens
        )


def pack_rows(batch: Experience, device: torch.device | str) -> PaddedRows:
    """Lays rows out for a forward pass in which equal prompts stand once.

    Args:
        batch: With the columns tokens and prompt_lengths.
        device: Where the model is.

    Returns:
        One row of S tokens without padding. Completion tokens are in the order of `batch`, as those
        of `pad_rows` are.
    """
    numbers = prompt_numbers(batch)
    prompts: dict[int, torch.Tensor] = {}
    for number, prompt in zip(numbers, prompts_of(batch), strict=True):
        prompts.setdefault(number, prompt)
    prompt_of_row = torch.tensor(numbers)
    prompt_lengths_G = torch.tensor([len(prompt) for prompt in prompts.values()])
    lengths_R = batch["tokens"].lengths()
    completions = [
        row[len(prompts[number]) :]
        for row, number in zip(batch["tokens"].rows(), numbers, strict=True)
    ]
    completion_lengths_R = torch.tensor([len(completion) for completion in completions])
    own_prompt_lengths_R = prompt_lengths_G[prompt_of_row]

    num_prompt_tokens = int(prompt_lengths_G.sum())
    first_of_prompt_G = prompt_lengths_G.cumsum(0) - prompt_lengths_G
    first_of_completion_R = (
        num_prompt_tokens + completion_lengths_R.cumsum(0) - completion_lengths_R
    )
    prompt_GP, prompt_places = _rectangle(first_of_prompt_G, prompt_lengths_G)
    query_RC, query_places = _rectangle(
        first_of_completion_R - num_prompt_tokens, completion_lengths_R
    )
    # Place j of a row is token j of its prompt, then of its completion.
    place_T = torch.arange(int(lengths_R.max()))
    is_prompt_RT = place_T < own_prompt_lengths_R[:, None]
    key_RT = torch.where(
        is_prompt_RT,
        first_of_prompt_G[prompt_of_row][:, None] + place_T,
        first_of_completion_R[:, None] + place_T - own_prompt_lengths_R[:, None],
    ).masked_fill(place_T >= lengths_R[:, None], -1)
    is_before_completion_RT = (place_T >= own_prompt_lengths_R[:, None] - 1) & (
        place_T < lengths_R[:, None] - 1
    )
    states_N = key_RT[is_before_completion_RT]
    mask_lengths = own_prompt_lengths_R
    if bool((mask_lengths == mask_lengths[0]).all()):
        mask_lengths = mask_lengths[:1]  # one mask for all rows
    place_C = torch.arange(query_RC.shape[1])
    may_attend = place_T <= mask_lengths[:, None, None] + place_C[:, None]
    positions_S = torch.cat(
        [*(torch.arange(len(prompt)) for prompt in prompts.values())]
        + [
            torch.arange(first, first + len(completion))
            for first, completion in zip(own_prompt_lengths_R.tolist(), completions, strict=True)
        ]
    )
    tokens_S = torch.cat([*prompts.values(), *completions]).to(torch.int64)
    layout = PrefixLayout(
        positions_1S=positions_S[None],
        num_prompt_tokens=num_prompt_tokens,
        num_prompts=len(prompts),
        num_rows=len(completions),
        prompts=RowGather.of(prompt_GP.flatten()),
        prompt_places=prompt_places,
        queries=RowGather.of(query_RC.flatten()),
        query_places=query_places,
        keys=RowGather.of(key_RT.flatten()),
        may_attend=may_attend[:, None],
        states=RowGather.of(states_N),
        prompts_S=torch.cat(
            [
                torch.arange(len(prompts)).repeat_interleave(prompt_lengths_G),
                prompt_of_row.repeat_interleave(completion_lengths_R),
            ]
        ),
        rows_S=torch.cat(
            [
                torch.full((num_prompt_tokens,), -1),
                torch.arange(len(completions)).repeat_interleave(completion_lengths_R),
            ]
        ),
    )
    return PaddedRows(
        tokens_BT=tokens_S[None].to(device),
        lengths_B=torch.tensor([len(tokens_S)]).to(device),
        state_index_N=states_N.to(device),
        targets_N=torch.cat(completions).to(device=device, dtype=torch.int64),
        prefixes=layout.to(device),
    )


def _rectangle(first_B: torch.Tensor, lengths_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs of an index side by side, -1 where there is none, and the places of all others.

    Example: runs from 0 and 2 of lengths 2 and 1 give [[0, 1], [2, -1]] and the places [0, 1, 2].
    """
    place = torch.arange(int(lengths_B.max()))
    is_there = place < lengths_B[:, None]
    index = (first_B[:, None] + place).masked_fill(~is_there, -1)
    return index, is_there.flatten().nonzero().flatten()
