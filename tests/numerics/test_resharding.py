"""Training weights on their way to a sampler: the way is chosen together, and failures quarantine.

The sampler is `VllmBackend` over an engine that only takes weights, so that no vLLM is loaded.
"""

from __future__ import annotations

import os
import signal
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fake_nccl import FakeFabric, FakeNccl, FakeQueue
from support.planned_bytes import planned_received
from support.rank_processes import RankContext, RankPool
from support.sampler_shards import folder_weights
from support.services import segments_of
from support.tiny_models import write_tiny_llama
from support.weight_ranks import assert_equal, cut

from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, TrainLayout
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.rollout.model_folder import ExpectedWeights, WeightsStaleError
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.rollout.vllm.engine.held_engine import HeldEngine
from rolemesh.engine.rollout.vllm.sampler import VllmBackend
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, SamplingSpec, VllmSpec
from rolemesh.engine.train.trainer import Trainer
from rolemesh.engine.transport import selection
from rolemesh.engine.transport.base import Message, TransferFailedError
from rolemesh.engine.transport.rings import process_memory, shm_ring
from rolemesh.engine.transport.selection import make_transport
from rolemesh.engine.weights.resharding import Resharder

PAPER = HybridLayout(TrainLayout(tp=2, dp=2), GenerateLayout(tp=1))
"""1-2-2 to 1-1-2-2."""
ZERO = HybridLayout(TrainLayout(tp=2, dp=2, fsdp=2), GenerateLayout(tp=2))
CUT_ROWS = HybridLayout(TrainLayout(dp=4, cp=2, fsdp=2))
WAIT_S = 60.0
SHORT_S = 2.0


class WeightTaker:
    """The part of vLLM's engine that an update uses."""

    def __init__(self) -> None:
        self.held: dict[str, torch.Tensor] = {}
        self.refused = ""
        """The tensor at which it fails."""
        self.fatal = ""
        """The tensor at which its process is killed."""

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> None:
        if method != "update_weights":
            return
        for name, tensor in args[0]["weights"]:
            if name == self.fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            if name == self.refused:
                raise WeightsStaleError(f"no room for {name}")
            self.held[name] = tensor

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return True


def make_sampler() -> tuple[VllmBackend, WeightTaker]:
    """A back end as its constructor leaves it, but without vLLM."""
    backend, engine = VllmBackend.__new__(VllmBackend), WeightTaker()
    vars(backend).update(
        policy_version=-1,
        _spec=VllmSpec(dtype="float32"),
        _expected=ExpectedWeights({}, {}),
        _stale_reason="no weights were sent yet",
        _is_generating=False,
        _held=HeldEngine(engine, world_is_ours=True, settings={}),
    )
    return backend, engine


def make_trainer(folder: Path, mesh: RankMesh) -> tuple[Trainer, CausalLm]:
    """The trainer cuts its model over fsdp ranks, which the model alone does not."""
    spec = ModelSpec(path=folder, compute_dtype="float32")
    trainer = Trainer.policy(spec, OptimizerSpec(), mesh=mesh)
    assert isinstance(trainer.model, CausalLm)
    return trainer, trainer.model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("reshard") / "model", tied=True)


# --- delivery -----------------------------------------------------------------------------


def deliver_twice(at: RankContext, folder: Path, layout: HybridLayout) -> tuple[str, list[int]]:
    """Name of the transport, and bytes: planned, received in two runs, sent in the last."""
    with at.connect(layout) as mesh:
        trainer, policy = make_trainer(folder, mesh)
        backend, engine = make_sampler()
        resharder = Resharder(policy, "float32")
        counted = [planned_received(resharder.plan, at.rank), resharder.received_bytes]
        for version in (1, 2):
            weights = dict(trainer.named_weights())
            backend.update_shard(resharder.run(weights, policy_version=version), version)
            counted.append(resharder.received_bytes)
            assert backend.policy_version == version
        counted.append(resharder.sent_bytes)
        expected = cut(resharder.plan.target, at.rank, folder_weights(folder))
        assert_equal(engine.held, expected)
        name = resharder.transport.name
        resharder.close()
        return name, counted


@pytest.mark.parametrize(
    "layout",
    [PAPER, ZERO, CUT_ROWS],
    ids=["1-2-2 to 1-1-2-2", "fsdp to tp 2", "ranks that cut rows"],
)
def test_the_sampler_holds_the_trainers_weights_and_each_run_counts_its_own_bytes(
    layout: HybridLayout, rank_pool: RankPool, folder: Path
) -> None:
    results = rank_pool.run(deliver_twice, 4, folder, layout)
    assert {name for name, _ in results} == {"process memory"}
    for _, (planned, before, first, second, _) in results:
        assert before == 0
        assert first == second == planned > 0
    assert sum(counted[4] for _, counted in results) == sum(counted[0] for _, counted in results)


