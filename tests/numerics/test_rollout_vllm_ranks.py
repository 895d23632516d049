"""vLLM as several ranks: each is given its own part of the weights and samples with the others.

Engines are loaded in processes of their own, a few for the whole file: a load takes many seconds,
and four processes at once take minutes on two cores. What loads others is in
test_rollout_vllm_layouts.py.
"""

from __future__ import annotations

import importlib
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.in_flight_checks import scores_by_version
from support.rank_processes import RankContext, RankPool
from support.rollout_checks import (
    load_trainer_model,
    logprob_differences,
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
from support.sampler_shards import folder_weights, rank_shard, shard_tensor
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

from rolemesh.engine.hardware.devices import give_back_memory
from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, LayoutError, TrainLayout
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.rollout.model_folder import WeightsStaleError
from rolemesh.engine.rollout.requests import RolloutTrajectory
from rolemesh.engine.rollout.vllm.sampler import VllmBackend
from rolemesh.engine.specs import HfSpec
from rolemesh.engine.transport.slots.shm_directory import SHM_DIRECTORY


def shared_memory_files() -> list[str]:
    return sorted(path.name for path in SHM_DIRECTORY.iterdir() if "cpushm" in path.name)


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stopping_model(tmp_path_factory.mktemp("ranks") / "model")


@pytest.fixture(scope="module")
def vllm_pool() -> Iterator[RankPool]:
    # Not the session's pool: a process that has imported vLLM is two gigabytes larger.
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def two_slices(vllm_pool: RankPool, folder: Path) -> list[Story]:
    layout = HybridLayout(TrainLayout(tp=2), GenerateLayout(tp=2))
    return vllm_pool.run(whole_story, 2, folder, layout, timeout_s=LOAD_TIMEOUT_S)


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


def test_modules_that_vllm_has_compiled_too_early_are_named(
    vllm_pool: RankPool, folder: Path
) -> None:
    (text,) = vllm_pool.run(makes_an_engine_too_late, 1, folder)
    assert "vllm.model_executor.layers.vocab_parallel_embedding was imported before" in text
    assert "call leave_uncompiled of rolemesh.engine.rollout.vllm.engine.process first" in text


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
