"""vLLM as several ranks: each is given its own part of the weights and samples with the others.

Engines are loaded in processes of their own, a few for the whole file: a load takes many seconds,
and four processes at once take minutes on two cores.
"""

from __future__ import annotations

import importlib
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.in_flight_checks import scores_by_version
from support.rank_processes import RankContext, RankPool
from support.rollout_checks import (
    load_trainer_model,
    logprob_differences,
    make_requests,
    rounded_copy,
    set_stop_tokens,
    tokens_by_row,
    trained_copy,
    versions_of,
)
from support.sampler_in_flight import (
    ARRIVALS,
    NEW,
    OLD,
    InFlight,
    continuations,
    in_flight_story,
    other_weights,
)
from support.sampler_shards import folder_weights, rank_shard, shard_tensor, shard_tensors
from support.tiny_models import write_tiny_llama

from rolemesh.engine.hardware.devices import give_back_memory
from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, LayoutError, TrainLayout
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.rollout.model_folder import WeightsStaleError
from rolemesh.engine.rollout.requests import RolloutRequest, RolloutTrajectory
from rolemesh.engine.rollout.vllm import sampler as vllm
from rolemesh.engine.rollout.vllm.sampler import VllmBackend
from rolemesh.engine.specs import HfSpec, SamplingSpec, VllmSpec
from rolemesh.engine.transport.slots.shm_directory import SHM_DIRECTORY

LOGPROB_BOUND = 5e-4
"""Mean abs difference promised between sampler and trainer, for both types. Measured: 1e-6 with two
slices, as with one; a missed update of this model's weights gives 1."""
SPEC = VllmSpec(dtype="float32", max_model_len=64, max_num_seqs=16)
GREEDY = SamplingSpec(greedy=True, max_new_tokens=24)
SAMPLED = SamplingSpec(max_new_tokens=24)
STOP_TOKENS = (2, *range(300, 400))
"""A fifth of the vocabulary, so that rows end at different steps."""
VOCAB_SIZE = 500
"""Padded to 512: with two slices the last one has 244 real rows of 256."""
LOAD_TIMEOUT_S = 400.0
"""For several loads of vLLM at once on a machine that does other work."""


@dataclass
class Story:
    """What a rank saw."""

    greedy: list[RolloutTrajectory]
    sampled: list[RolloutTrajectory]
    checksums: dict[str, str]
    """After its own parts were placed."""
    groups: tuple[int, ...] = ()
    """Torch ranks of vLLM's tensor group."""
    whole_checksums: dict[str, str] = field(default_factory=dict)
    """After vLLM's own loaders cut the whole weights."""
    loaded_checksums: dict[str, str] = field(default_factory=dict)
    """Of another engine, which read the folder itself."""
    loaded_greedy: list[RolloutTrajectory] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """policy_version after each refusal, and after the update that follows."""
    files: list[str] = field(default_factory=list)
    """Left in shared memory while the engine runs."""
    environment: dict[str, str | None] = field(default_factory=dict)
    in_flight: InFlight | None = None
    continued: list[RolloutTrajectory] = field(default_factory=list)
    """The other engine's, of what each row had when weights came in flight."""


def prompts(num_rows: int, seed: int = 0) -> list[RolloutRequest]:
    """Uneven prompts within the vocabulary."""
    return [
        replace(request, prompt_tokens=[token % VOCAB_SIZE for token in request.prompt_tokens])
        for request in make_requests(num_rows, seed)
    ]


def shared_memory_files() -> list[str]:
    return sorted(path.name for path in SHM_DIRECTORY.iterdir() if "cpushm" in path.name)


def place(backend: VllmBackend, mesh: RankMesh, folder: Path, version: int) -> None:
    shard = rank_shard(folder, mesh.layout, mesh.rank)
    backend.update_shard(shard_tensors(shard, folder_weights(folder)), version)


def vllm_group() -> tuple[int, ...]:
    from vllm.distributed.parallel_state import get_tp_group

    return tuple(get_tp_group().ranks)


