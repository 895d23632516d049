"""Kernels of layers, by Triton's interpreter, against transformers' own modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kernel_cases import Tensors, both, kernels
from support.layer_cases import (
    BFLOAT16_TOLERANCE,
    FAMILIES,
    FLOAT32_TOLERANCE,
    HEADS,
    MODELS,
    TYPES,
    WITHOUT_MLP,
    assert_near,
    counted,
    gated,
    modeling,
    normed,
    rotated,
)
from support.parallel_training import Job, Trained, joined, train
from support.rank_processes import RankContext, RankPool
from support.tiny_families import write_tiny_decoder
from support.token_batches import token_batch
from support.updates import forward_backward
from transformers import AutoConfig

from rolemesh.engine.experience import Experience
from rolemesh.engine.layout.ranks import TrainLayout
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, SftLossSpec
from rolemesh.engine.train.trainer import Trainer

CPU = "cpu"
MODEL_TOLERANCE = 2e-5
"""Relative to the largest number of a tensor: float32 through layers and a head."""
FAST_FACTOR = 1.5
"""In bfloat16 both differ from float32: the kernels, and the head's that rounds its states, by no
more than this times what transformers' operations do. 0.99 to 1.24 over 12 models."""
LAYOUTS = {
    "shares of tokens": (TrainLayout(tp=2), {"sequence_parallel": True}),
    "stages": (TrainLayout(pp=2), {}),
    "cut weights": (TrainLayout(dp=2, fsdp=2), {}),
}


def assert_agree(compute: Callable[[], Tensors], *, is_narrow: bool) -> None:
    """The kernels against transformers; `is_narrow`: some factor is bfloat16."""
    assert_near(*both(compute), BFLOAT16_TOLERANCE if is_narrow else FLOAT32_TOLERANCE)


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("shape", [(3, 5, 64), (7, 2, 3, 24), (1, 2), (0, 8)], ids=str)
def test_norms_are_transformers(
    shape: tuple[int, ...], types: tuple[torch.dtype, torch.dtype]
) -> None:
    is_narrow = torch.bfloat16 in types
    assert_agree(lambda: normed(CPU, "llama", shape, types), is_narrow=is_narrow)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 130, 0])
def test_gates_are_transformers(tokens: int, dtype: torch.dtype) -> None:
    assert_agree(lambda: gated(CPU, "llama", tokens, dtype), is_narrow=dtype == torch.bfloat16)


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize(
    ("shape", "rows_of_angles"),
    [((2, 5, 3, 16), 1), ((2, 5, 6, 12), 2), ((1, 7, 1, 2), 1), ((1, 0, 2, 8), 1)],
    ids=["one row of angles", "angles of each row", "one head", "no tokens"],
)
def test_rotations_are_transformers(
    shape: tuple[int, int, int, int], rows_of_angles: int, types: tuple[torch.dtype, torch.dtype]
) -> None:
    assert_agree(
        lambda: rotated(CPU, "llama", shape, types, rows_of_angles=rows_of_angles),
        is_narrow=torch.bfloat16 in types,
    )


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_every_family_has_the_same_parts(family: str) -> None:
    wide = TYPES["float32"]
    assert_agree(lambda: normed(CPU, family, (4, 32), wide), is_narrow=False)
    if family not in WITHOUT_MLP:
        assert_agree(lambda: gated(CPU, family, 6, torch.float32), is_narrow=False)
    assert_agree(lambda: rotated(CPU, family, (1, 3, 2, 8), wide), is_narrow=False)


def test_a_norm_of_many_programs_sums_its_weights_gradient_in_one_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rolemesh.engine.kernels import layers

    # Blocks of two rows, 3 programs of 6 blocks each, the last of them partly empty.
    monkeypatch.setattr(layers, "BLOCK_ELEMENTS", 32)
    monkeypatch.setattr(layers, "_most_programs", lambda _device: 3)
    compute = lambda: normed(CPU, "llama", (31, 16), TYPES["float32"])  # noqa: E731
    assert_agree(compute, is_narrow=False)
    with kernels("triton"):
        first, second = compute(), compute()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_nothing_is_written_over_what_was_given() -> None:
    from rolemesh.engine.kernels.layers import rms_norm, rotate, swiglu

    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(1, 4, 3, 16, generator=generator) for _ in range(4)]
    before = [tensor.clone() for tensor in given]
    x, other, cos, sin = given
    leaves = [x.requires_grad_(), other.requires_grad_()]
    results = [
        rms_norm(x, other[0, 0, 0], 1e-5),
        swiglu(x, other),
        rotate(x.transpose(1, 2), cos[:, :, 0], sin[:, :, 0]),
    ]
    kept = [result.detach().clone() for result in results]
    gradient = torch.ones_like(results[0])
    for result in results:
        result.backward(gradient.view_as(result), retain_graph=True)
    once = [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]
    for result in results:
        result.backward(gradient.view_as(result))
    for tensor, copy in zip(
        [*(leaf.detach() for leaf in leaves), cos, sin, *(one.detach() for one in results)],
        [*before, *kept],
        strict=True,
    ):
        assert torch.equal(tensor, copy)
    assert bool((gradient == 1).all())
    for leaf, grad in zip(leaves, once, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, 2 * grad)


