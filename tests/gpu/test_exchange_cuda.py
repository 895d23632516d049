"""Weights by an exchange between two services on one GPU. Not run on a GPU yet.

NCCL refuses two ranks on one device unless it takes them for two hosts, which `NCCL_HOSTID` makes
it do; our own check of the devices is told by NCCL's variable of 2.30.
"""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.rank_processes import RankContext, RankPool, run_ranks
from support.weight_ranks import assert_equal, cut, decoder, random_weights

from rolemesh.engine.layout.ranks import TrainLayout
from rolemesh.engine.transport.base import TransferFailedError
from rolemesh.engine.weights.exchanges.exchange import ExchangeEnd, exchange_plan

pytestmark = pytest.mark.gpu

TIMEOUT_S = 200.0
"""For two processes to load CUDA and cupy, and for NCCL to connect them."""


@pytest.fixture(autouse=True)
def _needs_nccl() -> None:
    reason = "cupy with NCCL is not installed: pip install cupy-cuda13x (of torch's CUDA version)"
    pytest.importorskip("cupy.cuda.nccl", reason=reason, exc_type=ImportError)


def connected(at: RankContext) -> ExchangeEnd:
    """An actor of one rank gives, a rollout service of the others takes slices."""
    os.environ["NCCL_HOSTID"] = f"rolemesh-rank-{at.rank}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    shape, takers = decoder(), TrainLayout(tp=at.world_size - 1)
    plan = exchange_plan(shape.manifest("float32"), shape, TrainLayout(), takers, "bfloat16")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    end = ExchangeEnd(plan, at.rank, device)
    end.connect(at.tell(end.offer))
    return end


def give_and_take(at: RankContext) -> str:
    with connected(at) as end:
        for version in (1, 2):
            whole = random_weights(end.plan.source.manifest, version)
            if at.rank == 0:
                held = {name: tensor.cuda() for name, tensor in whole.items()}
                end.send(held, policy_version=version)
                continue
            taken = {name: tensor.cpu() for name, tensor in end.receive(policy_version=version)}
            assert_equal(taken, cut(end.plan.target, at.rank, whole))
        return end.way


def test_slices_on_a_gpu_get_the_rounded_bits() -> None:
    assert run_ranks(give_and_take, 3, timeout_s=TIMEOUT_S) == ["NCCL"] * 3


def lose_the_taker(at: RankContext) -> str:
    end = connected(at)
    if at.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    held = {name: one.cuda() for name, one in random_weights(end.plan.source.manifest).items()}
    with pytest.raises(TransferFailedError) as caught:
        end.send(held, policy_version=1)
    end.close()
    return str(caught.value)


def test_a_giver_whose_taker_was_killed_gives_up() -> None:
    with RankPool(2) as pool:
        giver, taker = pool.outcomes(lose_the_taker, 2, timeout_s=TIMEOUT_S)
    assert "died" in str(taker.failure)
    assert giver.failure is None, giver.failure
    assert "NCCL" in giver.value
