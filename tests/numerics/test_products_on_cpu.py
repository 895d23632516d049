"""float32 products by either of torch's two libraries, against float64, and where each is asked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_families import write_tiny_decoder
from support.token_batches import score, token_batch
from torch.utils._python_dispatch import TorchDispatchMode

from rolemesh.engine.models import decoder
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.layers import products_on_cpu
from rolemesh.engine.models.layers.products_on_cpu import LEAST_WORK, linear, product
from rolemesh.engine.packing.packed_rows import pack_rows
from rolemesh.engine.specs import AdapterSpec, ModelSpec
from rolemesh.engine.specs.by_device import Device, held_to_older

FLOAT32_TOLERANCE = 2e-6
"""Of a result's norm: sums of 500 float32 products, each exact to 6e-8."""
MODEL_TOLERANCE = 2e-5
"""float32 through two layers, with sums in another order."""
LINEAR_LAYERS = 2 * 7
"""Of the tiny model. An adapter's first queries, keys and values have no gradient to pass on."""


@pytest.fixture(autouse=True)
def _as_with_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products_on_cpu, "is_faster", lambda: True)


class OneDnn(TorchDispatchMode):
    """Counts products that oneDNN is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func is torch.ops.mkldnn._linear_pointwise.default
        return func(*args, **(kwargs or {}))


def asked(x: torch.Tensor, weight_OI: torch.Tensor) -> int:
    with OneDnn() as counted:
        product(x, weight_OI)
    return counted.products


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).detach().norm() / exact.detach().norm())


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("is_dense", [True, False])
def test_products_and_gradients_are_those_of_float64(has_bias: bool, is_dense: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 96, 512 if is_dense else 700, generator=generator)[..., :512]
    given = [x, torch.randn(640, 512, generator=generator)]
    given += [torch.randn(640, generator=generator)] * has_bias
    leaves = [one.requires_grad_() for one in given]
    exact = [one.detach().double().requires_grad_() for one in given]
    direction = torch.randn(2, 96, 640, generator=generator)
    with OneDnn() as counted:
        found = linear(*leaves)
        found.backward(direction)
    assert counted.products == 2
    expected = torch.nn.functional.linear(*exact)
    expected.backward(direction.double())
    assert distance(found, expected) < FLOAT32_TOLERANCE
    for leaf, wanted in zip(leaves, exact, strict=True):
        assert leaf.grad is not None
        assert wanted.grad is not None
        assert distance(leaf.grad, wanted.grad) < FLOAT32_TOLERANCE


def test_only_the_gradients_that_are_wanted_are_made() -> None:
    for wanted in range(3):
        given = [torch.ones(2, 3), torch.ones(4, 3), torch.ones(4)]
        given[wanted].requires_grad_()
        linear(*given).sum().backward()
        assert [one.grad is not None for one in given] == [at == wanted for at in range(3)]


def test_large_float32_products_alone_are_for_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = LEAST_WORK // 512**2
    x, weight = torch.ones(rows, 512), torch.ones(512, 512)
    assert asked(x, weight) == 1
    assert asked(x[1:], weight) == 0
    for other in (torch.float64, torch.bfloat16):
        assert asked(x.to(other), weight.to(other)) == 0
    monkeypatch.undo()
    capability = torch.backends.cpu.get_cpu_capability()
    assert asked(x, weight) == (capability == "AVX512" and not held_to_older(os.environ))
    products_on_cpu.is_faster.cache_clear()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert asked(x, weight) == 0
    products_on_cpu.is_faster.cache_clear()


@pytest.mark.parametrize(
    ("how", "multiplies_bfloat16", "products"),
    [
        ({"compute_dtype": "float32"}, True, 2 * LINEAR_LAYERS),
        ({"compute_dtype": "bfloat16"}, True, LINEAR_LAYERS),
        ({"compute_dtype": "bfloat16"}, False, 2 * LINEAR_LAYERS),
        ({"compute_dtype": "float32", "adapter": AdapterSpec(rank=2)}, True, 2 * LINEAR_LAYERS - 3),
    ],
    ids=["float32", "bfloat16", "bfloat16 by float32", "adapter"],
)
@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_models_multiply_by_the_faster_library_and_compute_the_same(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: dict[str, Any],
    multiplies_bfloat16: bool,
    products: int,
    numerics: Any,
) -> None:
    machine = Device("cpu", multiplies_bfloat16=multiplies_bfloat16)
    monkeypatch.setattr(decoder, "device_of", lambda _: machine)
    monkeypatch.setattr(products_on_cpu, "LEAST_WORK", 0)
    folder = write_tiny_decoder(tmp_path / "model", "llama", attention_bias=True)
    rows = pack_rows(token_batch(vocab_size=100), "cpu")
    found = []
    for both in (True, False):
        monkeypatch.setattr(products_on_cpu, "is_faster", lambda both=both: both)
        model = CausalLm(ModelSpec(path=folder, **how), numerics=numerics)
        with OneDnn() as counted:
            logprobs, _ = score(model, rows, temperature=0.8)
            logprobs.square().sum().backward()
        is_narrow = numerics == "fast" and how["compute_dtype"] == "bfloat16"
        expected = 0 if is_narrow and multiplies_bfloat16 else products
        assert counted.products == both * (expected + 1)  # the head's logits
        gradients = [weight.grad.flatten() for _, weight in model.trained_weights()]
        found.append((logprobs.detach(), torch.cat(gradients)))
    tolerance = 0.05 if is_narrow else MODEL_TOLERANCE
    for by_both, by_one in zip(*found, strict=True):
        assert distance(by_both, by_one) < tolerance