def test_other_types_and_gates_are_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    from rolemesh.engine.kernels import layers

    def refuse(*_: Any) -> None:
        raise AssertionError("a kernel was asked")

    for name in ("rms_norm", "swiglu", "rotate"):
        monkeypatch.setattr(layers, name, refuse)
    module = modeling("llama")
    double = torch.randn(1, 3, 4, 8, dtype=torch.float64)
    with kernels("triton"):
        module.LlamaRMSNorm(8).double()(double)
        angles = double[:, 0]
        module.apply_rotary_pos_emb(double, double, angles, angles)
        config = AutoConfig.for_model("llama", hidden_size=8, hidden_act="gelu", **HEADS)
        module.LlamaMLP(config)(torch.randn(1, 2, 8))
        with pytest.raises(AssertionError, match="a kernel was asked"):
            module.LlamaRMSNorm(8)(double.float())


def scored(folder: Path, numerics: str, recompute: str) -> Tensors:
    """Loss and gradients of a small model."""
    dtype = "float32" if numerics == "exact" else "bfloat16"
    spec = ModelSpec.model_validate(
        {"path": folder, "compute_dtype": dtype, "activations": dtype, "recompute": recompute}
    )
    trainer = Trainer.policy(spec, OptimizerSpec(learning_rate=1e-3))
    batch = token_batch(prompt_lengths=(3, 5), completion_lengths=(4, 6), vocab_size=100)
    metrics = forward_backward(trainer, batch, SftLossSpec())
    gradients = {
        name: weight.grad
        for name, weight in trainer.model.named_weights()
        if weight.grad is not None
    }
    return {"loss": torch.tensor(metrics["loss"]), **gradients}


def distance(left: Tensors, right: Tensors) -> float:
    """Of all numbers, relative to each tensor's size."""
    parts = [(left[name] - right[name]).norm() / right[name].norm() for name in right]
    return float(torch.stack(parts).norm())


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("family", MODELS)
def test_a_model_of_each_family_computes_what_it_does_without(
    tmp_path: Path, family: str, numerics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rolemesh.engine.kernels import layers

    calls = counted(monkeypatch, layers, "rms_norm", "swiglu", "rotate")
    folder = write_tiny_decoder(tmp_path / family, family)
    recompute = {"llama": "full", "mistral": "selective"}.get(family, "none")
    found, expected = both(lambda: scored(folder, numerics, recompute))
    # Two layers of two norms, one at the end; qwen3 norms queries and keys besides.
    norms = 9 if family == "qwen3" else 5
    factor = 2 if recompute == "full" else 1
    assert calls["rms_norm"] == (norms - 1) * factor + 1
    assert calls["swiglu"] == 2 * factor
    assert calls["rotate"] == 4 * (2 if recompute != "none" else 1)
    assert found.keys() == expected.keys()
    if numerics == "fast":
        with kernels("torch"):
            wide = scored(folder, "exact", recompute)
        assert distance(found, wide) <= FAST_FACTOR * distance(expected, wide)
        assert distance(found, expected) > 0
        return
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() <= MODEL_TOLERANCE * tensor.abs().max(), name


def train_by(at: RankContext, job: Job, choice: str) -> Trained:
    """Trains as one rank, by the kernels or without them."""
    from rolemesh.engine.kernels import layers

    with kernels(choice), pytest.MonkeyPatch.context() as patch:
        calls = counted(patch, layers, "rms_norm")
        trained = train(at, job)
    assert bool(calls["rms_norm"]) == (choice == "triton")
    return trained


@pytest.mark.parametrize(("layout", "model"), LAYOUTS.values(), ids=LAYOUTS)
def test_ranks_that_cut_a_model_train_it_by_the_kernels(
    tmp_path: Path, rank_pool: RankPool, layout: TrainLayout, model: dict[str, Any]
) -> None:
    folder = write_tiny_decoder(tmp_path / "qwen3", "qwen3")
    batch: Experience = token_batch(
        prompt_lengths=(3, 5, 2), completion_lengths=(4, 6, 3), vocab_size=100
    )
    alone = Job(folder, batch, SftLossSpec())
    expected = joined(rank_pool.run(train_by, 1, alone, "torch"), alone.layout)
    spread = replace(alone, layout=layout, model=model)
    found = joined(rank_pool.run(train_by, layout.world_size, spread, "triton"), layout)
    for step, gradients in enumerate(expected.gradients):
        for name, tensor in gradients.items():
            error = (found.gradients[step][name] - tensor).abs().max()
            assert error <= MODEL_TOLERANCE * tensor.abs().max(), name
