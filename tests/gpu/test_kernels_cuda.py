"""Triton's kernels, compiled, against their references on the same device."""

# What the machine lacks is a reason to skip, and that must be known before the imports.

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("pydantic", reason="pydantic is not installed: pip install 'pydantic>=2.12'")
pytest.importorskip("triton", reason="triton is not installed")

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.kernel_cases import (
    BFLOAT16_TOLERANCE,
    HEADS,
    LOSSES,
    assert_both_agree,
    attended,
    both,
    estimated,
    kernels,
    lost,
    scored,
)

from rolemesh.engine.models.layers.shared_flex import flex_serves

pytestmark = pytest.mark.gpu

CUDA = "cuda"
FLOAT32_TOLERANCE = 1e-4
"""The order of sums, and exponentials by the device's fast instruction."""


@pytest.mark.parametrize("case", HEADS.values(), ids=HEADS)
def test_logprobs_entropy_and_gradients_are_the_references(case):
    tolerance = FLOAT32_TOLERANCE * max(1.0, case.get("scale", 0.0))
    assert_both_agree(lambda: scored(CUDA, **case), tolerance)


@pytest.mark.parametrize("num_rows", [4096, 4099], ids=["aligned", "ragged"])
def test_bfloat16_heads_of_many_tiles_are_the_references(num_rows):
    case = {"num_tokens": 1000, "num_rows": num_rows, "width": 256, "scale": 0.1}
    found, expected = both(
        lambda: scored(CUDA, **case, compute_dtype=torch.bfloat16, chunk_tokens=300)
    )
    for name in ("logprobs", "entropy"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-4)
    for name in ("gradient of hidden", "gradient of vocabulary"):
        error = float((found[name] - expected[name]).norm() / expected[name].norm())
        assert error < BFLOAT16_TOLERANCE, name


@pytest.mark.parametrize("change", ["", "on policy", "far"])
@pytest.mark.parametrize("spec", LOSSES.values(), ids=LOSSES)
def test_loss_gradient_and_metrics_are_the_references(spec, change):
    assert_both_agree(lambda: lost(CUDA, spec, (700, 1, 0, 1600, 3), change), FLOAT32_TOLERANCE)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.0)])
def test_advantages_and_returns_are_the_references(gamma, lam):
    lengths = (300, 1, 0, 5000, 77)
    assert_both_agree(lambda: estimated(CUDA, lengths, torch.float64, gamma, lam), 1e-9)
    assert_both_agree(lambda: estimated(CUDA, lengths, torch.float32, gamma, lam), 1e-5)


@pytest.mark.parametrize("completions", [(300, 1, 70, 9), (128, 0, 500, 3, 64, 1000)])
def test_flex_attention_of_shared_prompts_is_that_of_rectangles(completions):
    torch.backends.cuda.matmul.allow_tf32 = False
    assert flex_serves(torch.device(CUDA)) is False
    with kernels("triton"):
        assert flex_serves(torch.device(CUDA))
    # Two numbers of tokens a group: the second is another shape for what was compiled.
    for group in (2, len(completions)):
        assert_both_agree(partial(attended, CUDA, group, 150, completions), 2e-3)
