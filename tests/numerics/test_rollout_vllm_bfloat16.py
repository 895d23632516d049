"""vLLM in the trainer's process, bfloat16, untied embeddings: weights are rounded, nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.rollout_checks import (
    load_trainer_model,
    logprob_differences,
    make_requests,
    perturb,
    rounded_copy,
    trainer_checksums,
)
from support.sampler_shards import rank_shard, shard_tensors
from support.tiny_models import write_tiny_llama
from transformers import PreTrainedModel

from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.rollout.vllm import VllmBackend
from rolemesh.engine.specs import SamplingSpec, VllmSpec

LOGPROB_BOUND = 5e-4
"""Mean abs difference promised between sampler and trainer. Measured 1e-6; the float32 model itself
is 0.01 away."""

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="on a GPU vLLM rounds activations too"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("vllm") / "model", tied=False, num_layers=4)


@pytest.fixture(scope="module")
def backend(folder: Path) -> Iterator[VllmBackend]:
    backend = make_backend(VllmSpec(dtype="bfloat16", max_model_len=64), folder)
    assert isinstance(backend, VllmBackend)
    yield backend
    backend.close()


@pytest.fixture
def model(folder: Path) -> PreTrainedModel:
    return load_trainer_model(folder)


def test_float32_weights_arrive_rounded_to_bfloat16_once(
    backend: VllmBackend, model: PreTrainedModel
) -> None:
    for version in range(3):
        backend.update_weights(model.named_parameters(), version)
        assert backend.weight_checksums() == trainer_checksums(rounded_copy(model), torch.float32)
        assert "lm_head.weight" in backend.weight_checksums()
        perturb(model, seed=version)


def test_placed_parts_are_rounded_as_whole_weights_are(
    backend: VllmBackend, model: PreTrainedModel, folder: Path
) -> None:
    perturb(model, seed=7)
    shard, weights = rank_shard(folder), dict(model.state_dict())
    backend.update_shard(shard_tensors(shard, weights), 3)
    assert backend.weight_checksums() == trainer_checksums(rounded_copy(model), torch.float32)
    requests, sampling = make_requests(8), SamplingSpec(max_new_tokens=24)
    placed = list(backend.generate(requests, sampling))
    backend.update_weights(model.named_parameters(), 4)
    loaded = list(backend.generate(requests, sampling))
    # Equal, not near: both come from the same packs.
    assert {t.row: list(t.logprobs) for t in placed} == {t.row: list(t.logprobs) for t in loaded}


def test_logprobs_are_those_of_the_rounded_weights_in_float32(
    backend: VllmBackend, model: PreTrainedModel
) -> None:
    requests, sampling = make_requests(16), SamplingSpec(max_new_tokens=40)
    for version in range(2):
        backend.update_weights(model.named_parameters(), version)
        trajectories = list(backend.generate(requests, sampling))
        differences = logprob_differences(rounded_copy(model), requests, trajectories)
        assert differences.mean() < LOGPROB_BOUND
        # Weights that were not rounded would show, and so would a missed update.
        assert logprob_differences(model, requests, trajectories).mean() > 10 * LOGPROB_BOUND
        perturb(model, seed=version)
        missed = logprob_differences(rounded_copy(model), requests, trajectories)
        assert missed.mean() > 100 * LOGPROB_BOUND
