"""Kernels of layers, compiled, against transformers' own modules on the same device."""

# What the machine lacks is a reason to skip, and that must be known before the imports.

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("pydantic", reason="pydantic is not installed: pip install 'pydantic>=2.12'")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("triton", reason="triton is not installed")

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.kernel_cases import both, kernels
from support.layer_cases import (
    BFLOAT16_TOLERANCE,
    MODELS,
    TYPES,
    assert_near,
    gated,
    normed,
    rotated,
)
from support.tiny_families import write_tiny_decoder
from support.token_batches import token_batch
from support.updates import forward_backward

from rolemesh.engine.specs import ModelSpec, OptimizerSpec, SftLossSpec
from rolemesh.engine.train.trainer import Trainer

pytestmark = pytest.mark.gpu

CUDA = "cuda"
FLOAT32_TOLERANCE = 1e-5
"""Roots and exponentials by the device's fast instructions, and sums in another order."""
MODEL_TOLERANCE = {"float32": 1e-4, "autocast": 0.05, "bfloat16": 0.05}
"""Of a gradient's norm, through two layers."""


def tolerance_of(types):
    return BFLOAT16_TOLERANCE if torch.bfloat16 in types else FLOAT32_TOLERANCE


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("shape", [(2, 700, 1024), (3, 50, 16, 128), (5, 5120), (0, 64)], ids=str)
def test_norms_are_transformers(shape, types):
    assert_near(*both(lambda: normed(CUDA, "qwen3", shape, types)), tolerance_of(types))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gates_are_transformers(dtype):
    torch.backends.cuda.matmul.allow_tf32 = False
    assert_near(*both(lambda: gated(CUDA, "qwen3", 3001, dtype)), tolerance_of((dtype,)))


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("rows_of_angles", [1, 3])
def test_rotations_are_transformers(rows_of_angles, types):
    shape = (3, 701, 16, 128)
    assert_near(
        *both(lambda: rotated(CUDA, "qwen3", shape, types, rows_of_angles=rows_of_angles)),
        tolerance_of(types),
    )


def test_a_norms_gradient_is_the_same_twice():
    with kernels("triton"):
        first, second = (normed(CUDA, "qwen3", (9, 1000, 128), TYPES["float32"]) for _ in range(2))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("numerics", MODEL_TOLERANCE)
@pytest.mark.parametrize("family", MODELS)
def test_a_model_of_each_family_computes_what_it_does_without(tmp_path, family, numerics):
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = write_tiny_decoder(tmp_path / family, family)
    dtypes = {
        "compute_dtype": "float32" if numerics == "float32" else "bfloat16",
        "activations": "bfloat16" if numerics == "bfloat16" else "float32",
    }
    recompute = "full" if family == "llama" else "none"
    spec = ModelSpec.model_validate({"path": folder, "recompute": recompute, **dtypes})
    batch = token_batch(prompt_lengths=(3, 5), completion_lengths=(40, 60), vocab_size=100)

    def scored():
        trainer = Trainer.policy(spec, OptimizerSpec(learning_rate=1e-3), device=CUDA)
        metrics = forward_backward(trainer, batch, SftLossSpec())
        weights = dict(trainer.model.named_weights())
        return {"loss": torch.tensor(metrics["loss"])} | {
            name: weight.grad for name, weight in weights.items() if weight.grad is not None
        }

    found, expected = both(scored)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (found[name] - tensor).double().norm()
        assert error <= MODEL_TOLERANCE[numerics] * tensor.double().norm(), name
