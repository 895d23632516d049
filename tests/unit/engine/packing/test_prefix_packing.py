"""Tests of which rows share a prompt's copy, and of how packed tokens are laid out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.packing.batching import micro_batches, pad_rows
from rolemesh.engine.packing.prefix_layout import RowGather
from rolemesh.engine.packing.prefix_packing import (
    MOST_KEYS_PER_TOKEN,
    SharingCost,
    pack_rows,
    plan_passes,
    prompt_numbers,
)

COST = SharingCost(pairs_per_token=1000.0, margin=0.95)
"""About that of a small model."""

ROWS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), max_size=30)
"""(number of the prompt, length of the completion)."""
PROMPT_LENGTHS = (20, 3, 1, 11, 11)


def batch_of(rows: list[tuple[int, int]]) -> Experience:
    """Rows of those prompts; prompts 3 and 4 differ in their last token alone."""
    prompts = [[5] * 19 + [6], [7, 8, 9], [5], [10] * 11, [10] * 10 + [11]]
    tokens = [prompts[number] + [20 + row] * length for row, (number, length) in enumerate(rows)]
    return Experience(
        {
            "tokens": Column.ragged(ColumnKind.SEQUENCE, tokens, torch.int32),
            "prompt_lengths": Column(
                ColumnKind.ROW,
                torch.tensor([PROMPT_LENGTHS[number] for number, _ in rows], dtype=torch.int64),
            ),
        }
    )


def lengths_of(rows: list[tuple[int, int]]) -> tuple[list[int], list[int], list[int]]:
    """Lengths, prompt lengths and numbers of the prompts."""
    prompts = [PROMPT_LENGTHS[number] for number, _ in rows]
    lengths = [prompt + length for prompt, (_, length) in zip(prompts, rows, strict=True)]
    return lengths, prompts, [number for number, _ in rows]


# --- which rows share ---------------------------------------------------------------------


@given(ROWS, st.integers(1, 200))
def test_every_row_is_in_one_pass_and_within_the_budget(
    rows: list[tuple[int, int]], max_tokens: int
) -> None:
    lengths, prompt_lengths, prompts = lengths_of(rows)
    passes = plan_passes(lengths, prompt_lengths, prompts, max_tokens=max_tokens, cost=COST)
    assert sorted(row for one in passes for row in one.rows) == list(range(len(rows)))
    for one in passes:
        longest = max(lengths[row] for row in one.rows)
        if one.shares:
            distinct = {prompts[row] for row in one.rows}
            assert len(distinct) < len(one.rows)
            size = sum(PROMPT_LENGTHS[number] for number in distinct)
            size += sum(rows[row][1] for row in one.rows)
            assert len(one.rows) * longest <= MOST_KEYS_PER_TOKEN * max_tokens
        else:
            size = len(one.rows) * longest
        assert size <= max_tokens or len(one.rows) == 1


@given(ROWS, st.integers(1, 200))
def test_rows_without_a_common_prompt_are_grouped_as_ever(
    rows: list[tuple[int, int]], max_tokens: int
) -> None:
    lengths, prompt_lengths, _ = lengths_of(rows)
    passes = plan_passes(
        lengths, prompt_lengths, range(len(rows)), max_tokens=max_tokens, cost=COST
    )
    assert [one.rows for one in passes] == micro_batches(lengths, max_tokens)
    assert not any(one.shares for one in passes)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30), st.integers(0, 30)), max_size=15))
def test_a_unit_is_never_cut(units: list[tuple[int, int, int]]) -> None:
    rows = [(number, length) for number, *both in units for length in both]
    lengths, prompt_lengths, prompts = lengths_of(rows)
    passes = plan_passes(
        lengths, prompt_lengths, prompts, max_tokens=60, cost=COST, rows_per_unit=2
    )
    found = [row for one in passes for row in one.rows]
    assert sorted(found) == list(range(len(rows)))
    for one in passes:
        assert all(row % 2 == 0 for row in one.rows[::2])
        assert [row + 1 for row in one.rows[::2]] == one.rows[1::2]


def test_rows_share_wherever_they_stand() -> None:
    lengths, prompt_lengths, prompts = lengths_of([(0, 5), (1, 9), (0, 4), (3, 2), (0, 6)])
    passes = plan_passes(lengths, prompt_lengths, prompts, max_tokens=64, cost=COST)
    assert [(one.rows, one.shares) for one in passes] == [([0, 2, 4], True), ([3, 1], False)]


def test_a_prompt_whose_completions_exceed_the_budget_stands_in_several_passes() -> None:
    lengths, prompt_lengths, prompts = lengths_of([(0, 10)] * 7)
    passes = plan_passes(lengths, prompt_lengths, prompts, max_tokens=50, cost=COST)
    assert [(one.rows, one.shares) for one in passes] == [
        ([0, 1, 2], True),
        ([3, 4, 5], True),
        ([6], False),
    ]


def test_sharing_that_costs_more_is_left_alone() -> None:
    # Half of the attention over a common token is computed by a kernel that skips the other half.
    lengths, prompt_lengths, prompts = [4001, 4001], [1, 1], [0, 0]
    for pairs_per_token, shares in ((1e6, False), (1.0, False)):
        passes = plan_passes(
            lengths,
            prompt_lengths,
            prompts,
            max_tokens=10_000,
            cost=SharingCost(pairs_per_token, COST.margin),
        )
        assert [one.shares for one in passes] == [shares]


def test_the_cost_of_a_llama_layer_counts_its_products() -> None:
    # SmolLM2-135M: 3.54 M weights a layer, 9 heads of 64; 1024 pairs for a token at three times
    # the time for an operation.
    cost = SharingCost.of_sizes(
        layer_weights=2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536,
        attention_width=576,
        kind="cpu",
    )
    assert cost.pairs_per_token == pytest.approx(1024)
    # Four rows of 300: 1200 tokens; each of 300 attends to 150 on average.
    assert cost.rectangle(4, 300) == pytest.approx(1200 * (1 + 150 / 1024))
    # A prompt of 200 once, and completions of 100, 50, 50 and 10, in rectangles of 100 x 300.
    assert cost.packed([300, 250, 250, 210], [200] * 4, [7] * 4) == pytest.approx(
        410 + (200 * 100 + 4 * 100 * 300) / 1024
    )


def test_prompts_are_compared_token_for_token() -> None:
    batch = batch_of([(3, 2), (4, 2), (3, 0), (2, 1), (0, 1)])
    assert prompt_numbers(batch) == [0, 1, 0, 2, 3]


# --- how they are laid out ----------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 8)), min_size=1, max_size=12))
def test_each_completion_attends_to_its_prompt_and_itself(rows: list[tuple[int, int]]) -> None:
    batch = batch_of(rows)
    packed, padded = pack_rows(batch, "cpu"), pad_rows(batch, "cpu")
    layout = packed.prefixes
    assert layout is not None
    tokens_S = packed.tokens_BT[0]
    assert torch.equal(packed.targets_N, padded.targets_N)
    # Every prompt once, and every completion.
    distinct = {number for number, _ in rows}
    assert len(tokens_S) == sum(PROMPT_LENGTHS[number] for number in distinct) + sum(
        length for _, length in rows
    )
    keys_RT = layout.keys.index_M.view(len(rows), -1)
    own = torch.arange(len(tokens_S))
    queries_RC = (
        own[layout.num_prompt_tokens :][layout.queries.index_M]
        if any(length for _, length in rows)
        else own[:0]
    )
    queries_RC = queries_RC.view(len(rows), -1)
    mask = layout.may_attend.expand(len(rows), 1, *layout.may_attend.shape[2:])
    for row, ((number, length), tokens) in enumerate(
        zip(rows, batch["tokens"].rows(), strict=True)
    ):
        prompt = PROMPT_LENGTHS[number]
        for at in range(length):
            seen = keys_RT[row][mask[row, 0, at]]
            assert tokens_S[seen].tolist() == tokens[: prompt + at + 1].tolist()
            assert layout.positions_1S[0, seen].tolist() == list(range(prompt + at + 1))
            assert int(queries_RC[row, at]) == int(seen[-1])
    # No query, padding too, is without a key.
    assert bool(mask.any(-1).all())
    assert torch.equal(
        tokens_S[packed.state_index_N], padded.tokens_BT.flatten()[padded.state_index_N]
    )


def test_a_gather_adds_the_gradients_of_copies_and_none_of_padding() -> None:
    source = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([2, 0, -1, 2, 3, 2, -1])
    gather = RowGather.of(index)
    assert torch.equal(gather(source)[index >= 0], source[index[index >= 0]])
    weights = torch.randn(7, 3, dtype=torch.float64)
    (gather(source) * weights).sum().backward()
    expected = torch.zeros_like(source).index_add_(0, index[index >= 0], weights[index >= 0])
    torch.testing.assert_close(source.grad, expected, rtol=0, atol=1e-15)
    assert [rows.tolist() for rows, _ in gather.copies] == [[0, 2, 3], [2], [2]]


def test_rows_that_do_not_fit_are_refused() -> None:
    rows = Experience(
        {
            "tokens": Column.ragged(ColumnKind.SEQUENCE, [[5, 6], [5, 6]], torch.int32),
            "prompt_lengths": Column(ColumnKind.ROW, torch.tensor([2, 3])),
        }
    )
    with pytest.raises(ValueError, match="prompt_lengths of row 1 is 3 in a row of 2 tokens"):
        prompt_numbers(rows)
