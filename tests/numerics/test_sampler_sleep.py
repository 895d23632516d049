"""A sampler sleeps while its actor trains, and wakes in the order that leaves the most room."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.fake_cuda import FakeCuda
from support.rank_processes import RankContext, RankPool
from support.tiny_models import write_tiny_llama
from support.updates import update_whole
from torch.distributed.device_mesh import DeviceMesh

from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.parallel.data_parallel import cut_over_data
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.rollout.base import RolloutBackend
from rolemesh.engine.rollout.hf.sampler import HfBackend
from rolemesh.engine.rollout.model_folder import WeightsStaleError
from rolemesh.engine.rollout.requests import LaterRequests, RolloutRequest, RolloutTrajectory
from rolemesh.engine.rollout.vllm.engine import ranks as vllm_ranks
from rolemesh.engine.rollout.vllm.engine.held_engine import HeldEngine
from rolemesh.engine.rollout.vllm.engine.process import has_expandable_segments
from rolemesh.engine.rollout.vllm.engine.ranks import check_allocator, engine_start, launched_rank
from rolemesh.engine.rollout.vllm.sampler import VllmBackend
from rolemesh.engine.specs import ActorSpec, HfSpec, ModelSpec, SamplingSpec, SftLossSpec, VllmSpec
from rolemesh.engine.train.trainer import Trainer
from rolemesh.services.actor import servicers
from rolemesh.services.actor.servicers import ActorRole
from rolemesh.services.runtime.servicers.asked_prompts import AskedPrompts, asked_prompts
from rolemesh.v1 import rollout_pb2

DATA = {"type": "reasoning_gym", "task": "chain_sum", "train_size": 8, "held_out_size": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("sleep") / "model")


# --- the actor ----------------------------------------------------------------------------


class SleepySampler(RolloutBackend):
    """Samples with transformers, and sleeps as vLLM does: its weights are gone then."""

    yields_to_training = True

    def __init__(self, spec: HfSpec, folder: Path, log: list[str]) -> None:
        super().__init__(spec, folder)
        self._inner = HfBackend(spec, folder)
        self._log = log
        self._is_asleep = False

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        sampling: SamplingSpec,
        later: LaterRequests | None = None,
    ) -> Iterator[RolloutTrajectory]:
        self._log.append("generate")
        return self._inner.generate(requests, sampling, later)

    def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int
    ) -> None:
        assert not self._is_asleep
        self._log.append(f"weights {policy_version}")
        with self._update(policy_version):
            self._inner.update_weights(weights, policy_version)

    def weight_checksums(self) -> Mapping[str, str]:
        return self._inner.weight_checksums()

    def sleep(self) -> int:
        if not self._is_asleep:
            self._log.append("sleep")
            self._is_asleep = True
            self._hold_nothing("it slept")
        return 0

    def wake(self) -> int:
        if self._is_asleep:
            self._log.append("wake")
            self._is_asleep = False
        return 0

    def close(self) -> None:
        self._inner.close()


def test_the_sampler_sleeps_from_the_trainers_first_pass_to_its_next_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    monkeypatch.setattr(
        servicers,
        "make_backend",
        lambda spec, path, **_: SleepySampler(spec, path, log),
    )
    optim_step = Trainer.optim_step
    monkeypatch.setattr(
        Trainer, "optim_step", lambda *args: (log.append("optim_step"), optim_step(*args))[1]
    )
    role = ActorRole()
    spec = ActorSpec.model_validate(
        {
            "model": {"path": folder, "compute_dtype": "float32"},
            "optimizer": {"learning_rate": 1e-3},
            "data": DATA,
            "rollout": {"type": "hf", "max_model_len": 128},
        }
    )
    role.initialize(spec, 0, lambda stage, done, total: None, RankMesh.single())
    sampling = SamplingSpec(samples_per_prompt=2, max_new_tokens=3)

    def step(number: int) -> None:
        role.bring_weights()
        asked = first_prompts(count=2)
        batch = role.generate(
            asked,
            sampling,
            number,
            lambda stage, done, total: None,
            lineage=0,
            only=range(4),
        )
        role.trainer.compute_logprobs(batch, temperature=1.0)
        update_whole(role.trainer, batch, SftLossSpec(), epochs=1, mini_batch_rows=2, seed=0)

    step(0)
    step(1)
    # A generation after another without a pass between them leaves it awake.
    role.bring_weights()
    role.bring_weights()
    # Between roles it sleeps once, and waking the role takes no memory for it.
    role.sleep()
    role.sleep()
    role.wake()
    role.close()
    a_step = ["generate", "sleep", "optim_step", "optim_step"]
    assert log == [
        # The trainer scores the row by which the sampler is checked, before there are weights.
        *("sleep", "wake", "weights 0", *a_step),
        *("wake", "weights 2", *a_step),
        *("wake", "weights 4", "sleep"),
    ]


def first_prompts(count: int) -> AskedPrompts:
    """The first prompts of the training set."""
    request = rollout_pb2.GenerateRequest(
        prompts=rollout_pb2.PromptSlice(split=rollout_pb2.SPLIT_TRAIN, start=0, count=count)
    )
    return asked_prompts(request, 2)


# --- vLLM ---------------------------------------------------------------------------------


class Engine:
    """The part of vLLM's engine that sleeps; weights and cache take memory of one GPU."""

    BYTES: ClassVar = {"weights": 5 << 30, "kv_cache": 40 << 30}

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.awake: set[str] = set()
        self.has_room = True
        self.wake_up()

    def sleep(self, level: int) -> None:
        assert level == 2
        for tag in sorted(self.awake):
            self.cuda.used_bytes[1] -= self.BYTES[tag]
        self.awake.clear()
        # As vLLM's allocator does.
        torch.cuda.empty_cache()
        self.cuda.events.append("asleep")

    def wake_up(self, tags: list[str] | None = None) -> None:
        if not self.has_room:
            raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:163")
        for tag in tags or sorted(set(self.BYTES) - self.awake):
            assert tag not in self.awake
            self.cuda.used_bytes[1] += self.BYTES[tag]
            self.awake.add(tag)
            self.cuda.events.append(f"wake {tag}")

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> None:
        assert "weights" in self.awake
        self.cuda.events.append(method)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        assert "kv_cache" in self.awake
        return True


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    found = FakeCuda(monkeypatch, num_devices=2, rank=1)
    torch.cuda.set_device(1)
    return found


