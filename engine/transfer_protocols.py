"""Transfer protocols: which rows each rank of a role gets, and whose output counts.

Pure: no torch. The six protocols of HybridFlow (arXiv 2409.19256, Table 3) over the groups of a
`HybridLayout`, and a registry for further ones. A protocol is a pair of functions; source.collect
followed by target.distribute takes a batch from one role's layout to another's.

Table 3 says "micro-DP group" where only one generation replica makes sense, since section 5 gives
that name to ranks that hold different replicas' equal shards: here the ranks of one replica share
a chunk, and its first rank's output counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rolemesh.engine.layout.ranks import HybridLayout, LayoutError
from rolemesh.engine.packing.balance import balanced_partition

Rows: TypeAlias = tuple[int, ...]
"""Row numbers of a batch."""

Distribute: TypeAlias = Callable[[HybridLayout, Sequence[int]], tuple[Rows, ...]]
"""Rows of each rank, given the layout and the tokens in each row of the batch."""

Collect: TypeAlias = Callable[[HybridLayout], tuple[int, ...]]
"""Ranks whose output counts, in the order of their outputs."""


@dataclass(frozen=True, slots=True)
class TransferProtocol:
    """A pair of functions with a name.

    Example, the source side of the paper's Fig. 5(b): for `HybridLayout(TrainLayout(tp=2, dp=3))`
    and six rows of equal length, "3D_PROTO" gives ranks 0 and 1 rows (0, 1), ranks 2 and 3 rows
    (2, 3), ranks 4 and 5 rows (4, 5), and collects from ranks 0, 2 and 4.
    """

    name: str
    """Under which it is registered."""
    distribute: Distribute
    """Rows to ranks."""
    collect: Collect
    """Ranks to rows."""


def protocol(name: str) -> TransferProtocol:
    """The protocol of that name; raises ValueError with the known names."""
    if name not in _protocols:
        raise ValueError(f"transfer protocol is {name!r}: give one of {sorted(_protocols)}")
    return _protocols[name]


def register_protocol(name: str, distribute: Distribute, collect: Collect) -> TransferProtocol:
    """Adds a protocol for `protocol` to find.

    Both functions must be pure: every rank calls them for itself and all must agree.

    Args:
        name: Not taken yet.
        distribute: Rows to ranks; may leave ranks without rows.
        collect: Ranks to rows.

    Raises:
        ValueError: The name is taken.
    """
    if name in _protocols:
        raise ValueError(f"transfer protocol {name!r} is registered already: give another name")
    _protocols[name] = TransferProtocol(name, distribute, collect)
    return _protocols[name]


_protocols: dict[str, TransferProtocol] = {}


# --- rows to ranks ------------------------------------------------------------------------


def distribute_to_all(layout: HybridLayout, lengths: Sequence[int]) -> tuple[Rows, ...]:
    """All rows to every rank."""
    return (tuple(range(len(lengths))),) * layout.world_size


def distribute_over_dp(layout: HybridLayout, lengths: Sequence[int]) -> tuple[Rows, ...]:
    """Each data-parallel replica's part to all its ranks, parts of nearly equal tokens.

    With fewer rows than replicas the last replicas get none.
    """
    train = layout.train
    parts = [tuple(part) for part in balanced_partition(lengths, train.num_parts)]
    return tuple(parts[train.coordinates(rank).dp // train.cp] for rank in range(train.world_size))


def distribute_over_generation_replicas(
    layout: HybridLayout, lengths: Sequence[int]
) -> tuple[Rows, ...]:
    """Each generation replica's chunk to all its ranks: contiguous, sizes differ by one at most.

    How long completions will be is not known before, so prompts are cut by number. The first
    chunks are the larger ones; with fewer rows than replicas the last chunks are empty.
    """
    chunks = _contiguous_chunks(len(lengths), layout.num_replicas)
    return tuple(chunks[layout.chunk(rank)] for rank in range(layout.world_size))


def distribute_over_pure_dp(layout: HybridLayout, lengths: Sequence[int]) -> tuple[Rows, ...]:
    """Parts of nearly equal tokens to the ranks of a layout of data-parallel replicas alone."""
    _check_pure_dp(layout)
    return distribute_over_dp(layout, lengths)


def distribute_one_each(layout: HybridLayout, lengths: Sequence[int]) -> tuple[Rows, ...]:
    """Row r to rank r: the caller has one input for each rank."""
    if len(lengths) != layout.world_size:
        raise ValueError(
            f"the batch has {len(lengths)} rows: ALL_TO_ALL takes one for each of the "
            f"{layout.world_size} ranks"
        )
    return tuple((rank,) for rank in range(layout.world_size))


# --- ranks to rows ------------------------------------------------------------------------


def collect_all(layout: HybridLayout) -> tuple[int, ...]:
    """Every rank."""
    return tuple(range(layout.world_size))


def collect_last_stages(layout: HybridLayout) -> tuple[int, ...]:
    """Last stage and first slice of each data-parallel replica.

    Output exists on the last stage alone. Its slices hold copies, as do ranks that cut rows.
    """
    train = layout.train
    return tuple(
        train.rank(pp=train.pp - 1, tp=0, dp=part * train.cp) for part in range(train.num_parts)
    )


def collect_generation_replicas(layout: HybridLayout) -> tuple[int, ...]:
    """First rank of each generation replica, in chunk order; it must hold the finished output."""
    return tuple(replica[0] for replica in layout.replicas())


def collect_stages(layout: HybridLayout) -> tuple[int, ...]:
    """First slice of the first data-parallel replica, of each stage."""
    return tuple(layout.train.rank(pp=pp, tp=0, dp=0) for pp in range(layout.train.pp))


def collect_pure_dp(layout: HybridLayout) -> tuple[int, ...]:
    """Every rank of a layout of data-parallel replicas alone."""
    _check_pure_dp(layout)
    return collect_all(layout)


def _contiguous_chunks(num_rows: int, num_chunks: int) -> list[Rows]:
    size, larger = divmod(num_rows, num_chunks)
    bounds = [chunk * size + min(chunk, larger) for chunk in range(num_chunks + 1)]
    return [tuple(range(start, stop)) for start, stop in itertools.pairwise(bounds)]


def _check_pure_dp(layout: HybridLayout) -> None:
    train = layout.train
    if train.tp * train.pp * train.cp > 1:
        raise LayoutError(
            f"DP_PROTO needs tp 1, pp 1 and cp 1, but tp is {train.tp}, pp {train.pp} and cp "
            f"{train.cp}: use 3D_PROTO"
        )


register_protocol("ONE_TO_ALL", distribute_to_all, collect_all)
register_protocol("3D_PROTO", distribute_over_dp, collect_last_stages)
register_protocol(
    "3D_ALL_MICRO_DP", distribute_over_generation_replicas, collect_generation_replicas
)
register_protocol("3D_PP_ONLY", distribute_to_all, collect_stages)
register_protocol("DP_PROTO", distribute_over_pure_dp, collect_pure_dp)
register_protocol("ALL_TO_ALL", distribute_one_each, collect_all)