# --- a failure on the way -----------------------------------------------------------------


@dataclass
class Survivor:
    """What a rank saw after a failed update."""

    error: str
    policy_version: int
    refusals: list[str] = field(default_factory=list)
    """Of a generation, and of a further update over the broken transport."""
    num_held: int = 0
    num_due: int = 0


def lose_an_update(at: RankContext, folder: Path, layout: HybridLayout, event: str) -> Survivor:
    """An update that works, and one at which something happens to rank 3."""
    with at.connect(layout, timeout_s=WAIT_S) as mesh:
        trainer, policy = make_trainer(folder, mesh)
        backend, engine = make_sampler()
        resharder = Resharder(policy, "float32", timeout_s=WAIT_S)
        weights = dict(trainer.named_weights())
        backend.update_shard(resharder.run(weights, policy_version=1), 1)
        order = list(engine.held)
        assert backend.policy_version == 1
        engine.held.clear()
        if at.rank == 3:
            if event == "killed at its first":
                engine.fatal = order[0]
            elif event == "killed at its last":
                engine.fatal = order[-1]
            else:
                engine.refused = order[-1]
        kind = WeightsStaleError if engine.refused else TransferFailedError
        with pytest.raises(kind) as caught:
            backend.update_shard(resharder.run(weights, policy_version=2), 2)
        survivor = Survivor(str(caught.value), backend.policy_version)
        survivor.num_held, survivor.num_due = len(engine.held), len(order)
        request = RolloutRequest(row=0, prompt_tokens=[5], seed=0)
        with pytest.raises(WeightsStaleError) as refused:
            backend.generate([request], SamplingSpec())
        with pytest.raises(TransferFailedError) as again:
            backend.update_shard(resharder.run(weights, policy_version=3), 3)
        survivor.refusals = [str(refused.value), str(again.value)]
        if not engine.refused:
            assert caught.value.seconds < WAIT_S / 2
        resharder.close()
        return survivor


@pytest.mark.parametrize("event", ["killed at its first", "killed at its last"])
def test_a_killed_rank_quarantines_every_surviving_sampler(
    event: str, rank_pool: RankPool, folder: Path
) -> None:
    outcomes = rank_pool.outcomes(lose_an_update, 4, folder, PAPER, event)
    assert "died with exit code -9" in str(outcomes[3].failure)
    survivors = [outcome.value for outcome in outcomes[:3]]
    assert all(outcome.failure is None for outcome in outcomes[:3]), outcomes
    for survivor in survivors:
        assert_quarantined(survivor)
    # Whoever notices first gives up, and the rest may see that first: one names the dead rank.
    assert any("with rank 3" in survivor.error for survivor in survivors), survivors
    if event == "killed at its last":
        # All that they lacked had arrived; that rank 3 has nothing is reason enough.
        assert all(survivor.num_held == survivor.num_due for survivor in survivors)


def test_a_sampler_that_refuses_its_part_quarantines_all_at_once(
    rank_pool: RankPool, folder: Path
) -> None:
    outcomes = rank_pool.outcomes(lose_an_update, 4, folder, PAPER, "refuses its last")
    assert all(outcome.failure is None for outcome in outcomes), outcomes
    for outcome in outcomes:
        assert_quarantined(outcome.value)
    assert "no room for" in outcomes[3].value.refusals[0]


def assert_quarantined(survivor: Survivor) -> None:
    assert survivor.policy_version == -1
    refused, again = survivor.refusals
    assert f"the update to policy_version 2 failed: {survivor.error}" in refused
    assert "the transport failed before" in again


def meet_late(at: RankContext, folder: Path, layout: HybridLayout) -> str:
    """Rank 1 does not come to the transfer; it stays until rank 0 has given up."""
    with at.connect(layout, timeout_s=WAIT_S) as mesh:
        trainer, policy = make_trainer(folder, mesh)
        backend, _ = make_sampler()
        resharder = Resharder(policy, "float32", timeout_s=SHORT_S)
        store = at.store("end")
        if at.rank == 1:
            store.wait(["over"])
            resharder.close()
            return ""
        weights = dict(trainer.named_weights())
        with pytest.raises(TransferFailedError) as caught:
            backend.update_shard(resharder.run(weights, policy_version=1), 1)
        store.set("over", "yes")
        assert backend.policy_version == -1
        assert (caught.value.peer, caught.value.transport) == (1, "process memory")
        assert caught.value.seconds >= SHORT_S
        return str(caught.value)


