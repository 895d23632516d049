"""Which rows share a pass, and how packed rows are laid out: against all prefixes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.packing.packed_rows import PAD_TOKEN, pack_rows, whole_rows
from rolemesh.engine.packing.pass_cost import APART, PassCost
from rolemesh.engine.packing.planning import MOST_KEYS_PER_TOKEN, plan_passes
from rolemesh.engine.packing.token_tree import GrowingTree, RowOrder
from rolemesh.engine.packing.tree_layout import RowGather, TreeLayout

COST = PassCost(pairs_per_token=1000.0, pairs_per_call=200.0, margin=0.95)
"""About that of a small model."""
WHATEVER = PassCost(pairs_per_token=float("inf"), pairs_per_call=200.0, margin=float("inf"))
"""Shares all that rows have in common."""

ROW = st.lists(st.integers(0, 1), min_size=1, max_size=6)
"""Of two tokens: rows begin alike, are equal, and are beginnings of others."""
ROWS = st.lists(ROW, min_size=1, max_size=12)


def tensors(rows: list[list[int]]) -> list[torch.Tensor]:
    return [torch.tensor(row, dtype=torch.int32) for row in rows]


def prefixes(rows: list[list[int]]) -> set[tuple[int, ...]]:
    """Of all rows, each once: the tokens of a tree."""
    return {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}


def of_prompts(*pairs: tuple[list[int], int]) -> list[list[int]]:
    """Rows of (prompt, completion tokens); no two completions begin alike."""
    return [[*prompt, *[100 + row] * length] for row, (prompt, length) in enumerate(pairs)]


# --- the tree -----------------------------------------------------------------------------


@given(ROWS, st.randoms())
def test_a_growing_tree_has_each_prefix_once(rows: list[list[int]], random: object) -> None:
    order = RowOrder.of(tensors(rows))
    tree = GrowingTree(order, list(map(len, rows)), lambda shared, length: True)
    added: list[list[int]] = []
    numbers = list(range(len(rows)))
    random.shuffle(numbers)  # type: ignore[attr-defined]
    for row in numbers:
        tree.add([row])
        added.append(rows[row])
        assert tree.num_tokens == len(prefixes(added))
        assert (len(tree), tree.longest) == (len(added), max(map(len, added)))
    assert sum(branch.num_tokens for branch in tree.branches()) == tree.num_tokens


def test_a_row_shares_what_it_has_in_common_with_the_one_before_it() -> None:
    order = RowOrder.of(tensors([[5, 6, 8], [5, 6], [7], [5, 6, 8]]))
    assert order.rows == [1, 0, 3, 2]
    assert order.shared.tolist() == [0, 2, 3, 0]
    assert order.between(0, 2) == 2
    assert order.between(1, 3) == 0


# --- which rows share ---------------------------------------------------------------------


@given(ROWS, st.integers(1, 40), st.booleans())
def test_every_row_is_in_one_pass_and_within_the_budget(
    rows: list[list[int]], max_tokens: int, shares: bool
) -> None:
    passes = plan_passes(
        tensors(rows), max_tokens=max_tokens, cost=replace(WHATEVER, shares=shares)
    )
    assert sorted(row for one in passes for row in one) == list(range(len(rows)))
    for one in passes:
        own = [rows[row] for row in one]
        num_tokens = sum(map(len, own))
        size = len(prefixes(own)) if shares else num_tokens
        assert size <= max_tokens or len(own) == 1
        if size < num_tokens:
            keys = len(own) * max(map(len, own))
            assert keys <= MOST_KEYS_PER_TOKEN * max_tokens or len(own) == 1


@given(st.lists(st.integers(1, 30), max_size=30), st.integers(1, 100), st.booleans())
def test_rows_that_share_nothing_fill_passes_by_their_tokens(
    lengths: list[int], max_tokens: int, shares: bool
) -> None:
    """Two passes that would go into one are a bin too many."""
    rows = [[number] * length for number, length in enumerate(lengths)]
    passes = plan_passes(
        tensors(rows), max_tokens=max_tokens, cost=replace(WHATEVER, shares=shares)
    )
    sizes = [sum(lengths[row] for row in one) for one in passes]
    assert sum(sizes) == sum(lengths)
    assert sum(sorted(sizes)[:2]) > max_tokens or len(sizes) < 2
    assert [lengths[one[0]] for one in passes] == sorted(
        (lengths[one[0]] for one in passes), reverse=True
    )


def test_a_row_goes_where_it_leaves_the_least_room() -> None:
    lengths = [10, 7, 6, 3, 4, 1]
    rows = [[number] * length for number, length in enumerate(lengths)]
    found = plan_passes(tensors(rows), max_tokens=11, cost=COST)
    assert found == [[0, 5], [1, 4], [2, 3]]


@given(st.lists(st.tuples(ROW, ROW), max_size=10), st.integers(1, 40), st.booleans())
def test_a_unit_is_never_cut(
    units: list[tuple[list[int], list[int]]], max_tokens: int, shares: bool
) -> None:
    rows = [row for unit in units for row in unit]
    passes = plan_passes(
        tensors(rows),
        max_tokens=max_tokens,
        cost=replace(WHATEVER, shares=shares),
        rows_per_unit=2,
    )
    found = [row for one in passes for row in one]
    assert sorted(found) == list(range(len(rows)))
    for one in passes:
        assert all(row % 2 == 0 for row in one[::2])
        assert [row + 1 for row in one[::2]] == one[1::2]


def test_rows_share_wherever_they_stand() -> None:
    first, second, third = [5] * 20, [7, 8, 9], [10] * 11
    rows = of_prompts((first, 5), (second, 9), (first, 4), (third, 2), (first, 6))
    # Trees of 35, 12 and 13 tokens.
    assert plan_passes(tensors(rows), max_tokens=64, cost=COST) == [[0, 2, 4, 3, 1]]
    assert plan_passes(tensors(rows), max_tokens=36, cost=COST) == [[0, 2, 4], [3, 1]]


def test_a_tree_that_does_not_fit_is_cut_where_least_is_shared() -> None:
    # All begin with one token; the second and the third row share ten more.
    long = [1, *[2] * 10]
    rows = of_prompts(([1, 0], 18), (long, 5), (long, 5))
    assert [len(prefixes(rows[:end])) for end in (1, 2, 3)] == [20, 35, 40]
    assert plan_passes(tensors(rows), max_tokens=38, cost=WHATEVER) == [[1, 2], [0]]
    # A pass of the first row alone would not be half full.
    rows = [rows[0][:12], *rows[1:]]
    assert plan_passes(tensors(rows), max_tokens=30, cost=WHATEVER) == [[0, 1], [2]]


def test_a_prompt_whose_completions_exceed_the_budget_stands_in_several_passes() -> None:
    rows = of_prompts(*[([5] * 20, 10)] * 7)
    found = plan_passes(tensors(rows), max_tokens=50, cost=COST)
    assert found == [[0, 1, 2], [3, 4, 5], [6]]


def test_branches_with_many_keys_end_a_pass() -> None:
    """One token each behind a prompt of 100, whose keys are laid out for each of them."""
    rows = [[*[1] * 100, 2 + number] for number in range(40)]
    found = plan_passes(tensors(rows), max_tokens=200, cost=WHATEVER)
    most = MOST_KEYS_PER_TOKEN * 200 // 101
    assert [len(one) for one in found] == [most, most, 40 - 2 * most]


def test_a_budget_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens is 0: give at least 1"):
        plan_passes(tensors([[1]]), max_tokens=0, cost=COST)


@pytest.mark.parametrize("pairs_per_token", [1e6, 1.0])
def test_sharing_that_costs_more_is_left_alone(pairs_per_token: float) -> None:
    # Half of the attention over a common token is computed by a kernel that skips the other half.
    rows = of_prompts(([5], 4000), ([5], 4000))
    cost = replace(COST, pairs_per_token=pairs_per_token)
    assert not cost.keeps(1, 4001)
    packed = pack_rows(experience(rows, [1, 1]), "cpu", cost)
    assert packed.tokens_1S.shape == (1, 2 * 4001)


def test_a_row_begins_anew_where_too_little_is_shared() -> None:
    """Else a template of a few tokens would make every long prompt a branch."""
    prompt, other = [1, 2, *[3] * 100], [1, 2, *[4] * 100]
    rows = of_prompts((prompt, 3), (prompt, 4), (other, 3), (other, 4))
    batch = experience(rows, [len(prompt)] * 4)
    cost = replace(COST, pairs_per_token=100.0)
    assert cost.keeps(102, 106)
    assert not cost.keeps(2, 106)
    assert pack_rows(batch, "cpu", cost).tokens_1S.shape == (1, 2 * (102 + 3 + 4))
    assert pack_rows(batch, "cpu", WHATEVER).tokens_1S.shape == (1, 2 * (102 + 3 + 4) - 2)


def test_the_cost_of_a_llama_layer_counts_its_products() -> None:
    # SmolLM2-135M: 3.54 M weights a layer, 9 heads of 64; 1024 pairs for a token at three times
    # the time for an operation.
    cost = PassCost.of_sizes(
        layer_weights=2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536,
        attention_width=576,
        kind="cpu",
    )
    assert cost.pairs_per_token == pytest.approx(1024)
    assert cost.pairs_per_call == pytest.approx(2**21 / 1152)
    # By itself a row of 300 costs 300 tokens and half of its pairs, 343.9; less a twentieth, 326.8.
    # A branch of n over 300 costs n (1 + 300 / 1024): 252 tokens are below, 253 above.
    assert cost.keeps(300 - 252, 300)
    assert not cost.keeps(300 - 253, 300)
    assert not replace(cost, shares=False).keeps(299, 300)


@given(ROWS)
def test_blocks_waste_less_than_a_call_takes(rows: list[list[int]]) -> None:
    tree = GrowingTree(RowOrder.of(tensors(rows)), list(map(len, rows)), WHATEVER.keeps)
    tree.add(range(len(rows)))
    branches = tree.branches()
    blocks = replace(COST, pairs_per_call=9.0).blocks(branches)
    found = [branch for block in blocks for branch in block]
    assert len(found) == len(branches)
    assert set(found) == set(branches)
    for block in blocks:
        assert len({branch.shared > 0 for branch in block}) == 1
        pairs = max(one.num_tokens for one in block) * max(one.length for one in block)
        real = sum(branch.num_tokens * branch.length for branch in block)
        assert len(block) * pairs - real <= 9


# --- how they are laid out ----------------------------------------------------------------


def experience(rows: list[list[int]], prompt_lengths: list[int]) -> Experience:
    return Experience(
        {
            "tokens": Column.ragged(ColumnKind.SEQUENCE, rows, torch.int32),
            "prompt_lengths": Column(ColumnKind.ROW, torch.tensor(prompt_lengths)),
        }
    )


@given(ROWS, st.data(), st.sampled_from([0.0, 9.0, 1e9]))
def test_each_token_stands_once_and_attends_to_its_prefix(
    rows: list[list[int]], data: st.DataObject, pairs_per_call: float
) -> None:
    prompts = [data.draw(st.integers(1, len(row))) for row in rows]
    batch = experience(rows, prompts)
    packed = pack_rows(batch, "cpu", replace(WHATEVER, pairs_per_call=pairs_per_call))
    layout = packed.layout
    seen = attended(layout)
    tokens_S = packed.tokens_1S[0].tolist()
    paths = [tuple(tokens_S[key] for key in seen[place]) for place in range(len(tokens_S))]
    # Every prefix once, and each sees exactly itself.
    assert len(paths) == len(set(paths))
    assert set(paths) == prefixes(rows)
    assert layout.positions_1S.tolist() == [[len(path) - 1 for path in paths]]
    assert layout.longest == max(map(len, rows))
    # FlexAttention is told the same by two numbers a token.
    branch, last = layout.branch_S.tolist(), layout.last_branch_S.tolist()
    for query, keys in enumerate(seen):
        assert {
            key
            for key, path in enumerate(paths)
            if branch[key] <= branch[query] <= last[key] and len(path) <= len(paths[query])
        } == set(keys)
    # Each distinct completion token once, with the state before it, and all rows' in their order.
    expected = [
        (tuple(row[:end]), row[end])
        for row, prompt in zip(rows, prompts, strict=True)
        for end in range(prompt, len(row))
    ]
    states = [paths[place] for place in layout.states_U.index_M.tolist()]
    found = list(zip(states, packed.targets_U.tolist(), strict=True))
    assert len(set(found)) == len(found)
    assert [found[number] for number in layout.rows_N.index_M.tolist()] == expected
    assert [paths[place] for place in packed.last_B.tolist()] == list(map(tuple, rows))
    assert packed.lengths_B.tolist() == list(map(len, rows))
    numbers = torch.arange(len(found), dtype=torch.float32)
    targets_N = packed.targets_U[packed.of_rows(numbers).long()].tolist()
    assert targets_N == [token for _, token in expected]


@given(ROWS, st.data(), st.sampled_from([0.0, 9.0, 1e9]))
def test_rows_apart_are_a_rectangle_for_models_that_want_one(
    rows: list[list[int]], data: st.DataObject, pairs_per_call: float
) -> None:
    prompts = [data.draw(st.integers(1, len(row))) for row in rows]
    packed = pack_rows(
        experience(rows, prompts), "cpu", replace(APART, pairs_per_call=pairs_per_call)
    )
    assert packed.tokens_1S.shape[1] == sum(map(len, rows))
    rectangle = packed.rectangle()
    longest = max(map(len, rows))
    padded = [[*row, *[PAD_TOKEN] * (longest - len(row))] for row in rows]
    assert rectangle.tokens_BT.tolist() == padded
    assert rectangle.is_token_BT.sum(1).tolist() == list(map(len, rows))
    back_1S1 = rectangle.packed(rectangle.tokens_BT[..., None])
    assert torch.equal(back_1S1[..., 0], packed.tokens_1S)


def test_rows_that_share_are_no_rectangle() -> None:
    packed = pack_rows(experience([[5, 6], [5, 6, 7]], [1, 1]), "cpu", WHATEVER)
    with pytest.raises(ValueError, match="pack them apart"):
        packed.rectangle()


def test_rows_without_completions_have_their_last_places() -> None:
    packed = pack_rows(whole_rows([[5, 6, 7], [8]]), "cpu")
    assert packed.targets_U.shape == (0,)
    assert packed.tokens_1S[0][packed.last_B].tolist() == [7, 8]


def attended(layout: TreeLayout) -> list[list[int]]:
    """By packed token, the places that it attends to."""
    seen: list[list[int]] = []
    for block in layout.blocks:
        own = torch.arange(len(seen), len(seen) + block.num_tokens)
        shape = (block.num_branches, -1)
        assert (block.queries is None) == (block.back is None)
        queries = (own if block.queries is None else own[block.queries.index_M]).view(shape)
        if block.keys is None:
            keys, mask = queries, torch.ones(queries.shape[1], queries.shape[1]).tril().bool()
            mask = mask.expand(len(keys), -1, -1)
        else:
            assert block.may_attend is not None
            keys = block.keys.index_M.view(shape)
            mask = block.may_attend.expand(len(keys), 1, -1, -1)[:, 0]
        # No query, padding too, is without a key.
        assert bool(mask.any(-1).all())
        places = torch.arange(len(own)) if block.back is None else block.back.index_M
        for query, place in zip(own.tolist(), places.tolist(), strict=True):
            row, at = divmod(place, queries.shape[1])
            assert int(queries[row, at]) == query
            seen.append(keys[row][mask[row, at]].tolist())
    return seen


def test_a_gather_adds_the_gradients_of_copies_and_none_of_padding() -> None:
    source = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([2, 0, -1, 2, 3, 2, -1])
    gather = RowGather.of(index, 4)
    assert torch.equal(gather(source)[index >= 0], source[index[index >= 0]])
    weights = torch.randn(7, 3, dtype=torch.float64)
    (gather(source) * weights).sum().backward()
    expected = torch.zeros_like(source).index_add_(0, index[index >= 0], weights[index >= 0])
    torch.testing.assert_close(source.grad, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("prompt_length", [0, 4, -1])
def test_a_prompt_without_tokens_or_longer_than_its_row_is_refused(prompt_length: int) -> None:
    with pytest.raises(ValueError, match=rf"prompt_lengths of row 1 is {prompt_length} in a row"):
        pack_rows(experience([[5, 6], [7, 8, 9]], [1, prompt_length]), "cpu", COST)
