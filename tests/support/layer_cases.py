"""What stands between the products of layers, by kernels and by transformers' own modules.

Run by Triton's interpreter (tests/kernels) and on a GPU (tests/gpu): all of them are small.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from support.kernel_cases import Tensors
from transformers import AutoConfig

from rolemesh.engine.layout.family_records import RECORDS
from rolemesh.engine.models.layers.fused_layers import fuse_layers

FAMILIES = tuple(family for family, record in RECORDS.items() if record.kernel_classes)
MODELS = ("llama", "mistral", "qwen2", "qwen3")
"""Of which a whole model is tried; others have the same parts."""
WITHOUT_MLP = frozenset({"mixtral"})
"""Families whose layers have experts alone."""
FLOAT32_TOLERANCE = 2e-6
"""Relative and absolute, of numbers of size 1: sums of a row in another order, a root and a sigmoid
to their last two places."""
BFLOAT16_TOLERANCE = 2**-7
"""Relative: two roundings to 2^-8 of the size, where transformers rounds after each operation."""

HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}

TYPES = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "bfloat16 by float32": (torch.bfloat16, torch.float32),
    "float32 by bfloat16": (torch.float32, torch.bfloat16),
}
"""Of activations, and of weights or angles: under autocast, and where FSDP gathers in bfloat16."""


def modeling(family: str) -> Any:
    """The module of transformers, whose layers may take the kernels."""
    fuse_layers(family)
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def class_of(family: str, part: str) -> Any:
    """A class of transformers for a part of the family's layers."""
    return getattr(modeling(family), RECORDS[family].kernel_classes + part)


def counted(patch: pytest.MonkeyPatch, module: Any, *names: str) -> dict[str, int]:
    """How often each function of a module is called from now on."""
    calls = dict.fromkeys(names, 0)
    for name in names:
        real = getattr(module, name)

        def counting(*args: Any, name: str = name, real: Any = real) -> Any:
            calls[name] += 1
            return real(*args)

        patch.setattr(module, name, counting)
    return calls


def _pulled(result: torch.Tensor, inputs: Tensors) -> Tensors:
    """The result, and gradients of the inputs under a weighted sum of it."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(result.shape, generator=generator).to(result.device, result.dtype)
    (weights * result).sum().backward()
    gradients = {
        f"gradient of {name}": tensor.grad
        for name, tensor in inputs.items()
        if tensor.grad is not None
    }
    assert len(gradients) == len(inputs)
    return {"result": result.detach(), **gradients}


def normed(
    device: str, family: str, shape: tuple[int, ...], types: tuple[torch.dtype, torch.dtype]
) -> Tensors:
    """A norm of that shape, with rows of zeros and of large numbers."""
    generator = torch.Generator().manual_seed(sum(shape))
    module = class_of(family, "RMSNorm")(shape[-1], eps=1e-5)
    weight = 1 + 0.3 * torch.randn(shape[-1], generator=generator)
    module.weight = torch.nn.Parameter(weight.to(device, types[1]))
    x = torch.randn(shape, generator=generator)
    flat = x.view(-1, shape[-1])
    if len(flat) > 2:
        flat[1] = 0.0
        flat[2] *= 1000.0
    x = x.to(device, types[0]).requires_grad_()
    return _pulled(module(x), {"x": x, "weight": module.weight})


def gated(device: str, family: str, tokens: int, dtype: torch.dtype) -> Tensors:
    """An MLP, whose gates are sometimes far from 0."""
    config = AutoConfig.for_model(family, hidden_size=24, intermediate_size=40, **HEADS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module = class_of(family, "MLP")(config)
    module.gate_proj.weight.data *= 30
    module = module.to(device, dtype)
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(1, tokens, 24, generator=generator).to(device, dtype).requires_grad_()
    return _pulled(module(x), {"x": x, **dict(module.named_parameters())})


def rotated(
    device: str,
    family: str,
    shape: tuple[int, int, int, int],
    types: tuple[torch.dtype, torch.dtype],
    *,
    rows_of_angles: int = 1,
) -> Tensors:
    """Queries and keys [B, T, H, E] as projections give them; keys have half of the heads."""
    batch, length, heads, width = shape
    generator = torch.Generator().manual_seed(sum(shape))
    query, key = (
        torch.randn(batch, length, each, width, generator=generator)
        .to(device, types[0])
        .requires_grad_()
        for each in (heads, max(1, heads // 2))
    )
    # Not alike in both halves, as those of transformers are: a swapped half would not show.
    angles = torch.randn(rows_of_angles, length, width, generator=generator)
    cos, sin = angles.cos().to(device, types[1]), angles.sin().to(device, types[1])
    apply = modeling(family).apply_rotary_pos_emb
    found = apply(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
    results = _pulled(torch.cat([one.flatten() for one in found]), {"query": query, "key": key})
    # What attention reads next: the heads of a token side by side.
    assert all(one.transpose(1, 2).is_contiguous() for one in found)
    return results


def assert_near(found: Tensors, expected: Tensors, tolerance: float) -> None:
    """Equal types and shapes, and numbers within a tolerance of their size or their tensor's."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        ours = found[name]
        assert ours.dtype == tensor.dtype, name
        assert ours.shape == tensor.shape, name
        if not tensor.numel():
            continue
        sizes = tensor.double().abs()
        error = (ours.double() - tensor.double()).abs()
        assert bool((error <= tolerance * (sizes + sizes.max())).all()), name
