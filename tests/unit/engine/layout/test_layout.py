"""Rank arithmetic against constructions: groups from strides and from axes of an array.

The code makes them from coordinates.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.hybrid_layouts import (
    ORDERS,
    all_layouts,
    alone,
    generate_shard,
    hybrid,
    sizes,
    train_shard,
)

from rolemesh.engine.layout.ranks import (
    GenerateLayout,
    Groups,
    HybridLayout,
    LayoutError,
    TrainLayout,
)

# --- every layout of up to 16 ranks -------------------------------------------------------


def by_strides(pp: int, tp: int, dp: int, generate_pp: int, generate_tp: int) -> dict[str, Groups]:
    """Groups in order tp-pp-dp, from first ranks and strides as the paper describes them."""
    a, b, size = tp // generate_tp, pp // generate_pp, pp * tp
    starts = range(0, size * dp, size)
    groups = {
        "tp": [
            range(start + stage * tp, start + stage * tp + tp)
            for start in starts
            for stage in range(pp)
        ],
        "pp": [range(start + part, start + size, tp) for start in starts for part in range(tp)],
        "dp": [range(place, size * dp, size) for place in range(size)],
        "model": [range(start, start + size) for start in starts],
        "generate_tp": [
            range(start + stage * tp + first, start + stage * tp + tp, a)
            for start in starts
            for stage in range(pp)
            for first in range(a)
        ],
        "generate_pp": [
            range(start + stage * tp + part, start + size, b * tp)
            for start in starts
            for stage in range(b)
            for part in range(tp)
        ],
        "micro_dp": [
            [
                start + (stage + repeat) * tp + part + neighbour
                for repeat in range(b)
                for neighbour in range(a)
            ]
            for start in starts
            for stage in range(0, pp, b)
            for part in range(0, tp, a)
        ],
    }
    return {name: tuple(tuple(group) for group in made) for name, made in groups.items()}


def by_axes(layout: HybridLayout) -> dict[str, Groups]:
    """Groups as lines through an array of ranks, one axis for each coordinate."""
    train, generate = layout.train, layout.generate
    ranks = np.arange(layout.world_size)
    if train.order == "tp-pp-dp":
        train_DPT = ranks.reshape(train.dp, train.pp, train.tp)
    else:
        train_DPT = ranks.reshape(train.pp, train.dp, train.tp).transpose(1, 0, 2)
    if generate.grouping == "interval":
        # Axes: replica, generation stage, stage in it, generation slice, slice in it.
        fine = train_DPT.reshape(
            train.dp, generate.pp, layout.stage_ratio, generate.tp, layout.slice_ratio
        )
        generate_DPTM = fine.transpose(0, 1, 3, 2, 4).reshape(
            train.dp, generate.pp, generate.tp, layout.micro_dp
        )
    else:
        flat = train_DPT.reshape(train.dp, layout.micro_dp, generate.pp, generate.tp)
        generate_DPTM = flat.transpose(0, 2, 3, 1)

    def lines(array: np.ndarray, *axes: int) -> Groups:
        last = range(-len(axes), 0)
        moved = np.moveaxis(array, axes, tuple(last))
        size = int(np.prod([array.shape[axis] for axis in axes]))
        return tuple(tuple(map(int, sorted(line))) for line in moved.reshape(-1, size))

    return {
        "tp": lines(train_DPT, 2),
        "pp": lines(train_DPT, 1),
        "dp": lines(train_DPT, 0),
        "stage": lines(train_DPT, 0, 2),
        "model": lines(train_DPT, 1, 2),
        "generate_tp": lines(generate_DPTM, 2),
        "generate_pp": lines(generate_DPTM, 1),
        "micro_dp": lines(generate_DPTM, 3),
        "replicas": lines(generate_DPTM, 1, 2),
    }


def groups_of(layout: HybridLayout) -> dict[str, Groups]:
    return {
        "tp": layout.train.tp_groups(),
        "pp": layout.train.pp_groups(),
        "dp": layout.train.dp_groups(),
        "stage": layout.train.stage_groups(),
        "model": layout.train.model_groups(),
        "generate_tp": layout.tp_groups(),
        "generate_pp": layout.pp_groups(),
        "micro_dp": layout.micro_dp_groups(),
    }


def test_groups_are_the_papers_strides() -> None:
    for size in sizes():
        found, expected = groups_of(hybrid(*size)), by_strides(*size)
        for name in expected:
            assert sorted(found[name]) == sorted(expected[name]), (size, name)


def test_groups_are_lines_through_the_array_of_ranks() -> None:
    for layout in all_layouts("interval", "consecutive"):
        found, expected = groups_of(layout), by_axes(layout)
        for name in found:
            assert sorted(found[name]) == sorted(expected[name]), (layout, name)
        # Replicas are ordered by chunk and, inside, by (stage, slice).
        in_rank_order = [tuple(sorted(replica)) for replica in layout.replicas()]
        assert sorted(in_rank_order) == sorted(expected["replicas"]), layout


def test_groups_partition_the_ranks_in_the_order_of_their_first() -> None:
    for layout in all_layouts("interval", "consecutive"):
        for name, groups in groups_of(layout).items():
            members = [rank for group in groups for rank in group]
            assert sorted(members) == list(range(layout.world_size)), (layout, name)
            firsts = [group[0] for group in groups]
            assert firsts == sorted(firsts), (layout, name)
            assert len({len(group) for group in groups}) == 1, (layout, name)


def test_a_place_in_a_group_is_the_coordinate_along_it() -> None:
    for layout in all_layouts("interval", "consecutive"):
        train_at = [layout.train.coordinates(rank) for rank in range(layout.world_size)]
        generate_at = [layout.coordinates(rank) for rank in range(layout.world_size)]
        coordinates = {
            "tp": [at.tp for at in train_at],
            "pp": [at.pp for at in train_at],
            "dp": [at.dp for at in train_at],
            "generate_tp": [at.tp for at in generate_at],
            "generate_pp": [at.pp for at in generate_at],
        }
        groups = groups_of(layout)
        for name, along in coordinates.items():
            for group in groups[name]:
                assert [along[rank] for rank in group] == list(range(len(group))), (layout, name)
        # These are in rank order, which numbers stages outside of slices.
        for group in groups["micro_dp"]:
            assert sorted(generate_at[rank].micro for rank in group) == list(range(len(group)))


def test_a_rank_and_its_coordinates_name_each_other() -> None:
    for layout in all_layouts("interval"):
        train = layout.train
        seen = set()
        for rank in range(train.world_size):
            at = train.coordinates(rank)
            assert train.rank(pp=at.pp, tp=at.tp, dp=at.dp) == rank
            seen.add(at)
        assert len(seen) == train.world_size


def test_a_training_shard_lies_in_the_generation_shard_of_its_rank() -> None:
    for layout in all_layouts("interval"):
        for rank in range(layout.world_size):
            assert train_shard(layout, rank) <= generate_shard(layout, rank), (layout, rank)


def test_micro_dp_groups_hold_exactly_what_each_member_needs() -> None:
    for layout in all_layouts("interval"):
        for group in layout.micro_dp_groups():
            held = [cell for rank in group for cell in train_shard(layout, rank)]
            assert len(held) == len(set(held)), (layout, group)
            for rank in group:
                assert set(held) == generate_shard(layout, rank), (layout, rank)


def test_a_replica_holds_the_whole_model_once() -> None:
    for layout in all_layouts("interval", "consecutive"):
        cells = {(pp, tp) for pp in range(layout.train.pp) for tp in range(layout.train.tp)}
        for replica in layout.replicas():
            held = [cell for rank in replica for cell in generate_shard(layout, rank)]
            assert len(held) == len(cells), (layout, replica)
            assert set(held) == cells, (layout, replica)


def test_torchs_numbers_put_a_replica_next_to_each_other() -> None:
    for layout in all_layouts("interval", "consecutive"):
        numbers = layout.torch_ranks()
        assert sorted(numbers) == list(range(layout.world_size)), layout
        assert numbers[0] == 0, layout
        size = layout.generate.pp * layout.generate.tp
        for chunk, replica in enumerate(layout.replicas()):
            first = chunk * size
            assert [numbers[rank] for rank in replica] == list(range(first, first + size)), layout
            places = [
                (layout.coordinates(rank).pp, layout.coordinates(rank).tp) for rank in replica
            ]
            assert places == sorted(places), layout
            assert {layout.chunk(rank) for rank in replica} == {chunk}, layout


# --- the data axis ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "fsdp", "replicate"),
    [
        pytest.param(TrainLayout(dp=4), alone(4), ((0, 1, 2, 3),), id="replicated"),
        pytest.param(TrainLayout(dp=4, fsdp=4), ((0, 1, 2, 3),), alone(4), id="fsdp"),
        pytest.param(
            TrainLayout(dp=4, fsdp=2), ((0, 1), (2, 3)), ((0, 2), (1, 3)), id="hybrid-fsdp"
        ),
        pytest.param(
            TrainLayout(tp=2, dp=4, fsdp=2),
            ((0, 2), (1, 3), (4, 6), (5, 7)),
            ((0, 4), (1, 5), (2, 6), (3, 7)),
            id="hybrid-fsdp-of-slices",
        ),
        pytest.param(
            TrainLayout(pp=2, dp=4, fsdp=2, order="tp-dp-pp"),
            ((0, 1), (2, 3), (4, 5), (6, 7)),
            ((0, 2), (1, 3), (4, 6), (5, 7)),
            id="hybrid-fsdp-of-stages-outermost",
        ),
    ],
)
def test_the_data_axis_is_cut_within_and_replicated_across(
    train: TrainLayout, fsdp: Groups, replicate: Groups
) -> None:
    assert train.fsdp_groups() == fsdp
    assert train.replicate_groups() == replicate


def test_fsdp_and_replicate_groups_cross_in_each_data_group() -> None:
    for size in sizes():
        for order in ORDERS:
            pp, tp, dp = size[:3]
            for fsdp in range(1, dp + 1):
                if dp % fsdp:
                    continue
                train = TrainLayout(pp=pp, tp=tp, dp=dp, fsdp=fsdp, order=order)
                cut = {rank: group for group in train.fsdp_groups() for rank in group}
                copies = {rank: group for group in train.replicate_groups() for rank in group}
                for data in train.dp_groups():
                    for rank in data:
                        assert len(cut[rank]) == fsdp
                        assert len(copies[rank]) == dp // fsdp
                        assert set(cut[rank]) & set(copies[rank]) == {rank}
                        crossed = {other for near in cut[rank] for other in copies[near]}
                        assert crossed == set(data)


# --- what does not fit --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pp", "tp", "dp", "fsdp"])
@pytest.mark.parametrize("size", [0, -2])
def test_a_size_below_one_is_refused(name: str, size: int) -> None:
    with pytest.raises(LayoutError, match=rf"^{name} is {size}: give at least 1$"):
        TrainLayout(**{name: size})


@pytest.mark.parametrize("name", ["pp", "tp"])
def test_a_generation_size_below_one_is_refused(name: str) -> None:
    with pytest.raises(LayoutError, match=rf"^generate\.{name} is 0: give at least 1$"):
        GenerateLayout(**{name: 0})


def test_an_fsdp_size_that_does_not_divide_is_refused_with_those_that_do() -> None:
    with pytest.raises(
        LayoutError, match=r"fsdp 4 does not divide dp 6: give one of \[1, 2, 3, 6\]"
    ):
        TrainLayout(dp=6, fsdp=4)


@pytest.mark.parametrize(
    ("train", "generate", "message"),
    [
        pytest.param(
            TrainLayout(tp=4),
            GenerateLayout(tp=3),
            r"generate\.tp 3 does not divide train\.tp 4: give one of \[1, 2, 4\]",
            id="slices",
        ),
        pytest.param(
            TrainLayout(pp=2),
            GenerateLayout(pp=4),
            r"generate\.pp 4 does not divide train\.pp 2: give one of \[1, 2\]",
            id="more-stages-than-trained",
        ),
    ],
)
def test_a_generation_layout_that_does_not_divide_is_refused_with_those_that_do(
    train: TrainLayout, generate: GenerateLayout, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        HybridLayout(train, generate)


def test_unknown_orders_and_groupings_are_refused_with_the_known_ones() -> None:
    with pytest.raises(LayoutError, match="order is 'dp-tp': give 'tp-pp-dp' or 'tp-dp-pp'"):
        TrainLayout(order="dp-tp")  # type: ignore[arg-type]
    with pytest.raises(
        LayoutError, match=r"generate\.grouping is 'odd': give 'interval' or 'consecutive'"
    ):
        GenerateLayout(grouping="odd")  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_that_is_not_there_is_refused(rank: int) -> None:
    layout = hybrid(1, 4, 2, 1, 2)
    for ask in (layout.coordinates, layout.chunk, layout.train.coordinates):
        with pytest.raises(LayoutError, match=f"rank is {rank}: give 0 to 7"):
            ask(rank)


def test_coordinates_at_which_nobody_stands_are_refused() -> None:
    train = TrainLayout(pp=2, tp=2, dp=2)
    with pytest.raises(LayoutError, match="pp is 2: give 0 to 1"):
        train.rank(pp=2, tp=0, dp=0)
    with pytest.raises(LayoutError, match="tp is -1: give 0 to 1"):
        train.rank(pp=0, tp=-1, dp=0)
