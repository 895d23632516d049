"""vLLM as several ranks in further layouts and surroundings: each test loads engines of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.rank_processes import RankContext, RankPool
from support.rollout_checks import load_trainer_model, logprob_differences, rounded_copy
from support.sampler_shards import folder_weights
from support.vllm_ranks import (
    GREEDY,
    LOAD_TIMEOUT_S,
    LOGPROB_BOUND,
    SAMPLED,
    SPEC,
    Story,
    assert_same_trajectories,
    place,
    prompts,
    vllm_group,
    without_compiler,
    write_stopping_model,
)

from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, TrainLayout
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.rollout.vllm import sampler as vllm
from rolemesh.engine.rollout.vllm.sampler import VllmBackend
from rolemesh.engine.specs import VllmSpec


def short_story(
    at: RankContext, folder: Path, layout: HybridLayout, spec: VllmSpec = SPEC
) -> Story:
    """One load, parts placed, and each replica samples what only it was asked for.

    Where there are more ranks than the layout has, they are services of their own.
    """
    service, rank = divmod(at.rank, layout.world_size)
    store = at.store(f"service {service}")
    mesh = RankMesh.connect(layout, rank=rank, store=store, backend="gloo", timeout_s=120)
    try:
        backend = VllmBackend(spec, folder, mesh)
        place(backend, mesh, folder, 3)
        # A collective over all ranks would hang: replicas have different numbers of rows.
        requests = chunk_prompts(layout.chunk(rank))
        story = Story(
            greedy=list(backend.generate(requests, GREEDY)),
            sampled=list(backend.generate(requests, SAMPLED)),
            checksums=dict(backend.weight_checksums()),
            groups=vllm_group(),
        )
        backend.update_weights(folder_weights(folder).items(), 4)
        story.whole_checksums = dict(backend.weight_checksums())
        backend.close()
    finally:
        mesh.close()
    return story


def plain_story(at: RankContext, folder: Path, layout: HybridLayout) -> tuple[str, Story]:
    """The short story where vLLM has no collectives of its own, and nothing can be compiled.

    The first is so in its library for AVX2. The second is so in the whole story, too.

    Returns:
        Name of the module that vLLM adds and gathers with; the story.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.distributed.parallel_state import get_tp_group

    found: list[str] = []

    def check_groups(mesh: RankMesh) -> None:
        found.append(get_tp_group().device_communicator.dist_module.__name__)

    with (
        # Asked where the library has them.
        mock.patch.object(
            CpuCommunicator, "_all_group_ranks_share_shm_group_name", return_value=False
        ),
        mock.patch.object(vllm, "check_groups", check_groups),
        without_compiler(),
    ):
        story = short_story(at, folder, layout)
    return found[0], story


def chunk_prompts(chunk: int) -> list[RolloutRequest]:
    """What a replica is asked for."""
    return prompts(4 * (chunk + 1), seed=chunk)


def fails_then_starts(at: RankContext, folder: Path, layout: HybridLayout) -> list[float]:
    """A start that fails at its end, another one, and a collective of the trainer's."""

    def refuse(mesh: RankMesh) -> None:
        raise RuntimeError("vLLM's order of ranks has changed")

    with at.connect(layout) as mesh:
        check_groups, vllm.check_groups = vllm.check_groups, refuse
        try:
            with pytest.raises(RuntimeError, match="order of ranks has changed"):
                VllmBackend(SPEC, folder, mesh)
        finally:
            vllm.check_groups = check_groups
        VllmBackend(SPEC, folder, mesh, folder_version=0).close()
        value = torch.tensor([float(at.rank + 1)])
        dist.all_reduce(value, group=mesh.tp.process_group)
        return value.tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stopping_model(tmp_path_factory.mktemp("ranks") / "model")


@pytest.fixture(scope="module")
def vllm_pool() -> Iterator[RankPool]:
    # Not the session's pool: a process that has imported vLLM is two gigabytes larger.
    with RankPool(4) as pool:
        yield pool


def assert_replicas_sample(stories: Sequence[Story], folder: Path, layout: HybridLayout) -> None:
    """Each replica sampled its own rows as one sampler, with the folder's weights."""
    model = load_trainer_model(folder)
    numbers = layout.torch_ranks()
    for ranks in layout.tp_groups():
        first = stories[ranks[0]]
        for rank in ranks:
            assert stories[rank].groups == tuple(numbers[member] for member in ranks)
            assert stories[rank].checksums == stories[rank].whole_checksums
            assert_same_trajectories(stories[rank].greedy, first.greedy)
            assert_same_trajectories(stories[rank].sampled, first.sampled)
        requests = chunk_prompts(layout.chunk(ranks[0]))
        assert len(first.sampled) == len(requests)
        differences = logprob_differences(model, requests, first.sampled)
        assert differences.mean() < LOGPROB_BOUND


