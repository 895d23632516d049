"""Experts on a GPU: torch's grouped product, and a trainer beside a CPU's."""

# What the machine lacks is a reason to skip, and that must be known before the imports.

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("pydantic", reason="pydantic is not installed: pip install 'pydantic>=2.12'")
pytest.importorskip("transformers", reason="transformers is not installed")

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.family_cases import case_config
from support.tiny_families import write_tiny_decoder
from support.token_batches import token_batch

from rolemesh.engine.models.layers.experts import grouped_linear
from rolemesh.engine.specs import ModelSpec, OptimizerSpec
from rolemesh.engine.train.trainer import Trainer

pytestmark = pytest.mark.gpu

CUDA = "cuda"
STEP = 2**-7
"""Of bfloat16, relative."""


@pytest.mark.parametrize("outputs", [96, 4], ids=["one kernel", "rank 4 of an adapter"])
def test_the_grouped_product_is_that_of_each_expert(outputs):
    generator = torch.Generator().manual_seed(1)
    counts = [40, 0, 24, 64]
    x_NC = torch.randn(128, 64, generator=generator).bfloat16()
    weight_EOC = torch.randn(4, outputs, 64, generator=generator).bfloat16()
    upstream = torch.randn(128, outputs, generator=generator).bfloat16()
    found = {}
    for device in ("cpu", CUDA):
        x, weight = (one.to(device).requires_grad_() for one in (x_NC, weight_EOC))
        made = grouped_linear(x, weight, counts)
        made.backward(upstream.to(device))
        assert x.grad is not None
        assert weight.grad is not None
        found[device] = [one.float().cpu() for one in (made.detach(), x.grad, weight.grad)]
    for one, other in zip(found["cpu"], found[CUDA], strict=True):
        assert float((one - other).norm() / one.norm()) < STEP


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_a_mixture_scores_as_on_a_cpu(tmp_path, family, compute_dtype):
    folder = write_tiny_decoder(tmp_path, family, **case_config(family))
    batch = token_batch(vocab_size=100)
    scores = [
        Trainer.policy(
            ModelSpec(path=folder, compute_dtype=compute_dtype), OptimizerSpec(), device=device
        )
        .compute_logprobs(batch, temperature=1.0)["logprobs"]
        .values
        for device in ("cpu", CUDA)
    ]
    # With bfloat16 a token may go through another expert: the mean is bounded, not each.
    bound = 1e-4 if compute_dtype == "float32" else 0.05
    assert float((scores[0] - scores[1]).abs().mean()) < bound
