"""Transports between two ranks on one GPU. Not run on a GPU yet.

Needs torch and cupy, and nothing else that machines with a GPU may lack. NCCL refuses two ranks on
one device unless it takes them for two hosts (over loopback, any version) or is told to allow it
(NCCL 2.30 and newer).
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.planned_bytes import planned_received
from support.rank_processes import RankContext, RankPool, run_ranks
from support.weight_ranks import assert_equal, cut, decoder, random_weights

from rolemesh.engine.hardware.memory import PhaseMemory
from rolemesh.engine.layout.boxes import generate_layout, train_layout
from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, TrainLayout
from rolemesh.engine.transport.base import Message, TransferFailedError
from rolemesh.engine.transport.cuda_queue import CudaQueue
from rolemesh.engine.transport.groups.nccl import NcclTransport
from rolemesh.engine.transport.rings.cuda_ipc import cuda_ipc_transport
from rolemesh.engine.transport.rings.ring import RingTransport
from rolemesh.engine.transport.selection import make_transport
from rolemesh.engine.weights.plan import make_plan
from rolemesh.engine.weights.transfer import WeightTransfer

pytestmark = pytest.mark.gpu

WAIT_S = 60.0
TIMEOUT_S = 200.0
"""For two processes to load CUDA and cupy, and for NCCL to connect them."""
SIZES = (1, 4097, (1 << 20) + 3, 40 << 20)
"""Bytes; the last goes round the ring of CUDA IPC more than once."""
OLDEST_SHARING_NCCL = 23000

WAYS = ["CUDA IPC", "NCCL as two hosts", "NCCL on a shared device"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    """A way that this machine has."""
    reason = "cupy with NCCL is not installed: pip install cupy-cuda13x (of torch's CUDA version)"
    pytest.importorskip("cupy", reason=reason)
    nccl = pytest.importorskip("cupy.cuda.nccl", reason=reason, exc_type=ImportError)
    if request.param == WAYS[2] and nccl.get_version() < OLDEST_SHARING_NCCL:
        pytest.skip(f"NCCL is {nccl.get_version()}: ranks share a device from 2.30 on")
    return str(request.param)


def connect(at: RankContext, way: str) -> RingTransport | NcclTransport:
    """This rank's end; the process serves one way only, since NCCL reads its variables once."""
    device = torch.device("cuda", 0)
    queue = CudaQueue(device)
    transport: RingTransport | NcclTransport
    if way == "CUDA IPC":
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        transport = cuda_ipc_transport(at.rank, at.world_size, queue=queue, device_uuid=uuid)
    else:
        if way == "NCCL as two hosts":
            os.environ["NCCL_HOSTID"] = f"rolemesh-rank-{at.rank}"
            os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        else:
            os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        transport = NcclTransport(at.rank, at.world_size, queue=queue)
    transport.connect(at.tell(transport.offer), timeout_s=WAIT_S)
    return transport


def content(rank: int, size: int) -> torch.Tensor:
    """Random bytes, by sender and size."""
    generator = torch.Generator().manual_seed(1000 * size + rank)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def swap(at: RankContext, way: str) -> tuple[int, int]:
    """Both send to each other in one round, several times."""
    with connect(at, way) as transport:
        for size in SIZES:
            ours = content(at.rank, size).cuda()
            theirs = torch.zeros(size, dtype=torch.uint8, device="cuda")
            peer = 1 - at.rank
            transport.exchange([Message(peer, ours)], [Message(peer, theirs)]).wait(WAIT_S)
            assert torch.equal(theirs.cpu(), content(peer, size)), size
        return transport.sent_bytes, transport.received_bytes


def test_two_ranks_on_one_device_swap_bytes(way: str) -> None:
    total = sum(SIZES)
    assert run_ranks(swap, 2, way, timeout_s=TIMEOUT_S) == [(total, total)] * 2


def reshard(at: RankContext, way: str) -> tuple[int, int, int]:
    """There and back; bytes received, planned, and the peak of device memory on the way there."""
    layout = HybridLayout(TrainLayout(tp=2), GenerateLayout(tp=1))
    shape = decoder()
    train = train_layout(shape, layout.train)
    generate = generate_layout(shape, layout, "float32")
    weights = random_weights(train.manifest)
    there, back = make_plan(train, generate), make_plan(generate, train)
    held = {name: tensor.cuda() for name, tensor in cut(train, at.rank, weights).items()}
    with connect(at, way) as transport, PhaseMemory("cuda") as memory:
        moved = run(there, transport, held, version=1)
        received = transport.received_bytes
        returned = run(back, transport, moved, version=2)
    for actual, layout_of in ((moved, generate), (returned, train)):
        host = {name: tensor.cpu() for name, tensor in actual.items()}
        assert_equal(host, cut(layout_of, at.rank, weights))
    return received, planned_received(there, at.rank), memory.peak_bytes


def run(plan: Any, transport: Any, held: dict[str, torch.Tensor], *, version: int) -> Any:
    transfer = WeightTransfer(plan, transport.rank, transport, timeout_s=WAIT_S, device="cuda")
    return dict(transfer.run(held, policy_version=version))


def test_weights_reshard_there_and_back_bit_by_bit(way: str) -> None:
    for received, planned, peak in run_ranks(reshard, 2, way, timeout_s=TIMEOUT_S):
        assert received == planned > 0
        assert peak > 0


def lose_the_other(at: RankContext, way: str) -> str:
    """Rank 1 is killed before the second round."""
    transport = connect(at, way)
    buffer = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    peer = 1 - at.rank
    transport.exchange([Message(peer, buffer)], [Message(peer, buffer.clone())]).wait(WAIT_S)
    if at.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(TransferFailedError) as caught:
        transport.exchange([Message(peer, buffer)], [Message(peer, buffer.clone())]).wait(WAIT_S)
    return str(caught.value)


def test_a_killed_peer_is_named(way: str) -> None:
    with RankPool(2) as pool:
        survivor, killed = pool.outcomes(lose_the_other, 2, way, timeout_s=TIMEOUT_S)
    assert "died" in str(killed.failure)
    assert survivor.failure is None, survivor.failure
    assert "with rank 1 over" in survivor.value


def choose(at: RankContext) -> str:
    with (
        at.connect(HybridLayout(TrainLayout(dp=2))) as mesh,
        make_transport(mesh, torch.device("cuda")) as transport,
    ):
        return transport.name


def test_ranks_on_one_device_choose_cuda_ipc() -> None:
    pytest.importorskip("cupy", reason="cupy is not installed")
    assert run_ranks(choose, 2, timeout_s=TIMEOUT_S) == ["CUDA IPC"] * 2
