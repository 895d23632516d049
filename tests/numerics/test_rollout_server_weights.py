"""Whole weights on their way to vLLM servers: routes in order, bytes, failures. All on fakes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.fake_nccl import FakeQueue
from support.fake_vllm import FakeVllm, fake_vllm
from support.fake_workers import FakeGroup, FakeSender
from support.rollout_checks import load_trainer_model
from support.server_backends import when_rows_have_tokens
from support.tiny_families import write_tiny_decoder
from support.tiny_models import write_tiny_llama

from rolemesh.engine.layout.ranks import HybridLayout, LayoutError, TrainLayout
from rolemesh.engine.parallel.mesh import RankGroup, RankMesh
from rolemesh.engine.rollout.model_folder import WeightsStaleError
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.rollout.servers import weights
from rolemesh.engine.rollout.servers.client import SamplersUnavailableError, ServerRefusedError
from rolemesh.engine.rollout.servers.sampler import VllmServerBackend
from rolemesh.engine.rollout.servers.senders import BroadcastFailedError, NcclSender
from rolemesh.engine.specs import SamplingSpec, VllmServerSpec

SAMPLING = SamplingSpec(max_new_tokens=6)
UPDATE = [
    "/pause?mode=keep",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "/resume",
]
ORDERED = [*UPDATE, "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"]

Make = Callable[..., VllmServerBackend]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"), seed=4)


@pytest.fixture
def group() -> FakeGroup:
    return FakeGroup()


@pytest.fixture
def servers(group: FakeGroup) -> Iterator[list[FakeVllm]]:
    with fake_vllm() as first, fake_vllm() as second:
        for server in (first, second):
            server.is_dev, server.workers = True, group
        second.world_size = 2
        yield [first, second]


@pytest.fixture
def sender(group: FakeGroup) -> FakeSender:
    return FakeSender(group)


@pytest.fixture
def make(folder: Path, servers: list[FakeVllm], sender: FakeSender) -> Iterator[Make]:
    made: list[VllmServerBackend] = []

    def make(folder: Path = folder, **arguments: Any) -> VllmServerBackend:
        spec = VllmServerSpec(
            urls=tuple(one.url for one in servers),
            max_model_len=64,
            timeout_s=5,
            deadline_s=1.5,
            update_timeout_s=5,
            breaker_pause_s=0.2,
        )
        made.append(VllmServerBackend(spec, folder, sender=sender, **arguments))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def tensors(backend: VllmServerBackend, value: float) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.full(shape, value)) for name, shape in backend._expected.shapes.items()]


def sampled(backend: VllmServerBackend, count: int = 6) -> list[int]:
    asked = [RolloutRequest(row=row, prompt_tokens=[5, 9], seed=row) for row in range(count)]
    return sorted(one.row for one in backend.generate(asked, SAMPLING))


def ordered(server: FakeVllm) -> list[str]:
    return server.routes(*ORDERED)


def test_an_update_goes_the_way_of_the_routes_with_all_bytes_in_order(
    make: Make,
    servers: list[FakeVllm],
    group: FakeGroup,
    sender: FakeSender,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights, "CHUNK_BYTES", 2**16)
    backend = make()
    backend.update_weights(tensors(backend, 0.125), 0)
    # One server has one worker, the other two: ranks 1, and 2 with 3.
    offsets = {one["rank_offset"]: one["world_size"] for one in group.infos}
    assert offsets == {1: 4, 2: 4}
    for server in servers:
        routes = ordered(server)
        assert routes[0] == "/init_weight_transfer_engine"
        once = list(dict.fromkeys(routes[1:]))
        assert once == UPDATE
        assert routes.count("/update_weights") > 2  # a chunk each
        received = group.received[server.url]
        assert [name for name, _ in received] == list(backend._expected.shapes)
        for name, tensor in received:
            assert tensor.dtype == torch.bfloat16
            assert tuple(tensor.shape) == backend._expected.shapes[name]
            assert torch.all(tensor == 0.125)
    assert sampled(backend) == list(range(6))
    salts = {body["cache_salt"] for one in servers for body in one.drawn()}
    # The next one uses the group that is there, and other keys and values.
    backend.update_weights(tensors(backend, 0.25), 1)
    assert sender.num_connects == 1
    sampled(backend)
    assert len({body["cache_salt"] for one in servers for body in one.drawn()} - salts) == 1
    assert all("model" not in body for one in servers for body in one.drawn())


def test_experts_are_sent_as_files_hold_them(
    make: Make, servers: list[FakeVllm], group: FakeGroup, tmp_path: Path
) -> None:
    """The loaders of vLLM refuse the names of Mixtral's stacks."""
    mixtral = write_tiny_decoder(
        tmp_path, "mixtral", vocab_size=512, num_local_experts=3, bos_token_id=1, eos_token_id=2
    )
    backend = make(folder=mixtral)
    sent = load_trainer_model(mixtral)
    backend.update_weights(((name, one.detach()) for name, one in sent.named_parameters()), 0)
    received = dict(group.received[servers[0].url])
    stored = load_file(mixtral / "model.safetensors")
    assert received.keys() == stored.keys()
    assert any(".block_sparse_moe.experts.2.w3." in name for name in received)
    for name, tensor in received.items():
        assert torch.equal(tensor, stored[name].bfloat16())


