"""Norms and rotary positions of a CPU against transformers' own modules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.kernel_cases import Tensors, kernels
from support.layer_cases import (
    FAMILIES,
    FLOAT32_TOLERANCE,
    TYPES,
    assert_near,
    counted,
    modeling,
    normed,
    rotated,
)

from rolemesh.engine.models.layers import layers_on_cpu

CPU = "cpu"
WIDE = TYPES["float32"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each was asked."""
    return counted(monkeypatch, layers_on_cpu, "rms_norm", "rotate")


def assert_agree(compute: Callable[[], Tensors]) -> None:
    """Ours against transformers'."""
    found = compute()
    with kernels("torch"):
        assert_near(found, compute(), FLOAT32_TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [(3, 5, 64), (7, 2, 3, 24), (1, 2), (0, 8), (300, 576)], ids=str)
def test_norms_are_transformers(family: str, shape: tuple[int, ...], calls: dict[str, int]) -> None:
    assert_agree(lambda: normed(CPU, family, shape, WIDE))
    assert calls["rms_norm"] == 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("shape", "rows_of_angles"),
    [((2, 5, 3, 16), 1), ((2, 5, 6, 12), 2), ((1, 7, 1, 2), 1), ((1, 0, 2, 8), 1)],
    ids=["one row of angles", "angles of each row", "one head", "no tokens"],
)
def test_rotations_are_transformers(
    family: str, shape: tuple[int, int, int, int], rows_of_angles: int, calls: dict[str, int]
) -> None:
    assert_agree(lambda: rotated(CPU, family, shape, WIDE, rows_of_angles=rows_of_angles))
    assert calls["rotate"] == 2


def test_heads_that_are_normed_apart_may_lie_in_any_order() -> None:
    generator = torch.Generator().manual_seed(1)
    x, gradient = (torch.randn(1, 6, 5, 8, generator=generator) for _ in range(2))
    results = []
    for order in (lambda one: one, lambda one: one.transpose(1, 2).contiguous().transpose(1, 2)):
        leaf, weight = x.clone().requires_grad_(), torch.ones(8, requires_grad=True)
        layers_on_cpu.rms_norm(order(leaf), weight, 1e-5).backward(order(gradient))
        results.append((leaf.grad, weight.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=FLOAT32_TOLERANCE, atol=FLOAT32_TOLERANCE)


def test_a_frozen_norm_passes_gradients_on_and_a_first_one_has_none_to_pass() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 8, generator=generator), torch.randn(8, generator=generator)
    both = [tensor.clone().requires_grad_() for tensor in (x, weight)]
    layers_on_cpu.rms_norm(*both, 1e-5).sum().backward()
    for trained in (0, 1):
        given = [x.clone(), weight.clone()]
        given[trained].requires_grad_()
        layers_on_cpu.rms_norm(*given, 1e-5).sum().backward()
        assert given[1 - trained].grad is None
        assert both[trained].grad is not None
        assert torch.equal(given[trained].grad, both[trained].grad)


def test_nothing_is_written_over_what_was_given() -> None:
    generator = torch.Generator().manual_seed(0)
    x, cos, sin = (torch.randn(1, 4, 3, 16, generator=generator) for _ in range(3))
    given = [x, cos, sin]
    before = [tensor.clone() for tensor in given]
    leaf = x.requires_grad_()
    results = [
        layers_on_cpu.rms_norm(leaf, cos[0, 0, 0], 1e-5),
        layers_on_cpu.rotate(leaf.transpose(1, 2), cos[:, :, 0], sin[:, :, 0]).transpose(1, 2),
    ]
    kept = [result.detach().clone() for result in results]
    gradient = torch.ones_like(x)
    for _ in range(2):
        for result in results:
            result.backward(gradient, retain_graph=True)
    for tensor, copy in zip([*given, *results], [*before, *kept], strict=True):
        assert torch.equal(tensor, copy)
    assert bool((gradient == 1).all())


def test_other_types_are_left_to_transformers(calls: dict[str, int]) -> None:
    module = modeling("llama")
    for dtype in (torch.float64, torch.bfloat16):
        x = torch.randn(1, 3, 4, 8).to(dtype)
        module.LlamaRMSNorm(8).to(dtype)(x)
        module.apply_rotary_pos_emb(x, x, x[:, 0], x[:, 0])
    assert not any(calls.values())
