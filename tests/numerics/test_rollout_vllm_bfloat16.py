"""vLLM in the trainer's process, bfloat16, untied embeddings: weights are rounded, nothing else.

And what the completions of a prompt share, which is the same with other types.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.rollout.vllm.sampler import VllmBackend
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


def _same_prompt(num_rows: int) -> list[RolloutRequest]:
    """Rows of one prompt of 40 tokens, with seeds of their own."""
    prompt = tuple(3 + index % 50 for index in range(40))
    return [
        RolloutRequest(row=row, prompt_tokens=prompt, seed=100 + row) for row in range(num_rows)
    ]


def test_completions_share_their_prompt_within_a_generation(
    backend: VllmBackend, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = backend.engine.engine_core.engine_core.scheduler
    schedule, computed = scheduler.schedule, []

    def counting(*arguments: Any, **options: Any) -> Any:
        output = schedule(*arguments, **options)
        computed.append(output.total_num_scheduled_tokens)
        return output

    monkeypatch.setattr(scheduler, "schedule", counting)
    requests, logprobs = _same_prompt(8), []
    backend.update_weights(model.named_parameters(), 9)
    for _ in range(2):
        computed.clear()
        trajectories = list(backend.generate(requests, SamplingSpec(max_new_tokens=1)))
        assert logprob_differences(rounded_copy(model), requests, trajectories).mean() < (
            LOGPROB_BOUND
        )
        # The first row's prompt; of the others the 8 tokens that are no whole block of 32. The
        # second generation finds nothing of the first: it has the bits of one in a new process.
        assert sum(computed) == 40 + 7 * 8
        logprobs.append({t.row: list(t.logprobs) for t in trajectories})
    assert logprobs[0] == logprobs[1]


def test_no_key_of_old_weights_outlives_them(backend: VllmBackend, model: PreTrainedModel) -> None:
    pool = backend.engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    backend.update_weights(model.named_parameters(), 10)
    list(backend.generate(_same_prompt(2), SamplingSpec(max_new_tokens=1)))
    assert len(pool.cached_block_hash_to_block) > 0
    backend.update_weights(model.named_parameters(), 11)
    assert len(pool.cached_block_hash_to_block) == 0
