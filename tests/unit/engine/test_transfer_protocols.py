"""The paper's six transfer protocols (arXiv 2409.19256, Table 3), and a user's own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolemesh.engine import transfer_protocols
from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, LayoutError, TrainLayout
from rolemesh.engine.transfer_protocols import (
    Rows,
    TransferProtocol,
    protocol,
    register_protocol,
)

ROUND_TRIPS = ("3D_PROTO", "3D_ALL_MICRO_DP")
SIX = ("ONE_TO_ALL", "3D_PROTO", "3D_ALL_MICRO_DP", "3D_PP_ONLY", "DP_PROTO", "ALL_TO_ALL")
EIGHT = [3, 1, 4, 1, 5, 9, 2, 6]


@st.composite
def layouts(draw: st.DrawFn) -> HybridLayout:
    generate_pp, b, generate_tp, a, parts, cp = (draw(st.integers(1, 3)) for _ in range(6))
    return HybridLayout(
        TrainLayout(
            pp=generate_pp * b,
            tp=generate_tp * a,
            dp=parts * cp,
            cp=cp,
            order=draw(st.sampled_from(["tp-pp-dp", "tp-dp-pp"])),
        ),
        GenerateLayout(
            pp=generate_pp,
            tp=generate_tp,
            grouping=draw(st.sampled_from(["interval", "consecutive"])),
        ),
    )


LENGTHS = st.lists(st.integers(1, 50), max_size=24)


def collected(
    chosen: TransferProtocol, layout: HybridLayout, lengths: Sequence[int]
) -> list[tuple[int, Rows]]:
    """Ranks whose output counts, in order, each with its rows."""
    rows = chosen.distribute(layout, lengths)
    return [(rank, rows[rank]) for rank in chosen.collect(layout)]


def rows_back(chosen: TransferProtocol, layout: HybridLayout, lengths: Sequence[int]) -> list[int]:
    """Rows of all outputs that count, ascending."""
    return sorted(row for _, rows in collected(chosen, layout, lengths) for row in rows)


@pytest.mark.parametrize("name", ROUND_TRIPS)
@given(layout=layouts(), lengths=LENGTHS)
def test_each_row_that_is_distributed_comes_back_once(
    name: str, layout: HybridLayout, lengths: list[int]
) -> None:
    assert rows_back(protocol(name), layout, lengths) == list(range(len(lengths)))


@given(dp=st.integers(1, 6), lengths=LENGTHS)
def test_pure_data_parallelism_brings_each_row_back_once(dp: int, lengths: list[int]) -> None:
    layout = HybridLayout(TrainLayout(dp=dp))
    assert rows_back(protocol("DP_PROTO"), layout, lengths) == list(range(len(lengths)))
    assert protocol("DP_PROTO").collect(layout) == tuple(range(dp))


@given(layout=layouts())
def test_one_input_for_each_rank_comes_back_from_each(layout: HybridLayout) -> None:
    ranks = range(layout.world_size)
    found = collected(protocol("ALL_TO_ALL"), layout, [1] * layout.world_size)
    assert found == [(rank, (rank,)) for rank in ranks]


@given(layout=layouts(), lengths=LENGTHS)
def test_one_to_all_gives_a_copy_from_every_rank(layout: HybridLayout, lengths: list[int]) -> None:
    rows = tuple(range(len(lengths)))
    found = collected(protocol("ONE_TO_ALL"), layout, lengths)
    assert found == [(rank, rows) for rank in range(layout.world_size)]


@given(layout=layouts(), lengths=LENGTHS)
def test_3d_proto_gives_a_model_group_the_same_rows_and_replicas_others(
    layout: HybridLayout, lengths: list[int]
) -> None:
    rows = protocol("3D_PROTO").distribute(layout, lengths)
    parts = []
    for group in layout.train.model_groups():
        assert len({rows[rank] for rank in group}) == 1
        parts.append(rows[group[0]])
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    tokens = [sum(lengths[row] for row in part) for part in parts]
    assert max(tokens) - min(tokens) <= max(lengths, default=0)


@given(layout=layouts())
def test_3d_proto_collects_the_last_stage_and_first_slice_of_each_replica(
    layout: HybridLayout,
) -> None:
    train = layout.train
    at = [train.coordinates(rank) for rank in protocol("3D_PROTO").collect(layout)]
    assert [(where.pp, where.tp, where.dp) for where in at] == [
        (train.pp - 1, 0, dp) for dp in range(0, train.dp, train.cp)
    ]


@given(layout=layouts(), lengths=LENGTHS)
def test_prompts_are_cut_into_contiguous_nearly_equal_chunks(
    layout: HybridLayout, lengths: list[int]
) -> None:
    chosen = protocol("3D_ALL_MICRO_DP")
    rows = chosen.distribute(layout, lengths)
    counted = collected(chosen, layout, lengths)
    # In chunk order the chunks are the batch, the first ones one row longer.
    assert [row for _, chunk in counted for row in chunk] == list(range(len(lengths)))
    sizes = [len(chunk) for _, chunk in counted]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    for replica, (first, chunk) in zip(layout.replicas(), counted, strict=True):
        assert (layout.coordinates(first).pp, layout.coordinates(first).tp) == (0, 0)
        assert {rows[rank] for rank in replica} == {chunk}


def test_figure_7_gives_each_rank_its_prompt() -> None:
    layout = HybridLayout(TrainLayout(tp=2, dp=2), GenerateLayout(tp=1))
    generation = protocol("3D_ALL_MICRO_DP")
    assert generation.distribute(layout, [1] * 4) == ((0,), (1,), (2,), (3,))
    # After the micro-data-parallel all-gather: ranks 1 and 2 hold P1 and P2, 3 and 4 the others.
    assert protocol("3D_PROTO").distribute(layout, [1] * 4) == ((0, 1), (0, 1), (2, 3), (2, 3))


def test_figure_8_chunks_repeat_at_the_generation_slices() -> None:
    layout = HybridLayout(TrainLayout(tp=4, dp=2), GenerateLayout(tp=2))
    chosen = protocol("3D_ALL_MICRO_DP")
    rows = chosen.distribute(layout, EIGHT)
    assert rows == ((0, 1), (2, 3), (0, 1), (2, 3), (4, 5), (6, 7), (4, 5), (6, 7))
    assert chosen.collect(layout) == (0, 1, 4, 5)


def test_figure_5b_takes_six_rows_from_three_replicas_to_two() -> None:
    """(p, t, d) = (1, 2, 3) to (2, 1, 2): each rank has its replica's rows."""
    chosen, lengths = protocol("3D_PROTO"), [7] * 6
    actor = HybridLayout(TrainLayout(pp=1, tp=2, dp=3))
    critic = HybridLayout(TrainLayout(pp=2, tp=1, dp=2))
    produced = chosen.distribute(actor, lengths)
    assert produced == ((0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5))
    assert chosen.collect(actor) == (0, 2, 4)
    wanted = chosen.distribute(critic, lengths)
    assert wanted == ((0, 1, 2), (0, 1, 2), (3, 4, 5), (3, 4, 5))


