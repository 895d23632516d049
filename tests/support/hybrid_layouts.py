"""Layouts of training and generation of up to 16 ranks, and the cells that each rank holds."""

from __future__ import annotations

from collections.abc import Iterator

from rolemesh.engine.layout.ranks import (
    GenerateLayout,
    Grouping,
    Groups,
    HybridLayout,
    RankOrder,
    TrainLayout,
)

MAX_RANKS = 16
ORDERS: tuple[RankOrder, ...] = ("tp-pp-dp", "tp-dp-pp")


def hybrid(
    pp: int,
    tp: int,
    dp: int,
    generate_pp: int,
    generate_tp: int,
    order: RankOrder = "tp-pp-dp",
    grouping: Grouping = "interval",
) -> HybridLayout:
    return HybridLayout(
        TrainLayout(pp=pp, tp=tp, dp=dp, order=order),
        GenerateLayout(pp=generate_pp, tp=generate_tp, grouping=grouping),
    )


def sizes() -> Iterator[tuple[int, int, int, int, int]]:
    """All divisible (p, t, d, p_g, t_g) of up to MAX_RANKS ranks."""
    for pp in range(1, MAX_RANKS + 1):
        for tp in range(1, MAX_RANKS // pp + 1):
            for dp in range(1, MAX_RANKS // (pp * tp) + 1):
                for generate_pp in range(1, pp + 1):
                    for generate_tp in range(1, tp + 1):
                        if pp % generate_pp == 0 and tp % generate_tp == 0:
                            yield pp, tp, dp, generate_pp, generate_tp


def all_layouts(*groupings: Grouping) -> Iterator[HybridLayout]:
    for size in sizes():
        for order in ORDERS:
            for grouping in groupings:
                yield hybrid(*size, order, grouping)


def train_shard(layout: HybridLayout, rank: int) -> set[tuple[int, int]]:
    """The (stage, slice) cells that a rank trains."""
    at = layout.train.coordinates(rank)
    return {(at.pp, at.tp)}


def generate_shard(layout: HybridLayout, rank: int) -> set[tuple[int, int]]:
    """The (training stage, training slice) cells that a rank generates with."""
    at = layout.coordinates(rank)
    a, b = layout.slice_ratio, layout.stage_ratio
    return {
        (stage, part)
        for stage in range(at.pp * b, (at.pp + 1) * b)
        for part in range(at.tp * a, (at.tp + 1) * a)
    }


def alone(num_ranks: int) -> Groups:
    return tuple((rank,) for rank in range(num_ranks))
