"""Groups and volumes of the paper (arXiv 2409.19256, section 5), literally."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import pytest
from support.hybrid_layouts import (
    all_layouts,
    alone,
    generate_shard,
    hybrid,
    train_shard,
)

from rolemesh.engine.layout.ranks import (
    Groups,
)

# --- the paper's cases, literally ---------------------------------------------------------


@dataclass(frozen=True)
class Case:
    sizes: tuple[int, int, int, int, int]
    tp: Groups
    pp: Groups
    dp: Groups
    generate_tp: Groups
    generate_pp: Groups
    micro_dp: Groups
    chunks: tuple[int, ...]
    without_overlap: tuple[int, ...]
    """Ranks whose training shard lies outside of their generation shard by the paper's method A."""


CASES = {
    "figure-7": Case(
        sizes=(1, 2, 2, 1, 1),
        tp=((0, 1), (2, 3)),
        pp=alone(4),
        dp=((0, 2), (1, 3)),
        generate_tp=alone(4),
        generate_pp=alone(4),
        micro_dp=((0, 1), (2, 3)),
        chunks=(0, 1, 2, 3),
        without_overlap=(),
    ),
    "figure-8b": Case(
        sizes=(1, 4, 2, 1, 2),
        tp=((0, 1, 2, 3), (4, 5, 6, 7)),
        pp=alone(8),
        dp=((0, 4), (1, 5), (2, 6), (3, 7)),
        generate_tp=((0, 2), (1, 3), (4, 6), (5, 7)),
        generate_pp=alone(8),
        micro_dp=((0, 1), (2, 3), (4, 5), (6, 7)),
        chunks=(0, 1, 0, 1, 2, 3, 2, 3),
        without_overlap=(1, 2, 5, 6),
    ),
    "2-2-1-to-2-1-2-1": Case(
        sizes=(2, 2, 1, 2, 1),
        tp=((0, 1), (2, 3)),
        pp=((0, 2), (1, 3)),
        dp=alone(4),
        generate_tp=alone(4),
        generate_pp=((0, 2), (1, 3)),
        micro_dp=((0, 1), (2, 3)),
        chunks=(0, 1, 0, 1),
        without_overlap=(1, 2),
    ),
    "2-4-1-to-1-2-4-1": Case(
        sizes=(2, 4, 1, 1, 2),
        tp=((0, 1, 2, 3), (4, 5, 6, 7)),
        pp=((0, 4), (1, 5), (2, 6), (3, 7)),
        dp=alone(8),
        generate_tp=((0, 2), (1, 3), (4, 6), (5, 7)),
        generate_pp=alone(8),
        micro_dp=((0, 1, 4, 5), (2, 3, 6, 7)),
        chunks=(0, 1, 0, 1, 2, 3, 2, 3),
        without_overlap=(1, 2, 5, 6),
    ),
    "4-2-1-to-2-2-2-1": Case(
        sizes=(4, 2, 1, 2, 2),
        tp=((0, 1), (2, 3), (4, 5), (6, 7)),
        pp=((0, 2, 4, 6), (1, 3, 5, 7)),
        dp=alone(8),
        generate_tp=((0, 1), (2, 3), (4, 5), (6, 7)),
        generate_pp=((0, 4), (1, 5), (2, 6), (3, 7)),
        micro_dp=((0, 2), (1, 3), (4, 6), (5, 7)),
        chunks=(0, 0, 1, 1, 0, 0, 1, 1),
        without_overlap=(2, 3, 4, 5),
    ),
}

with_cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@with_cases
def test_training_groups_of_the_paper(case: Case) -> None:
    train = hybrid(*case.sizes).train
    assert train.tp_groups() == case.tp
    assert train.pp_groups() == case.pp
    assert train.dp_groups() == case.dp


@with_cases
def test_generation_groups_of_the_paper(case: Case) -> None:
    layout = hybrid(*case.sizes)
    assert layout.tp_groups() == case.generate_tp
    assert layout.pp_groups() == case.generate_pp
    assert layout.micro_dp_groups() == case.micro_dp
    assert tuple(layout.chunk(rank) for rank in range(layout.world_size)) == case.chunks


@with_cases
def test_method_a_loses_the_overlap_on_the_papers_ranks(case: Case) -> None:
    layout = hybrid(*case.sizes, grouping="consecutive")
    outside = tuple(
        rank
        for rank in range(layout.world_size)
        if not train_shard(layout, rank) <= generate_shard(layout, rank)
    )
    assert outside == case.without_overlap


def test_figure_8a_groups_neighbours() -> None:
    layout = hybrid(1, 4, 2, 1, 2, grouping="consecutive")
    assert layout.tp_groups() == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.train.model_groups() == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_figure_8_replicas_in_torchs_numbers() -> None:
    interval, consecutive = hybrid(1, 4, 2, 1, 2), hybrid(1, 4, 2, 1, 2, grouping="consecutive")
    assert interval.replicas() == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert interval.torch_ranks() == (0, 2, 1, 3, 4, 6, 5, 7)
    assert consecutive.torch_ranks() == tuple(range(8))


# --- Table 2 ------------------------------------------------------------------------------


def test_cost_of_the_transition_is_that_of_table_2() -> None:
    """In exact fractions of the model: own + received = peak, and nothing is held twice."""
    for layout in all_layouts("interval"):
        pp, tp = layout.train.pp, layout.train.tp
        generate_size = layout.generate.pp * layout.generate.tp
        cell = Fraction(1, pp * tp)
        for rank in range(layout.world_size):
            own, needed = train_shard(layout, rank), generate_shard(layout, rank)
            received = len(needed - own) * cell
            assert received == Fraction(pp * tp - generate_size, generate_size * tp * pp)
            assert received == Fraction(layout.micro_dp - 1, pp * tp)
            peak = len(needed | own) * cell
            assert peak == Fraction(1, generate_size)
            assert len(own) * cell + received == peak


@pytest.mark.parametrize(
    ("tp", "pp", "generate_tp", "micro_dp", "received", "received_by_v", "peak"),
    [
        pytest.param(8, 1, 2, 4, Fraction(3, 8), Fraction(7, 8), Fraction(1, 2), id="7B"),
        pytest.param(8, 1, 4, 2, Fraction(1, 8), Fraction(7, 8), Fraction(1, 4), id="13B"),
        pytest.param(8, 4, 8, 4, Fraction(3, 32), Fraction(31, 32), Fraction(1, 8), id="34B"),
        pytest.param(8, 8, 8, 8, Fraction(7, 64), Fraction(63, 64), Fraction(1, 8), id="70B"),
    ],
)
def test_volumes_of_figure_14(
    tp: int,
    pp: int,
    generate_tp: int,
    micro_dp: int,
    received: Fraction,
    received_by_v: Fraction,
    peak: Fraction,
) -> None:
    layout = hybrid(pp, tp, 1, 1, generate_tp)
    cell = Fraction(1, pp * tp)
    assert layout.micro_dp == micro_dp
    for rank in range(layout.world_size):
        own, needed = train_shard(layout, rank), generate_shard(layout, rank)
        assert len(needed - own) * cell == received
        assert len(needed) * cell == peak
    # HybridFlow-V gathers over all of the training replica.
    (replica,) = layout.train.model_groups()
    assert 1 - Fraction(1, len(replica)) == received_by_v