@pytest.fixture
def backend(cuda: FakeCuda) -> VllmBackend:
    """As its constructor leaves it, over an engine that keeps account of memory."""
    made = VllmBackend.__new__(VllmBackend)
    vars(made).update(
        policy_version=3,
        yields_to_training=True,
        _device=torch.device("cuda", 1),
        _spec=VllmSpec(dtype="float32"),
        _held=HeldEngine(Engine(cuda), world_is_ours=True, settings={}),
    )
    cuda.events.clear()
    return made


def test_the_caches_memory_comes_after_the_weights_have(
    cuda: FakeCuda, backend: VllmBackend
) -> None:
    cuda.cached_bytes[1] = 7 << 30
    # What the trainer had left in torch's cache is not of vLLM's freeing.
    assert backend.sleep() == sum(Engine.BYTES.values())
    assert torch.cuda.mem_get_info(1)[0] == torch.cuda.mem_get_info(1)[1]
    assert backend.sleep() == 0
    with pytest.raises(WeightsStaleError, match="slept and was sent no weights"):
        backend.weight_checksums()
    assert backend.wake() == Engine.BYTES["weights"]
    assert backend.wake() == 0
    backend.update_shard(iter(()), 4)
    assert cuda.events == [
        *("empty_cache", "empty_cache", "asleep", "wake weights"),
        *("start_weight_update", "update_weights", "finish_weight_update", "wake kv_cache"),
    ]
    assert {index for _, index in cuda.asked} == {1}
    assert backend.policy_version == 4


def test_a_sleeping_engine_wakes_to_be_ended(
    cuda: FakeCuda, backend: VllmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[set[str]] = []
    monkeypatch.setattr(
        "rolemesh.engine.rollout.vllm.engine.held_engine.end_engine",
        lambda engine, *, world_is_ours: ended.append(set(engine.awake)),
    )
    backend.sleep()
    backend.close()
    assert ended == [{"weights", "kv_cache"}]
    check_allocator()


def test_an_engine_that_had_no_room_to_wake_is_ended_and_no_other_is_made(
    cuda: FakeCuda, backend: VllmBackend, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_ranks, "_spoilt_by", "")
    monkeypatch.setattr(
        "rolemesh.engine.rollout.vllm.engine.held_engine.end_engine", lambda *_, **__: None
    )
    backend.sleep()
    backend.engine.has_room = False
    backend.close()
    with pytest.raises(RuntimeError, match=r"out of memory.*start the service again"):
        VllmBackend(VllmSpec(), folder)


def test_vllm_is_told_the_ranks_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with launched_rank(1, 4, torch.device("cuda", 3)):
        assert (os.environ["RANK"], os.environ["LOCAL_RANK"]) == ("1", "3")
    with (
        pytest.raises(ValueError, match="device is cuda:1, but an engine of one rank takes the"),
        engine_start(RankMesh.single(), torch.device("cuda", 1)),
    ):
        pass


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1,expandable_segments:True"}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:true"}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, False),
    ],
)
def test_expandable_segments_are_found(environment: dict[str, str], expected: bool) -> None:
    assert has_expandable_segments(environment) is expected


# --- FSDP2 --------------------------------------------------------------------------------


class _StopHere(Exception):
    """FSDP2 would now ask for the current device."""


def selected_for_the_cut(at: RankContext, folder: Path) -> int:
    """The current device where FSDP2 begins, on a thread that had selected none."""
    with (
        at.connect(HybridLayout(TrainLayout(dp=2, fsdp=2))) as mesh,
        pytest.MonkeyPatch.context() as patch,
    ):
        stage = CausalLm(ModelSpec(path=folder, compute_dtype="float32"))
        FakeCuda(patch, num_devices=2)

        def look(*_: Any, **__: Any) -> Any:
            raise _StopHere

        patch.setattr(DeviceMesh, "from_group", look)
        with pytest.raises(_StopHere):
            cut_over_data(stage, mesh, torch.device("cuda", at.rank))
        return torch.cuda.current_device()


def test_fsdp_cuts_on_the_ranks_own_gpu(rank_pool: RankPool, folder: Path) -> None:
    assert rank_pool.run(selected_for_the_cut, 2, folder) == [0, 1]