def test_nothing_runs_while_weights_come_and_what_ran_goes_on_by_the_new_ones(
    make: Make, servers: list[FakeVllm]
) -> None:
    backend = make(updates_between_steps=True)
    backend.update_weights(tensors(backend, 0.125), 0)
    for server in servers:
        server.token_s = 0.05
    backend.between_steps = when_rows_have_tokens(
        backend, 3, lambda: backend.update_weights(tensors(backend, 0.25), 1)
    )
    asked = [RolloutRequest(row=row, prompt_tokens=[5, 9], seed=row) for row in range(6)]
    found = list(backend.generate(asked, SAMPLING))
    assert len(found) == 6
    assert sum(set(one.policy_versions) == {0, 1} for one in found) >= 3
    for server in servers:
        assert server.weight_version.split("-")[1] == "v1"


def test_a_server_that_was_started_anew_waits_for_the_next_update(
    make: Make, servers: list[FakeVllm], sender: FakeSender
) -> None:
    backend = make()
    backend.update_weights(tensors(backend, 0.125), 0)
    # It has its folder's weights, and would serve them.
    servers[0].kill()
    servers[0].start()
    servers[0].calls.clear()
    assert sampled(backend) == list(range(6))
    assert "draw" not in servers[0].routes()
    backend.update_weights(tensors(backend, 0.25), 1)
    assert sender.num_connects == 2
    assert "/shutdown_weight_transfer_engine" in ordered(servers[1])
    time.sleep(0.3)
    assert sampled(backend, 12) == list(range(12))
    assert "draw" in servers[0].routes()


def test_an_update_goes_to_those_that_are_there(
    make: Make, servers: list[FakeVllm], group: FakeGroup
) -> None:
    backend = make()
    servers[1].kill()
    backend.update_weights(tensors(backend, 0.125), 0)
    assert [one["world_size"] for one in group.infos] == [2]
    assert sampled(backend) == list(range(6))
    servers[0].kill()
    with pytest.raises(SamplersUnavailableError):
        backend.update_weights(tensors(backend, 0.25), 1)


@pytest.mark.parametrize("route", [one.partition("?")[0] for one in UPDATE])
def test_a_server_that_fails_on_the_way_fails_the_update_and_nothing_is_sampled(
    make: Make, servers: list[FakeVllm], route: str
) -> None:
    backend = make()
    servers[1].route_faults[route] = [500]
    with pytest.raises(ServerRefusedError, match="start it anew"):
        backend.update_weights(tensors(backend, 0.125), 0)
    with pytest.raises(WeightsStaleError):
        backend.generate([], SAMPLING)


def test_a_server_that_dies_in_the_broadcast_does_not_leave_the_sender_waiting(
    make: Make, servers: list[FakeVllm], group: FakeGroup
) -> None:
    backend = make()
    backend.update_weights(tensors(backend, 0.125), 0)

    def kill_soon() -> None:
        threading.Thread(target=servers[1].kill).start()
        time.sleep(1.0)

    servers[1].kill_soon = kill_soon  # type: ignore[attr-defined]
    group.refused = [len(group.sent) + 2]
    started = time.monotonic()
    with pytest.raises((BroadcastFailedError, RuntimeError)):
        backend.update_weights(tensors(backend, 0.25), 1)
    assert time.monotonic() - started < 5
    with pytest.raises(WeightsStaleError):
        backend.generate([], SAMPLING)


