"""vLLM with fast numerics on a CPU: bfloat16 activations, float32 logits."""

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
)
from support.tiny_models import write_tiny_llama
from transformers import PreTrainedModel

from rolemesh.engine.rollout.vllm.sampler import VllmBackend
from rolemesh.engine.specs import SamplingSpec, VllmSpec

EXACT_BOUND = 1e-4
"""Mean abs difference at which activations are certainly float32: measured 1e-6 there."""
FAST_BOUND = 0.05
"""The same for bfloat16 activations: 0.02 on SmolLM2-135M, see docs/measurements.md."""

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="how a CPU samples")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(True, id="tied"),
        pytest.param(False, id="untied", marks=pytest.mark.slow),
    ],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(
        tmp_path_factory.mktemp("vllm") / "model", tied=request.param, num_layers=4
    )


@pytest.fixture(scope="module")
def backend(folder: Path) -> Iterator[VllmBackend]:
    # Given, so that a CPU without instructions for bfloat16 computes in it, too.
    spec = VllmSpec(max_model_len=128, activations="bfloat16")
    backend = VllmBackend(spec, folder, numerics="fast")
    yield backend
    backend.close()


@pytest.fixture
def model(folder: Path) -> PreTrainedModel:
    return load_trainer_model(folder)


def test_activations_are_bfloat16_and_logprobs_follow_each_update(
    backend: VllmBackend, model: PreTrainedModel
) -> None:
    requests, sampling = make_requests(16), SamplingSpec(max_new_tokens=40)
    for version in range(2):
        backend.update_weights(model.named_parameters(), version)
        trajectories = list(backend.generate(requests, sampling))
        found = logprob_differences(rounded_copy(model), requests, trajectories)
        assert EXACT_BOUND < found.mean() < FAST_BOUND
        perturb(model, seed=version)
        missed = logprob_differences(rounded_copy(model), requests, trajectories)
        assert missed.mean() > 2 * FAST_BOUND


def test_logits_are_not_rounded(backend: VllmBackend, model: PreTrainedModel) -> None:
    backend.update_weights(model.named_parameters(), 10)
    logits: list[torch.Tensor] = []

    def look(module: Any) -> None:
        for child in module.modules():
            if type(child).__name__ == "LogitsProcessor":
                child.register_forward_hook(lambda _, __, result: logits.append(result))

    backend.engine.apply_model(look)
    list(backend.generate(make_requests(2), SamplingSpec(max_new_tokens=2)))
    assert logits
    assert {tensor.dtype for tensor in logits} == {torch.float32}
    assert not torch.equal(logits[0], logits[0].bfloat16().float())