def test_a_rank_that_does_not_come_is_named_with_the_seconds(
    rank_pool: RankPool, folder: Path
) -> None:
    layout = HybridLayout(TrainLayout(tp=2), GenerateLayout(tp=1))
    message = rank_pool.run(meet_late, 2, folder, layout)[0]
    assert message.startswith(f"rank 0 waited {SHORT_S:.1f} s for the header")
    assert "with rank 1 over process memory: it did not do its part in time" in message


# --- the choice of a way ------------------------------------------------------------------


def choose_in_trouble(at: RankContext, trouble: str) -> tuple[str, list[str]]:
    """The transport that comes of it when rank 1 cannot use memory of others, and what is left."""

    def full(num_bytes: int) -> Any:
        raise OSError(28, "No space left on device")

    def forbidden(*runs: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    def absent(self: Any, peer: int, handle: str) -> None:
        raise FileNotFoundError(2, "No such file or directory", handle)

    with pytest.MonkeyPatch.context() as patch, at.connect(HybridLayout(TrainLayout(dp=3))) as mesh:
        if at.rank == 1 and trouble == "full":
            patch.setattr(shm_ring.Segment, "create", staticmethod(full))
        elif at.rank == 1 and trouble == "unreachable":
            patch.setattr(shm_ring.HostSlots, "open", absent)
            patch.setattr(process_memory.MemorySlots, "open", absent)
        elif at.rank == 1 and trouble == "forbidden":
            patch.setattr(process_memory, "_read", forbidden)
        with make_transport(mesh, torch.device("cpu"), timeout_s=WAIT_S) as transport:
            # Gloo's ranks connect in turns: one that closes at once may end those of the others.
            dist.barrier(mesh.world.process_group)
            name = transport.name
    return name, segments_of(os.getpid())


@pytest.mark.parametrize(
    ("trouble", "taken"),
    [
        ("full", "gloo"),
        ("unreachable", "gloo"),
        ("forbidden", "shared memory"),
        ("", "process memory"),
    ],
)
def test_all_ranks_take_the_best_way_that_each_of_them_can(
    trouble: str, taken: str, rank_pool: RankPool
) -> None:
    assert rank_pool.run(choose_in_trouble, 3, trouble) == [(taken, [])] * 3


def choose_on_gpus(at: RankContext, cupy: str) -> tuple[str, list[str]]:
    """The way between ranks that take themselves for ranks on two GPUs, and why not another.

    What they exchange lies on the CPU: it must arrive all the same.
    """
    told = selection.Surroundings(
        device="cuda", uuid=f"GPU-{at.rank}", host="a", nccl_shares_devices=False
    )
    warnings: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection.Surroundings, "of", lambda device: told)
        patch.setattr(selection, "CudaQueue", lambda device: FakeQueue())
        patch.setattr(selection._LOG, "warning", lambda text, *of: warnings.append(text % of))
        if cupy == "without libnccl on rank 1":
            there: Any = FakeNccl(FakeFabric())
            there.available = at.rank == 0
            patch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
            patch.setitem(sys.modules, "cupy.cuda", types.ModuleType("cupy.cuda"))
            patch.setitem(sys.modules, "cupy.cuda.nccl", there)
        with (
            at.connect(HybridLayout(TrainLayout(dp=2))) as mesh,
            make_transport(mesh, torch.device("cuda", 0), timeout_s=WAIT_S) as transport,
        ):
            ours = torch.full((5,), at.rank, dtype=torch.uint8)
            theirs = torch.full((5,), 9, dtype=torch.uint8)
            peer = 1 - at.rank
            transport.exchange([Message(peer, ours)], [Message(peer, theirs)]).wait(WAIT_S)
            assert theirs.tolist() == [peer] * 5
            return transport.name, warnings


@pytest.mark.parametrize("cupy", ["not installed", "without libnccl on rank 1"])
def test_gpus_without_cupys_nccl_on_some_rank_fall_back_on_all(
    cupy: str, rank_pool: RankPool
) -> None:
    """A rank that began with NCCL alone would wait in it for ever."""
    missing = {
        "not installed": "rank 0: cupy's NCCL is not available",
        "without libnccl on rank 1": "rank 1: cupy finds no libnccl",
    }
    (name, warnings), other = rank_pool.run(choose_on_gpus, 2, cupy)
    assert (name, warnings) == other
    # This torch is the build for CPUs, so that torch's own NCCL is left as well.
    assert name == "gloo through host memory"
    ours, torchs = warnings
    assert f"NCCL cannot be used between the ranks: {missing[cupy]}" in ours
    assert "install rolemesh[gpu]" in ours
    assert "torch's NCCL cannot be used" in torchs
    assert "built without NCCL" in torchs