def test_servers_without_the_routes_say_how_to_start_them(
    make: Make, servers: list[FakeVllm]
) -> None:
    servers[0].is_dev = servers[1].is_dev = False
    backend = make()
    with pytest.raises(ServerRefusedError, match="VLLM_SERVER_DEV_MODE=1"):
        backend.update_weights(tensors(backend, 0.125), 0)


def test_whole_weights_come_to_a_rollout_service_of_one_rank(make: Make) -> None:
    alone, both = RankGroup((0,), 0, None), RankGroup((0, 1), 0, None)
    mesh = RankMesh(
        layout=HybridLayout(TrainLayout(dp=2)),
        rank=0,
        world=both,
        **dict.fromkeys(
            (
                *("tp", "pp", "dp", "fsdp", "replicate", "model", "stage", "generate_tp"),
                *("micro_dp", "experts", "expert_fsdp", "expert_replicate", "cp", "parts"),
            ),
            alone,
        ),
    )
    with pytest.raises(LayoutError, match=r"layout\.dp 1"):
        make(mesh=mesh, updates_between_steps=True)


# --- the calls of NCCL -------------------------------------------------------------------------


class RecordingNccl:
    """`cupy.cuda.nccl`, as far as a sender calls it."""

    NCCL_UINT8, NCCL_FLOAT32, NCCL_SUM = 1, 7, 0

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.comes = threading.Event()
        self.comes.set()
        self.error: str | None = None

    def get_unique_id(self) -> bytes:
        return b"u" * 128

    def NcclCommunicator(self, world_size: int, unique_id: bytes, rank: int) -> Any:
        self.comes.wait(20)
        self.calls.append(("init", world_size, unique_id, rank))
        return self

    def allReduce(self, *arguments: Any) -> None:
        self.calls.append(("allReduce", *arguments))

    def broadcast(self, *arguments: Any) -> None:
        self.calls.append(("broadcast", *arguments))

    def check_async_error(self) -> None:
        if self.error is not None:
            raise RuntimeError(self.error)

    def abort(self) -> None:
        self.calls.append(("abort",))


def test_the_warm_up_comes_before_all_else_and_tensors_go_as_bytes_from_root_0() -> None:
    nccl, queue = RecordingNccl(), FakeQueue()
    sender = NcclSender(queue, torch.device("cpu"), nccl=nccl)
    sender.connect(sender.unique_id(), 3, timeout_s=5)
    tensor = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    sender.broadcast(tensor)
    sender.wait(timeout_s=5)
    init, reduce, sent = nccl.calls
    assert init == ("init", 3, b"u" * 128, 0)
    # One element of float32, as vLLM's workers issue it after they joined.
    assert (reduce[0], *reduce[3:]) == ("allReduce", 1, 7, 0, queue.pointer)
    pointer = tensor.data_ptr()
    assert sent == ("broadcast", pointer, pointer, 12, 1, 0, queue.pointer)
    with pytest.raises(ValueError, match="not contiguous"):
        sender.broadcast(tensor.T)
    nccl.error = "remote process exited"
    sender.broadcast(tensor)
    with pytest.raises(BroadcastFailedError, match="remote process exited"):
        sender.wait(timeout_s=5)
    assert nccl.calls[-1] == ("abort",)
    with pytest.raises(BroadcastFailedError, match="connect first"):
        sender.broadcast(tensor)


def test_a_group_whose_workers_do_not_come_is_given_up() -> None:
    nccl = RecordingNccl()
    sender = NcclSender(FakeQueue(), torch.device("cpu"), nccl=nccl)
    nccl.comes.clear()
    with pytest.raises(BroadcastFailedError, match="could not be joined"):
        sender.connect(sender.unique_id(), 2, timeout_s=0.2)
    threading.Timer(0.2, sender.abort).start()
    started = time.monotonic()
    with pytest.raises(BroadcastFailedError, match="could not be joined"):
        sender.connect(sender.unique_id(), 2, timeout_s=30)
    assert time.monotonic() - started < 5
    nccl.comes.set()