def whole_story(at: RankContext, folder: Path, layout: HybridLayout) -> Story:
    """All that two slices are asked for, with one load of ours and one of vLLM's.

    Nothing can be compiled.
    """
    with at.connect(layout) as mesh, without_compiler():
        backend = VllmBackend(SPEC, folder, mesh)
        files = shared_memory_files()
        environment = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        shard, weights = rank_shard(folder, layout, mesh.rank), folder_weights(folder)

        refusals, versions = [], []

        def refused(tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
            with pytest.raises(WeightsStaleError) as caught:
                backend.update_shard(tensors, 2)
            refusals.append(str(caught.value))
            versions.append(backend.policy_version)
            with pytest.raises(WeightsStaleError, match="update to policy_version 2 failed"):
                backend.generate(prompts(1), GREEDY)

        whole = {n: shard_tensor(shard, n, weights) for n in shard.shapes}
        name = "model.layers.1.self_attn.qkv_proj.weight"
        refused([pair for pair in whole.items() if pair[0] != name])
        refused([(n, t[:-1] if n == name else t) for n, t in whole.items()])
        refused([*whole.items(), (name, whole[name])])
        refused([("model.layers.0.self_attn.q_proj.weight", torch.zeros(64, 64))])

        place(backend, mesh, folder, 3)
        versions.append(backend.policy_version)
        story = Story(
            greedy=list(backend.generate(prompts(12), GREEDY)),
            sampled=list(backend.generate(prompts(12), SAMPLED)),
            checksums=dict(backend.weight_checksums()),
            groups=vllm_group(),
            refusals=refusals,
            versions=versions,
            files=files,
            environment=environment,
        )
        backend.update_weights(weights.items(), 4)
        story.whole_checksums = dict(backend.weight_checksums())
        told = in_flight_story(backend, mesh, folder, weights, prompts(12), GREEDY)
        story.in_flight = told
        backend.close()

        backend = VllmBackend(SPEC, folder, mesh, folder_version=5)
        story.loaded_checksums = dict(backend.weight_checksums())
        story.loaded_greedy = list(backend.generate(prompts(12), GREEDY))
        rest = continuations(prompts(12), told.taken, GREEDY.max_new_tokens)
        story.continued = list(backend.generate(rest, GREEDY))
        backend.close()
    return story


def without_compiler() -> AbstractContextManager[Any]:
    """What would be compiled fails, as on a machine without a compiler."""
    torch._dynamo.reset()  # What was compiled before would be there.
    return mock.patch(
        "torch._inductor.compile_fx.compile_fx", side_effect=RuntimeError("vLLM compiles")
    )


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


def makes_an_engine_too_late(at: RankContext, folder: Path) -> str:
    """What is said where vLLM's modules were imported before anything was settled."""
    from vllm.platforms import current_platform

    importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    with (
        mock.patch.object(type(current_platform), "simple_compile_backend", "inductor"),
        pytest.raises(RuntimeError) as caught,
    ):
        VllmBackend(SPEC, folder)
    return str(caught.value)


def chunk_prompts(chunk: int) -> list[RolloutRequest]:
    """What a replica is asked for."""
    return prompts(4 * (chunk + 1), seed=chunk)


def one_rank_greedy(at: RankContext, folder: Path) -> list[RolloutTrajectory]:
    backend = VllmBackend(SPEC, folder, folder_version=3)
    try:
        (model,) = backend.engine.apply_model(weakref.ref)
        return list(backend.generate(prompts(12), GREEDY))
    finally:
        backend.close()
        give_back_memory(torch.device("cpu"))
        # A second run of the process would find its memory taken.
        assert model() is None


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
    path = write_tiny_llama(
        tmp_path_factory.mktemp("ranks") / "model", tied=True, vocab_size=VOCAB_SIZE
    )
    set_stop_tokens(path, STOP_TOKENS)
    return path


@pytest.fixture(scope="module")
def vllm_pool() -> Iterator[RankPool]:
    # Not the session's pool: a process that has imported vLLM is two gigabytes larger.
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def two_slices(vllm_pool: RankPool, folder: Path) -> list[Story]:
    layout = HybridLayout(TrainLayout(tp=2), GenerateLayout(tp=2))
    return vllm_pool.run(whole_story, 2, folder, layout, timeout_s=LOAD_TIMEOUT_S)


def assert_same_trajectories(
    left: Sequence[RolloutTrajectory], right: Sequence[RolloutTrajectory]
) -> None:
    assert [t.row for t in left] == [t.row for t in right]
    assert tokens_by_row(left) == tokens_by_row(right)
    assert [list(t.logprobs) for t in left] == [list(t.logprobs) for t in right]


def test_both_slices_sample_the_same_tokens(two_slices: list[Story]) -> None:
    first, second = two_slices
    assert first.groups == second.groups == (0, 1)
    assert len(first.sampled) == 12
    assert_same_trajectories(first.sampled, second.sampled)
    assert_same_trajectories(first.greedy, second.greedy)


def test_sliced_logprobs_are_those_of_a_full_forward(two_slices: list[Story], folder: Path) -> None:
    model = load_trainer_model(folder)
    for story in two_slices:
        assert versions_of(story.sampled) == {3}
        differences = logprob_differences(model, prompts(12), story.sampled)
        assert differences.mean() < LOGPROB_BOUND


def test_slices_take_the_greedy_tokens_of_one_rank(
    two_slices: list[Story], vllm_pool: RankPool, folder: Path
) -> None:
    (alone,) = vllm_pool.run(one_rank_greedy, 1, folder, timeout_s=LOAD_TIMEOUT_S)
    for story in two_slices:
        assert tokens_by_row(story.greedy) == tokens_by_row(alone)
        assert tokens_by_row(story.loaded_greedy) == tokens_by_row(alone)


def test_placed_parts_are_what_vllm_cuts_and_what_it_loads_from_the_folder(
    two_slices: list[Story],
) -> None:
    for story in two_slices:
        assert story.checksums == story.whole_checksums
        assert story.checksums == story.loaded_checksums
    first, second = (story.checksums for story in two_slices)
    different = {name for name in first if first[name] != second[name]}
    # Norms are whole on every rank; everything else is cut.
    assert first.keys() == second.keys()
    assert {name for name in first if "norm" not in name} == different


def test_parts_that_do_not_fit_quarantine_the_engine_until_a_whole_update(
    two_slices: list[Story],
) -> None:
    name = "model.layers.1.self_attn.qkv_proj.weight"
    for story in two_slices:
        lacks, misshapen, repeated, unknown = story.refusals
        assert f"shard update lacks '{name}'" in lacks
        assert f"'{name}' with shape [127, 64], but this rank's is [128, 64]" in misshapen
        assert f"'{name}', which came before" in repeated
        assert "'model.layers.0.self_attn.q_proj.weight', which vLLM's model does not" in unknown
        assert story.versions == [-1, -1, -1, -1, 3]


def test_a_start_leaves_no_shared_memory_and_no_environment(two_slices: list[Story]) -> None:
    for story in two_slices:
        assert story.files == []
        assert set(story.environment.values()) == {None}


def in_flight(story: Story) -> InFlight:
    assert story.in_flight is not None
    return story.in_flight


def test_slices_take_weights_in_flight_before_one_step(
    two_slices: list[Story], folder: Path
) -> None:
    first, second = (in_flight(story) for story in two_slices)
    assert_same_trajectories(first.taken, second.taken)
    models = {NEW: load_trainer_model(folder)}
    models[OLD] = trained_copy(models[NEW], other_weights(folder_weights(folder)).items())
    requests = {request.row: request for request in prompts(12)}
    for one in first.taken:
        tokens, versions = one.completion_tokens, list(one.policy_versions)
        # Rank 0 had the weights five steps before, and waited for rank 1.
        assert versions == [OLD if at < max(ARRIVALS) else NEW for at in range(len(tokens))]
        prompt = requests[one.row].prompt_tokens
        scores = scores_by_version(models, prompt, tokens, versions)
        assert list(one.logprobs) == pytest.approx(scores.tolist(), abs=LOGPROB_BOUND)


def test_what_follows_an_update_in_flight_is_what_a_fresh_engine_continues_with(
    two_slices: list[Story],
) -> None:
    for story in two_slices:
        taken = tokens_by_row(in_flight(story).taken)
        continued = tokens_by_row(story.continued)
        # Of twelve rows; the others had met a stop token before.
        assert len(continued) > 2
        for row, tokens in continued.items():
            assert list(taken[row][max(ARRIVALS) :]) == list(tokens)


def test_weights_that_one_slice_cannot_take_are_sampled_with_by_none(
    two_slices: list[Story],
) -> None:
    first, second = (in_flight(story) for story in two_slices)
    gone = "the publisher's memory is gone"
    assert f"rank 1 could not take its weights, so no rank samples with them: {gone}" in (
        first.broken
    )
    assert first.errors[0] in first.broken
    assert second.errors[0] == gone
    for one, story in zip((first, second), two_slices, strict=True):
        assert "update in the middle of the generation failed" in one.broken
        assert one.version_after == -1
        assert "update to policy_version 12 failed" in one.refusals[0]
        # The next whole update heals both.
        assert versions_of(one.healed) == {13}
        assert tokens_by_row(one.healed) == tokens_by_row(story.loaded_greedy)


def test_weights_that_one_slice_cannot_fetch_are_taken_by_none(two_slices: list[Story]) -> None:
    first, second = (in_flight(story) for story in two_slices)
    assert "rank 1 could not take its weights, so the update has failed" in first.errors[1]
    assert second.errors[1] == "the publisher does not answer"
    for one in (first, second):
        assert versions_of(one.kept) == {13}
        assert tokens_by_row(one.kept) == tokens_by_row(one.healed)
        assert "the sampler still holds version 13" in one.refusals[1]


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


def test_modules_that_vllm_has_compiled_too_early_are_named(
    vllm_pool: RankPool, folder: Path
) -> None:
    (text,) = vllm_pool.run(makes_an_engine_too_late, 1, folder)
    assert "vllm.model_executor.layers.vocab_parallel_embedding was imported before" in text
    assert "call leave_uncompiled of rolemesh.engine.rollout.vllm.engine.process first" in text


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


def test_pipelines_of_vllm_are_refused() -> None:
    alone = RankMesh.single()
    mesh = replace(alone, layout=HybridLayout(TrainLayout(pp=2), GenerateLayout(pp=2)))
    with pytest.raises(LayoutError, match=r"generate\.pp is 2: .* give generate\.pp 1"):
        VllmBackend(SPEC, Path("nowhere"), mesh)


@pytest.mark.parametrize("generate", [GenerateLayout(tp=2), GenerateLayout(pp=2)])
def test_hf_samples_with_whole_models_only(generate: GenerateLayout) -> None:
    mesh = replace(RankMesh.single(), layout=HybridLayout(TrainLayout(tp=2, pp=2), generate))
    with pytest.raises(LayoutError, match="rollout type hf samples with whole models"):
        make_backend(HfSpec(), Path("nowhere"), mesh)