@pytest.mark.slow
def test_replicas_of_whole_models_sample_by_themselves(vllm_pool: RankPool, folder: Path) -> None:
    layout = HybridLayout(TrainLayout(tp=2), GenerateLayout(tp=1))
    stories = vllm_pool.run(short_story, 2, folder, layout, timeout_s=LOAD_TIMEOUT_S)
    assert [story.groups for story in stories] == [(0,), (1,)]
    assert_replicas_sample(stories, folder, layout)


@pytest.mark.slow
def test_vllm_takes_the_interval_groups_of_the_layout(vllm_pool: RankPool, folder: Path) -> None:
    layout = HybridLayout(TrainLayout(tp=4), GenerateLayout(tp=2))
    assert layout.tp_groups() == ((0, 2), (1, 3))
    stories = vllm_pool.run(short_story, 4, folder, layout, timeout_s=LOAD_TIMEOUT_S)
    assert_replicas_sample(stories, folder, layout)
    # The layout's ranks 0 and 2 are one sampler, not 0 and 1.
    assert len(stories[0].greedy) == len(stories[2].greedy) == 4
    assert len(stories[1].greedy) == len(stories[3].greedy) == 8
    assert stories[0].checksums == stories[1].checksums
    assert stories[0].checksums != stories[2].checksums


@pytest.mark.slow
def test_more_slices_than_key_value_heads_share_them(vllm_pool: RankPool, folder: Path) -> None:
    layout = HybridLayout(TrainLayout(tp=4), GenerateLayout(tp=4))
    stories = vllm_pool.run(short_story, 4, folder, layout, timeout_s=LOAD_TIMEOUT_S)
    assert_replicas_sample(stories, folder, layout)
    name = "model.layers.0.self_attn.k_proj.weight"
    held = [story.checksums[name] for story in stories]
    assert held[0] == held[1] != held[2] == held[3]


@pytest.mark.slow
def test_slices_need_neither_shared_memory_nor_a_compiler(
    vllm_pool: RankPool, folder: Path
) -> None:
    layout = HybridLayout(TrainLayout(tp=2), GenerateLayout(tp=2))
    told = vllm_pool.run(plain_story, 2, folder, layout, timeout_s=LOAD_TIMEOUT_S)
    assert [name for name, _ in told] == ["torch.distributed", "torch.distributed"]
    assert_replicas_sample([story for _, story in told], folder, layout)


@pytest.mark.slow
def test_two_services_start_at_once_on_one_host(vllm_pool: RankPool, folder: Path) -> None:
    layout = HybridLayout(TrainLayout(tp=2), GenerateLayout(tp=2))
    stories = vllm_pool.run(short_story, 4, folder, layout, timeout_s=LOAD_TIMEOUT_S)
    assert_replicas_sample(stories[:2], folder, layout)
    assert_replicas_sample(stories[2:], folder, layout)


@pytest.mark.slow
def test_two_slices_of_bfloat16_agree(vllm_pool: RankPool, folder: Path) -> None:
    layout = HybridLayout(TrainLayout(tp=2), GenerateLayout(tp=2))
    spec = SPEC.model_copy(update={"dtype": "bfloat16"})
    first, second = vllm_pool.run(short_story, 2, folder, layout, spec, timeout_s=LOAD_TIMEOUT_S)
    assert_same_trajectories(first.sampled, second.sampled)
    assert first.checksums == first.whole_checksums
    model = rounded_copy(load_trainer_model(folder))
    differences = logprob_differences(model, chunk_prompts(0), first.sampled)
    assert differences.mean() < LOGPROB_BOUND


@pytest.mark.slow
def test_a_failed_start_spoils_neither_the_next_nor_the_trainers_groups(
    vllm_pool: RankPool, folder: Path
) -> None:
    layout = HybridLayout(TrainLayout(tp=2), GenerateLayout(tp=2))
    sums = vllm_pool.run(fails_then_starts, 2, folder, layout, timeout_s=LOAD_TIMEOUT_S)
    assert sums == [[3.0], [3.0]]