def test_pp_only_shows_everything_to_all_and_asks_each_stage_once() -> None:
    layout = HybridLayout(TrainLayout(pp=2, tp=2, dp=2))
    chosen = protocol("3D_PP_ONLY")
    assert chosen.distribute(layout, [1, 1]) == ((0, 1),) * 8
    assert chosen.collect(layout) == (0, 2)
    outermost = HybridLayout(TrainLayout(pp=2, tp=2, dp=2, order="tp-dp-pp"))
    assert chosen.collect(outermost) == (0, 4)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        pytest.param("3D_PROTO", ((1,), (0,), (), ()), id="longest-first"),
        pytest.param("3D_ALL_MICRO_DP", ((0,), (1,), (), ()), id="first-chunks"),
        pytest.param("DP_PROTO", ((1,), (0,), (), ()), id="pure"),
    ],
)
def test_fewer_rows_than_ranks_leave_the_last_without(name: str, rows: tuple[Rows, ...]) -> None:
    layout = HybridLayout(TrainLayout(dp=4))
    assert protocol(name).distribute(layout, [3, 5]) == rows
    assert rows_back(protocol(name), layout, [3, 5]) == [0, 1]


def test_ragged_rows_are_balanced_by_their_tokens() -> None:
    layout = HybridLayout(TrainLayout(dp=2))
    first, second = protocol("3D_PROTO").distribute(layout, [100, 1, 1, 1, 1])
    assert (first, second) == ((0,), (1, 2, 3, 4))


def test_pure_data_parallelism_refuses_slices_and_stages() -> None:
    layout = HybridLayout(TrainLayout(tp=2, pp=3, dp=2, cp=2))
    for ask in (
        lambda: protocol("DP_PROTO").distribute(layout, [1]),
        lambda: protocol("DP_PROTO").collect(layout),
    ):
        with pytest.raises(LayoutError, match="but tp is 2, pp 3 and cp 2: use 3D_PROTO"):
            ask()


def test_one_input_each_refuses_another_number_of_rows() -> None:
    with pytest.raises(ValueError, match="the batch has 3 rows: ALL_TO_ALL takes one for each of"):
        protocol("ALL_TO_ALL").distribute(HybridLayout(TrainLayout(tp=2)), [1, 1, 1])


# --- the registry -------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that a test adds are gone after it."""
    monkeypatch.setattr(transfer_protocols, "_protocols", dict(transfer_protocols._protocols))


def first_rank_only(layout: HybridLayout, lengths: Sequence[int]) -> tuple[Rows, ...]:
    return (tuple(range(len(lengths))), *[()] * (layout.world_size - 1))


@pytest.mark.usefixtures("registry")
def test_a_users_pair_is_found_by_its_name() -> None:
    added = register_protocol("FIRST_ONLY", first_rank_only, lambda layout: (0,))
    assert protocol("FIRST_ONLY") is added
    layout = HybridLayout(TrainLayout(dp=3))
    assert collected(added, layout, [2, 2]) == [(0, (0, 1))]


@pytest.mark.usefixtures("registry")
def test_a_name_is_given_once() -> None:
    with pytest.raises(ValueError, match="'3D_PROTO' is registered already: give another name"):
        register_protocol("3D_PROTO", first_rank_only, lambda layout: (0,))


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="transfer protocol is '4D_PROTO': give one of") as caught:
        protocol("4D_PROTO")
    assert all(repr(name) in str(caught.value) for name in SIX)
