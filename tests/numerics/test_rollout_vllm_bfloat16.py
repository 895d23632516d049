"""vLLM in the trainer's process, bfloat16, untied embeddings: the cast on the way, and rounding."""

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
    trainer_checksums,
)
from support.sampler_shards import rank_shard, shard_tensors
from support.tiny_models import write_tiny_llama
from transformers import PreTrainedModel

from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.rollout.vllm import VllmBackend
from rolemesh.engine.specs import SamplingSpec, VllmSpec

BFLOAT16_LOGPROB = 3e-2
"""Mean abs difference from float32. This model's weights are seven times as wide as usual, and so
is its rounding: measured 0.016 to 0.021 here, 0.014 on SmolLM2-135M."""
FLOAT32_LOGIT = 1e-4
"""Logits of up to 20, summed over 64 products in another order: some 1e-6 each. A bfloat16 logit
of 8 is off by up to 0.03."""


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
        assert backend.weight_checksums() == trainer_checksums(model, torch.bfloat16)
        assert "lm_head.weight" in backend.weight_checksums()
        perturb(model, seed=version)


def test_placed_parts_are_rounded_and_their_logits_float32(
    backend: VllmBackend, model: PreTrainedModel, folder: Path
) -> None:
    perturb(model, seed=7)
    shard, weights = rank_shard(folder), dict(model.state_dict())
    backend.update_shard(shard_tensors(shard, weights), 3)
    assert backend.weight_checksums() == trainer_checksums(model, torch.bfloat16)
    requests, sampling = make_requests(8), SamplingSpec(max_new_tokens=24)
    placed = list(backend.generate(requests, sampling))
    backend.update_weights(model.named_parameters(), 4)
    loaded = list(backend.generate(requests, sampling))
    # Equal, not near: the head's float32 logits come from the same packs.
    assert {t.row: list(t.logprobs) for t in placed} == {t.row: list(t.logprobs) for t in loaded}


def test_logprobs_are_near_those_of_float32(backend: VllmBackend, model: PreTrainedModel) -> None:
    requests, sampling = make_requests(16), SamplingSpec(max_new_tokens=40)
    for version in range(2):
        backend.update_weights(model.named_parameters(), version)
        trajectories = list(backend.generate(requests, sampling))
        assert logprob_differences(model, requests, trajectories).mean() < BFLOAT16_LOGPROB
        perturb(model, seed=version)
        missed = logprob_differences(model, requests, trajectories)
        assert missed.mean() > 10 * BFLOAT16_LOGPROB


def test_residual_stream_and_logits_are_float32(
    backend: VllmBackend, model: PreTrainedModel
) -> None:
    if torch.cuda.is_available():
        pytest.skip("on a GPU vLLM's own head_dtype option is used")
    for version in range(2):
        # Twice: an update packs the head again.
        perturb(model, seed=version)
        backend.update_weights(model.named_parameters(), version)
        residuals, projections = [], []

        def watch(
            vllm_model: Any, residuals: list[Any] = residuals, projections: list[Any] = projections
        ) -> list[Any]:
            return [
                vllm_model.model.norm.register_forward_pre_hook(
                    lambda _, arguments: residuals.append(arguments[1])
                ),
                vllm_model.logits_processor.register_forward_hook(
                    lambda _, arguments, logits: projections.append((arguments[1], logits.clone()))
                ),
            ]

        (handles,) = backend._engine.apply_model(watch)
        list(backend.generate(make_requests(5), SamplingSpec(max_new_tokens=3)))
        for handle in handles:
            handle.remove()
        assert {residual.dtype for residual in residuals} == {torch.float32}
        head_VD = model.get_output_embeddings().weight.detach().bfloat16().float()
        for hidden_BD, logits_BV in projections:
            assert hidden_BD.dtype == torch.bfloat16
            assert logits_BV.dtype == torch.float32
            torch.testing.assert_close(
                logits_BV, hidden_BD.float() @ head_VD.t(), atol=FLOAT32_LOGIT, rtol=0
            )
