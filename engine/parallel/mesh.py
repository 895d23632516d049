"""The process groups of one rank, made from a layout.

Needs torch.distributed, but runs without it where there is one rank.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from rolemesh.engine.layout.ranks import Groups, HybridLayout, TrainLayout, check_rank


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that work together on one thing, as one of them sees it."""

    ranks: tuple[int, ...]
    """Members, in the group's order."""
    index: int
    """This rank's place among them."""
    process_group: dist.ProcessGroup | None
    """Numbers its members as `ranks` does, so that a collective's parts are in that order; None
    where the rank is alone."""

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this rank comes first."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank comes last."""
        return self.index == self.size - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMesh:
    """All groups of one rank. Owned by the rank's compute thread.

    Ranks are the layout's. Torch's world numbers them otherwise (see
    `HybridLayout.torch_ranks`); `torch_rank` translates where a call wants torch's number.

    Example::

        mesh = RankMesh.connect(layout, rank=3, store=store, backend="gloo", timeout_s=60)
        dist.all_reduce(tensor, group=mesh.tp.process_group)
        mesh.close()
    """

    layout: HybridLayout
    rank: int
    world: RankGroup
    """All ranks, in their own order (dist.group.WORLD has torch's)."""
    tp: RankGroup
    """Slices of the same stage and replica."""
    pp: RankGroup
    """Stages of one pipeline, first stage first."""
    dp: RankGroup
    """The data axis: ranks of the same stage and slice."""
    cp: RankGroup
    """Ranks of it that cut each packed row among them, its beginning first."""
    parts: RankGroup
    """Ranks at this one's place of all replicas, each with another part of the rows."""
    fsdp: RankGroup
    """Ranks that cut this rank's parameters among them."""
    replicate: RankGroup
    """Ranks that hold the very same parameters."""
    experts: RankGroup
    """Ranks that share the experts of this rank's layers out, in the order of experts."""
    expert_fsdp: RankGroup
    """Ranks that cut this rank's experts among them."""
    expert_replicate: RankGroup
    """Ranks that hold the very same parts of experts."""
    stage: RankGroup
    """Ranks that together hold one stage: its slices, of all replicas."""
    model: RankGroup
    """Ranks of one data-parallel replica, which see the same rows."""
    generate_tp: RankGroup
    """Slices of one generation replica."""
    micro_dp: RankGroup
    """Ranks of one training replica with the same generation shard."""

    @classmethod
    def single(cls) -> RankMesh:
        """The mesh of a rank that is alone."""
        layout, alone = HybridLayout(TrainLayout()), RankGroup((0,), 0, None)
        return cls(layout=layout, rank=0, **dict.fromkeys(_kinds(layout), alone))

    @classmethod
    def connect(
        cls,
        layout: HybridLayout,
        *,
        rank: int,
        store: Any,
        backend: str,
        timeout_s: float,
    ) -> RankMesh:
        """Joins torch's world and makes the groups. Every rank calls it.

        Args:
            layout: Of all ranks.
            rank: This one.
            store: torch.distributed.Store where the ranks meet; fresh, or under a new prefix.
            backend: e.g. "gloo" or "cpu:gloo,cuda:nccl".
            timeout_s: Of each collective operation.

        Raises:
            LayoutError: There is no such rank.
            RuntimeError: Torch's world exists already: `close` the mesh that made it.
        """
        check_rank(rank, layout.world_size)
        if layout.world_size == 1:
            return cls.single()
        if dist.is_initialized():
            raise RuntimeError("torch's world exists already: close the mesh that made it")
        numbers = layout.torch_ranks()
        timeout = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group(
            backend,
            store=store,
            rank=numbers[rank],
            world_size=layout.world_size,
            timeout=timeout,
        )
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        groups = {
            name: _join(groups, rank, numbers, timeout, made)
            for name, groups in _kinds(layout).items()
        }
        return cls(layout=layout, rank=rank, **groups)

    def torch_rank(self, rank: int) -> int:
        """The number of a rank in torch's world."""
        return self.layout.torch_ranks()[rank]

    def close(self) -> None:
        """Leaves torch's world. vLLM, which borrows it, must be closed before."""
        if self.world.process_group is not None:
            dist.destroy_process_group()


def _kinds(layout: HybridLayout) -> dict[str, Groups]:
    """All groups, by the field of the mesh that has this rank's."""
    train = layout.train
    return {
        "world": (tuple(range(layout.world_size)),),
        "tp": train.tp_groups(),
        "pp": train.pp_groups(),
        "dp": train.dp_groups(),
        "cp": train.cp_groups(),
        "parts": train.part_groups(),
        "fsdp": train.fsdp_groups(),
        "replicate": train.replicate_groups(),
        "experts": train.expert_groups(),
        "expert_fsdp": train.expert_fsdp_groups(),
        "expert_replicate": train.expert_replicate_groups(),
        "stage": train.stage_groups(),
        "model": train.model_groups(),
        "generate_tp": layout.tp_groups(),
        "micro_dp": layout.micro_dp_groups(),
    }


def _join(
    groups: Iterable[tuple[int, ...]],
    rank: int,
    numbers: tuple[int, ...],
    timeout: datetime.timedelta,
    made: dict[tuple[int, ...], dist.ProcessGroup],
) -> RankGroup:
    """Makes the process groups of one kind; all ranks make all of them, in the same order."""
    own: RankGroup | None = None
    for members in groups:
        if len(members) > 1 and members not in made:
            # use_local_synchronization would let members alone make it, but then two groups made
            # by overlapping ranks at once can take each other's keys in the store.
            ordered = [numbers[member] for member in members]
            # Torch's numbers need not ascend with the place in the group. Said only where it
            # matters: torch before 2.12 always sorts, and knows no such argument.
            options: dict[str, Any] = {} if ordered == sorted(ordered) else {"sort_ranks": False}
            # A group does not take over its world's timeout, but torch's own of up to 30 minutes.
            made[members] = dist.new_group(ordered, timeout=timeout, **options)
        if rank in members:
            own = RankGroup(members, members.index(rank), made.get(members))
    if own is None:
        raise AssertionError(f"rank {rank} is in none of {groups}")
    return own
