"""Names of vLLM's shared memory: agreed by the ranks, their own, and gone after the start."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.rank_processes import RankContext, RankPool

from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, TrainLayout
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.rollout.vllm.engine import shared_memory as vllm_shared_memory
from rolemesh.engine.rollout.vllm.engine.ranks import launched_rank
from rolemesh.engine.rollout.vllm.engine.shared_memory import remove_dead_files, shared_memory_name
from rolemesh.engine.transport.slots.shm import Segment
from rolemesh.engine.transport.slots.shm_directory import SHM_DIRECTORY

INTERVALS = HybridLayout(TrainLayout(tp=4), GenerateLayout(tp=2))
"""Generation groups (0, 2) and (1, 3)."""
PAIR = HybridLayout(TrainLayout(tp=2), GenerateLayout(tp=2))


def file_of(name: str, rank: int = 0) -> Path:
    """What vLLM makes of a name: group, members, and a number a rank."""
    return SHM_DIRECTORY / f"{name}-tp:0-[0-1]-cpushm_{rank}"


def enter(mesh: RankMesh) -> tuple[str, bool]:
    group = mesh.generate_tp
    with shared_memory_name(group, mesh.torch_rank(group.ranks[0])) as name:
        own = file_of(name, group.index)
        own.touch()
    return name, own.exists()


def names_twice(at: RankContext) -> list[tuple[str, bool]]:
    with at.connect(INTERVALS) as mesh:
        return [enter(mesh), enter(mesh)]


def name_of_a_host_of_its_own(at: RankContext) -> str:
    vllm_shared_memory.host_identity = lambda: f"host {at.rank}"
    with at.connect(PAIR) as mesh:
        return enter(mesh)[0]


def die_in_the_middle(at: RankContext) -> None:
    with at.connect(PAIR) as mesh, shared_memory_name(mesh.generate_tp, 0) as name:
        file_of(name, at.rank).touch()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def made() -> Iterator[list[Path]]:
    """Files to remove after the test."""
    files: list[Path] = []
    yield files
    for path in files:
        path.unlink(missing_ok=True)


def test_ranks_of_a_replica_agree_on_a_name_that_no_other_start_has(rank_pool: RankPool) -> None:
    ranks = rank_pool.run(names_twice, 4)
    for start in range(2):
        names = [rank[start][0] for rank in ranks]
        assert names[0] == names[2]
        assert names[1] == names[3]
        assert names[0] != names[1]
    assert len({name for rank in ranks for name, _ in rank}) == 4
    assert not any(is_left for rank in ranks for _, is_left in rank)


def test_ranks_that_share_no_memory_get_different_names(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(name_of_a_host_of_its_own, 2)
    assert first != second
    # The processes serve other tests.
    rank_pool.run(restore_host_identity, 2)


def restore_host_identity(at: RankContext) -> None:
    from rolemesh.engine.transport.slots.shm import host_identity

    vllm_shared_memory.host_identity = host_identity


def test_what_a_killed_start_left_is_removed_by_the_next(rank_pool: RankPool) -> None:
    outcomes = rank_pool.outcomes(die_in_the_middle, 2)
    assert all(outcome.failure == "died with exit code -9" for outcome in outcomes)
    # Other files of that folder belong to tests that run at the same time.
    left = set(SHM_DIRECTORY.glob("rolemesh-*cpushm*"))
    assert left
    rank_pool.run(names_twice, 4)
    assert not left & set(SHM_DIRECTORY.glob("rolemesh-*cpushm*"))


def test_files_of_a_live_start_and_of_others_stay(made: list[Path]) -> None:
    owner = Segment.create(1)
    live = file_of(owner.name)
    dead = file_of(f"rolemesh-{os.getpid()}-{uuid.uuid4().hex}")
    foreign = SHM_DIRECTORY / f"-tp:0-[0-1]-cpushm_{uuid.uuid4().hex}"
    made += [live, dead, foreign]
    for path in made:
        path.touch()
    try:
        # It may also remove what a test that runs at the same time left.
        assert dead.name in remove_dead_files()
        assert not dead.exists()
        assert live.exists()
        assert foreign.exists()
    finally:
        owner.unlink()
    assert live.name in remove_dead_files()


def test_the_launchers_variables_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "9")
    for name in ("WORLD_SIZE", "VLLM_DIST_IDENT"):
        # Engines of other tests in this process may have left theirs.
        monkeypatch.delenv(name, raising=False)
    with launched_rank(1, 4, torch.device("cpu")):
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "4")
        os.environ["VLLM_DIST_IDENT"] = "some name"
    assert os.environ["RANK"] == "9"
    assert "WORLD_SIZE" not in os.environ
    assert "VLLM_DIST_IDENT" not in os.environ
