"""The processes that play ranks in other tests."""

from __future__ import annotations

import os
import pickle  # noqa: TID251 - between the processes of one test
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.rank_processes import RankContext, RankFailedError, RankPool, run_ranks

from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout


@dataclass(frozen=True)
class Pair:
    rank: int
    tensor: torch.Tensor


def scaled(at: RankContext, pair: Pair) -> Pair:
    return Pair(at.rank, pair.tensor * at.rank)


def summed(at: RankContext) -> float:
    with at.connect(HybridLayout(TrainLayout(dp=at.world_size))) as mesh:
        value = torch.tensor([float(at.rank + 1)])
        dist.all_reduce(value, group=mesh.dp.process_group)
    return float(value)


def process(at: RankContext) -> int:
    return os.getpid()


def rank_one_raises(at: RankContext) -> str:
    with at.connect(HybridLayout(TrainLayout(dp=2))):
        if at.rank == 1:
            raise ValueError("no such thing")
        dist.barrier()
    return "done"


def rank_one_dies(at: RankContext) -> str:
    if at.rank == 1:
        os._exit(3)
    return "done"


def returns_a_function(at: RankContext) -> object:
    return lambda: at.rank


def rank_one_waits(at: RankContext) -> None:
    if at.rank == 1:
        at.store().wait(["never set"])


def test_values_go_there_and_back_and_ranks_meet() -> None:
    assert run_ranks(summed, 2) == [3.0, 3.0]


def test_classes_of_a_test_file_travel(rank_pool: RankPool) -> None:
    given = Pair(-1, torch.tensor([1.0, 2.0]))
    results = rank_pool.run(scaled, 2, given)
    assert [result.rank for result in results] == [0, 1]
    assert results[1].tensor.tolist() == [1.0, 2.0]


def test_a_pool_keeps_its_processes(rank_pool: RankPool) -> None:
    first = rank_pool.run(process, 2)
    assert rank_pool.run(summed, 2) == [3.0, 3.0]
    assert rank_pool.run(process, 2) == first
    assert os.getpid() not in first


def test_a_rank_that_raises_is_named_with_its_traceback(rank_pool: RankPool) -> None:
    with pytest.raises(RankFailedError, match=r"(?s)rank 1: .*rank_one_raises.*no such thing"):
        rank_pool.run(rank_one_raises, 2)
    assert rank_pool.run(summed, 2) == [3.0, 3.0]


def test_a_rank_that_dies_is_named_and_replaced(rank_pool: RankPool) -> None:
    with pytest.raises(RankFailedError, match="rank 1: died with exit code 3"):
        rank_pool.run(rank_one_dies, 2)
    outcomes = rank_pool.outcomes(rank_one_dies, 2)
    assert outcomes[0].value == "done"
    assert outcomes[1].failure == "died with exit code 3"
    assert rank_pool.run(summed, 2) == [3.0, 3.0]


def test_a_late_rank_is_killed_and_replaced(rank_pool: RankPool) -> None:
    with pytest.raises(RankFailedError, match=r"rank 1: did not end within 0\.5 s"):
        rank_pool.run(rank_one_waits, 2, timeout_s=0.5)
    assert rank_pool.run(summed, 2) == [3.0, 3.0]


def test_arguments_that_cannot_be_pickled_leave_the_pool_in_step(rank_pool: RankPool) -> None:
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        rank_pool.run(scaled, 2, lambda: None)
    assert rank_pool.run(summed, 2) == [3.0, 3.0]


def test_a_result_that_cannot_be_pickled_fails_its_rank(rank_pool: RankPool) -> None:
    with pytest.raises(RankFailedError, match=r"(?s)rank [01]: .*lambda"):
        rank_pool.run(returns_a_function, 2)
    assert rank_pool.run(summed, 2) == [3.0, 3.0]


def test_a_function_that_no_process_can_import_is_refused(rank_pool: RankPool) -> None:
    with pytest.raises(ValueError, match="define it at the top level"):
        rank_pool.run(lambda at: None, 2)
    with pytest.raises(ValueError, match="world_size is 9: give 1 to 8"):
        rank_pool.run(process, 9)


def test_functions_and_classes_of_a_program_are_found(tmp_path: Path) -> None:
    """As benchmarks are, which are run and not imported."""
    program = tmp_path / "program.py"
    program.write_text(
        "from dataclasses import dataclass\n"
        "from support.rank_processes import run_ranks\n"
        "@dataclass\n"
        "class Given:\n"
        "    number: int\n"
        "def raised(at, given):\n"
        "    return Given(given.number + at.rank)\n"
        "if __name__ == '__main__':\n"
        "    print([one.number for one in run_ranks(raised, 2, Given(5))])\n"
    )
    tests = str(Path(__file__).parents[1])
    printed = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": tests},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert printed.stdout.splitlines()[-1] == "[5, 6]"
