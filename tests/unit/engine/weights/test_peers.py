"""Ranks that agree: all go on, or all raise the same."""

from __future__ import annotations

from pathlib import Path

from support.thread_peers import run_peers

from rolemesh.engine.parallel.agreement import Peers
from rolemesh.engine.weights.checkpoints.folders import FolderExistsError, whole_folder


def test_each_rank_gets_its_own_result_and_the_facts_of_all() -> None:
    found = run_peers(3, lambda peers: peers.agree(lambda: ({peers.rank}, [peers.rank, 0.5])))
    facts = [[0, 0.5], [1, 0.5], [2, 0.5]]
    assert found == [({0}, facts), ({1}, facts), ({2}, facts)]
    assert Peers.alone().agree(lambda: ("mine", "fact")) == ("mine", ["fact"])


def test_the_failure_of_one_is_raised_by_all() -> None:
    def work(peers: Peers) -> None:
        def fails() -> tuple[None, None]:
            if peers.rank:
                raise FolderExistsError(f"no folder for {peers.rank}")
            return None, None

        peers.agree(fails, (FolderExistsError, ValueError))

    for error in run_peers(3, work):
        assert type(error) is FolderExistsError
        assert str(error) == "no folder for 1"


def test_an_unknown_failure_names_the_rank_elsewhere_and_stays_as_it_is_at_home() -> None:
    def work(peers: Peers) -> None:
        def fails() -> tuple[None, None]:
            if peers.rank == 1:
                raise OSError(28, "No space left on device")
            return None, None

        peers.agree(fails)

    errors = run_peers(2, work)
    assert type(errors[0]) is RuntimeError
    assert "rank 1 failed: OSError: [Errno 28] No space left" in str(errors[0])
    assert isinstance(errors[1], OSError)


def test_ranks_write_one_folder(tmp_path: Path) -> None:
    def work(peers: Peers) -> None:
        with whole_folder(tmp_path / "deep" / "folder", peers=peers) as temporary:
            peers.agree(lambda: (temporary.joinpath(str(peers.rank)).write_text("x"), None))

    assert run_peers(3, work) == [None] * 3
    assert sorted(path.name for path in (tmp_path / "deep" / "folder").iterdir()) == list("012")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["folder"]
    for error in run_peers(2, work):
        assert type(error) is FolderExistsError


def test_a_rank_that_fails_in_the_block_leaves_nothing(tmp_path: Path) -> None:
    def work(peers: Peers) -> None:
        with whole_folder(tmp_path / "folder", peers=peers) as temporary:

            def write() -> tuple[None, None]:
                temporary.joinpath(str(peers.rank)).write_text("x")
                if peers.rank == 1:
                    raise OSError("disk full")
                return None, None

            peers.agree(write)

    errors = run_peers(3, work)
    assert all("disk full" in str(error) for error in errors)
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_see_different_disks_are_told_so(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()

    def work(peers: Peers) -> None:
        target = tmp_path / ("" if peers.is_first else "own") / "folder"
        with whole_folder(target, peers=peers):
            pass

    for error in run_peers(2, work):
        assert isinstance(error, ValueError)
        assert "rank 1 does not see" in str(error)
    assert [path.name for path in tmp_path.iterdir()] == ["own"]
