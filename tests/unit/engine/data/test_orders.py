"""Orders are pure functions of the position: the position is the whole cursor."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolemesh.engine.data.orders.by_seed import Epochs, Mixture, shuffled
from rolemesh.engine.seeds import derive_seed

weights_lists = st.lists(st.floats(min_value=1e-3, max_value=1e3), min_size=1, max_size=5)
seeds = st.integers(min_value=0, max_value=2**53 - 1)


def mixture(weights: list[float], sizes: list[int], seed: int) -> Mixture:
    orders = [Epochs(size, shuffled(size, f"{seed}/{at}")) for at, size in enumerate(sizes)]
    return Mixture(orders, sizes, weights, seed)


def merged_draws(weights: list[float], count: int, seed: int) -> list[tuple[int, int]]:
    """The oracle: every draw up to a late time, from position 0, sorted by time."""
    total = sum(map(Fraction, weights))
    timed = []
    for source, weight in enumerate(weights):
        for draw in range(count + 1):
            jitter = Fraction(derive_seed(seed, "mixture", source, draw), 2**63)
            timed.append(((draw + jitter) * total / Fraction(weight), source, draw))
    return [(source, draw) for _, source, draw in sorted(timed)[:count]]


@settings(max_examples=60, deadline=None)
@given(weights=weights_lists, seed=seeds, start=st.integers(0, 60), count=st.integers(1, 30))
def test_what_stands_at_a_position_is_what_a_walk_from_the_start_finds(weights, seed, start, count):
    walked = merged_draws(weights, start + count, seed)
    drawn = mixture(weights, [1] * len(weights), seed).draws(start, count)
    assert drawn == walked[start:]


@settings(max_examples=60, deadline=None)
@given(
    weights=weights_lists,
    seed=seeds,
    start=st.integers(0, 10**12),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=6),
)
def test_a_slice_is_the_same_however_it_is_cut(weights, seed, start, cuts):
    sizes = [3 + at for at in range(len(weights))]
    whole = mixture(weights, sizes, seed).rows(start, sum(cuts))
    pieces, at = [], start
    for cut in cuts:
        # A new object each time: as after a restart.
        pieces += mixture(weights, sizes, seed).rows(at, cut)
        at += cut
    assert pieces == whole


@settings(max_examples=60, deadline=None)
@given(weights=weights_lists, seed=seeds, start=st.integers(0, 10**9))
def test_every_stretch_holds_each_source_in_its_share(weights, seed, start):
    count = 200
    drawn = Counter(
        source for source, _ in mixture(weights, [1] * len(weights), seed).draws(start, count)
    )
    for source, weight in enumerate(weights):
        expected = count * weight / sum(weights)
        # Each end of the stretch is off by one draw of the source and by one of every other.
        assert abs(drawn[source] - expected) <= 2 + 2 * len(weights) * weight / sum(weights)


@settings(max_examples=40, deadline=None)
@given(weights=weights_lists, seed=seeds)
def test_a_source_is_drawn_from_without_a_gap_and_each_epoch_has_each_row_once(weights, seed):
    sizes = [4] * len(weights)
    mixed = mixture(weights, sizes, seed)
    by_source: dict[int, list[int]] = {}
    for source, draw in mixed.draws(0, 120):
        by_source.setdefault(source, []).append(draw)
    assert all(draws == list(range(len(draws))) for draws in by_source.values())
    seen: dict[int, list[int]] = {}
    for row in mixed.rows(0, 120):
        seen.setdefault(row // 4, []).append(row % 4)
    for rows in seen.values():
        for epoch in range(len(rows) // 4):
            assert sorted(rows[4 * epoch : 4 * epoch + 4]) == [0, 1, 2, 3]


def test_sources_of_equal_weight_do_not_simply_take_turns():
    sources = [source for source, _ in mixture([1.0, 1.0], [5, 5], 7).draws(0, 100)]
    # Strict turns by luck: a jitter would have to fall right 50 times, at most 2 ** -50.
    assert sources not in ([0, 1] * 50, [1, 0] * 50)


def test_another_seed_mixes_otherwise():
    assert mixture([2, 1], [9, 9], 1).rows(0, 40) != mixture([2, 1], [9, 9], 2).rows(0, 40)


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 12), epoch=st.integers(0, 10**6), seed=seeds)
def test_an_epoch_holds_every_row_once(size, epoch, seed):
    order = Epochs(size, shuffled(size, str(seed)))
    assert sorted(order.rows(epoch * size, size)) == list(range(size))


def test_a_slice_over_the_border_of_epochs_works_each_out_once():
    asked: list[int] = []

    def order(epoch: int) -> list[int]:
        asked.append(epoch)
        return [0, 1, 2]

    epochs = Epochs(3, order)
    assert epochs.rows(1, 4) == [1, 2, 0, 1]
    assert asked == [0, 1]


@pytest.mark.parametrize("weights", [[1e-9, 1.0], [1.0, 1e-9]])
def test_a_source_of_hardly_any_weight_does_not_disturb_the_other(weights):
    rare = weights.index(1e-9)
    drawn = mixture(weights, [5, 5], 0).draws(1000, 500)
    # Its one draw falls among the first 1,500 positions with a chance of about 2e-6.
    assert all(source != rare for source, _ in drawn)
