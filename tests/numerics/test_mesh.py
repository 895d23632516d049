"""The process groups of four real ranks, against the layout that they were made from."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from support.rank_processes import RankContext, RankPool

from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, LayoutError, TrainLayout
from rolemesh.engine.parallel.mesh import RankMesh

GROUPS = (
    *("world", "tp", "pp", "dp", "fsdp", "replicate", "stage", "model", "generate_tp"),
    "micro_dp",
)

LAYOUTS = {
    "figure-7": HybridLayout(TrainLayout(tp=2, dp=2), GenerateLayout(tp=1)),
    # Interval groups: torch's numbers differ from the ranks.
    "1-4-1-to-1-2-2-1": HybridLayout(TrainLayout(tp=4), GenerateLayout(tp=2)),
    "2-2-1-to-2-1-2-1": HybridLayout(TrainLayout(pp=2, tp=2), GenerateLayout(pp=2, tp=1)),
    "2-2-1-to-1-2-2-1": HybridLayout(TrainLayout(pp=2, tp=2), GenerateLayout(tp=2)),
    "stages-outermost": HybridLayout(TrainLayout(pp=2, dp=2, order="tp-dp-pp")),
    "hybrid-fsdp": HybridLayout(TrainLayout(dp=4, fsdp=2)),
    "neighbours": HybridLayout(TrainLayout(tp=4), GenerateLayout(tp=2, grouping="consecutive")),
}


def members_by_all_gather(
    at: RankContext, layouts: dict[str, HybridLayout]
) -> dict[str, dict[str, tuple[list[int], tuple[int, ...], int]]]:
    """By layout and group: ranks in the order of an all-gather, the group's ranks and own index."""
    found: dict[str, dict[str, tuple[list[int], tuple[int, ...], int]]] = {}
    for name, layout in layouts.items():
        with at.connect(layout, name=name) as mesh:
            found[name] = {}
            for kind in GROUPS:
                group = getattr(mesh, kind)
                gathered = [at.rank]
                if group.process_group is not None:
                    parts = [torch.zeros(1, dtype=torch.int64) for _ in group.ranks]
                    mine = torch.tensor([at.rank])
                    dist.all_gather(parts, mine, group=group.process_group)
                    gathered = [int(part) for part in parts]
                found[name][kind] = (gathered, group.ranks, group.index)
    return found


def test_an_all_gather_in_each_group_gives_the_layouts_members(rank_pool: RankPool) -> None:
    found = rank_pool.run(members_by_all_gather, 4, LAYOUTS)
    for name, layout in LAYOUTS.items():
        train = layout.train
        groups = {
            "world": ((0, 1, 2, 3),),
            "tp": train.tp_groups(),
            "pp": train.pp_groups(),
            "dp": train.dp_groups(),
            "fsdp": train.fsdp_groups(),
            "replicate": train.replicate_groups(),
            "stage": train.stage_groups(),
            "model": train.model_groups(),
            "generate_tp": layout.tp_groups(),
            "micro_dp": layout.micro_dp_groups(),
        }
        assert set(groups) == set(GROUPS)
        for kind, of_kind in groups.items():
            for members in of_kind:
                for index, rank in enumerate(members):
                    gathered, ranks, own = found[rank][name][kind]
                    assert (ranks, own) == (members, index), (name, kind, rank)
                    assert gathered == list(members), (name, kind, rank)


def ring(at: RankContext, layout: HybridLayout) -> int:
    """Sends this rank's number to the next rank, and returns what the one before sent."""
    with at.connect(layout) as mesh:
        following = mesh.torch_rank((at.rank + 1) % at.world_size)
        before = mesh.torch_rank((at.rank - 1) % at.world_size)
        sent, received = torch.tensor([at.rank]), torch.zeros(1, dtype=torch.int64)
        work = dist.isend(sent, following)
        assert work is not None
        dist.recv(received, before)
        work.wait()
        assert dist.get_rank() == mesh.torch_rank(at.rank)
        return int(received)


def test_torchs_numbers_lead_a_message_to_the_rank(rank_pool: RankPool) -> None:
    layout = LAYOUTS["1-4-1-to-1-2-2-1"]
    assert layout.torch_ranks() == (0, 2, 1, 3)
    assert rank_pool.run(ring, 4, layout) == [3, 0, 1, 2]


def connect_twice(at: RankContext, layout: HybridLayout) -> str:
    with at.connect(layout, name="first"):
        try:
            with at.connect(layout, name="second"):
                return "no error"
        except RuntimeError as error:
            return str(error)


def test_a_second_world_is_refused_until_the_first_is_closed(rank_pool: RankPool) -> None:
    refusals = rank_pool.run(connect_twice, 2, HybridLayout(TrainLayout(dp=2)))
    assert refusals == ["torch's world exists already: close the mesh that made it"] * 2
    # A fresh call connects again in the same processes.
    assert rank_pool.run(ring, 2, HybridLayout(TrainLayout(dp=2))) == [1, 0]


def test_a_rank_that_is_alone_needs_no_world() -> None:
    mesh = RankMesh.connect(
        HybridLayout(TrainLayout()), rank=0, store=None, backend="gloo", timeout_s=1
    )
    assert mesh == RankMesh.single()
    assert not dist.is_initialized()
    for kind in GROUPS:
        group = getattr(mesh, kind)
        assert (group.ranks, group.size, group.process_group) == ((0,), 1, None)
        assert group.is_first
        assert group.is_last
    assert mesh.torch_rank(0) == 0
    mesh.close()


def test_a_rank_outside_of_the_layout_is_refused() -> None:
    with pytest.raises(LayoutError, match="rank is 2: give 0 to 1"):
        RankMesh.connect(
            HybridLayout(TrainLayout(dp=2)), rank=2, store=None, backend="gloo", timeout_s=1
        )


LATE_TIMEOUT_S = 2.0


def wait_for_one_that_never_comes(at: RankContext) -> tuple[str, float]:
    """Rank 0 waits in a tensor group of which the other rank stays away."""
    with at.connect(HybridLayout(TrainLayout(tp=2, dp=2)), timeout_s=LATE_TIMEOUT_S) as mesh:
        started = time.monotonic()
        said = ""
        if mesh.rank == 0:
            with pytest.raises(RuntimeError) as caught:
                dist.all_reduce(torch.zeros(1), group=mesh.tp.process_group)
            said = str(caught.value)
        seconds = time.monotonic() - started
        # The others leave the world only afterwards: a closed connection would be noticed at once.
        store = at.store("end")
        if mesh.rank == 0:
            store.set("end", b"")
        store.get("end")
        return said, seconds


def test_a_rank_that_stays_away_is_given_up_after_the_meshs_timeout(rank_pool: RankPool) -> None:
    said, seconds = rank_pool.run(wait_for_one_that_never_comes, 4)[0]
    assert "imed out" in said
    # Torch's own timeout is 30 minutes; the machine may be busy.
    assert LATE_TIMEOUT_S * 0.9 < seconds < 30
